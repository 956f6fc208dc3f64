# SPDX-License-Identifier: Apache-2.0
"""T2 and the prioritized half of T3: one draw with importance weights and the priority update of the same rows."""

from __future__ import annotations

import contenders
import torch
from peers import arguments, bursts, start_peers
from timing import Table, burst_of


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    table = Table("Prioritized sampling and update")
    peers = {} if options.no_peers else start_peers(table.missing)
    replays = {"torch": contenders.prioritized(options.rows, 256, "torch")}
    try:
        replays["numba"] = contenders.prioritized(options.rows, 256, "numba")
    except ImportError as error:
        table.missing["numba"] = str(error)
    theirs = None
    try:
        theirs = contenders.torchrl_prioritized(options.rows)
    except Exception as error:  # whatever its missing extension raises
        table.missing["torchrl"] = f"its C++ extension does not load beside torch {torch.__version__}: {error}"[:200]
    for batch_size in (32, 256, 4096):
        work = f"prioritized {batch_size}"
        contestants = {}
        for name, replay in replays.items():
            contestants[name] = burst_of(lambda replay=replay: contenders.feedback(replay, batch_size))  # noqa: B023
        if theirs is not None:
            contestants["torchrl"] = burst_of(lambda: contenders.torchrl_feedback(theirs, batch_size))  # noqa: B023
        contestants |= bursts(peers, table.missing, "prioritized", rows=options.rows, batch_size=batch_size)
        table.measure(work, contestants, rounds=options.rounds)
        if batch_size == 256:
            if "numba" in replays:
                table.faster("T2", work, "numba", "torchrl", 5)
                table.faster("T2", work, "numba", "tianshou", 2)
            table.faster("T2", work, "torch", "torchrl", 2.5)
        if batch_size == 4096:
            table.faster("T3", work, "numba" if "numba" in replays else "torch", "torchrl", 8)
    for peer in peers.values():
        peer.close()
    table.finish(save=options.save, name="prioritized")


if __name__ == "__main__":
    main()
