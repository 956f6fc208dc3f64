# SPDX-License-Identifier: Apache-2.0
"""Files of an experiment's results: numbers as JSON, a page in Markdown, learning curves as a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.learning.comparison import Comparison, compare, contrast_text, interquartile_mean, interval
from tests.benchmarks.learning.experiment import Experiment, Measure
from tests.benchmarks.learning.pictures import draw_panels
from tests.benchmarks.learning.recorder import SeedRun, seed_runs

PACKAGES = (
    *("torch", "torchrl", "tensordict", "numpy", "scipy", "lightning", "gymnasium", "mujoco", "minigrid", "MinAtar"),
    *("box2d", "gymnasium-robotics", "ray", "numba"),
)

LEGEND = (
    "Intervals in brackets are of 95 %: Student's below eight seeds, otherwise from resampled seeds, widened for few. "
    "The interquartile mean leaves out the lowest and the highest quarter of the seeds. Probability of improvement: "
    "that a seed of the first arm is better than a seed of the second, any two seeds compared."
)


class Results:
    """Finished units of an experiment.

    Args:
        experiment: whose measures and comparisons are computed.
        units: what was recorded, see ``Unit.results``.
        seeds: all that are to be run.
    """

    def __init__(self, experiment: Experiment, units: Sequence[dict[str, Any]], seeds: Sequence[int]) -> None:
        self.experiment = experiment
        self.units = [unit for unit in units if unit["arm"] in experiment.arms]
        self.seeds = list(seeds)
        self.runs: dict[str, dict[int, SeedRun]] = {arm: {} for arm in experiment.arms}
        for unit in self.units:
            self.runs[unit["arm"]] |= seed_runs(unit)
        self._compared: dict[str, list[Comparison]] = {}

    @property
    def cut_at(self) -> int | None:
        """Last step of unfinished units that were cut to a common length, else ``None``."""
        return next((unit["cut_at"] for unit in self.units if "cut_at" in unit), None)

    @property
    def missing(self) -> dict[str, list[int]]:
        """Seeds that have not been run, by arm."""
        absent = {arm: [seed for seed in self.seeds if seed not in runs] for arm, runs in self.runs.items()}
        return {arm: seeds for arm, seeds in absent.items() if seeds}

    def values(self, arm: str, measure: Measure) -> dict[int, float]:
        """Returns a measure of an arm by seed.

        Raises:
            ValueError: it is not a finite number.
        """
        values = {seed: float(measure.of(run)) for seed, run in self.runs[arm].items() if seed in self.seeds}
        if not np.isfinite(list(values.values())).all():
            raise ValueError(f"{self.experiment.name}, {arm}: {measure.name!r} by seed is {values}; give a finite one.")
        return values

    def comparisons(self, measure: Measure) -> list[Comparison]:
        """Returns the comparisons of all pairs of arms over the seeds that both have; computed once."""
        if measure.name not in self._compared:
            self._compared[measure.name] = self._compare(measure)
        return self._compared[measure.name]

    def content(self, provenance: dict[str, Any]) -> dict[str, Any]:
        """Returns everything that ``NAME.json`` holds."""
        experiment = self.experiment
        measures = [experiment.measure, *experiment.also]
        return {
            "name": experiment.name,
            "title": experiment.title,
            "claim": experiment.claim,
            "task": experiment.task,
            "settings": experiment.settings,
            "arms": experiment.arms,
            "seeds": self.seeds,
            "pilot_seeds": list(experiment.pilot_seeds),
            "missing": self.missing,
            **({} if self.cut_at is None else {"cut_at": self.cut_at}),
            "measure": experiment.measure.name,
            "verdicts": [each.text for each in self.comparisons(experiment.measure)],
            "comparisons": {each.name: [asdict(pair) for pair in self.comparisons(each)] for each in measures},
            "values": {each.name: {arm: self.values(arm, each) for arm in experiment.arms} for each in measures},
            "commits": sorted({unit["commit"] for unit in self.units}),
            **provenance,
            "units": self.units,
        }

    def page(self, provenance: dict[str, Any]) -> str:
        """Returns the page in Markdown."""
        experiment = self.experiment
        verdicts = "\n".join(f"* {each.text}." for each in self.comparisons(experiment.measure))
        return "\n\n".join(
            part
            for part in (
                f"# {experiment.title}",
                experiment.task,
                f"Claim: {experiment.claim}",
                self._unfinished(),
                f"Primary measure, fixed before these seeds were run: {experiment.measure.name} "
                f"({'higher' if experiment.measure.higher_is_better else 'lower'} is better). Seeds {spans(self.seeds)}"
                f"{f'; pilot seeds {spans(experiment.pilot_seeds)}' if experiment.pilot_seeds else ''}.",
                verdicts,
                self._arms_table(),
                self._pairs_table() if experiment.pairs else "",
                LEGEND,
                experiment.notes,
                f"Settings: `{json.dumps(experiment.settings)}`. Arms: `{json.dumps(dict(experiment.arms))}`.",
                f"Written by `{provenance['command']}`; "
                f"{', '.join(f'{name} {version}' for name, version in provenance['versions'].items())}; "
                f"commits {', '.join(sorted({unit['commit'] for unit in self.units}))}.",
            )
            if part
        )

    def draw(self, path: Path) -> None:
        """Writes the picture of the learning curves, if the experiment has panels."""
        if self.experiment.panels:
            draw_panels(self.experiment, self.runs, path)

    def _compare(self, measure: Measure) -> list[Comparison]:
        made = []
        for arm, other in self.experiment.pairs:
            ours, theirs = self.values(arm, measure), self.values(other, measure)
            seeds = [seed for seed in self.seeds if seed in ours and seed in theirs]
            if seeds:
                columns = ([each[seed] for seed in seeds] for each in (ours, theirs))
                options = {"higher_is_better": measure.higher_is_better, "digits": measure.digits}
                options["is_complete"] = not {arm, other} & self.missing.keys()
                made.append(compare(arm, other, *columns, measure.contrast, **options))
        return made

    def _unfinished(self) -> str:
        if self.cut_at is not None:
            return (
                f"**Unfinished: {self.cut_at:,} of {self.experiment.run_length}.** Every run is cut to the steps that "
                "all runs have reached. The verdicts are of this part."
            )
        if not self.missing:
            return ""
        absent = "; ".join(f"{arm}: {spans(seeds)}" for arm, seeds in self.missing.items())
        return f"**Unfinished: no verdict on arms of which seeds are missing.** Seeds that have not been run: {absent}."

    def _arms_table(self) -> str:
        measure, others = self.experiment.measure, self.experiment.also
        header = ["arm", "seeds", f"{measure.name}: mean", "interquartile mean", "median"]
        header += [*(each.name for each in others), "CPU s per run"]
        rows = []
        for arm, runs in self.runs.items():
            if not runs:
                continue
            values = np.array(list(self.values(arm, measure).values()))
            form = f",.{measure.digits}f"
            row = [arm, str(len(values)), mean_text(values, measure.digits)]
            row += [f"{float(of(values)):{form}}" for of in (interquartile_mean, np.median)]
            row += [mean_text(np.array(list(self.values(arm, each).values())), each.digits) for each in others]
            seconds = sum(unit["seconds"] for unit in self.units if unit["arm"] == arm) / len(runs)
            rows.append([*row, f"{seconds:,.1f}" if seconds < 100 else f"{seconds:,.0f}"])
        return markdown_table(header, rows)

    def _pairs_table(self) -> str:
        measures = [self.experiment.measure, *self.experiment.also]
        by_measure = {each.name: self.comparisons(each) for each in measures}
        header = ["compared", *(f"{each.name}: {each.contrast.name}" for each in measures)]
        header += ["probability of improvement", "seeds better"]
        rows = []
        for number, pair in enumerate(by_measure[measures[0].name]):
            cells = []
            for each in measures:
                seen = by_measure[each.name][number]
                cells.append(contrast_text(each.contrast, seen.value, seen.low, seen.high, each.digits))
            chance = "{:.2f} [{:.2f}, {:.2f}]".format(*pair.improvement)
            rows.append([f"{pair.arm} with {pair.other}", *cells, chance, f"{pair.seeds_better} of {pair.seeds}"])
        return markdown_table(header, rows)


def provenance(command: str) -> dict[str, Any]:
    """Returns how results were made: the command, versions of the installed packages, the machine."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"command": command, "versions": versions, "machine": f"{platform.system()} {platform.machine()}"}


def write(results: Results, provenance: dict[str, Any], folder: Path) -> None:
    """Writes ``NAME.json``, ``NAME.md`` and ``NAME.png`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / results.experiment.name
    path.with_suffix(".json").write_text(json.dumps(results.content(provenance)) + "\n")
    path.with_suffix(".md").write_text(results.page(provenance) + "\n")
    results.draw(path.with_suffix(".png"))


def mean_text(values: np.ndarray, digits: int) -> str:
    """Returns the mean with its interval."""
    low, high = interval(np.mean, values)
    form = f",.{digits}f"
    return f"{values.mean():{form}} [{low:{form}}, {high:{form}}]"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, others: str = "---:") -> str:
    """Returns a table, the first column to the left and the others to the right, or as given."""
    first, *below = (f"| {' | '.join(line)} |" for line in (header, *rows))
    rule = f"|{'|'.join(['---', *[others] * (len(header) - 1)])}|"
    return "\n".join([first, rule, *below])


def spans(seeds: Iterable[int]) -> str:
    """Returns seeds in words.

    Example:
        >>> spans([3, 1, 2, 7])
        '1 to 3, 7'
    """
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{part[0]} to {part[-1]}" if part[1:] else str(part[0]) for part in parts)
