# SPDX-License-Identifier: Apache-2.0
"""What the experiments share: paired runs in two processes, standard errors and tables in Markdown."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

PROCESSES = 2
RESULTS = Path(__file__).parent / "results"
RESAMPLES = 10_000


def run_all(
    run: Callable[..., dict[str, Any]], methods: Iterable[str], seeds: Sequence[int], *options: Any, kept: Path | None
) -> Runs:
    """``run(method, seed, *options)`` of every pair in two processes of one numerical thread.

    Args:
        run: one run.
        methods: names.
        seeds: of the runs of each method.
        options: of every run.
        kept: a file that takes every run as it ends; a later call with the same options goes on from there. ``None``
            keeps nothing.

    Returns:
        By method, what ``run`` returned for each seed, in the order of the seeds.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are about to start
    done: dict[str, dict[str, Any]] = {}
    if kept is not None and kept.exists():
        done = {key: made for key, made in json.loads(kept.read_text()).items() if key.endswith(f"{options}")}
    key_of = {(method, seed): f"{method} {seed} {options}" for seed in seeds for method in methods}
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(run, *pair, *options): pair for pair, key in key_of.items() if key not in done}
        for job in as_completed(jobs):
            method, seed = jobs[job]
            done[key_of[method, seed]] = job.result()
            if kept is not None:
                kept.write_text(json.dumps(done) + "\n")
            print(f"[{len(done)}/{len(key_of)}] {method}, seed {seed}: {job.result()['seconds']:.1f} s", flush=True)
    return {method: [done[key_of[method, seed]] for seed in seeds] for method in methods}


def unfinished(name: str) -> Path:
    """Where the runs of an experiment are kept until all have ended."""
    return RESULTS / f"{name}.unfinished.json"


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Of the mean."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def bootstrap_error(statistic: Callable[..., np.ndarray], *columns: Sequence[float]) -> float:
    """Standard error of a statistic of paired columns, from resampled seeds.

    Args:
        statistic: one array ``[resamples, seeds]`` for each column to ``[resamples]``.
        columns: numbers by seed.
    """
    seeds = len(columns[0])
    drawn = np.random.default_rng(0).integers(0, seeds, size=(RESAMPLES, seeds))
    return float(np.std(statistic(*(np.asarray(column, dtype=np.float64)[drawn] for column in columns)), ddof=1))


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median, from resampled seeds."""
    return bootstrap_error(lambda drawn: np.median(drawn, axis=1), values)


def ratio_of_medians_error(values: Sequence[float], reference: Sequence[float]) -> float:
    """Standard error of the ratio of two medians over the same seeds, which are resampled together."""
    return bootstrap_error(lambda a, b: np.median(a, axis=1) / np.median(b, axis=1), values, reference)


def with_error(value: float, error: float, digits: int = 3) -> str:
    """``value ± error`` with as many digits after the point."""
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, the first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_results(
    name: str, page: str, content: dict[str, Any], draw_runs: Callable[[dict[str, Any], Path], None]
) -> None:
    """Writes ``results/<name>.md``, ``.json`` and, by ``draw_runs(content, path)``, ``.png``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    path.with_suffix(".md").write_text(page + "\n")
    path.with_suffix(".json").write_text(json.dumps(content) + "\n")
    draw_runs(content, path.with_suffix(".png"))
    unfinished(name).unlink(missing_ok=True)
    print(f"written: {path}.md, .json and .png")


def expect_narrow_replay() -> None:
    """Silences, in this process, the warning that nearly one level is replayed: the temperature is what is measured."""
    warnings.filterwarnings("ignore", message=".*took the same level as the replay before")


Runs = dict[str, list[dict[str, Any]]]
