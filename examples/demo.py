# SPDX-License-Identifier: Apache-2.0
"""Three published effects in two minutes on two cores: a table, and one picture with a panel for each.

    python examples/demo.py            # writes runs/demo/demo.png and demo-narrow.png
    python examples/demo.py --fast     # two seeds and few steps, to see it run

Level replay, event tables, and hindsight, each beside uniform replay with the same six seeds. These are mechanism
experiments: they show the effect that a paper claims on a small problem. Problems and learners are those of
tests/benchmarks, which compares more methods over more seeds. The panel of event tables trains this library's DQN.
Seeds were fixed before the first run.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # runs are parallel, operations are not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests.benchmarks

import numpy as np

PROCESSES = 2
# Modules of tests/benchmarks by the names of their experiments.
FILES = {"locks": "locks", "event-tables-agent": "event_tables_agent", "bits": "bits"}
CLOSING = """These are mechanism experiments on small problems. Larger ones, with more methods and more seeds, and those
in which no effect appeared, are in tests/benchmarks/results and docs/benchmarks.md; make experiments runs them.
Next: .venv/bin/lightning-replay fit -c configs/lightning/per_dqn_cartpole.yaml"""


@dataclass
class Run:
    """One seed of one method.

    Args:
        value: figure in the panel's table.
        at: x of the curve's points, ``[P]``.
        curve: y of the curve's points, ``[P]``.
    """

    value: float
    at: list[int]
    curve: list[float]


@dataclass
class Panel:
    """One claim: a baseline and a method over paired seeds.

    Args:
        title: of the panel.
        paper: makes the claim.
        baseline: name of the baseline in the experiment.
        method: name of the published method in the experiment.
        labels: of both in the table and the picture.
        seeds: fixed before the first run.
        value: description of the figure in the table.
        higher_is_better: of this value.
        axes: names of the axes of the picture.
        train: function of a method's name, seeds, whether to be fast, and a report of the fraction done; returns a run
            by seed.
        seconds: approximate time of one seed of one method, for the progress bar.
        stacked: whether all seeds of a method run together.
    """

    title: str
    paper: str
    baseline: str
    method: str
    labels: tuple[str, str]
    seeds: tuple[int, ...]
    value: str
    higher_is_better: bool
    axes: tuple[str, str]
    train: Callable[[str, tuple[int, ...], bool, Callable[[float], None]], dict[int, Run]]
    seconds: float
    stacked: bool = False
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)

    def of(self, method: str) -> list[Run]:
        """Returns the runs of a method in the order of the seeds."""
        return [self.runs[method, seed] for seed in self.seeds]

    @property
    def is_done(self) -> bool:
        return len(self.runs) == 2 * len(self.seeds)


def record(
    name: str,
    method: str,
    seeds: tuple[int, ...],
    is_fast: bool,
    report: Callable[[float], None],
    changes: dict[str, Any] | None = None,
) -> Any:
    """Returns what an experiment of tests/benchmarks recorded of one of its arms, by seed, with changed settings."""
    from tests.benchmarks.learning.runner import record, runs_of

    module = importlib.import_module(f"tests.benchmarks.learning.experiments.{FILES[name]}")
    (experiment,) = [each for each in module.EXPERIMENTS if each.name == name]
    experiment = replace(experiment, settings=experiment.settings | (changes or {}))
    settings = experiment.settings | (experiment.fast if is_fast else {})
    end = settings["rounds"] * settings["episodes"] if "rounds" in settings else settings.get("env_steps", 1)

    def on_record(step: int) -> None:
        report(min(1.0, step / end))

    out = record(experiment, method, seeds, is_fast=is_fast, on_record=on_record)
    return runs_of(out)


def play_locks(method: str, seeds: tuple[int, ...], is_fast: bool, report: Callable[[float], None]) -> dict[int, Run]:
    runs = {}
    for seed in seeds:
        run = record("locks", method, (seed,), is_fast, lambda share: None)[seed]
        runs[seed] = Run(run.final["success"], run.steps, run.curves["success"].tolist())
    return runs


def walk_rooms(method: str, seeds: tuple[int, ...], is_fast: bool, report: Callable[[float], None]) -> dict[int, Run]:
    from tests.benchmarks.learning.pictures import curves_of

    runs = {}
    for seed in seeds:
        run = record("event-tables-agent", method, (seed,), is_fast, report)[seed]
        at, curves = curves_of({seed: run}, "greedy_return", block=4)
        runs[seed] = Run(run.final["steps_to_near_optimal"], at.tolist(), curves[0].tolist())
    return runs


def flip_bits(method: str, seeds: tuple[int, ...], is_fast: bool, report: Callable[[float], None]) -> dict[int, Run]:
    # A quarter of the experiment's rounds is enough for the method, and no number of rounds for the baseline.
    runs = record("bits", method, seeds, is_fast, report, {} if is_fast else {"rounds": 150})
    curves = {seed: run.curves["reached"] for seed, run in runs.items()}
    return {seed: Run(float(curves[seed][-3:].mean()), run.steps, curves[seed].tolist()) for seed, run in runs.items()}


def panels(is_fast: bool) -> list[Panel]:
    built = [
        Panel(
            title="Level replay, combination locks",
            paper="Prioritized Level Replay, Jiang et al. 2021",
            baseline="uniform",
            method="level replay, staleness weight 0.3",
            labels=("uniform levels", "prioritized levels"),
            seeds=tuple(range(400, 406)),
            value="share of all locks opened at the end",
            higher_is_better=True,
            axes=("episodes", "share of all locks opened"),
            train=play_locks,
            seconds=1.0,
        ),
        Panel(
            title="Event tables, three rooms, the library's DQN",
            paper="Stratified Sampling from Event Tables, Kompella et al. 2022",
            baseline="uniform",
            method="event table: goal",
            labels=("uniform replay", "event table of the goal"),
            seeds=tuple(range(400, 406)),
            value="steps from the first goal to a near-optimal policy",
            higher_is_better=False,
            axes=("environment steps", "share of seeds that reach the goal greedily"),
            train=walk_rooms,
            seconds=14.0,
        ),
        Panel(
            title="Hindsight, flipping 20 bits",
            paper="Hindsight Experience Replay, Andrychowicz et al. 2017",
            baseline="uniform",
            method="hindsight: future",
            labels=("uniform replay", "hindsight"),
            seeds=tuple(range(400, 406)),
            value="share of goals reached in the last three evaluations",
            higher_is_better=True,
            axes=("episodes", "share of goals reached"),
            train=flip_bits,
            seconds=3.0,
            stacked=True,
        ),
    ]
    for panel in built if is_fast else []:
        panel.seeds = panel.seeds[:2]
    return built


_shares: Any = None  # fraction done of each job, shared with the processes


def _connect(shares: Any) -> None:
    global _shares
    _shares = shares


def _work(number: int, panel: int, method: str, seeds: tuple[int, ...], is_fast: bool) -> dict[int, Run]:
    def report(share: float) -> None:
        _shares[number] = share

    return panels(is_fast)[panel].train(method, seeds, is_fast, report)


def run_all(built: list[Panel], is_fast: bool) -> Iterable[Panel]:
    """Yields each panel when its last run has ended; a bar shows the progress of all runs."""
    from tqdm import tqdm

    jobs = []
    for number, panel in enumerate(built):
        groups = [panel.seeds] if panel.stacked else [(seed,) for seed in panel.seeds]
        jobs += [(number, method, seeds) for seeds in groups for method in (panel.baseline, panel.method)]
    # The longest job starts before the last short ones, so that both processes end together.
    longest = next(job for job in reversed(jobs) if built[job[0]].stacked)
    jobs.remove(longest)
    jobs.insert(len(jobs) * 3 // 4, longest)
    costs = [built[number].seconds * len(seeds) for number, _, seeds in jobs]
    if "forkserver" in multiprocessing.get_all_start_methods():  # whose processes share what it has imported
        context: Any = multiprocessing.get_context("forkserver")
        experiments = [f"tests.benchmarks.learning.experiments.{file}" for file in FILES.values()]
        context.set_forkserver_preload(["__main__", *experiments])
    else:
        context = multiprocessing.get_context("spawn")
    shares = context.Array("d", len(jobs), lock=False)
    bar = tqdm(
        total=100,
        bar_format="{percentage:3.0f}% |{bar}| {elapsed}",
        mininterval=0.5 if sys.stderr.isatty() else 10.0,
    )
    with ProcessPoolExecutor(PROCESSES, context, _connect, (shares,)) as pool, bar:
        running: dict[Future, int] = {
            pool.submit(_work, job, panel, method, seeds, is_fast): job
            for job, (panel, method, seeds) in enumerate(jobs)
        }
        while running:
            ended, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in ended:
                job = running.pop(future)
                shares[job] = 1.0
                number, method, _ = jobs[job]
                panel = built[number]
                panel.runs |= {(method, seed): run for seed, run in future.result().items()}
                if panel.is_done:
                    bar.clear()
                    yield panel
            share = sum(cost * done for cost, done in zip(costs, shares, strict=True)) / sum(costs)
            bar.update(100 * share - bar.n)


def print_table(panel: Panel) -> None:
    """Prints every seed of both methods, their differences, means and standard errors."""
    baseline, method = (np.array([run.value for run in panel.of(name)]) for name in (panel.baseline, panel.method))
    difference = method - baseline
    digits = 3 if abs(baseline).max() < 10 else 0
    better = "higher" if panel.higher_is_better else "lower"
    print(f"\n{panel.title} ({panel.paper})\n  {panel.value}; {better} is better\n")
    print(f"  {'seed':<28}" + "".join(f"{seed:>9}" for seed in panel.seeds) + f"{'mean':>12} ± standard error")
    for label, numbers in zip((*panel.labels, "difference"), (baseline, method, difference), strict=True):
        sign = "+" if label == "difference" else ""
        cells = "".join(f"{number:>{sign}9,.{digits}f}" for number in numbers)
        mean, error = (
            f"{numbers.mean():>{sign}12,.{digits}f}",
            f"{numbers.std(ddof=1) / len(numbers) ** 0.5:,.{digits}f}",
        )
        print(f"  {label:<28}{cells}{mean} ± {error}")
    ahead = difference > 0 if panel.higher_is_better else difference < 0
    medians = " and ".join(f"{np.median(numbers):,.{digits}f}" for numbers in (baseline, method))
    print(f"  {panel.labels[1]} better for {ahead.sum()} of {len(ahead)} seeds; medians {medians}")


def draw(built: list[Panel], path: Path, columns: int) -> None:
    """Writes a PNG file: means of the finished panels, with bands of one standard error."""
    from lightning_replay.inspection.plotting import count_on, make_figure, save_figure
    from tests.benchmarks.learning.pictures import band_note, draw_band

    rows = len(built) // columns
    figure, grid = make_figure("the picture of the demo", rows, columns, width=4.4 * columns, height=4.6 * rows)
    for axes, panel in zip(grid.flat, built, strict=True):
        axes.set(title=panel.title, xlabel=panel.axes[0], ylabel=panel.axes[1])
        count_on(axes.xaxis)
        if not panel.is_done:
            axes.text(0.5, 0.5, "still running", transform=axes.transAxes, ha="center")
            continue
        for method, label in zip((panel.baseline, panel.method), panel.labels, strict=True):
            runs = panel.of(method)
            draw_band(axes, runs[0].at, [run.curve for run in runs], label)
        note = {"title": band_note(len(panel.seeds)), "title_fontsize": "small", "fontsize": "small"}
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, **note)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="two seeds and few steps")
    parser.add_argument("--directory", type=Path, default=Path("runs", "demo"))
    options = parser.parse_args()
    started = time.perf_counter()
    picture = options.directory / "demo.png"
    built = panels(options.fast)
    print("Each method beside uniform replay, same seeds, none left out; about two minutes on two cores.", flush=True)
    for panel in run_all(built, options.fast):
        print_table(panel)
        draw(built, picture, columns=len(built))
        draw(built, picture.with_stem("demo-narrow"), columns=1)
        print(f"  {time.perf_counter() - started:.0f} s; this panel is in {picture}", flush=True)
    print(f"\n{picture}: the three learning curves. {time.perf_counter() - started:.0f} s in all.\n{CLOSING}")


if __name__ == "__main__":
    main()
