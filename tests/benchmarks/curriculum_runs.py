# SPDX-License-Identifier: Apache-2.0
"""Runs of a curriculum experiment: carried out by worker processes, kept one by one, summed up as table and picture."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from experiment_pictures import draw_panels

RESULTS = Path(__file__).parent / "results"
METHODS = {
    "us": "uniform schedule",
    "exp3": "EXP3",
    "db": "no curriculum",
    "dbc": "easy-to-hard stages",
    "drc": "reverse curriculum",
}  # in the order of tables and pictures


@dataclass(frozen=True)
class Job:
    """Runs that one process plays side by side: pairs of method and seed, and the settings of all."""

    runs: list[tuple[str, int]]
    settings: dict[str, Any]


def options(description: str, methods: Sequence[str], seeds: int, together: int) -> argparse.Namespace:
    """Reads ``--seeds``, ``--methods``, ``--processes``, ``--save`` and ``--fast``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, default=seeds, help="seeds 0 to this many")
    parser.add_argument("--methods", nargs="+", default=list(methods), choices=list(METHODS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--together", type=int, default=together, help="runs that a process plays side by side")
    parser.add_argument("--save", action="store_true", help="keep every run at once, go on where an earlier call ended")
    parser.add_argument("--fast", action="store_true", help="a smoke run of seconds that learns and keeps nothing")
    return parser.parse_args()


@dataclass
class Runs:
    """The runs of one experiment.

    Each is ``{"method", "seed", "updates": [n], "success": {task: [n]}, "seconds", ...}``: greedy success along the
    way, the last entry being the one at the end, which more episodes measure.

    Args:
        title: of table and picture.
        name: of the files in ``results``.
        tasks: their names, the target first.
        settings: of every run; kept runs of other settings are refused.
    """

    title: str
    name: str
    tasks: Sequence[str]
    settings: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Where runs are kept."""
        return RESULTS / f"{self.name}.json"

    def load(self) -> None:
        """Takes over the runs that were kept.

        Raises:
            ValueError: they were made with other settings.
        """
        if not self.path.exists():
            return
        kept = json.loads(self.path.read_text())
        if kept["settings"] != json.loads(json.dumps(self.settings)):
            raise ValueError(f"{self.path} was made with other settings; move it away or restore {kept['settings']}")
        self.runs = kept["runs"]

    def carry_out(self, play: Callable[[Job], list[dict[str, Any]]], chosen: argparse.Namespace) -> None:
        """Plays what is missing, all methods of a seed before the next seed."""
        save = chosen.save and not chosen.fast
        if save:
            self.load()
        done = {(run["method"], run["seed"]) for run in self.runs}
        seeds = range(1 if chosen.fast else chosen.seeds)
        missing = [(method, seed) for seed in seeds for method in chosen.methods if (method, seed) not in done]
        jobs = [Job(missing[i : i + chosen.together], self.settings) for i in range(0, len(missing), chosen.together)]
        with multiprocessing.get_context("spawn").Pool(max(1, min(chosen.processes, len(jobs)))) as pool:
            for runs in pool.imap_unordered(play, jobs):
                for run in runs:
                    self.runs.append(run)
                    ends = "  ".join(f"{task} {values[-1]:.2f}" for task, values in run["success"].items())
                    print(f"{run['method']:5s} seed {run['seed']}: {ends}  ({run['seconds']:.0f} s)", flush=True)
                if save:
                    self.save()

    def save(self) -> None:
        """Writes the runs, the table and the picture."""
        RESULTS.mkdir(exist_ok=True)
        runs = sorted(self.runs, key=lambda run: (list(METHODS).index(run["method"]), run["seed"]))
        content = {"title": self.title, "settings": self.settings, "runs": runs}
        self.path.write_text(json.dumps(content, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(self.report())
        draw_runs(content, self.path.with_suffix(".png"))

    def at_end(self, method: str, task: str) -> list[float]:
        """Success of every run of a method at its end."""
        return [run["success"][task][-1] for run in self.runs if run["method"] == method]

    def report(self) -> str:
        """The table in Markdown, mean and standard error over the seeds, and what sets the methods apart."""
        lines = [f"# {self.title}", "", "Greedy success at the end, mean over the seeds ± standard error.", ""]
        lines += ["| method | seeds | " + " | ".join(self.tasks) + " | minutes a run |"]
        lines += ["|---" * (len(self.tasks) + 3) + "|"]
        for method, words in METHODS.items():
            seconds = [run["seconds"] for run in self.runs if run["method"] == method]
            if seconds:
                cells = [_mean_and_error(self.at_end(method, task)) for task in self.tasks]
                minutes = statistics.mean(seconds) / 60
                lines.append(f"| {words} | {len(seconds)} | " + " | ".join(cells) + f" | {minutes:.1f} |")
        lines += ["", *self.comparisons(), ""]
        lines += ["Settings: " + ", ".join(f"{name} {value}" for name, value in self.settings.items()) + ".", ""]
        return "\n".join(lines)

    def comparisons(self) -> list[str]:
        """How far each curriculum lies above no curriculum on the target, in standard errors of the difference."""
        target, baseline = self.tasks[0], self.at_end("db", self.tasks[0])
        lines = []
        for method, words in METHODS.items():
            values = self.at_end(method, target)
            if method == "db" or len(values) < 2 or len(baseline) < 2:
                continue
            difference = statistics.mean(values) - statistics.mean(baseline)
            error = math.hypot(standard_error(values), standard_error(baseline))
            ratio = f"{difference / error:.1f} standard errors" if error else "no spread over the seeds"
            lines.append(f"* {words} above no curriculum on {target}: {difference:.2f} ({ratio}).")
        return lines


def draw_runs(content: dict[str, Any], path: Path) -> None:
    """Success on every task over the updates."""
    runs = content["runs"]
    by_method = {words: [run for run in runs if run["method"] == method] for method, words in METHODS.items()}
    panels = {
        f"task {task}": {
            words: np.array([run["success"][task] for run in of_method])
            for words, of_method in by_method.items()
            if of_method
        }
        for task in runs[0]["success"]
    }
    draw_panels(panels, runs[0]["updates"], path, content["title"], "updates", "greedy success", ylim=(-0.03, 1.03))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _mean_and_error(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.2f} ± {standard_error(values):.2f}" if len(values) > 1 else f"{mean:.2f}"
