# SPDX-License-Identifier: Apache-2.0
"""The command line of an experiment on several seeds: trains, prints a page and, with --save, writes the results."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiment_tables import unfinished, write_results

Seen = dict[str, Any]  # by method, what its runs returned


class Plan(NamedTuple):
    """An experiment with the settings of its command line.

    Attributes:
        settings: kept with the results.
        train: trains all methods on the given seeds; unfinished runs are kept in the file, if there is one.
        page: Markdown of the runs on these seeds, which took so many minutes.
        summary: further results of the runs on these seeds.
        name: of the files in ``results``, if not that of the experiment.
    """

    settings: dict[str, Any]
    train: Callable[[range, Path | None], Seen]
    page: Callable[[Seen, range, float], str]
    summary: Callable[[Seen, range], dict[str, Any]] = lambda runs, seeds: {}
    name: str | None = None


def run_experiment(
    name: str,
    doc: str | None,
    plan: Callable[[argparse.Namespace], Plan],
    draw_runs: Callable[[dict[str, Any], Path], None],
    *,
    seeds: int,
    first_seed: int,
    fast: str,
    fast_seeds: int = 2,
    more_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Reads the command line, trains, prints the page and, with ``--save``, writes ``results/<name>.*``.

    Args:
        name: of the experiment and its results.
        doc: description for ``--help``.
        plan: from the options to what is run.
        draw_runs: draws the picture of the results.
        seeds: default number of seeds.
        first_seed: default of the first seed.
        fast: what ``--fast`` runs, for ``--help``.
        fast_seeds: number of seeds with ``--fast``.
        more_options: adds the experiment's own options.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--first-seed", type=int, default=first_seed)
    more_options(parser)
    parser.add_argument("--save", action="store_true", help=f"write results/{name}.md, .json and .png")
    parser.add_argument("--fast", action="store_true", help=fast)
    options = parser.parse_args()
    planned = plan(options)
    name = planned.name or name
    chosen = range(options.first_seed, options.first_seed + (fast_seeds if options.fast else options.seeds))
    started = time.perf_counter()
    runs = planned.train(chosen, unfinished(name) if options.save else None)
    minutes = (time.perf_counter() - started) / 60
    page = planned.page(runs, chosen, minutes)
    print(page)
    if options.save:
        content = {"seeds": list(chosen), **planned.settings, "minutes": minutes, **planned.summary(runs, chosen)}
        write_results(name, page, content | {"runs": runs}, draw_runs)
