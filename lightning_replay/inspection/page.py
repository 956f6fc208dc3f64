# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about buffers, its charts and cards, the same contents as text and as pictures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_replay.inspection.contents import (
    REWARD,
    TERMINATED,
    LevelContents,
    RankedEpisodes,
    ReplayContents,
    highest_episodes,
    shown_rows,
)
from lightning_replay.inspection.figures import edges_of, figures_of
from lightning_replay.inspection.rows import RowImages, png_of

__all__ = ["STYLE", "History", "Subject", "cells", "concentration", "histogram", "lanes", "lines", "page_of", "short"]


class Card(NamedTuple):
    """A part of a page; ``content`` and ``note`` are HTML."""

    title: str
    content: str
    note: str = ""
    is_wide: bool = False

    def html(self) -> str:
        """Returns the card."""
        wide = ' class="wide"' if self.is_wide else ""
        note = f"<p>{self.note}</p>" if self.note else ""
        return f"<section{wide}><h3>{escape(self.title)}</h3>{self.content}{note}</section>"


def legend(*names: str) -> str:
    """Returns the names of the series of a picture, each beside its colour."""
    keys = (f'<span class="key key{number}"></span>{escape(name)}' for number, name in enumerate(names))
    return f'<span class="legend">{"</span><span class=legend>".join(keys)}</span>'


def number(text: str, share: float) -> str:
    """Returns a number with a bar whose length is a share of the cell."""
    width = 100 * min(max(share, 0.0), 1.0)
    return f'{escape(text)}<span class="bar"><span style="width:{width:.1f}%"></span></span>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of HTML cells; the first column is its heads'."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


WIDTH, HEIGHT = 380, 210
WIDE = 720  # of lanes, which have a line of the page for themselves
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 20, 10, 42
_LANE, _LANE_NAME = 40, 22  # height with and of the name, which is larger on narrow screens
_LANE_LEFT, _LONGEST_NAME = 20, 50
_MOST_TICKS = 4
_POINTS = 60  # of a curve of shares

#: Style of the charts; the page defines the variables.
STYLE = """
svg { display: block; width: 100%; height: auto; font: 11.5px system-ui, sans-serif; }
svg text { fill: var(--muted); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--muted); stroke-width: 1; }
svg .fill0 { fill: var(--series0); } svg .fill1 { fill: var(--series1); } svg .fill2 { fill: var(--series2); }
svg .stroke { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .line0 { stroke: var(--series0); } svg .line1 { stroke: var(--series1); } svg .line2 { stroke: var(--series2); }
svg .line3 { stroke: var(--series3); } svg .line4 { stroke: var(--series4); } svg .line5 { stroke: var(--series5); }
svg .even { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 4 4; fill: none; }
"""
_SERIES = 6  # colours of lines


def histogram(
    edges: np.ndarray,
    values: np.ndarray,
    xlabel: str,
    ylabel: str,
    title: str,
    line: np.ndarray | None = None,
    *,
    is_log: bool = False,
) -> str:
    """Returns bars over ``edges``, ``[P + 1]``, of heights ``values``, ``[P]``, not negative.

    Args:
        edges, values, xlabel, ylabel: see above.
        title: description for those who do not see the picture.
        line: further heights ``[P]``, drawn as a line of steps.
        is_log: whether the bars are equally wide on a logarithmic axis; all edges are positive then.
    """
    xs = np.log10(edges) if is_log else np.asarray(edges, dtype=np.float64)
    top = float(max(values.max(initial=0.0), 0.0 if line is None else line.max(initial=0.0))) or 1.0
    frame = _Frame((float(xs[0]), float(xs[-1])), (0.0, top), xlabel, ylabel)
    parts = [frame.axes(log_x=is_log)]
    for left, right, value, low, high in zip(xs[:-1], xs[1:], values, edges[:-1], edges[1:], strict=True):
        if value > 0:
            x, width = frame.x(left), frame.x(right) - frame.x(left)
            inset = 1 if width > 3 else 0
            y = frame.y(value)
            tip = f"{short(low)} to {short(high)}: {short(value)}"
            parts.append(
                f'<rect class="fill0" x="{x:.1f}" y="{y:.1f}" width="{max(width - inset, 0.5):.1f}" '
                f'height="{max(frame.bottom - y, 0.5):.1f}"><title>{tip}</title></rect>'
            )
    if line is not None:
        points = [(float(at), float(value)) for pair, value in zip(pairwise(xs), line, strict=True) for at in pair]
        parts.append(frame.line(points, "stroke line1"))
    return _svg(parts, title)


def lines(
    series: Mapping[str, tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]],
    xlabel: str,
    ylabel: str,
    title: str,
    *,
    top: float | None = None,
    has_even: bool = False,
) -> str:
    """Returns a line for each of ``series``, x and y by name; ``has_even`` adds the diagonal from 0 to 1.

    Up to six series have a colour of their own.
    """
    every = [np.asarray(part, dtype=np.float64) for pair in series.values() for part in pair]
    xs, ys = np.concatenate(every[0::2]), np.concatenate(every[1::2])
    high = float(ys.max(initial=0.0)) or 1.0
    frame = _Frame(
        (float(xs.min()), float(xs.max())), (min(0.0, float(ys.min())), high if top is None else top), xlabel, ylabel
    )
    parts = [frame.axes()]
    if has_even:
        parts.append(frame.line([(0.0, 0.0), (1.0, 1.0)], "even"))
    for number, (x, y) in enumerate(series.values()):
        parts.append(frame.line(list(zip(x, y, strict=True)), f"stroke line{number % _SERIES}"))
        if len(x) == 1:  # a line of one point has no length
            at, height = frame.x(x[0]), frame.y(y[0])
            parts.append(f'<circle class="stroke line{number % _SERIES}" cx="{at:.1f}" cy="{height:.1f}" r="2"/>')
    return _svg(parts, title)


def concentration(probability: np.ndarray, chosen: str, things: str) -> str:
    """Returns the share of what is chosen over the share of things, the likeliest first.

    Args:
        probability: of each thing, ``[N]``, of sum 1.
        chosen: such as ``draws``.
        things: such as ``rows``.
    """
    count = len(probability)
    falling = np.concatenate(([0.0], np.cumsum(np.sort(probability)[::-1])))
    places = np.unique(np.linspace(0, count, _POINTS).round().astype(np.int64))
    return lines(
        {chosen: (places / count, falling[places])},
        f"share of {things}, the likeliest first",
        f"share of {chosen}",
        f"Share of {chosen} over the share of {things}, the likeliest first",
        top=1.0,
        has_even=True,
    )


def lanes(edges: np.ndarray, values: Mapping[str, np.ndarray], xlabel: str, title: str) -> str:
    """Returns a lane for each name: parts between ``edges``, ``[P + 1]``, stronger the higher their value in [0, 1].

    Names are above their lanes, so that the lanes have the width of a narrow screen, too.
    """
    height = _TOP + _LANE * len(values)
    size = {"left": _LANE_LEFT, "width": WIDE, "height": height + _BOTTOM}
    frame = _Frame((float(edges[0]), float(edges[-1])), (0.0, 1.0), xlabel, "", **size)
    parts = [frame.axes(has_y=False)]
    for number, (name, lane) in enumerate(values.items()):
        y = _TOP + number * _LANE
        shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        parts.append(f'<text x="{_LANE_LEFT}" y="{y + _LANE_NAME - 5}">{escape(shown)}</text>')
        for start, stop, value in zip(edges[:-1], edges[1:], lane, strict=True):
            if value > 0:
                x, width = frame.x(start), frame.x(stop) - frame.x(start)
                tip = f"{escape(name)}, {short(start)} to {short(stop)}: {value:.0%}"
                opacity = 0.15 + 0.85 * min(float(value), 1.0)  # what is there at all can be seen
                place = (
                    f'x="{x:.1f}" y="{y + _LANE_NAME}" width="{max(width, 0.7):.2f}" height="{_LANE - _LANE_NAME - 2}"'
                )
                parts.append(f'<rect class="fill0" {place} fill-opacity="{opacity:.2f}"><title>{tip}</title></rect>')
    return _svg(parts, title, height + _BOTTOM, WIDE)


def cells(values: np.ndarray, names: Sequence[str], title: str) -> str:
    """Returns a grid of cells, row after row: one for each of ``values``, ``[L]``, stronger the higher it is.

    Args:
        values: not NaN.
        names: of the cells, for their tips.
        title: see :func:`histogram`.
    """
    columns = max(1, min(len(values), int(np.ceil(np.sqrt(len(values) * 2.0)))))
    side = (WIDTH - 4) / max(columns, 12)
    rows = -(-len(values) // columns)
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    parts = []
    for number, (value, name) in enumerate(zip(values.tolist(), names, strict=True)):
        share = (value - low) / (high - low) if high > low else 0.5
        x, y = 2 + number % columns * side, 2 + number // columns * side
        gap = 1 if side > 5 else 0
        parts.append(
            f'<rect class="fill0" x="{x:.1f}" y="{y:.1f}" width="{side - gap:.1f}" height="{side - gap:.1f}" '
            f'fill-opacity="{0.08 + 0.92 * share:.2f}"><title>{escape(name)}: {short(value)}</title></rect>'
        )
    return _svg(parts, title, rows * side + 4)


def short(value: float) -> str:
    """Returns a number in few characters.

    Example:
        >>> short(1_500_000), short(20_000), short(0.25), short(0.000012), short(3)
        ('1.5M', '20k', '0.25', '1.2e-05', '3')
    """
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.99999 and abs(value) >= 10_000:
            return f"{value / unit:.3g}{name}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


class _Frame:
    """The area of a chart with two axes, and the places of values in it."""

    def __init__(
        self,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        xlabel: str,
        ylabel: str,
        *,
        left: int = _LEFT,
        width: int = WIDTH,
        height: float = HEIGHT,
    ) -> None:
        low, high = x_range
        self._x_range = (low, high) if high > low else (low - 0.5, low + 0.5)
        self._y_range = y_range if y_range[1] > y_range[0] else (y_range[0], y_range[0] + 1.0)
        self._labels = (xlabel, ylabel)
        self._left, self._right, self.bottom = left, width - _RIGHT, height - _BOTTOM

    def x(self, value: float) -> float:
        low, high = self._x_range
        return self._left + (value - low) / (high - low) * (self._right - self._left)

    def y(self, value: float) -> float:
        low, high = self._y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - _TOP)

    def line(self, points: Sequence[tuple[float, float]], style: str) -> str:
        places = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="{style}" points="{places}"/>'

    def axes(self, *, log_x: bool = False, has_y: bool = True) -> str:
        xlabel, ylabel = self._labels
        parts = []
        for value in _ticks(*self._y_range) if has_y else []:
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{self._left}" x2="{self._right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{self._left - 5}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
        for value in _ticks(*self._x_range, whole=log_x):
            shown = short(10.0**value) if log_x else short(value)
            parts.append(
                f'<text x="{self.x(value):.1f}" y="{self.bottom + 15:.1f}" text-anchor="middle">{shown}</text>'
            )
        middle = (self._left + self._right) / 2
        parts.append(f'<text x="{middle:.1f}" y="{self.bottom + 33:.1f}" text-anchor="middle">{escape(xlabel)}</text>')
        ends = f'x1="{self._left}" x2="{self._right}" y1="{self.bottom:.1f}" y2="{self.bottom:.1f}"'
        parts.append(f'<line class="axis" {ends}/>')
        if ylabel:
            y = (_TOP + self.bottom) / 2
            place = f'x="11" y="{y:.1f}" transform="rotate(-90 11 {y:.1f})"'
            parts.append(f'<text {place} text-anchor="middle">{escape(ylabel)}</text>')
        return "".join(parts)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Returns round numbers from ``low`` to ``high``; with ``whole`` whole ones, if there are two."""
    step = 10.0 ** np.floor(np.log10((high - low) / _MOST_TICKS))
    if whole and np.floor(high) > np.ceil(low):
        step = max(step, 1.0)
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= _MOST_TICKS)
    first, last = np.ceil(low / step - 1e-9), np.floor(high / step + 1e-9)
    return [float(number * step) + 0.0 for number in np.arange(first, last + 1)]  # adding 0 turns -0.0 into 0.0


def _svg(parts: Sequence[str], title: str, height: float = HEIGHT, width: int = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


_MOST_CELLS = 1_200  # beyond that a cell has several levels
_LISTED_LEVELS = 10
_MOST_DECADES = 6  # of a logarithmic scale of colours


def cards_of_levels(contents: LevelContents) -> list[Card]:
    """Returns the cards of what a level buffer holds."""
    if not len(contents):
        return []
    probability = contents.probability
    maps = [
        Card("Scores by level", *_heat_map(contents, contents.score, "score")),
        Card("Staleness by level", *_heat_map(contents, contents.staleness, "staleness, in episodes")),
    ]
    if probability is not None:
        # one level may have nearly all of it
        clipped = np.log10(probability.clip(min=probability.max() * 10.0**-_MOST_DECADES))
        maps.append(
            Card(
                "Replay probability by level", *_heat_map(contents, clipped, "logarithm of the probability to base 10")
            )
        )
        maps.append(_level_concentration(contents, probability))
    edges, is_log = edges_of(contents.score)
    counts, _ = np.histogram(contents.score, edges)
    picture = histogram(
        edges, counts, "score" + (" (logarithmic)" if is_log else ""), "levels", "Histogram of scores", is_log=is_log
    )
    return [*maps, Card("Scores", picture), _listed(contents)]


def _heat_map(contents: LevelContents, values: np.ndarray, what: str) -> tuple[str, str]:
    """Returns a heat map over the levels in the order of their ids, and a note."""
    ids, count = contents.level_ids, len(contents)
    groups = np.array_split(np.arange(count), min(count, _MOST_CELLS))
    means = np.array([values[group].mean() for group in groups])
    names = [
        f"level {ids[group[0]]}" if len(group) == 1 else f"levels {ids[group[0]]} to {ids[group[-1]]}"
        for group in groups
    ]
    each = "A cell for each level" if len(groups) == count else f"A cell for about {count / len(groups):.0f} levels"
    values_shown = f"{what} from {short(means.min())} to {short(means.max())}"
    note = f"{each} with a score, ascending by id: {values_shown}, stronger colour is more."
    return cells(means, names, f"Heat map of levels: {what}"), escape(note)


def _level_concentration(contents: LevelContents, probability: np.ndarray) -> Card:
    count = len(contents)
    picture = concentration(probability, "replays", "levels")
    effective = contents.effective_levels
    note = "" if effective is None else f"As if {effective:,.1f} of {count:,} levels were equally likely."
    return Card("Expected replays", picture, escape(note))


def _listed(contents: LevelContents) -> Card:
    by = contents.score if contents.probability is None else contents.probability
    rows = []
    for place in np.argsort(-by, kind="stable")[:_LISTED_LEVELS].tolist():
        likely = [] if contents.probability is None else [f"{contents.probability[place]:.2%}"]
        rows.append(
            [
                f"{contents.level_ids[place]}",
                short(float(contents.score[place])),
                f"{contents.staleness[place]:,}",
                *likely,
            ]
        )
    heads = ["level", "score", "staleness", *([] if contents.probability is None else ["replay probability"])]
    title = "Levels of the highest score" if contents.probability is None else "Likeliest levels"
    return Card(title, table(heads, rows))


_EPISODES = 5  # listed
_STRIPS, _FRAMES = 3, 10  # episodes shown as film strips, and images of each
_PARTS = 120  # of the timeline
_GIVEN = "transitions given so far"


def cards_of_replay(contents: ReplayContents) -> list[Card]:
    """Returns the cards of what a buffer holds; of an empty one those of its options."""
    if not len(contents):
        return []
    found = [
        _ages(contents),
        _rewards(contents),
        _priorities(contents),
        _concentration(contents),
        _retention_priorities(contents),
        _kept(contents),
        _tables(contents),
        _timeline(contents),
    ]
    ranked = highest_episodes(contents, _EPISODES)
    if ranked is not None:
        found += [_film_strips(contents, contents.images, ranked), _episodes(contents, ranked)]
    return [card for card in found if card is not None]


def _ages(contents: ReplayContents) -> Card | None:
    ages = contents.ages
    if ages is None:
        return None
    edges, is_log = edges_of(ages)
    counts, _ = np.histogram(ages, edges)
    line, note = None, ""
    if contents.draws is not None:
        drawn, _ = np.histogram(ages, edges, weights=contents.draws.probability)
        line = drawn
        note = legend("rows stored", "rows of the next draws, as expected")
    picture = histogram(
        edges,
        counts / len(ages),
        "age: transitions given since",
        "share of rows",
        "Histogram of the ages of the stored rows",
        line,
        is_log=is_log,
    )
    return Card("Age", picture, note)


def _rewards(contents: ReplayContents) -> Card | None:
    reward = contents.columns.get(REWARD)
    if reward is None:
        return None
    finite = reward[np.isfinite(reward)]
    if not len(finite):
        return None
    edges, _ = edges_of(finite, has_log=False)
    counts, _ = np.histogram(finite, edges)
    picture = histogram(edges, counts / len(finite), "reward", "share of rows", "Histogram of the stored rewards")
    return Card("Rewards", picture)


def _priorities(contents: ReplayContents) -> Card | None:
    draws = contents.draws
    if draws is None or draws.priority is None:
        return None
    positive = draws.priority[draws.priority > 0]
    if not len(positive):
        return None
    edges, is_log = edges_of(positive)
    counts, _ = np.histogram(positive, edges)
    picture = histogram(
        edges,
        counts / len(draws.priority),
        "priority, before its exponent" + (" (logarithmic)" if is_log else ""),
        "share of rows",
        "Histogram of the priorities",
        is_log=is_log,
    )
    notes = [f"New rows get {short(draws.default_priority or 1.0)}."]
    zero = len(draws.priority) - len(positive)
    if zero:
        notes.append(f"{zero:,} rows have priority 0 and are not in the picture.")
    return Card("Priorities", picture, escape(" ".join(notes)))


def _concentration(contents: ReplayContents) -> Card | None:
    draws = contents.draws
    if draws is None:
        return None
    count = len(draws.probability)
    picture = concentration(draws.probability, "draws", "rows")
    what = "priorities" if draws.priority is not None else "probabilities"
    notes = [
        f"Expected from the {what} at this moment; how often each row was drawn is not stored.",
        f"Effective sample size {draws.effective_rows:,.0f} of {count:,} rows: this many equally likely rows would "
        "repeat as often. The dashed line is a uniform draw.",
    ]
    if draws.of_tables is not None and any(one.share is None for one in contents.tables):
        notes.append("Tables have the shares that were drawn from them so far.")
    return Card("Expected draws", picture, escape(" ".join(notes)))


def _retention_priorities(contents: ReplayContents) -> Card | None:
    retained = contents.retained
    if retained is None:
        return None
    known = retained.surprise[~np.isnan(retained.surprise)]
    if not len(known):
        return Card(
            "Surprise",
            "",
            "No surprise is known yet: no row has had feedback, and there is no function for the first.",
        )
    both = np.sqrt(np.concatenate((known, retained.newest_surprise)))
    positive = both[both > 0]
    if not len(positive):
        return None
    edges, is_log = edges_of(positive)
    stored, _ = np.histogram(np.sqrt(known), edges)
    newest, _ = np.histogram(np.sqrt(retained.newest_surprise), edges)
    picture = histogram(
        edges,
        stored / max(len(known), 1),
        "root of the surprise: the magnitude of a TD error",
        "share of rows",
        "Histogram of the surprise of stored rows and of the newest",
        newest / max(len(retained.newest_surprise), 1),
        is_log=is_log,
    )
    return Card("Surprise", picture, legend("rows stored", "newest rows, as first in, first out would hold"))


def _kept(contents: ReplayContents) -> Card | None:
    retained = contents.retained
    if retained is None or not retained.offered:
        return None
    edges, kept = retained.kept_by_arrival(_PARTS // 2)
    picture = histogram(
        edges, kept, _GIVEN, "share still stored", "Share of rows still stored, by when they were offered"
    )
    left = retained.offered - len(contents)
    note = (
        f"{retained.offered:,} rows were offered; {left:,} of them are not stored: {retained.refused:,} were refused "
        f"at once and {retained.evicted:,} evicted later. Of those that left only these counts and times are known."
    )
    return Card("Who stayed", picture, escape(note))


def _tables(contents: ReplayContents) -> Card | None:
    if not contents.tables:
        return None
    drawn = sum(one.drawn for one in contents.tables)
    rows = []
    for one in contents.tables:
        share_drawn = one.drawn / drawn if drawn else None
        rows.append(
            [
                escape(one.name),
                number(f"{len(one.slots):,} of {one.capacity:,}", one.fill),
                "–" if one.share is None else number(f"{one.share:.1%}", one.share),
                "–" if share_drawn is None else number(f"{share_drawn:.1%}", share_drawn),
                f"{one.appended - len(one.slots):,}",
                "–" if one.events is None else f"{one.events:.2%}",
            ]
        )
    heads = [
        "table",
        "entries",
        "share of a batch",
        "share drawn so far",
        "entries that left",
        "steps that were events",
    ]
    note = "" if drawn else "Nothing was drawn yet."
    return Card("Tables", table(heads, rows), note, is_wide=True)


def _timeline(contents: ReplayContents) -> Card | None:
    written, given = contents.written, contents.given
    if written is None or not given:
        return None
    first = 0 if contents.retained is not None else int(written.min())
    edges = np.unique(np.linspace(first, given, _PARTS + 1).round().astype(np.int64))
    if len(edges) < 2:
        return None
    there = np.diff(edges)
    shares: dict[str, np.ndarray] = {}
    for one in contents.tables:
        counts, _ = np.histogram(written[contents.places_of(one.slots)], edges)
        shares[one.name] = counts / there
    if not shares:
        shares["stored"] = np.histogram(written, edges)[0] / there
    ended, terminated = contents.ended, contents.columns.get(TERMINATED)
    notes = ["Stronger colour: a larger share of the transitions of that time is stored (in a table)."]
    if ended is not None:
        notes.append("Of ends, rewards above and below 0 the strongest part has the most.")
        if terminated is not None:
            shares["terminated"] = _relative(written[terminated], edges)
            ended = ended & ~terminated
            shares["truncated"] = _relative(written[ended], edges)
        else:
            shares["episode ends"] = _relative(written[ended], edges)
    reward = contents.columns.get(REWARD)
    if reward is not None and 0 < np.count_nonzero(reward) < 0.5 * len(reward):  # else every part has some
        shares["reward > 0"], shares["reward < 0"] = (
            _relative(written[which], edges) for which in (reward > 0, reward < 0)
        )
    kept = {name: values for name, values in shares.items() if values.any()}
    picture = lanes(edges, kept, _GIVEN, "Timeline of the stored rows")
    return Card("Timeline", picture, escape(" ".join(notes)), is_wide=True)


def _relative(written: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns how many rows were written in each part, over the most of a part."""
    counts, _ = np.histogram(written, edges)
    return counts / max(int(counts.max()), 1)


def _episodes(contents: ReplayContents, ranked: RankedEpisodes) -> Card:
    assert contents.written is not None and contents.given is not None
    rows = []
    for one in ranked.episodes:
        written = contents.written[one.places]
        rows.append(
            [
                f"{int(written.min()):,} to {int(written.max()):,}",
                f"{len(one.places):,}",
                *([] if ranked.by == "return" else [short(one.rank)]),
                "–" if one.episode_return is None else short(one.episode_return),
                f"{contents.given - 1 - int(written.max()):,}",
            ]
        )
    ranks = [] if ranked.by == "return" else [ranked.by]
    heads = ["number of its rows", "rows stored", *ranks, "sum of their rewards", "age of the last"]
    note = f"The first of {ranked.total:,} episodes, ranked by {ranked.by}; of an episode, the rows that are stored."
    return Card(_title(ranked), table(heads, rows), escape(note), is_wide=True)


def _title(ranked: RankedEpisodes) -> str:
    return "Episodes of the highest return" if ranked.by == "return" else f"Episodes of the highest {ranked.by}"


def _film_strips(contents: ReplayContents, images: RowImages | None, ranked: RankedEpisodes) -> Card | None:
    if images is None or contents.written is None:
        return None
    strips = []
    for one in ranked.episodes[:_STRIPS]:
        shown = shown_rows(one, _FRAMES)
        highest = int(np.argmax(one.value))
        figures = []
        for row, image in zip(shown.tolist(), images.of_rows(contents.slots[one.places[shown]]), strict=True):
            source = b64encode(png_of(image)).decode()
            mark = ' class="highest"' if row == highest else ""
            step = f"row {row + 1} of {len(one.places)}"
            figures.append(
                f'<figure{mark}><img alt="{step}" src="data:image/png;base64,{source}">'
                f"<figcaption>{row + 1}: {short(float(one.value[row]))}</figcaption></figure>"
            )
        strips.append(f'<div class="strip">{"".join(figures)}</div>')
    what = "reward" if ranked.by == "return" else ranked.by.removeprefix("mean ")
    note = f"A line for each episode; below an image the number of its row and the {what}. The highest is framed."
    return Card(f"Film strips: {_title(ranked).lower()}", "".join(strips), escape(note), is_wide=True)


# Series in the order and near the colours of lightning_replay.inspection.plotting, lighter on a dark screen.
PAGE_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1b1f24; --muted: #59636e; --line: #dfe3e8;
  --series0: #0072b2; --series1: #d55e00; --series2: #009e73; --series3: #cc79a7; --series4: #b57f00;
  --series5: #3a9fd0; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1d2127; --text: #e6e9ed; --muted: #9aa5b1;
  --line: #333a43; --series0: #56b4e9; --series1: #f0894a; --series2: #2fc39a; --series3: #dd9cc0; --series4: #e6b800;
  --series5: #a8d8f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px; max-width: 1180px; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 32px 0 12px; }
h3 { font-size: 15px; margin: 0 0 8px; }
.sub { color: var(--muted); margin: 4px 0 16px; overflow-wrap: anywhere; }
section p { color: var(--muted); font-size: 13px; margin: 8px 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-bottom: 12px; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 20px; font-weight: 600; } .tile span { color: var(--muted); font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 345px), 1fr)); gap: 12px;
  grid-auto-flow: dense; }
section { min-width: 0; } section.wide { grid-column: 1 / -1; } .wide svg { max-width: 900px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; }
th { color: var(--muted); font-weight: 500; font-size: 13px; } tr:last-child td { border-bottom: 0; }
dl { margin: 0; display: grid; grid-template-columns: max-content 1fr; gap: 4px 14px; font-size: 13px; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
.bar { display: block; height: 5px; min-width: 60px; max-width: 160px; border-radius: 3px; margin-top: 4px;
  background: var(--line); }
.bar span { display: block; height: 5px; border-radius: 3px; background: var(--series0); }
.legend { margin-right: 14px; white-space: nowrap; } .key { display: inline-block; width: 12px; height: 12px;
  margin-right: 5px; border-radius: 2px; vertical-align: -1px; background: var(--series0); }
.key1 { background: var(--series1); } .key2 { background: var(--series2); } .key3 { background: var(--series3); }
.key4 { background: var(--series4); } .key5 { background: var(--series5); }
.strip { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 10px; }
.strip figure { margin: 0; width: 84px; } .strip img { width: 84px; image-rendering: pixelated; display: block;
  border: 2px solid transparent; border-radius: 3px; } .strip .highest img { border-color: var(--series1); }
.strip figcaption { font-size: 11px; color: var(--muted); text-align: center; }
@media (max-width: 520px) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 6px; }
  .legend { white-space: normal; } .wide svg text { font-size: 18px; } }
"""

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
        history: figures over the run so far, see :func:`~lightning_replay.inspection.figures.figures_of`.
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
        return [*cards_of_levels(contents), _list("Counters", _numbers(contents.counters))]
    lists = [_list("Counters", _numbers(contents.counters)), _list("Columns", dict(contents.layout))]
    return [*cards_of_replay(contents), *lists, _list("Options", dict(contents.options), is_wide=True)]


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


_STRIPS_IN_PICTURE, _FRAMES_IN_PICTURE = 3, 10  # episodes, and images of each
_GAP = 2  # pixels
_CELL = 12
_LEAST, _MOST = np.array([237.0, 244.0, 250.0]), np.array([0.0, 84.0, 140.0])  # from light to blue
_BACKGROUND = 128


def pictures_of(contents: ReplayContents | LevelContents) -> dict[str, np.ndarray]:
    """Returns pictures by name, uint8 ``[H, W, 3]`` each, as far as there are any.

    Of a replay with images ``film_strips``, a line for each of the three episodes of the highest priority, see
    :func:`~lightning_replay.inspection.contents.highest_episodes`. Of levels ``score_by_level`` and
    ``staleness_by_level``, a cell for each level in the order of their ids, darker for a higher value.
    """
    if isinstance(contents, LevelContents):
        named = {"score_by_level": contents.score, "staleness_by_level": contents.staleness}
        return {name: heat_map(values) for name, values in named.items() if len(values)}
    ranked = None if contents.images is None else highest_episodes(contents, _STRIPS_IN_PICTURE)
    if ranked is None or contents.images is None:
        return {}
    strips = []
    for episode in ranked.episodes:
        slots = contents.slots[episode.places[shown_rows(episode, _FRAMES_IN_PICTURE)]]
        strips.append(_side_by_side(contents.images.of_rows(slots)))
    return {"film_strips": np.concatenate(strips)}


def heat_map(values: np.ndarray) -> np.ndarray:
    """Returns a grid of cells, uint8 ``[H, W, 3]``, row after row one for each of ``values``, ``[L]``, L > 0."""
    columns = int(np.ceil(np.sqrt(len(values) * 2.0)))
    rows = -(-len(values) // columns)
    low, high = float(values.min()), float(values.max())
    share = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    colors = np.full((rows * columns, 3), float(_BACKGROUND))
    colors[: len(values)] = _LEAST + share[:, None] * (_MOST - _LEAST)
    grid = colors.reshape(rows, columns, 3).astype(np.uint8)
    return grid.repeat(_CELL, 0).repeat(_CELL, 1)


def _side_by_side(images: list[np.ndarray]) -> np.ndarray:
    """Returns up to ten images of equal shape in a line, with room for ten."""
    height, width, _ = images[0].shape
    line = np.full((height + _GAP, _FRAMES_IN_PICTURE * (width + _GAP), 3), _BACKGROUND, np.uint8)
    for place, image in enumerate(images):
        line[:height, place * (width + _GAP) : place * (width + _GAP) + width] = image
    return line


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
