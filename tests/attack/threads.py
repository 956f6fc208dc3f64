# SPDX-License-Identifier: Apache-2.0
"""One buffer used by several threads at once, and by forks of the process meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lightning_replay import load_replay, save_replay
from lightning_replay.saving import snapshot
from tests.attack.histories import held_slots
from tests.attack.report import Report
from tests.attack.variants import DISCOUNT, VARIANTS, Variant

CAPACITY, BATCH = 300, 16
PATIENCE = 30.0  # seconds after which a forked process hangs
FORKED = "this process was forked while another thread used this"


class Shared:
    """A buffer and what its threads do with it, each until the time is over or something fails."""

    def __init__(self, variant: Variant, seed: int, folder: Path, report: Report, until: float) -> None:
        self.variant, self.folder, self.report, self.until = variant, folder, report, until
        self.replay = variant.build(CAPACITY, BATCH, seed, folder / "rows")
        self.world = variant.world(seed)
        self.replay.extend(self.world.take(CAPACITY // 2))

    def go_on(self, call: Callable[[], None]) -> None:
        while time.monotonic() < self.until and not self.report.findings:
            with self.report.round(f"{call.__name__} of {self.variant} beside others"):
                call()
                self.report.count(call.__name__)

    def extend(self) -> None:
        self.replay.extend(self.world.take(17))

    def sample(self) -> None:
        batch = self.replay.sample()
        self.world.check(batch, DISCOUNT, mixed=self.variant.is_mixed)
        self.replay.update_priority(batch, torch.rand(len(batch)))

    def save(self) -> None:
        save_replay(self.replay, self.folder / "save")
        replay = load_replay(self.folder / "save", trust=["tests"])
        slots = held_slots(replay)
        numbers = sorted(self.world.check(replay.storage.get(slots), DISCOUNT))
        if self.variant.is_ring and not self.variant.has_frames:
            whole = list(range(numbers[0], numbers[0] + len(numbers)))
            assert numbers == whole and len(numbers) <= CAPACITY, "a save is of two moments"
        replay.sample()

    def fork(self) -> None:
        """A forked process goes on with the buffer, or its calls are refused; it does not hang."""
        child = os.fork()
        if child == 0:
            os._exit(self._go_on_alone())
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                assert status == 0, f"a forked process ends with {status}"
                return
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError("a forked process hangs")

    def _go_on_alone(self) -> int:
        try:
            self._draw_and_write()
            return 0
        except BaseException:
            traceback.print_exc()
            return 4

    def _draw_and_write(self) -> None:
        """Rows in a file are the parent's: they cannot be written here, nor read once it has written others.

        Where another thread used the buffer at the fork, any call may be refused.
        """
        in_file = "in_file" in self.variant.chosen
        for _ in range(3):
            try:
                batch = self.replay.sample()
            except RuntimeError as error:
                assert in_file or FORKED in str(error)
                break
            self.world.check(batch, DISCOUNT, mixed=self.variant.is_mixed)
        try:
            self.replay.extend(self.world.rows([0, 1]))
        except RuntimeError as error:
            assert in_file or FORKED in str(error)
            return
        assert not in_file, "a forked process wrote the parent's rows"
        self.replay.sample()


@contextmanager
def _crowded() -> Iterator[None]:
    """Threads take turns often and snapshots are read in pieces below a row, as if the buffer were a large one."""
    interval, piece = sys.getswitchinterval(), snapshot.PIECE_BYTES
    sys.setswitchinterval(1e-5)
    snapshot.PIECE_BYTES = 64
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        snapshot.PIECE_BYTES = piece


def attack(seed: int, seconds: float, variants: list[Variant] = VARIANTS) -> Report:
    report = Report()
    for place, variant in enumerate(variants):
        own = Report()
        with tempfile.TemporaryDirectory() as folder, own.round(f"threads of {variant}"), _crowded():
            until = time.monotonic() + seconds
            shared = Shared(variant, 1_000 * seed + place, Path(folder), own, until)
            calls = (shared.extend, shared.sample, shared.save, shared.fork)
            threads = [threading.Thread(target=shared.go_on, args=(call,)) for call in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        report.add(own)
    return report
