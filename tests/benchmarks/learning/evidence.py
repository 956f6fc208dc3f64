# SPDX-License-Identifier: Apache-2.0
"""The table of ``docs/evidence.md``: every method and experiment beside the paper's claim, from the kept results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.learning.experiment import Experiment
from tests.benchmarks.learning.page import markdown_table, mean_text, spans

PAGE = Path(__file__).parents[3] / "docs" / "evidence.md"
PAGES = "../tests/benchmarks/results"
BEGIN, END = "<!-- table: written by the runner -->\n", "<!-- end of the table -->\n"
HEADER = ("method and the paper's claim", "task", "headline verdicts by the primary measure [95 % interval]", "command")

# By method: what the paper claims, and the experiments on it.
METHODS: Mapping[str, tuple[str, Sequence[str]]] = {
    "Prioritized level replay": (
        "test return on Procgen, uniform = 100: 128; MultiRoom: the same return (0.80, 0.81), sooner; without "
        "staleness or without scores worse",
        ("locks", "lock-temperatures", "multi-room"),
    ),
    "mixreg and UCB-DrAC": (
        "test return on Procgen: level replay with UCB-DrAC more than 76 % above PPO, the best of those compared",
        ("augmentation",),
    ),
    "Learnability of prompts": (
        "mazes and robots: levels of high p (1 - p) are learned faster than uniform ones; nothing on language models",
        ("prompts",),
    ),
    "Neighbourhood mixup": (
        "TD3 after 200,000 steps, uniform to mixup: HalfCheetah 6,467 to 9,340, Walker2d 2,236 to 4,611, Ant 2,005 to "
        "4,347",
        (
            "nmer-short",
            "nmer-15k",
            "nmer-50k",
            "nmer-walker2d-25k",
            "nmer-ant-25k",
            "nmer-half-cheetah",
            "nmer-walker2d",
            "nmer-ant",
        ),
    ),
    "Event tables": (
        "faster and with less variance than uniform, PER and reverse sweep; SAC on LunarLander in about half of the "
        "epochs",
        (
            "rooms",
            "event-tables",
            "event-tables-limits",
            "event-tables-in-turn",
            "event-tables-agent",
            "event-tables-file",
            "obstacle-course",
            "random-skills",
            "lunar-lander",
        ),
    ),
    "Parallel curriculum": (
        "half-field offense, 1v0: 99.5 % goals after a million updates, a direct buffer fails",
        ("half-field", "half-field-file"),
    ),
    "Recurrent agents on sequences": (
        "stored recurrent states and prioritized sequences solve tasks of memory that an agent without state cannot",
        ("memory",),
    ),
    "Retention by surprise and on-policyness": (
        "Atari, 1M steps, 10,000 transitions: better than FIFO in 39 of 52 games",
        (
            "retention-breakout",
            "retention-sticky",
            "mended-retention-sticky",
            "mended-retention",
            "kl-retention",
            "minatar-200",
        ),
    ),
    "Hindsight": (
        "bit flipping: DQN alone solves no more than 13 bits, with hindsight up to 50; sparse rewards of robots are "
        "hardly learned without it",
        ("bits", "goals"),
    ),
    "Demonstrations in half of each batch": (
        "RLPD: sparse tasks of Adroit and AntMaze that online rows alone do not solve",
        ("halves",),
    ),
    "Prioritization variants": (
        "LAP, PAL, reliability, the newest row in every batch and reshuffling: each better than uniform or prioritized "
        "draws on its paper's tasks",
        ("variants",),
    ),
    "Combinations of these": (
        "of no paper",
        (
            "combined-mixup-events",
            "combined-mixup-goal",
            "combined-events-retention",
            "combined-mixup-curriculum",
            "combined-levels-priorities",
        ),
    ),
    "The same buffer in RLlib": (
        "no published claim; expected to learn as RLlib's own prioritized buffer",
        ("rllib-dqn", "rllib-dqn-3-steps", "rllib-sac", "rllib-shards", "apex-cartpole"),
    ),
}

# Results of experiments that others replaced; their files are in the history.
REPLACED = ("multi-room-4", "two-rooms", "point-maze")


def table(experiments: Mapping[str, Experiment], results: Path) -> str:
    """Returns the table in Markdown, a row for each experiment."""
    return markdown_table(HEADER, rows(experiments, results), others="---")


def check_places(experiments: Iterable[str]) -> None:
    """Refuses experiments that the table has no place for.

    Raises:
        ValueError: an experiment has no place in ``METHODS``, or a place has no experiment.
    """
    placed = [name for _, names in METHODS.values() for name in names]
    of_methods = {name for name in experiments if not name.startswith("files-")}  # those are in configurations.md
    if unplaced := set(placed) ^ of_methods:
        raise ValueError(
            f"METHODS and the experiments differ in {sorted(unplaced)}; give each experiment a place in METHODS of "
            f"{Path(__file__).relative_to(PAGE.parents[1])}, or write to a folder of your own with --results."
        )


def rows(experiments: Mapping[str, Experiment], results: Path) -> Iterator[list[str]]:
    """Yields the rows of the table: method with claim, task, verdicts, command."""
    check_places(experiments)
    for method, (claim, names) in METHODS.items():
        for number, name in enumerate(names):
            first = f"**{method}**: {claim}" if number == 0 else f"{method}"
            path, experiment = results / f"{name}.json", experiments[name]
            title, found = experiment.title, "not finished, no verdict yet"
            if path.exists():
                title, found = f"[{title}]({PAGES}/{name}.md)", headline_text(json.loads(path.read_text()), experiment)
            task = f"{title}; {experiment.run_length}, seeds {spans(experiment.seeds)}"
            yield [first, task, found, f"`make experiments ONLY={name}`"]


def headline_text(content: dict[str, Any], experiment: Experiment) -> str:
    """Returns the headline comparisons by the primary measure, and a link to all where there are more.

    An experiment with one arm has none, and its mean stands there.

    Args:
        content: of its ``NAME.json``.
        experiment: whose ``headlines`` are shown.
    """
    prefix = "unfinished; " if content["missing"] else ""
    every = content["comparisons"][content["measure"]]
    texts = [pair["text"] for pair in every if (pair["arm"], pair["other"]) in experiment.headlines]
    if not every:  # of one arm, or of one that is finished
        values = content["values"][content["measure"]].items()
        digits = experiment.measure.digits
        texts = [f"{arm} {mean_text(np.array([*of.values()]), digits)}" for arm, of in values if of]
    if len(texts) < len(every):
        texts.append(f"[all {len(every)} comparisons]({PAGES}/{experiment.name}.md)")
    return "<br>".join([f"{prefix}{content['measure']}:", *texts])


def write_table(experiments: Mapping[str, Experiment], results: Path, page: Path = PAGE) -> None:
    """Replaces the table in the page."""
    replace_table(page, table(experiments, results))


def replace_table(page: Path, text: str) -> None:
    """Writes a table between the two marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{rest.split(END)[1]}")
