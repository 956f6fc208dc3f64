# SPDX-License-Identifier: Apache-2.0
"""Results of a unit while it runs, and its checkpoints."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CHECKPOINT_SECONDS = 300.0


class OutOfTimeError(Exception):
    """The budget of the command is spent; the unit goes on from its checkpoint in a later command."""


@dataclass(frozen=True)
class SeedRun:
    """Recorded curves and final numbers of one seed.

    Args:
        steps: of the points of all curves, ``[P]``.
        curves: by name, ``[P]``.
        final: numbers of the end.
    """

    steps: list[int]
    curves: dict[str, np.ndarray]
    final: dict[str, float]


@dataclass
class Recorder:
    """Records the curves of the seeds of a unit and writes its checkpoints.

    Args:
        seeds: of the unit.
        folder: of checkpoints; none are kept without one.
        deadline: ``time.time()`` after which :meth:`checkpoint` ends the unit.
        checkpoint_seconds: between two checkpoints.
        on_record: called with the step after each :meth:`record`.
    """

    seeds: Sequence[int]
    folder: Path | None = None
    deadline: float = float("inf")
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    on_record: Callable[[int], None] = lambda step: None
    resume_from: Path | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._content: dict[str, Any] = {"steps": [], "curves": {}, "final": {}, "seconds": 0.0}
        self._started = time.process_time()
        self._saved_at = time.monotonic()
        if complete := self._complete():
            self._content = json.loads((complete[-1] / "recorded.json").read_text())
            self.resume_from = complete[-1] / "state"

    def record(self, step: int, **values: Any) -> None:
        """Adds a point to curves: by name, one number for each seed.

        Args:
            step: larger than the one before.
            values: array or sequence ``[seeds]``; the same names at every call.
        """
        steps, curves = self._content["steps"], self._content["curves"]
        if steps and step <= steps[-1]:
            raise ValueError(f"step is {step} after {steps[-1]}; record steps in increasing order.")
        if steps and set(values) != set(curves):
            raise ValueError(f"record was given {sorted(values)} and before {sorted(curves)}; give the same names.")
        numbers = {name: self._numbers(name, value) for name, value in values.items()}
        steps.append(int(step))
        for name, points in numbers.items():
            curves.setdefault(name, []).append(points)
        self.on_record(int(step))

    def final(self, **values: Any) -> None:
        """Records numbers of the end of the run: by name, one for each seed."""
        self._content["final"] |= {name: self._numbers(name, value) for name, value in values.items()}

    def add_seconds(self, seconds: float) -> None:
        """Counts CPU seconds of earlier processes, of a run that keeps its state without :meth:`checkpoint`."""
        self._content["seconds"] += seconds

    def checkpoint(self, save: Callable[[Path], None]) -> None:
        """Makes the unit resumable from here, if the last checkpoint is old enough.

        Args:
            save: writes the state of the run into an empty folder, from which a later run is resumed.

        Raises:
            OutOfTimeError: the budget is spent; the state has been saved.
        """
        is_over = time.time() >= self.deadline
        if self.folder is None or not (is_over or time.monotonic() - self._saved_at >= self.checkpoint_seconds):
            return
        before = self._complete()
        number = int(before[-1].name) + 1 if before else 0
        part = self.folder / f"{number:06d}.part"
        shutil.rmtree(part, ignore_errors=True)
        (part / "state").mkdir(parents=True)
        save(part / "state")
        (part / "recorded.json").write_text(json.dumps(self.content))
        part.rename(part.with_suffix(""))  # complete from here on, whatever happens
        for old in set(self.folder.iterdir()) - {part.with_suffix("")}:
            shutil.rmtree(old)
        self._saved_at = time.monotonic()
        if is_over:
            raise OutOfTimeError

    @property
    def content(self) -> dict[str, Any]:
        """Everything recorded, as JSON, with the CPU seconds of this process and those before it."""
        return self._content | {"seconds": self._content["seconds"] + time.process_time() - self._started}

    def _complete(self) -> list[Path]:
        """Returns the completely written checkpoints, the newest last."""
        if self.folder is None or not self.folder.exists():
            return []
        return sorted(path for path in self.folder.iterdir() if path.name.isdigit())

    def _numbers(self, name: str, values: Any) -> list[float]:
        numbers = np.asarray(values, dtype=np.float64)
        if numbers.shape != (len(self.seeds),):
            raise ValueError(f"{name} has the shape {list(numbers.shape)}; give one number for each of {self.seeds}.")
        # Seven digits are more than a float32 has, and NaN is no JSON.
        return [float(f"{number:.7g}") if np.isfinite(number) else None for number in numbers]  # type: ignore[misc]


def seed_runs(content: dict[str, Any]) -> dict[int, SeedRun]:
    """Splits what was recorded of a unit, with its ``seeds``, into the runs of its seeds."""
    runs = {}
    for row, seed in enumerate(content["seeds"]):
        curves = {
            name: np.array([points[row] for points in curve], dtype=np.float64)
            for name, curve in content["curves"].items()
        }
        numbers = {
            name: float("nan") if values[row] is None else values[row] for name, values in content["final"].items()
        }
        runs[seed] = SeedRun(content["steps"], curves, numbers)
    return runs
