# SPDX-License-Identifier: Apache-2.0
"""The tables of ``docs/evidence.md``: the experiments on each method with their verdicts, from the kept results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.learning.experiment import Experiment
from tests.benchmarks.learning.page import markdown_table, mean_text

PAGE = Path(__file__).parents[3] / "docs" / "evidence.md"
PAGES = "../tests/benchmarks/results"
BEGIN, END = "<!-- table: written by the runner -->\n", "<!-- end of the table -->\n"
RATIO = "ratio of medians "
HEADER = ("experiment", "verdicts")
SPELLING = {"eighbour": "eighbor", "andomised": "andomized", "centre": "center", ";": ",", " %": "%"}
VERDICTS = {
    "better": "**better**",
    "worse": "**worse**",
    "too few seeds": "no verdict from so few seeds",
    "unfinished": "no verdict yet",
}

# By method, which is a section of the page: the experiments on it.
METHODS: Mapping[str, Sequence[str]] = {
    "Prioritized level replay": ("locks", "lock-temperatures", "multi-room"),
    "mixreg and UCB-DrAC": ("augmentation",),
    "Learnability of prompts": ("prompts", "prompts-rare"),
    "Replayed groups": ("prompts-refill",),
    "Neighborhood mixup": (
        "nmer-short",
        "nmer-norm",
        "nmer-full",
        "nmer-15k",
        "nmer-50k",
        "nmer-walker2d-25k",
        "nmer-ant-25k",
        "nmer-half-cheetah",
        "nmer-walker2d",
        "nmer-ant",
    ),
    "Event tables": (
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
    "Parallel curriculum": ("half-field", "half-field-file"),
    "Recurrent agents on sequences": ("memory",),
    "Retention by surprise and on-policyness": (
        "retention-breakout",
        "retention-sticky",
        "mended-retention-sticky",
        "mended-retention",
        "kl-retention",
        "minatar-200",
    ),
    "Hindsight": ("bits", "goals"),
    "Demonstrations in half of each batch": ("halves", "halves-norm"),
    "Draws by age": (
        "age-few-half-cheetah",
        "age-few-double-pendulum",
        "age-many-half-cheetah",
        "age-many-double-pendulum",
    ),
    "Combinations of these": (
        "combined-mixup-events",
        "combined-mixup-goal",
        "combined-events-retention",
        "combined-mixup-curriculum",
        "combined-levels-priorities",
    ),
    "The same buffer in RLlib": ("rllib-dqn", "rllib-dqn-3-steps", "rllib-sac", "rllib-shards", "apex-cartpole"),
}

# Results of experiments that others replaced, or whose parts left the library; their files are in the history.
REPLACED = (
    "multi-room-4",
    "two-rooms",
    "point-maze",
    "half-field-signals",
    "half-field-choice",
    "variants",
    "variants-lander",
)


def table(method: str, experiments: Mapping[str, Experiment], results: Path) -> str:
    """Returns the table of a method in Markdown, a row for each experiment."""
    return markdown_table(HEADER, rows(method, experiments, results), others="---")


def check_places(experiments: Iterable[str]) -> None:
    """Refuses experiments that the page has no place for.

    Raises:
        ValueError: an experiment has no place in ``METHODS``, or a place has no experiment.
    """
    placed = [name for names in METHODS.values() for name in names]
    of_methods = {name for name in experiments if not name.startswith("files-")}  # those are in configurations.md
    if unplaced := set(placed) ^ of_methods:
        raise ValueError(
            f"METHODS and the experiments differ in {sorted(unplaced)}; give each experiment a place in METHODS of "
            f"{Path(__file__).relative_to(PAGE.parents[1])}, or write to a folder of your own with --results."
        )


def rows(method: str, experiments: Mapping[str, Experiment], results: Path) -> Iterator[list[str]]:
    """Yields the rows of the table of a method: experiment, verdicts."""
    check_places(experiments)
    for name in METHODS[method]:
        path, experiment = results / f"{name}.json", experiments[name]
        shown, found = f"`{name}`", "not finished, no verdict yet"
        if path.exists():
            shown, found = f"[`{name}`]({PAGES}/{name}.md)", headline_text(json.loads(path.read_text()), experiment)
        yield [american(f"{shown}: {task(experiment)}"), american(found)]


def task(experiment: Experiment) -> str:
    """Returns what is learned and for how long; the rest of the title is in the section's heading and in the arms."""
    title = experiment.title.rpartition(": ")[0] or experiment.title
    return title if experiment.run_length in title else f"{title}, {experiment.run_length}"


def headline_text(content: dict[str, Any], experiment: Experiment) -> str:
    """Returns the headline comparisons by the primary measure, and of how many where there are more.

    Comparisons with the same arm stand below one line that names it. An experiment with one arm has none, and its mean
    stands there.

    Args:
        content: of its ``NAME.json``.
        experiment: whose ``headlines`` are shown.
    """
    measure = content["measure"]
    every = content["comparisons"][measure]
    pairs = [pair for pair in every if (pair["arm"], pair["other"]) in experiment.headlines]
    title = f"{measure}, {len(pairs)} of {len(every)} comparisons" if len(pairs) < len(every) else measure
    if pairs and all(RATIO in pair["text"] for pair in pairs):
        title += f" ({RATIO.strip()})"
    unfinished = "unfinished, " if content["missing"] else ""
    if "cut_at" in content:
        unfinished = f"unfinished, the first {content['cut_at']:,} steps, "
    lines: dict[str, list[str]] = {}
    for pair in pairs:
        verdict = VERDICTS.get(pair["verdict"], pair["verdict"])
        lines.setdefault(f"against {pair['other']}:", []).append(f"{pair['arm']}: {verdict}, {figures(pair['text'])}")
    if not every:  # of one arm, or of one that is finished
        values = content["values"][measure].items()
        means = [f"{arm} {mean_text(np.array([*of.values()]), experiment.measure.digits)}" for arm, of in values if of]
        return "<br>".join([f"{unfinished}{title}:", *means])
    return "<br>".join([f"{unfinished}{title}", *(line for other, found in lines.items() for line in (other, *found))])


def figures(text: str) -> str:
    """Returns the figures of a verdict without the words that the page has once for all.

    Example:
        >>> figures("A is better than B: ratio of medians 0.61 [0.43, 0.84], 4 of 4 seeds (few seeds: rely on ...)")
        '0.61 [0.43, 0.84], 4/4'
    """
    short = re.sub(r"(\d+) of (\d+) seeds(?: \(few seeds.*\))?$", r"\1/\2", text.replace(RATIO, ""))
    return short.rpartition(": ")[2]


def american(text: str) -> str:
    """Returns a text of the kept results as the pages spell and punctuate.

    Example:
        >>> american("neighbourhood mixup; end observed")
        'neighborhood mixup, end observed'
    """
    for kept, shown in SPELLING.items():
        text = text.replace(kept, shown)
    return text


def write_table(experiments: Mapping[str, Experiment], results: Path, page: Path = PAGE) -> None:
    """Replaces the table of each method in its section of the page."""
    sections = page.read_text().split("\n## ")
    for number, section in enumerate(sections):
        if (method := section.split("\n")[0]) in METHODS:
            sections[number] = with_table(section, table(method, experiments, results))
    page.write_text("\n## ".join(sections))


def replace_table(page: Path, text: str) -> None:
    """Writes a table between the two marks of a page."""
    page.write_text(with_table(page.read_text(), text))


def with_table(page: str, text: str) -> str:
    """Returns the text of a page, or a section of one, with a table between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n\n{END}{rest.split(END)[1]}"
