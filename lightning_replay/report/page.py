# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about buffers: inline SVG, images as data, no scripts, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from lightning_replay.report import level_cards, replay_cards
from lightning_replay.report.cards import Card, legend
from lightning_replay.report.charts import STYLE, lines, short
from lightning_replay.report.contents import ReplayContents
from lightning_replay.report.figures import figures_of
from lightning_replay.report.levels import LevelContents
from lightning_replay.report.page_style import PAGE_STYLE

__all__ = ["History", "Subject", "page_of"]

_MOST_SERIES = 6  # colours of lines

History = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # by figure: environment steps, and values


class Subject(NamedTuple):
    """A buffer on a page. ``size`` is in bytes on the disk, ``None`` of a buffer in use."""

    name: str
    contents: ReplayContents | LevelContents
    size: int | None = None


def page_of(title: str, subtitle: str, subjects: Sequence[Subject], history: History | None = None) -> str:
    """Returns the page.

    Args:
        title: heading.
        subtitle: below it.
        subjects: the buffers, one after the other.
        history: figures over the run so far, see :func:`~lightning_replay.report.figures.figures_of`.
    """
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="sub">{escape(subtitle)}</p>']
    for subject in subjects:
        if subject.name:
            parts.append(f"<h2>{escape(subject.name)}</h2>")
        parts += [_tiles(subject), _cards(_of_subject(subject.contents))]
    over_time = _over_time(history or {})
    if over_time:
        parts += ["<h2>Over the run</h2>", _cards(over_time)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _cards(cards: Sequence[Card]) -> str:
    return f'<div class="cards">{"".join(card.html() for card in cards)}</div>'


def _of_subject(contents: ReplayContents | LevelContents) -> list[Card]:
    if isinstance(contents, LevelContents):
        return [*level_cards.cards_of(contents), _list("Counters", _numbers(contents.counters))]
    lists = [_list("Counters", _numbers(contents.counters)), _list("Columns", dict(contents.layout))]
    return [*replay_cards.cards_of(contents), *lists, _list("Options", dict(contents.options), is_wide=True)]


def _list(title: str, entries: Mapping[str, str], *, is_wide: bool = False) -> Card:
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in entries.items())
    return Card(title, f"<dl>{listed}</dl>" if listed else "<p>none</p>", is_wide=is_wide)


def _numbers(counters: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{value:,}" for name, value in counters.items()}


def _tiles(subject: Subject) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in tiles_of(subject)
    )
    return f'<div class="tiles">{tiles}</div>'


def tiles_of(subject: Subject) -> list[tuple[str, str]]:
    """Returns the most important figures of a buffer, as text by name."""
    contents, figures = subject.contents, figures_of(subject.contents)
    size = [] if subject.size is None else [("on the disk", _bytes(subject.size))]
    if isinstance(contents, LevelContents):
        of = "" if contents.capacity is None else f" of {contents.capacity:,}"
        tiles = [(f"levels with a score ({contents.kind})", f"{len(contents):,}{of}")]
        named = {
            "score_mean": "mean score",
            "staleness_mean": "mean staleness",
            "effective_levels": "effective number of levels",
        }
        return [*tiles, *((name, short(figures[key])) for key, name in named.items() if key in figures), *size]
    # Tables share slots, so that the storage has more of them than a full buffer uses.
    full = "slots in use, of" if contents.tables else "full, of"
    tiles = [("transitions", f"{len(contents):,}"), (f"{full} {contents.capacity:,}", f"{figures['fill']:.1%}")]
    if "age_mean" in figures:
        tiles.append((f"mean age, at most {short(figures['age_max'])}", short(figures["age_mean"])))
    if "effective_share" in figures:
        shown = f"{figures['effective_share']:.1%} of the rows"
        tiles.append((f"effective sample size, {shown}", short(figures["effective_sample_size"])))
    if "draws_of_top_tenth" in figures:
        tiles.append(("of the draws go to the likeliest tenth", f"{figures['draws_of_top_tenth']:.1%}"))
    return [*tiles, *size]


def _bytes(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"


def _over_time(history: History) -> list[Card]:
    """Returns a chart for each figure, and one for all tables together of what tables have."""
    groups: dict[str, dict[str, tuple[Sequence[float], Sequence[float]]]] = {}
    for name, series in history.items():
        head, _, rest = name.partition("/")
        table, _, figure = rest.rpartition("/")
        group, member = (f"{head}: {figure}", table) if table else (name, name)
        groups.setdefault(group, {})[member] = series
    cards = []
    for group, members in groups.items():
        shown = dict(list(members.items())[:_MOST_SERIES])
        title = group.replace("_", " ")
        note = legend(*shown) if len(shown) > 1 else ""
        cards.append(Card(title, lines(shown, "environment steps", "", f"{title} over the run"), note))
    return cards
