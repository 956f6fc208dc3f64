# SPDX-License-Identifier: Apache-2.0
"""What a buffer holds, as lines of text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lightning_replay.report.charts import short
from lightning_replay.report.contents import ReplayContents
from lightning_replay.report.episodes import highest_episodes
from lightning_replay.report.levels import LevelContents
from lightning_replay.report.page import Subject, tiles_of

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_LISTED = 3


def printable(text: str) -> str:
    """Returns a text with all characters that a terminal does not print, but for line ends, as escape sequences.

    Names in a file may hold sequences that a terminal executes.

    Example:
        >>> printable("a\\x1b[2Jb")
        'a\\\\x1b[2Jb'
    """
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def text_about(subject: Subject) -> str:
    """Returns several lines about a buffer, the last empty."""
    contents = subject.contents
    lines = [subject.name] if subject.name else []
    lines += [f"  {value} {name}" for name, value in tiles_of(subject)]
    lines += [f"  {name}: {count:,}" for name, count in contents.counters.items()]
    lines += _of_levels(contents) if isinstance(contents, LevelContents) else _of_replay(contents)
    return "\n".join([*lines, ""])


def _of_replay(contents: ReplayContents) -> Iterable[str]:
    if not len(contents):
        yield "  the buffer is empty"
    ages, draws = contents.ages, contents.draws
    if ages is not None and len(contents):
        yield f"  ages: {_quantiles(ages)}"
    if draws is not None and draws.priority is not None:
        yield f"  priorities: {_quantiles(draws.priority)}"
    drawn = sum(table.drawn for table in contents.tables)
    for table in contents.tables:
        share = "" if table.share is None else f", {table.share:.1%} of a batch"
        so_far = f", {table.drawn / drawn:.1%} of the rows drawn" if drawn else ""
        yield f"  table {table.name}: {len(table.slots):,} of {table.capacity:,} entries{share}{so_far}"
    ranked = highest_episodes(contents, _LISTED)
    if ranked is not None and contents.written is not None:
        yield f"  {ranked.total:,} episodes; of the highest {ranked.by}:"
        for one in ranked.episodes:
            last = int(contents.written[one.places[-1]])
            yield f"    {short(one.rank)}: {len(one.places):,} rows, the last is number {last:,}"
    for name, value in contents.options.items():
        yield f"  {name}: {value}"
    if contents.layout:
        yield f"  columns: {', '.join(f'{name} {kind}' for name, kind in contents.layout.items())}"


def _of_levels(contents: LevelContents) -> Iterable[str]:
    if not len(contents):
        yield "  no level has a score"
        return
    yield f"  scores: {_quantiles(contents.score)}"
    yield f"  staleness: {_quantiles(contents.staleness)}"


def _quantiles(values: np.ndarray) -> str:
    found = np.quantile(values.astype(np.float64), _QUANTILES)
    return ", ".join(
        f"{short(value)} {name}"
        for value, name in zip(found, ("at least", "first quarter", "median", "third quarter", "at most"), strict=True)
    )
