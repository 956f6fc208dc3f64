# SPDX-License-Identifier: Apache-2.0
"""Saving a buffer of a million: how long it takes, and how long those wait who insert meanwhile."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
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
    table = Table("Saving while another thread inserts 64 rows at a time")
    # One writes where the oldest rows are, the other wherever a row is evicted.
    for name, fill in (("first in, first out", contenders.prioritized), ("retention", contenders.retention)):
        _measure(table, name, fill(options.rows, 256))
    for rows, new in ((options.rows, 5_000), (100_000, 10_000)):
        _measure_again(table, contenders.prioritized(rows, 256), new)
    buffer = contenders.torchrl_uniform(options.rows)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        dumps = [microseconds(lambda: buffer.dumps(Path(folder) / str(number))) for number in range(ROUNDS)]  # noqa: B023
    _keep(table, f"dumps {options.rows:,} rows", {"torchrl uniform, not synced": statistics.median(dumps)})
    table.finish(save=options.save, name="save")


def _measure(table: Table, name: str, replay: Replay) -> None:
    """Saves with and without a thread that inserts, and inserts with and without a save."""
    alone, beside, inserts = [], [], []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for number in range(2 * ROUNDS):
            work = partial(save_replay, replay, Path(folder) / str(number))
            if number % 2:
                alone.append(microseconds(work))
            else:
                took, times = Writer(replay).beside(work)
                beside.append(took * 1e6)
                inserts.append(times)
            shutil.rmtree(Path(folder) / str(number))
    quiet = Writer(replay).beside(lambda: time.sleep(statistics.median(beside) / 1e6))[1]
    saves = {"alone": statistics.median(alone), "beside inserts": statistics.median(beside)}
    _keep(table, f"save {len(replay):,} rows, {replay.nbytes / 1e6:.0f} MB, {name}", saves)
    waits = {
        "alone": statistics.median(quiet),
        "alone, longest": max(quiet),
        "beside a save": statistics.median(time for times in inserts for time in times),
        "beside a save, longest": statistics.median(map(max, inserts)),
    }
    _keep(table, f"insert {ROWS_AT_ONCE}, {name}", waits)
    share = waits["beside a save, longest"] / saves["beside inserts"]
    table.at_most(f"{name}: longest insert beside a save over the time of the save", share, 0.1)


def _measure_again(table: Table, replay: Replay, new: int) -> None:
    """Saves into the directory of an earlier save, after some new rows and after none."""
    rows = half_cheetah(new)
    times: dict[str, list[float]] = {"whole": [], f"after {new:,} new rows": [], "after nothing": []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for _ in range(2 * ROUNDS):
            shutil.rmtree(Path(folder) / "save", ignore_errors=True)
            for name, samples in times.items():
                if name.endswith("new rows"):
                    replay.extend(rows)
                samples.append(microseconds(partial(save_replay, replay, Path(folder) / "save")))
    _keep(table, f"save {len(replay):,} rows again", {name: statistics.median(each) for name, each in times.items()})


def _keep(table: Table, work: str, times: dict[str, float]) -> None:
    table.times[work] = times
    print(f"{work}: " + "  ".join(f"{name} {value:,.0f}" for name, value in times.items()) + "  (us)", flush=True)


if __name__ == "__main__":
    main()
