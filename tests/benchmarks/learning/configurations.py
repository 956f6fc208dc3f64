# SPDX-License-Identifier: Apache-2.0
"""What each shipped configuration reaches: the table of ``docs/configurations.md``, and a comment in each file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightning_replay.options import config_directory, config_files
from tests.benchmarks.learning.evidence import PAGE, replace
from tests.benchmarks.learning.experiment import Experiment, Measure, hash_of
from tests.benchmarks.learning.experiments.shipped_files import HALF_FIELD, arm
from tests.benchmarks.learning.page import markdown_table, spans
from tests.benchmarks.learning.recorder import SeedRun, seed_runs

CONFIGURATIONS = PAGE.with_name("configurations.md")
PREFIX = "files-"  # of the experiments that are not on methods but on files
ELSEWHERE = {"half-field-file": HALF_FIELD}  # experiments on one file; the arm "the file" runs it unchanged
HEADER = ("file", "steps", "return (range)", "random actions", "minutes")
USUAL_SEEDS = range(700, 703)  # of the runs of a file; others are named in its row


@dataclass(frozen=True)
class Reached:
    """What the runs of a file reached.

    Args:
        file: of ``configs``.
        env_steps: of a run.
        runs: by seed; those with other settings than the experiment's are left out.
        minutes: of CPU of the process that learns, mean of the runs.
        measure: of the experiment.
        is_return: whether the measure is one of returns, and not named in the table.
    """

    file: str
    env_steps: int
    runs: Mapping[int, SeedRun] = field(default_factory=dict)
    minutes: float = 0.0
    measure: Measure | None = None
    is_return: bool = True

    @property
    def steps(self) -> str:
        """Steps of a run, and of how many where they are a part."""
        full = arm(self.file)["env_steps"]
        return f"{self.env_steps:,}" + (f" of {full:,}" if self.env_steps < full else "")

    @property
    def row(self) -> list[str]:
        """Row of the table."""
        link = f"[`{self.file}`](../configs/{self.file})"
        if not self.runs:
            return [link, self.steps, "not run yet", "", ""]
        reached = self._values if self.is_return else f"{self.measure.name}: {self._values}"  # type: ignore[union-attr]
        seeds = "" if set(self.runs) == set(USUAL_SEEDS) else f", {self._seeds}"
        return [link, self.steps, f"{reached}{seeds}", self._random, figure(self.minutes)]

    @property
    def comment(self) -> str:
        """Line of the file."""
        if not self.runs:
            return "# Reached: not run yet; see docs/configurations.md."
        what = "return" if self.is_return else self.measure.name  # type: ignore[union-attr]
        random = f"; random actions {mean}" if (mean := self._random) else ""
        return f"# Reached: {what} {self._values} after {self.steps} steps, {self._seeds}{random}."

    @property
    def _seeds(self) -> str:
        return f"{'seeds' if len(self.runs) > 1 else 'seed'} {spans(self.runs)}"

    @property
    def _values(self) -> str:
        values = [self.measure.of(run) for run in self.runs.values()]  # type: ignore[union-attr]
        spread = f" ({figure(min(values))} to {figure(max(values))})" if values[1:] else ""
        return f"{figure(float(np.mean(values)))}{spread}"

    @property
    def _random(self) -> str:
        values = [run.final["random_return"] for run in self.runs.values() if "random_return" in run.final]
        return figure(float(np.mean(values))) if values else ""


def figure(value: float) -> str:
    """Returns a number with three digits or those before its point.

    Example:
        >>> figure(1234.5), figure(-12.34), figure(0.5)
        ('1,234', '-12.3', '0.50')
    """
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def reached(experiments: Mapping[str, Experiment], results: Path) -> list[Reached]:
    """Returns what each shipped file reached, in the order of the files.

    Raises:
        ValueError: a file has no arm in an experiment on files.
    """
    found = {file: Reached(file, arm(file)["env_steps"]) for file in ELSEWHERE.values()}
    for name, experiment in experiments.items():
        is_return, path = name.startswith(PREFIX), results / f"{name}.json"
        if not (is_return or name in ELSEWHERE):
            continue
        units = json.loads(path.read_text())["units"] if path.exists() else []
        for each in experiment.arms if is_return else ("the file",):
            file, settings = ELSEWHERE.get(name, each), experiment.settings_of(each)
            mine = [unit for unit in units if (unit["arm"], unit["settings_hash"]) == (each, hash_of(settings))]
            runs = {seed: run for unit in mine for seed, run in seed_runs(unit).items()}
            steps = settings.get("env_steps", arm(file)["env_steps"])
            minutes = sum(unit["seconds"] for unit in mine) / 60 / max(1, len(runs))
            found[file] = Reached(file, steps, runs, minutes, experiment.measure, is_return)
    if absent := set(config_files()) ^ set(found):
        raise ValueError(f"{sorted(absent)}: each file of configs has an arm in one experiment named {PREFIX}…")
    return [found[file] for file in config_files()]


def table(experiments: Mapping[str, Experiment], results: Path) -> str:
    """Returns the table in Markdown, a row for each file."""
    return markdown_table(HEADER, [each.row for each in reached(experiments, results)])


def write(experiments: Mapping[str, Experiment], results: Path) -> None:
    """Replaces the table of the page and the comments of the files."""
    replace(CONFIGURATIONS, table(experiments, results))
    for each in reached(experiments, results):
        path = config_directory() / each.file
        path.write_text(with_comment(path.read_text(), each.comment))


def with_comment(text: str, comment: str) -> str:
    """Returns a file's text with this line after its command."""
    command, rest = re.sub(r"^# Reached: .*\n", "", text, flags=re.MULTILINE).split("\n", 1)
    return f"{command}\n{comment}\n{rest}"
