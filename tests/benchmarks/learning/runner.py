# SPDX-License-Identifier: Apache-2.0
"""The command that runs experiments: which ones, which units of them, and what is written."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import fnmatch
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.benchmarks.learning.evidence import check_places, write_table
from tests.benchmarks.learning.experiment import Experiment, Settings
from tests.benchmarks.learning.page import Results, provenance, write
from tests.benchmarks.learning.recorder import Recorder, SeedRun, seed_runs
from tests.benchmarks.learning.units import (
    ROOT,
    begins_anew,
    carry_out_all,
    commit,
    set_aside,
    take_finished,
    units_of,
)

EXPERIMENTS = Path(__file__).parent / "experiments"
RESULTS = Path(__file__).parents[1] / "results"
COMMAND = "python -m tests.benchmarks.learning"
NICENESS = 10
FAST_SEEDS = 2


class UsageError(ValueError):
    """A command that names what does not exist; the message is for whoever typed it."""


def all_experiments() -> dict[str, Experiment]:
    """By name, in the order of the files."""
    found: dict[str, Experiment] = {}
    for path in sorted(EXPERIMENTS.glob("*.py")):
        module = importlib.import_module(f"tests.benchmarks.learning.experiments.{path.stem}")
        for experiment in module.EXPERIMENTS:
            if experiment.name in found:
                raise ValueError(f"{path.name} has an experiment {experiment.name!r}, which another file has too.")
            found[experiment.name] = experiment
    return found


def chosen(names: Sequence[str], patterns: Sequence[str], what: str) -> list[str]:
    """Names that match one of the patterns, in their own order; all without patterns.

    Raises:
        UsageError: a pattern matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            close = difflib.get_close_matches(pattern, names, n=1)
            raise UsageError(
                f"no {what} is named {pattern!r}{f', did you mean {close[0]!r}?' if close else ';'} choose from "
                f"{', '.join(map(repr, names))}; * stands for any text."
            )
    return [name for name in names if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def at_least_one(text: str) -> int:
    """A whole number from the command line."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give a whole number of at least 1")
    return int(text)


def minutes(text: str) -> float:
    """A length of time from the command line."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give a number of minutes, 0 or more")
    return number


def parser_of(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options."""
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="experiments, also patterns (nmer*)")
    parser.add_argument("--list", action="store_true", help="names, finished units, and whether results are written")
    parser.add_argument("--arms", nargs="+", default=[], metavar="ARM", help="arms that are run, also patterns")
    parser.add_argument("--seeds", type=at_least_one, metavar="N", help="run the first N seeds only")
    parser.add_argument("--pilot", action="store_true", help="run the pilot seeds; the page goes to .experiments")
    parser.add_argument(
        "--budget-minutes", type=minutes, default=float("inf"), help="stop then; a later command goes on"
    )
    parser.add_argument("--processes", type=at_least_one, default=1, help="of one thread each")
    parser.add_argument("--fast", action="store_true", help="two seeds and few steps; nothing is kept")
    parser.add_argument(
        "--partial", action="store_true", help="write results of unfinished experiments, from which any machine goes on"
    )
    parser.add_argument("--restart", action="store_true", help="set kept units aside (NAME.old-1), begin anew")
    parser.add_argument("--redraw", action="store_true", help="pages and pictures from the results; nothing is run")
    parser.add_argument("--state", type=Path, default=ROOT / ".experiments", help="folder of the units")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(options: argparse.Namespace, experiments: dict[str, Experiment] | None = None) -> int:
    """Carries out a command; returns the exit status, 1 where something is unfinished."""
    experiments = all_experiments() if experiments is None else experiments
    names = chosen(list(experiments), options.only, "experiment")
    arms = {name: chosen(list(experiments[name].arms), options.arms, f"arm of {name}") for name in names}
    writes_table = options.results == RESULTS and not (options.list or options.worker or options.pilot)
    if options.fast:
        for name in names:
            print(run_fast(experiments[name], arms[name]))
        return 0
    if writes_table:
        check_places(experiments)  # before hours are spent
    os.nice(max(0, NICENESS - os.nice(0)))
    torch.set_num_threads(1)
    deadline = time.time() + 60 * options.budget_minutes
    unfinished = 0
    for name in names:
        if options.list:
            print(progress(experiments[name], options))
        elif options.redraw:
            redraw(experiments[name], results_of(experiments[name], options))
        else:
            unfinished += not run(experiments[name], arms[name], options, deadline)
    if writes_table:
        write_table(all_experiments(), RESULTS)
    return int(unfinished > 0)


def run(experiment: Experiment, arms: Sequence[str], options: argparse.Namespace, deadline: float) -> bool:
    """Carries out units of an experiment, then prints its page and writes its results.

    Returns:
        Whether the experiment is complete.
    """
    seeds = list(experiment.pilot_seeds if options.pilot else experiment.seeds)
    state = state_of(experiment, options)
    if options.restart and not options.worker:
        set_aside(state)
    elif not (options.pilot or options.worker or begins_anew(state)):
        take_finished(units_of(experiment, seeds, list(experiment.arms), state), results_of(experiment, options))
    units = units_of(experiment, seeds[: options.seeds], arms, state)
    helpers = [] if options.worker else start_workers(experiment, options, deadline)
    try:
        carry_out_all(units, deadline, lambda line: print(line, flush=True))
        for helper in helpers:
            if status := helper.wait():
                raise RuntimeError(f"a process of {experiment.name} ended with status {status}; its error is above.")
    finally:
        for helper in helpers:
            helper.terminate()  # where an error or a signal ends this process; later commands go on
            helper.wait()
    if options.worker:
        return True
    every = units_of(experiment, seeds, list(experiment.arms), state)
    results = Results(experiment, [unit.results() for unit in every if unit.is_finished], seeds)
    if not results.units:
        return False
    made = provenance(command_of(experiment, options))
    print(results.page(made), "\n", flush=True)
    is_complete = not results.missing
    if options.pilot:
        write(results, made, state)
    elif is_complete or options.partial:
        write(results, made, options.results)
        print(f"written: {results_of(experiment, options)}, .md and .png", flush=True)
    return is_complete


def run_fast(experiment: Experiment, arms: Sequence[str]) -> str:
    """Runs the first seeds with the experiment's fast settings; returns the page, keeps nothing."""
    seeds = list(experiment.seeds)[:FAST_SEEDS]
    fast = dataclasses.replace(experiment, settings=experiment.settings | experiment.fast)
    units = []
    for unit in units_of(experiment, seeds, arms, Path()):
        content = record(experiment, unit.arm, unit.seeds, is_fast=True).content
        units.append({"arm": unit.arm, "seeds": list(unit.seeds), "commit": commit(), **content})
    results, made = Results(fast, units, seeds), provenance(f"{COMMAND} --only {experiment.name} --fast")
    with tempfile.TemporaryDirectory() as folder:
        write(results, made, Path(folder))
    return results.page(made)


def record(experiment: Experiment, arm: str, seeds: Sequence[int], *, is_fast: bool = False, **options) -> Recorder:
    """Runs some seeds of an arm in this process, without the runner's folders.

    Args:
        experiment: which.
        arm: its name.
        seeds: stacked in one run.
        is_fast: with the experiment's fast settings.
        options: further ones of the recorder.
    """
    settings: Settings = experiment.settings_of(arm) | (experiment.fast if is_fast else {})
    out = Recorder(seeds, **options)
    experiment.run(settings, seeds, out)
    return out


def runs_of(out: Recorder) -> dict[int, SeedRun]:
    """What was recorded, by seed."""
    return seed_runs({"seeds": list(out.seeds), **out.content})


def start_workers(experiment: Experiment, options: argparse.Namespace, deadline: float) -> list[subprocess.Popen]:
    """Starts further processes, which take units of the experiment too."""
    command = [sys.executable, "-m", "tests.benchmarks.learning", *worker_options(experiment, options, deadline)]
    return [subprocess.Popen(command, cwd=ROOT) for _ in range(options.processes - 1)]


def worker_options(experiment: Experiment, options: argparse.Namespace, deadline: float) -> list[str]:
    """The options of these processes."""
    given = ["--worker", "--only", experiment.name, "--state", str(options.state)]
    given += ["--pilot"] if options.pilot else []
    given += [] if options.seeds is None else ["--seeds", str(options.seeds)]
    given += ["--budget-minutes", str(max(0.0, deadline - time.time()) / 60)]
    return given + (["--arms", *options.arms] if options.arms else [])


def results_of(experiment: Experiment, options: argparse.Namespace) -> Path:
    """Where the numbers of an experiment are written."""
    return options.results / f"{experiment.name}.json"


def redraw(experiment: Experiment, path: Path) -> None:
    """Writes page and picture anew from the runs in ``NAME.json``."""
    if not path.exists():
        print(f"{experiment.name}: no results")
        return
    kept = json.loads(path.read_text())
    made = {name: kept[name] for name in ("command", "versions", "machine")}
    write(Results(experiment, kept["units"], kept["seeds"]), made, path.parent)
    print(f"written: {path}, .md and .png")


def progress(experiment: Experiment, options: argparse.Namespace) -> str:
    """How many units are finished, and whether results are written."""
    seeds = experiment.pilot_seeds if options.pilot else experiment.seeds
    units = units_of(experiment, list(seeds), list(experiment.arms), state_of(experiment, options))
    finished, path = sum(unit.is_finished for unit in units), results_of(experiment, options)
    written = ""
    if path.exists() and not options.pilot:
        written = (
            ", unfinished results are written" if json.loads(path.read_text())["missing"] else ", results are written"
        )
    return f"{experiment.name}: {finished} of {len(units)} units finished{written}"


def state_of(experiment: Experiment, options: argparse.Namespace) -> Path:
    """The folder of an experiment's units."""
    return options.state / (f"{experiment.name}-pilot" if options.pilot else experiment.name)


def command_of(experiment: Experiment, options: argparse.Namespace) -> str:
    """What another user types to repeat the results."""
    flags = [flag for flag, is_set in (("--pilot", options.pilot), ("--partial", options.partial)) if is_set]
    return " ".join([COMMAND, "--only", experiment.name, *flags])
