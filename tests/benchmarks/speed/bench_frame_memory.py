# SPDX-License-Identifier: Apache-2.0
"""Memory of frames stored once: what is resident while Atari steps go in, against what the buffer reports.

What a buffer says, ``nbytes``, is what it has taken from the system: rows for all of its capacity from the first ones
on, and frames as they come, up to ``frame_capacity``. Each kind fills in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from bench_memory import resident_bytes
from timing import Table

if TYPE_CHECKING:
    from lightning_replay import Replay
    from lightning_replay.collecting import VectorSteps

# By name: steps of a return (None is the uniform ring), and capacity as a share of the steps that go in.
KINDS = {
    "uniform": (None, 1.0),
    "retention, 1-step": (1, 1.0),
    "retention, 5-step": (5, 1.0),
    "retention, 5-step, a tenth kept": (5, 0.1),
}
GAME = "SpaceInvaders"
ENVIRONMENTS = 4


def peak_bytes() -> int:
    """The most that was resident in this process since :func:`reset_peak` (Linux)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def reset_peak() -> None:
    """Starts :func:`peak_bytes` from what is resident now, where the system lets us."""
    with contextlib.suppress(OSError):  # then the peak is that of the whole process, which cannot be less
        Path("/proc/self/clear_refs").write_text("5")


def build(kind: str, steps: int) -> Replay:
    """The buffer of a kind into which so many steps go."""
    from lightning_replay import recipes

    n_steps, share = KINDS[kind]
    capacity = int(share * steps)
    options = {"frame_stack": 4, "image_key": "observation", "seed": 0}
    if n_steps is None:
        return recipes.uniform(capacity, 32, **options)
    return recipes.surprise_retention(
        capacity,
        32,
        initial_surprise=lambda rows: rows["next", "reward"].flatten() ** 2,
        n_steps=n_steps,
        **options,
    )


def fill(replay: Replay, vector: VectorSteps, act: Callable[[], object], steps: int, per_write: int) -> None:
    """Steps the environments, ``per_write`` rows at a time."""
    for _ in range(0, steps, per_write):
        taken = []
        while len(taken) * ENVIRONMENTS < per_write:
            vector.step(act())
            taken.append(vector.columns)
        replay.extend_columns({key: np.concatenate([columns[key] for columns in taken]) for key in taken[0]})


def measure(kind: str, steps: int, screen_size: int = 84, per_write: int = 32) -> dict[str, int]:
    """Bytes: ``reported`` by the buffer; that this process grew by at the first rows (``taken``), at most while it
    filled (``peak``), and up to the end (``left``); and ``frames`` held of ``frame_capacity``.
    """
    import torch

    from lightning_replay.collecting import VectorSteps
    from lightning_replay.lit.rollouts import make_environments, random_actions

    torch.set_num_threads(1)
    environments = make_environments(
        "Atari-v0", {"game": GAME, "screen_size": screen_size}, ENVIRONMENTS, asynchronous=False
    )
    vector = VectorSteps(environments)
    vector.reset(seed=0)

    def act() -> object:
        return random_actions(vector.single_action_space, ENVIRONMENTS)

    warm = build(kind, 500)  # libraries take memory at their first use
    fill(warm, vector, act, 600, per_write)
    del warm
    before = resident_bytes()
    reset_peak()
    replay = build(kind, steps)
    fill(replay, vector, act, per_write, per_write)
    while not len(replay):  # returns over several steps come later
        fill(replay, vector, act, per_write, per_write)
    taken = resident_bytes() - before
    fill(replay, vector, act, steps, per_write)
    peak, left = peak_bytes() - before, resident_bytes() - before
    environments.close()
    return {
        "reported": replay.nbytes,
        "taken": taken,
        "peak": peak,
        "left": left,
        "rows": len(replay),
        "frames": replay.storage.frames_held,
        "frame_capacity": replay.storage.frame_capacity,
    }


def measure_apart(kind: str, steps: int, screen_size: int = 84, per_write: int = 32) -> dict[str, int]:
    """:func:`measure` in a process of its own."""
    code = (
        "import json, bench_frame_memory as bench\n"
        f"print(json.dumps(bench.measure({kind!r}, {steps}, {screen_size}, {per_write})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    if result.returncode:
        raise RuntimeError(f"{kind}: {result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="steps that go into each buffer")
    parser.add_argument("--save", action="store_true", help="write results/frame_memory.json")
    options = parser.parse_args()
    table = Table("Peak of the resident size over what the buffer reports, Atari frames")
    for kind in KINDS:
        found = measure_apart(kind, options.rows)
        sizes = ", ".join(f"{name} {found[name] / 1e6:,.1f} MB" for name in ("reported", "taken", "peak", "left"))
        used = f"{found['frames']:,} of {found['frame_capacity']:,} frames in {found['rows']:,} rows"
        print(f"{kind}, {options.rows:,} steps: {sizes}; {used}", flush=True)
        ratio = found["peak"] / found["reported"]
        table.at_most(f"{kind}: distance of peak / reported = {ratio:.4f} from 1", abs(ratio - 1), 0.05)
    table.finish(save=options.save, name="frame_memory")


if __name__ == "__main__":
    main()
