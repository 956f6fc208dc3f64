# SPDX-License-Identifier: Apache-2.0
"""Memory: how far the resident size of a full buffer is from what it says, each kind in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

from peers import arguments
from timing import Table

KINDS = ("uniform", "prioritized", "neighborhood_mixup")


def resident_bytes() -> int:
    """Resident bytes of this process (Linux with glibc), freed ones given back first."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_over_reported(kind: str, rows: int) -> float:
    """Growth of the resident size while ``rows`` transitions go in, over the growth of ``nbytes``."""
    import torch
    from transitions import in_chunks

    from lightning_replay import recipes

    torch.set_num_threads(1)
    warm = getattr(recipes, kind)(capacity=2_000, batch_size=256, seed=0)  # libraries allocate on first use
    for chunk in in_chunks(4_000, chunk=1_000):
        warm.extend(chunk)
        warm.sample()
    replay = getattr(recipes, kind)(capacity=rows, batch_size=256, seed=0)
    before = resident_bytes()
    for chunk in in_chunks(rows, chunk=1_000):
        replay.extend(chunk)
    replay.sample()
    return (resident_bytes() - before) / replay.nbytes


def main() -> None:
    """Measures and prints."""
    options = arguments(__doc__)
    table = Table("Resident size over what the buffer reports")
    for kind in KINDS:
        # The neighbour lists of a million rows would take half an hour to build.
        rows = options.rows if kind != "neighborhood_mixup" else min(options.rows, 100_000)
        code = f"import bench_memory; print(bench_memory.growth_over_reported({kind!r}, {rows}))"
        output = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
        ratio = float(output.stdout)
        table.at_most(
            f"memory {kind}, {rows:,} rows: distance of resident / reported = {ratio:.3f} from 1", abs(ratio - 1), 0.05
        )
    table.finish(save=options.save, name="memory")


if __name__ == "__main__":
    main()
