# SPDX-License-Identifier: Apache-2.0
"""The command line of the experiments: its options, and the names that they accept."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.learning.experiment import Experiment
from tests.benchmarks.learning.units import ROOT, UsageError

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = "python -m tests.benchmarks.learning"


def chosen(names: Sequence[str], patterns: Sequence[str], what: str) -> list[str]:
    """Returns the names that one of the patterns stands for, in their own order; all without patterns.

    A pattern is a name, or has ``*`` for any text, or is the beginning of names up to a hyphen, if none is just that.

    Raises:
        UsageError: a pattern stands for none.

    Example:
        >>> chosen(["nmer-15k", "rooms", "rooms-2"], ["nmer", "rooms"], "experiment")
        ['nmer-15k', 'rooms']
    """
    found: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern) or [name for name in names if name.startswith(f"{pattern}-")]
        if not matching:
            close = difflib.get_close_matches(pattern, names, n=1)
            raise UsageError(
                f"no {what} is named {pattern!r}{f', did you mean {close[0]!r}?' if close else ';'} choose from "
                f"{', '.join(map(repr, names))}; * stands for any text."
            )
        found.update(matching)
    return [name for name in names if not patterns or name in found]


def at_least_one(text: str) -> int:
    """Returns a whole number from the command line."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give a whole number of at least 1")
    return int(text)


def minutes(text: str) -> float:
    """Returns a length of time from the command line, in minutes."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give a number of minutes, 0 or more")
    return number


def folder(text: str) -> Path:
    """Returns the path of a folder, which need not exist, from the command line."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a file; give a folder, which is made where it does not exist")
    return path


def parser_of(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options of the command and returns the parser."""
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="experiments, also patterns (*-15k) or beginnings (nmer)"
    )
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
    parser.add_argument(
        "--cut", action="store_true", help="as --partial; all units end at the last step of the slowest"
    )
    parser.add_argument("--in-turn", action="store_true", help="units advance together, one checkpoint at a time")
    parser.add_argument("--restart", action="store_true", help="set kept units aside (NAME.old-1), begin anew")
    parser.add_argument("--redraw", action="store_true", help="pages and pictures from the results; nothing is run")
    parser.add_argument("--state", type=folder, default=ROOT / ".experiments", help="folder of the units")
    parser.add_argument("--results", type=folder, default=RESULTS, help="folder of the results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def worker_options(experiment: Experiment, options: argparse.Namespace, deadline: float) -> list[str]:
    """Returns the options of a process that runs units beside this one."""
    given = ["--worker", "--only", experiment.name, "--state", str(options.state)]
    given += ["--pilot"] if options.pilot else []
    given += ["--in-turn"] if options.in_turn else []
    given += [] if options.seeds is None else ["--seeds", str(options.seeds)]
    given += ["--budget-minutes", str(max(0.0, deadline - time.time()) / 60)]
    return given + (["--arms", *options.arms] if options.arms else [])


def command_of(experiment: Experiment, options: argparse.Namespace) -> str:
    """Returns the command that repeats the results."""
    every = {"--pilot": options.pilot, "--partial": options.partial, "--cut": options.cut}
    return " ".join([COMMAND, "--only", experiment.name, *(flag for flag, is_set in every.items() if is_set)])
