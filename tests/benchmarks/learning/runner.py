# SPDX-License-Identifier: Apache-2.0
"""Runs experiments and writes their results."""

from __future__ import annotations

import argparse
import dataclasses
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

from tests.benchmarks.learning import configurations
from tests.benchmarks.learning.command import COMMAND, RESULTS, chosen, command_of, worker_options
from tests.benchmarks.learning.evidence import check_places, write_lists
from tests.benchmarks.learning.experiment import Experiment, Settings
from tests.benchmarks.learning.page import Results, provenance, write
from tests.benchmarks.learning.recorder import Recorder, SeedRun, seed_runs
from tests.benchmarks.learning.units import (
    ROOT,
    begins_anew,
    carry_out_all,
    carry_out_in_turn,
    commit,
    cut_to_common_length,
    set_aside,
    take_finished,
    units_of,
)

EXPERIMENTS = Path(__file__).parent / "experiments"
NICENESS = 10
FAST_SEEDS = 2


def all_experiments() -> dict[str, Experiment]:
    """Returns the experiments of all files by name, in the order of the files."""
    found: dict[str, Experiment] = {}
    for path in sorted(EXPERIMENTS.glob("*.py")):
        module = importlib.import_module(f"tests.benchmarks.learning.experiments.{path.stem}")
        for experiment in module.EXPERIMENTS:
            if experiment.name in found:
                raise ValueError(f"{path.name} has an experiment {experiment.name!r}, which another file has too.")
            found[experiment.name] = experiment
    return found


def main(options: argparse.Namespace, experiments: dict[str, Experiment] | None = None) -> int:
    """Carries out a command; returns the exit status, 1 where something is unfinished."""
    experiments = all_experiments() if experiments is None else experiments
    names = chosen(list(experiments), options.only, "experiment")
    arms = {name: chosen(list(experiments[name].arms), options.arms, f"arm of {name}") for name in names}
    writes_pages = options.results == RESULTS and not (options.list or options.worker or options.pilot)
    if options.fast:
        for name in names:
            print(run_fast(experiments[name], arms[name]))
        return 0
    if writes_pages:
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
    if writes_pages:
        write_lists(all_experiments(), RESULTS)
        configurations.write(all_experiments(), RESULTS)
    return int(unfinished > 0)


def run(experiment: Experiment, arms: Sequence[str], options: argparse.Namespace, deadline: float) -> bool:
    """Carries out units of an experiment, then prints its page and writes its results.

    Returns:
        Whether the experiment is complete.
    """
    seeds = list(experiment.pilot_seeds if options.pilot else experiment.seeds)
    state = state_of(experiment, options)
    if options.restart:
        set_aside(state)
    elif not (options.pilot or options.worker or begins_anew(state)):
        take_finished(units_of(experiment, seeds, list(experiment.arms), state), results_of(experiment, options))
    units = units_of(experiment, seeds[: options.seeds], arms, state)
    helpers = [] if options.worker else start_workers(experiment, options, deadline)
    try:
        carry_out = carry_out_in_turn if options.in_turn else carry_out_all
        carry_out(units, deadline, lambda line: print(line, flush=True))
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
    finished = [unit.results() for unit in every if unit.is_finished]
    results = Results(experiment, cut_to_common_length(every) if options.cut else finished, seeds)
    if not results.units:
        return False
    made = provenance(command_of(experiment, options))
    print(results.page(made), "\n", flush=True)
    is_complete = len(finished) == len(every)
    if options.pilot:
        write(results, made, state)
    elif is_complete or options.partial or options.cut:
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
        experiment: with the arm.
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
    """Returns the recorded runs by seed."""
    return seed_runs({"seeds": list(out.seeds), **out.content})


def start_workers(experiment: Experiment, options: argparse.Namespace, deadline: float) -> list[subprocess.Popen]:
    """Starts further processes, which take units of the experiment too."""
    command = [sys.executable, "-m", "tests.benchmarks.learning", *worker_options(experiment, options, deadline)]
    return [subprocess.Popen(command, cwd=ROOT) for _ in range(options.processes - 1)]


def results_of(experiment: Experiment, options: argparse.Namespace) -> Path:
    """Returns the path of an experiment's results."""
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
    """Returns the number of finished units in words, and whether results are written."""
    seeds = experiment.pilot_seeds if options.pilot else experiment.seeds
    units = units_of(experiment, list(seeds), list(experiment.arms), state_of(experiment, options))
    finished, path = sum(unit.is_finished for unit in units), results_of(experiment, options)
    written = ""
    if path.exists() and not options.pilot:
        kept = json.loads(path.read_text())
        is_unfinished = kept["missing"] or "cut_at" in kept
        written = ", unfinished results are written" if is_unfinished else ", results are written"
    return f"{experiment.name}: {finished} of {len(units)} units finished{written}"


def state_of(experiment: Experiment, options: argparse.Namespace) -> Path:
    """Returns the folder of an experiment's units."""
    return options.state / (f"{experiment.name}-pilot" if options.pilot else experiment.name)
