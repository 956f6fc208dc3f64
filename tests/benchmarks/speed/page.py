# SPDX-License-Identifier: Apache-2.0
"""The tables and the figure of ``docs/benchmarks.md``, from the kept results of the speed benchmarks.

``python -m tests.benchmarks.speed.page`` writes them anew; a test compares the page with what this returns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.learning.page import markdown_table

RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"
PLACE = "../tests/benchmarks/results"
FIGURE = RESULTS / "buffer_times.png"
OWN = {"as columns", "its torch index"}  # contenders of this library beside the first
LONG = 100_000.0  # microseconds, from which a table has milliseconds

# The name of a result, between the markers of its tables; and the markers of the table at the top.
# "targets" leaves the times out.
_MARKED = re.compile(r"(<!--(tables|targets):(\w+)-->\n).*?(<!--end-->\n)", re.DOTALL)
_TOP = re.compile(r"(<!--overview-->\n).*?(<!--end-->\n)", re.DOTALL)

# Result, work, and its contenders by their names on the page, this library first.
Row = tuple[str, str, Mapping[str, str]]
# Panels of the figure by their titles.
PANELS: Mapping[str, Row] = {
    "draw 256 uniformly": (
        "uniform",
        "uniform 256",
        {"this library": "ours", "TorchRL": "torchrl", "cpprb": "cpprb", "tianshou": "tianshou"},
    ),
    "draw 256 by priority, update": (
        "prioritized",
        "prioritized 256",
        {
            "this library": "numba",
            "its torch index": "torch",
            "TorchRL": "torchrl",
            "cpprb": "cpprb",
            "tianshou": "tianshou",
        },
    ),
    "insert 1 with priority": (
        "insert",
        "insert 1",
        {"this library": "prioritized", "as columns": "prioritized, columns", "TorchRL": "torchrl", "cpprb": "cpprb"},
    ),
    "draw 32 stacks of frames": ("frames", "sample 32", {"this library": "ours", "TorchRL": "torchrl"}),
}
_WHOLE = {
    "this library": "ours, Lightning",
    "a loop in one file": "single file, fused Adam",
    **{name: name for name in ("Stable-Baselines3", "TorchRL", "tianshou")},
}
# Rows of the table at the top, beside the panels.
WHOLE: Mapping[str, Row] = {
    "DQN on CartPole, a step and its update": ("end_to_end", "DQN", _WHOLE),
    "TD3 on HalfCheetah, the same": ("end_to_end", "TD3", _WHOLE),
    "SAC on HalfCheetah, the same": ("end_to_end", "SAC", _WHOLE),
    "PPO on CartPole, a step of a rollout": ("end_to_end", "PPO", _WHOLE),
    "DQN in RLlib, a training step": (
        "rllib",
        "training step",
        {"this library": "configured", "RLlib's buffer": "rllib"},
    ),
}


def with_tables(page: str, results: Path = RESULTS) -> str:
    """Returns the page with the tables between its markers as the results have them now."""

    def written(found: re.Match[str]) -> str:
        content = json.loads((results / f"{found[3]}.json").read_text())
        return f"{found[1]}\n{tables(content, found[3], found[2] == 'tables')}\n\n{found[4]}"

    return _TOP.sub(lambda found: f"{found[1]}\n{overview(results)}\n\n{found[2]}", _MARKED.sub(written, page))


def overview(results: Path = RESULTS) -> str:
    """Returns the table at the top in Markdown: microseconds of this library, the fastest other, and TorchRL."""
    rows = []
    for label, (name, work, contenders) in {**WHOLE, **PANELS}.items():
        times = times_of(json.loads((results / f"{name}.json").read_text()))[work]
        ours, *others = ((times[contender], shown) for shown, contender in contenders.items())
        best, shown = min(each for each in others if each[1] not in OWN)
        theirs = time(times[contenders["TorchRL"]]) if "TorchRL" in contenders else ""
        rows.append([label, time(ours[0]), f"{time(best)}, {shown}", theirs])
    return markdown_table(["µs", "this library", "fastest other", "TorchRL"], rows)


def times_of(content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the microseconds of a result by work and contender."""
    works = content.get("works", {}).items()
    whole = {work.upper(): {name: each["wall"] for name, each in found.items()} for work, found in works}
    return whole | content.get("us", {})


def tables(content: Mapping[str, Any], name: str, has_times: bool = True) -> str:
    """Returns the times of a result, how many targets it meets and those it misses, in Markdown.

    Args:
        content: Content of its ``NAME.json``: microseconds by work and contender, and targets.
        name: Name of the file, for a link to it.
        has_times: Whether the times are there, and not only the targets.
    """
    parts = [_table(works) for works in _of_one_table(times_of(content) if has_times else {})]
    targets = content["targets"]
    missed = [
        f"* {re.sub(r'^T[0-9]+:? ', '', each['target'])}: {_value(each['value'])} ({_limit(each)})"
        for each in targets
        if not each["met"]
    ]
    met = f"[{len(targets) - len(missed)} of {len(targets)} targets met]({PLACE}/{name}.json)."
    parts.append(f"{met} Missed:" if missed else met)
    if missed:
        parts.append("\n".join(missed))
    return "\n\n".join(parts)


def time(microseconds: float, unit: str = "µs") -> str:
    """Returns a time without its unit, three digits or the whole number of it.

    Example:
        >>> time(31.37), time(5.49), time(385_599.3, "ms"), time(5_295.1, "ms")
        ('31', '5.5', '386', '5.3')
    """
    value = microseconds / 1_000 if unit == "ms" else microseconds
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def draw(results: Path = RESULTS, path: Path = FIGURE) -> None:
    """Draws bars of every contender, a panel for each work."""
    from lightning_replay.inspection.plotting import make_figure, save_figure
    from tests.benchmarks.learning.pictures import NARROW_WIDTH, shrink

    figure, grid = make_figure("the picture of the benchmarks", rows=len(PANELS), height=6.4, width=NARROW_WIDTH)
    for axes, (title, (name, work, contenders)) in zip(grid.flat, PANELS.items(), strict=True):
        times = json.loads((results / f"{name}.json").read_text())["us"][work]
        labels = list(reversed(contenders))
        bars = axes.barh(labels, [times[contenders[label]] for label in labels])
        for bar, label in zip(bars, labels, strict=True):
            bar.set_color("tab:blue" if label == "this library" else "tab:gray")
        axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize="small")
        axes.set_xlim(0, 1.3 * max(times[label] for label in contenders.values()))
        axes.set_title(title, fontsize="medium")
        axes.tick_params(labelsize="small")
    figure.supxlabel("microseconds", fontsize="medium")
    save_figure(figure, path)
    shrink(path)


def _of_one_table(times: Mapping[str, Mapping[str, float]]) -> list[dict[str, Mapping[str, float]]]:
    """Works that one table can hold, in their order: contenders are those of its first work, or some of them."""
    together: list[dict[str, Mapping[str, float]]] = []
    for work, found in times.items():
        fitting = (works for works in together if found.keys() <= next(iter(works.values())).keys())
        if (works := next(fitting, None)) is None:
            together.append(works := {})
        works[work] = found
    return together


def _table(works: Mapping[str, Mapping[str, float]]) -> str:
    """Times in Markdown, a line if there is one, in milliseconds if one of them is long."""
    unit = "ms" if max(max(found.values()) for found in works.values()) >= LONG else "µs"
    names = list(next(iter(works.values())))
    rows = [
        [work, *(time(found[name], unit) if name in found else "" for name in names)] for work, found in works.items()
    ]
    if len(rows) == len(names) == 1:
        return f"{rows[0][0]}, {names[0]}: {rows[0][1]} {unit}."
    if len(names) > len(rows):  # the longer way down, so that a narrow page has room
        columns = zip(names, *(row[1:] for row in rows), strict=True)
        return markdown_table([unit, *works], map(list, columns))
    return markdown_table([unit, *names], rows)


def _value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _limit(target: Mapping[str, Any]) -> str:
    sign, word = ("≤", "at most") if "at most" in target else ("≥", "at least")
    return f"{sign}{_value(target[word])}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
    draw()
