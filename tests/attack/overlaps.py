# SPDX-License-Identifier: Apache-2.0
"""Writers and readers of one directory at once, in threads and processes: every load is of one save."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.levels import LevelBuffer
from tests import level_steps
from tests.attack.report import Report
from tests.saves import names_in

WRITERS, READERS = 4, 3


class Contents(ABC):
    """Saves in which everything is one number, so that a mixture shows."""

    @abstractmethod
    def save(self, number: int, place: Path) -> None:
        """Saves a thing that is made of ``number``."""

    @abstractmethod
    def load(self, place: Path) -> set[float]:
        """Returns the numbers in the save."""


class Rows(Contents):
    """A buffer filled with rows of one number, of one priority that is the number too."""

    capacity = 2_000

    def __init__(self) -> None:
        self.replay = recipes.prioritized(self.capacity, 4, priority_exponent=1.0, priority_offset=0.0, seed=0)

    def save(self, number: int, place: Path) -> None:
        value = torch.full((self.capacity, 5), float(number))
        rows = {"observation": value, "action": value, "td_error": value[:, 0]}
        self.replay.extend(TensorDict(rows, [self.capacity]))
        save_replay(self.replay, place, previous=place if number % 2 else None)

    def load(self, place: Path) -> set[float]:
        replay = load_replay(place)
        leaves = replay.sampler.state_dict()["tree"]["leaves"]
        return {*replay[:]["observation"].unique().tolist(), *replay[:]["action"].unique().tolist(), *leaves.tolist()}


class Scores(Contents):
    """A level buffer in which every score is the number."""

    count = 300

    def __init__(self) -> None:
        self.levels = level_steps.buffer(self.count)

    def save(self, number: int, place: Path) -> None:
        for level in range(self.count):
            level_steps.play(self.levels, level, float(number))
        self.levels.save(place)

    def load(self, place: Path) -> set[float]:
        levels: LevelBuffer = level_steps.buffer(self.count)
        levels.load(place)
        return set(levels.probabilities()["score"].tolist())


def write(build: Callable[[], Contents], place: Path, seed: int, until: float) -> None:
    contents, chosen, number = build(), random.Random(seed), seed * 1_000 + 1
    while time.monotonic() < until:
        contents.save(number, place)
        number += 1
        time.sleep(chosen.random() * 0.01)


def attack(build: Callable[[], Contents], seconds: float) -> Report:
    report, seen = Report(), Counter[float]()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "place"
        first = build()
        first.save(1, place)
        children = [_forked(build, place, seed, seconds) for seed in range(1, WRITERS // 2 + 1)]
        until = time.monotonic() + seconds  # from here on: forking a large process takes half a second

        def save(seed: int) -> None:
            with report.round("a save beside writers"):
                write(build, place, seed, until)

        def read() -> None:
            contents = build()
            while time.monotonic() < until:
                with report.round("a load beside writers"):
                    found = contents.load(place)
                    assert len(found) == 1, f"a mixture of the saves {sorted(found)} was loaded"
                    seen.update(found)

        writers = [threading.Thread(target=save, args=(seed,)) for seed in range(WRITERS // 2 + 1, WRITERS + 1)]
        threads = [*writers, *(threading.Thread(target=read) for _ in range(READERS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with report.round("writers beside each other"):
            ends = [os.waitpid(child, 0)[1] for child in children]
            assert not any(ends), f"saves of other processes failed: {ends}"
            assert len(first.load(place)) == 1
            assert len(names_in(place)) == 2, f"left there: {names_in(place)}"
    report.count("loads", seen.total())
    report.count("different saves loaded", len(seen))
    return report


def _forked(build: Callable[[], Contents], place: Path, seed: int, seconds: float) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            write(build, place, seed, time.monotonic() + seconds)
            code = 0
        finally:
            os._exit(code)
    return child
