# SPDX-License-Identifier: Apache-2.0
"""The lists of ``docs/evidence.md``: the experiments on each method with their verdicts, from the kept results."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.learning.experiment import Experiment
from tests.benchmarks.learning.page import mean_text

PAGE = Path(__file__).parents[3] / "docs" / "evidence.md"
PAGES = "../tests/benchmarks/results"
BEGIN, END = "<!--written-by-the-runner-->\n", "<!--end-->\n"
RATIO = "ratio of medians "
SPELLING = {"eighbour": "eighbor", "andomised": "andomized", "centre": "center", ";": ",", " %": "%"}
VERDICTS = {
    "better": "**better**",
    "worse": "**worse**",
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


def listed(method: str, experiments: Mapping[str, Experiment], results: Path) -> str:
    """Returns the list of a method in Markdown: an item for each experiment, below the measure that several have."""
    usual = usual_measure(method, results)
    lines = [f"* {shown}\n{found}" for shown, found in items(method, experiments, results, usual)]
    return "\n".join([american(f"Usual measure: {usual}.\n"), *lines] if usual else lines)


def usual_measure(method: str, results: Path) -> str | None:
    """Returns the primary measure of most finished experiments on a method, ``None`` if no two have the same one."""
    contents = [json.loads(path.read_text()) for name in METHODS[method] if (path := results / f"{name}.json").exists()]
    measures = Counter(measure_text(content) for content in contents).most_common(1)
    return next((measure for measure, count in measures if count > 1), None)


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


def items(
    method: str, experiments: Mapping[str, Experiment], results: Path, usual: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yields the items of a method: experiment, list of verdicts. They leave out the ``usual`` measure."""
    check_places(experiments)
    for name in METHODS[method]:
        path, experiment = results / f"{name}.json", experiments[name]
        shown, found = f"`{name}`: {task(experiment)}", "  * not finished"
        if path.exists():
            content = json.loads(path.read_text())
            shown = f"[`{name}`]({PAGES}/{name}.md): {task(experiment)}{count_text(content, experiment)}"
            found = headline_text(content, experiment, usual)
        yield american(shown), american(found)


def task(experiment: Experiment) -> str:
    """Returns what is learned and for how long; the rest of the title is in the section's heading and in the arms."""
    title = experiment.title.rpartition(": ")[0] or experiment.title
    return title if experiment.run_length in title else f"{title}, {experiment.run_length}"


def measure_text(content: dict[str, Any]) -> str:
    """Returns the primary measure, and whether arms are compared by ratios."""
    measure = content["measure"]
    is_ratio = any(RATIO in pair["text"] for pair in content["comparisons"][measure])
    return f"{measure} ({RATIO.strip()})" if is_ratio else measure


def headlines_of(content: dict[str, Any], experiment: Experiment) -> tuple[list[dict[str, Any]], int]:
    """Returns the headline comparisons by the primary measure, and the number of all comparisons."""
    every = content["comparisons"][content["measure"]]
    return [pair for pair in every if (pair["arm"], pair["other"]) in experiment.headlines], len(every)


def count_text(content: dict[str, Any], experiment: Experiment) -> str:
    """Returns how many of the comparisons are shown, in brackets, and nothing if all are shown."""
    pairs, every = headlines_of(content, experiment)
    return f" ({len(pairs)} of {every})" if len(pairs) < every else ""


def headline_text(content: dict[str, Any], experiment: Experiment, usual: str | None = None) -> str:
    """Returns a list of the primary measure and the headline comparisons by it, indented for an item of a list.

    Comparisons with the same arm stand below one line that names it. An experiment with one arm has none, and its mean
    stands there.

    Args:
        content: of its ``NAME.json``.
        experiment: whose ``headlines`` are shown.
        usual: a measure that is not named.
    """
    pairs, every = headlines_of(content, experiment)
    title = ["unfinished"] if content["missing"] or "cut_at" in content else []
    title += [f"the first {content['cut_at']:,} steps"] if "cut_at" in content else []
    title += [measure] if (measure := measure_text(content)) != usual else []
    lines: dict[str, list[str]] = {}
    for pair in pairs:
        verdict = VERDICTS.get(pair["verdict"], pair["verdict"])
        lines.setdefault(f"against {pair['other']}:", []).append(f"{pair['arm']}: {verdict}, {figures(pair['text'])}")
    shown = [line for other, found in lines.items() for line in (f"  * {other}", *(f"    * {one}" for one in found))]
    if not every:  # of one arm, or of one that is finished
        values = content["values"][content["measure"]].items()
        shown = [
            f"  * {arm} {mean_text(np.array([*of.values()]), experiment.measure.digits)}" for arm, of in values if of
        ]
    return "\n".join([f"  * {', '.join(title)}", *shown] if title else shown)


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


def write_lists(experiments: Mapping[str, Experiment], results: Path, page: Path = PAGE) -> None:
    """Replaces the list of each method in its section of the page."""
    sections = page.read_text().split("\n## ")
    for number, section in enumerate(sections):
        if (method := section.split("\n")[0]) in METHODS:
            sections[number] = between_marks(section, listed(method, experiments, results))
    page.write_text("\n## ".join(sections))


def replace(page: Path, text: str) -> None:
    """Writes a text between the two marks of a page."""
    page.write_text(between_marks(page.read_text(), text))


def between_marks(page: str, text: str) -> str:
    """Returns a page, or a section of one, with another text between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n\n{END}{rest.split(END)[1]}"
