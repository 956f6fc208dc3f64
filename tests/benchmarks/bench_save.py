# SPDX-License-Identifier: Apache-2.0
"""Saving a buffer of a million: how long it takes, and how long those wait who insert meanwhile."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import contenders
import torch
from peers import arguments
from timing import Table, microseconds
from transitions import half_cheetah

from lightning_replay import save_replay
from lightning_replay.replay import Replay

ROWS_AT_ONCE = 64
ROUNDS = 3


class Writer:
    """A thread that inserts blocks of rows one after the other and keeps the microseconds of each."""

    def __init__(self, replay: Replay) -> None:
        self._replay, self._rows = replay, half_cheetah(ROWS_AT_ONCE)
        self._times: list[float] = []
        self._is_running = True
        self._thread = threading.Thread(target=self._go_on)

    def _go_on(self) -> None:
        while self._is_running:
            self._times.append(microseconds(lambda: self._replay.extend(self._rows)))
            time.sleep(0.001)  # as environments and a network would take

    def beside(self, work: Callable[[], object]) -> tuple[float, list[float]]:
        """Returns the seconds of ``work`` and the microseconds of all inserts meanwhile."""
        self._thread.start()
        took = microseconds(work) / 1e6
        self._is_running = False
        self._thread.join()
        return took, self._times


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    table = Table("Saving while another thread inserts 64 rows at a time (microseconds)")
    replay = contenders.prioritized(options.rows, 256, "auto")
    theirs = contenders.torchrl_uniform(options.rows)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        alone, beside, inserts, dumps = [], [], [], []
        for number in range(ROUNDS):
            place = Path(folder) / str(number)
            alone.append(microseconds(lambda: save_replay(replay, place)))  # noqa: B023
            shutil.rmtree(place)
            took, times = Writer(replay).beside(lambda: save_replay(replay, place))  # noqa: B023
            beside.append(took * 1e6)
            inserts.append(times)
            shutil.rmtree(place)
            dumps.append(microseconds(lambda: theirs.dumps(place)))  # noqa: B023
            shutil.rmtree(place)
        quiet = Writer(replay).beside(lambda: time.sleep(statistics.median(beside) / 1e6))[1]
    table.times = {
        f"save {options.rows:,} rows, {replay.nbytes / 1e6:.0f} MB": {
            "nobody inserts": statistics.median(alone),
            "beside inserts": statistics.median(beside),
            "torchrl dumps, not synced": statistics.median(dumps),
        },
        "insert 64": {
            "no save": statistics.median(quiet),
            "beside a save, median": statistics.median(time for times in inserts for time in times),
            "beside a save, longest": statistics.median(map(max, inserts)),
            "no save, longest": max(quiet),
        },
    }
    for work, times in table.times.items():
        print(f"{work}: " + "  ".join(f"{name} {value:,.0f}" for name, value in times.items()) + "  (us)")
    print(f"inserts during a save: {[len(times) for times in inserts]}")
    longest = table.times["insert 64"]["beside a save, longest"]
    table.at_most("longest wait of an insert over the seconds of the save", longest / statistics.median(beside), 0.05)
    table.finish(save=options.save, name="save")


if __name__ == "__main__":
    main()
