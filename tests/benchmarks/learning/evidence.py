# SPDX-License-Identifier: Apache-2.0
"""The table of ``docs/evidence.md``: every method and experiment beside the paper's claim, from the kept results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.benchmarks.learning.experiment import Experiment
from tests.benchmarks.learning.page import markdown_table, spans

PAGE = Path(__file__).parents[3] / "docs" / "evidence.md"
BEGIN, END = "<!-- table: written by the runner -->\n", "<!-- end of the table -->\n"
HEADER = ("method and the paper's claim", "task", "verdicts by the primary measure [95 % interval]", "command")

# By method: what the paper claims, and the experiments on it with the length of a run.
METHODS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Prioritized level replay": (
        "test return on Procgen, uniform = 100: 128; MultiRoom: the same return (0.80, 0.81), sooner; without "
        "staleness or without scores worse",
        {
            "locks": "6,400 episodes",
            "lock-temperatures": "6,400 episodes",
            "multi-room": "1,200,000 steps",
        },
    ),
    "Neighbourhood mixup": (
        "TD3 after 200,000 steps, uniform to mixup: HalfCheetah 6,467 to 9,340, Walker2d 2,236 to 4,611, Ant 2,005 to "
        "4,347",
        {
            "nmer-short": "8,000 steps",
            "nmer-15k": "15,000 steps",
            "nmer-half-cheetah": "200,000 steps",
            "nmer-walker2d": "100,000 steps",
            "nmer-ant": "100,000 steps",
        },
    ),
    "Event tables": (
        "faster and with less variance than uniform, PER and reverse sweep; SAC on LunarLander in about half of the "
        "epochs",
        {
            "rooms": "30,000 steps",
            "event-tables": "12,000 steps after the first goal",
            "event-tables-limits": "12,000 steps after the first goal",
            "event-tables-in-turn": "12,000 steps after the first goal",
            "event-tables-agent": "12,000 steps after the first goal",
            "event-tables-file": "20,000 steps",
            "lunar-lander": "120,000 steps",
        },
    ),
    "Parallel curriculum": (
        "half-field offense, 1v0: 99.5 % goals with EXP3, a direct buffer fails",
        {"half-field": "120,000 updates"},
    ),
    "Retention by surprise and on-policyness": (
        "Atari, 1M steps, 10,000 transitions: better than FIFO in 39 of 52 games",
        {
            "retention-breakout": "32,000 steps",
            "retention-sticky": "32,000 steps",
            "mended-retention-sticky": "32,000 steps",
            "mended-retention": "32,000 steps",
            "kl-retention": "32,000 steps",
            "minatar-200": "60,000 steps",
        },
    ),
    "Combinations of these": (
        "of no paper",
        {
            "combined-mixup-events": "8,000 steps",
            "combined-mixup-goal": "3,200 steps",
            "combined-events-retention": "12,000 steps after the first goal",
            "combined-mixup-curriculum": "4,000 steps",
            "combined-levels-priorities": "2,400 episodes",
        },
    ),
    "The same buffer in RLlib": (
        "no published claim; expected to learn as RLlib's own prioritized buffer",
        {
            "rllib-dqn": "12,000 steps",
            "rllib-dqn-3-steps": "15,000 steps",
            "rllib-sac": "4,000 steps",
            "apex-cartpole": "20,000 steps",
        },
    ),
}

# Results of experiments that others replaced; their files are in the history.
REPLACED = ("multi-room-4", "two-rooms", "half-field-90000", "point-maze")


def table(experiments: Mapping[str, Experiment], results: Path) -> str:
    """The table in Markdown, a row for each experiment."""
    return markdown_table(HEADER, rows(experiments, results), others="---")


def rows(experiments: Mapping[str, Experiment], results: Path) -> Iterator[list[str]]:
    """Its rows.

    Raises:
        ValueError: an experiment has no place in ``METHODS``, or a place has no experiment.
    """
    placed = [name for _, runs in METHODS.values() for name in runs]
    if unplaced := set(placed) ^ set(experiments):
        raise ValueError(f"METHODS and the experiments differ in {sorted(unplaced)}; give each experiment a place.")
    for method, (claim, lengths) in METHODS.items():
        for number, (name, length) in enumerate(lengths.items()):
            first = f"**{method}**: {claim}" if number == 0 else f"{method}"
            page = results / f"{name}.json"
            found = compared(json.loads(page.read_text())) if page.exists() else "not finished, no verdict yet"
            experiment = experiments[name]
            title = experiment.title
            if page.exists():
                title = f"[{title}](../tests/benchmarks/results/{name}.md)"
            task = f"{title}; {length}, seeds {spans(experiment.seeds)}"
            yield [first, task, found, f"`make experiments ONLY={name}`"]


def compared(content: dict) -> str:
    """All comparisons of an experiment by its primary measure, from its ``NAME.json``."""
    prefix = "unfinished, so no verdict; " if content["missing"] else ""
    return "<br>".join([f"{prefix}{content['measure']}:", *content["verdicts"]])


def write_table(experiments: Mapping[str, Experiment], results: Path, page: Path = PAGE) -> None:
    """Replaces the table in the page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(experiments, results)}\n\n{END}{rest.split(END)[1]}")
