# SPDX-License-Identifier: Apache-2.0
"""What each shipped configuration reaches: the table of ``docs/configurations.md``, and a comment in each file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_replay.options import config_directory, config_files
from tests.benchmarks.learning.evidence import PAGE, replace_table
from tests.benchmarks.learning.experiment import Experiment, hash_of
from tests.benchmarks.learning.experiments.shipped_files import arm
from tests.benchmarks.learning.page import markdown_table, spans
from tests.benchmarks.learning.recorder import SeedRun, seed_runs

CONFIGURATIONS = PAGE.with_name("configurations.md")
PREFIX = "files-"  # of the experiments that are not on methods but on files
HEADER = ("file", "steps", "seeds", "return at the end, mean (lowest to highest)", "random actions", "minutes a run")


@dataclass(frozen=True)
class Reached:
    """What the runs of a file reached.

    Args:
        experiment: with an arm of the file's name.
        file: of ``configs``.
        runs: by seed; those with other settings than the experiment's are left out.
    """

    experiment: Experiment
    file: str
    runs: Mapping[int, SeedRun]

    @property
    def steps(self) -> str:
        """Steps of a run, in words where they are a part."""
        run, full = (each["env_steps"] for each in (self.experiment.arms[self.file], arm(self.file)))
        return f"{run:,}" + (f" of {full:,}" if run < full else "")

    @property
    def row(self) -> list[str]:
        """Row of the table."""
        link = f"[`{self.file}`](../configs/{self.file})"
        if not self.runs:
            return [link, self.steps, "", "not run yet", "", ""]
        others = [self._mean(name) for name in ("random_return", "minutes")]
        return [link, self.steps, spans(self.runs), self._returns, figure(others[0]), figure(others[1])]

    @property
    def comment(self) -> str:
        """Line of the file."""
        if not self.runs:
            return "# Reached: not run yet; see docs/configurations.md."
        seeds = f"seed {spans(self.runs)}" if len(self.runs) == 1 else f"seeds {spans(self.runs)}"
        return (
            f"# Reached: return {self._returns} after {self.steps} steps, {seeds}; random actions "
            f"{figure(self._mean('random_return'))}."
        )

    @property
    def _returns(self) -> str:
        values = [self.experiment.measure.of(run) for run in self.runs.values()]
        spread = f" ({figure(min(values))} to {figure(max(values))})" if values[1:] else ""
        return f"{figure(float(np.mean(values)))}{spread}"

    def _mean(self, name: str) -> float:
        return float(np.mean([run.final[name] for run in self.runs.values()]))


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
    found: dict[str, Reached] = {}
    for experiment in (each for name, each in experiments.items() if name.startswith(PREFIX)):
        path = results / f"{experiment.name}.json"
        units = json.loads(path.read_text())["units"] if path.exists() else []
        for file in experiment.arms:
            settings = hash_of(experiment.settings_of(file))
            mine = [unit for unit in units if (unit["arm"], unit["settings_hash"]) == (file, settings)]
            runs = {seed: run for unit in mine for seed, run in seed_runs(unit).items()}
            found[file] = Reached(experiment, file, runs)
    if absent := set(config_files()) ^ set(found):
        raise ValueError(f"{sorted(absent)}: each file of configs has an arm in one experiment named {PREFIX}…")
    return [found[file] for file in config_files()]


def table(experiments: Mapping[str, Experiment], results: Path) -> str:
    """Returns the table in Markdown, a row for each file."""
    return markdown_table(HEADER, [each.row for each in reached(experiments, results)])


def write(experiments: Mapping[str, Experiment], results: Path) -> None:
    """Replaces the table of the page and the comments of the files."""
    replace_table(CONFIGURATIONS, table(experiments, results))
    for each in reached(experiments, results):
        path = config_directory() / each.file
        path.write_text(with_comment(path.read_text(), each.comment))


def with_comment(text: str, comment: str) -> str:
    """Returns a file's text with this line at the end of its first comment."""
    without = re.sub(r"^# Reached: .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\A((?:#.*\n)+)", lambda head: f"{head[0]}{comment}\n", without)
