# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about buffers, its charts and cards, the same contents as text and as pictures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from lightning_replay.inspection.contents import (
    REWARD,
    TERMINATED,
    LevelContents,
    RankedEpisodes,
    ReplayContents,
    StoredEpisode,
    highest_episodes,
    shown_rows,
)
from lightning_replay.inspection.rows import png_of

# --- charts, as SVG: they need no library, follow the colors of a dark screen, and have tips ---

WIDTH = 380
HEIGHT = 210
WIDE = 720  # Lanes have a line of the page for themselves.
_RIGHT = 20
_TOP = 10
_BOTTOM = 42
_LANE = 40
_LANE_NAME = 22  # The name of a lane is larger on narrow screens.
_LANE_LEFT = 20
_LONGEST_NAME = 50
_MOST_TICKS = 4
_POINTS = 60  # A curve of shares has at most this number.
_SERIES = 6  # Lines have this number of colors.


def edges_of(values: np.ndarray, most: int = 40, *, has_log: bool = True) -> tuple[np.ndarray, bool]:
    """Returns the edges of a histogram, ``[P + 1]``, of finite values, and whether they are logarithmic."""
    low = float(values.min())
    high = float(values.max())
    if has_log and low > 0 and high > 100 * low:
        return np.geomspace(low, high * (1 + 1e-9), most + 1), True  # rounding may leave the largest out
    if high <= low:
        width = max(abs(low) * 0.05, 0.5)
        return np.array([low - width, low + width]), False
    if values.dtype.kind in "iub" and high - low < most:
        return np.arange(low, high + 2) - 0.5, False
    return np.linspace(low, high, most + 1), False


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
    """Returns bars over ``edges``, ``[P + 1]``, of heights ``values``, ``[P]``, and further heights as a ``line``."""
    xs = np.log10(edges) if is_log else np.asarray(edges, dtype=np.float64)
    top = max(values.max(initial=0.0), 0.0 if line is None else line.max(initial=0.0))
    chart = _Chart(title, (xs[0], xs[-1]), (0.0, top), xlabel, ylabel, is_log=is_log)
    for pair, (low, high), value in zip(pairwise(xs), pairwise(edges), values, strict=True):
        if value > 0:
            left, right, y = *map(chart.x, pair), chart.y(value)
            gap = 1 if right - left > 3 else 0  # between wide bars
            tip = f"{short(low)} to {short(high)}: {short(value)}"
            chart.parts.append(_rect(left, y, right - left - gap, chart.bottom - y, tip))
    if line is not None:
        chart.line([(at, value) for pair, value in zip(pairwise(xs), line, strict=True) for at in pair], "stroke line1")
    return chart.svg()


def lines(
    series: Mapping[str, tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]],
    xlabel: str,
    ylabel: str,
    title: str,
    *,
    has_even: bool = False,
) -> str:
    """Returns a line for each of ``series``, x and y by name, and with ``has_even`` the diagonal from 0 to 1."""
    every = [np.asarray(part, dtype=np.float64) for pair in series.values() for part in pair]
    xs = np.concatenate(every[0::2])
    ys = np.concatenate(every[1::2])
    y_range = min(0.0, ys.min()), 1.0 if has_even else ys.max(initial=0.0)
    chart = _Chart(title, (xs.min(), xs.max()), y_range, xlabel, ylabel)
    if has_even:
        chart.line([(0.0, 0.0), (1.0, 1.0)], "even")
    for number, (x, y) in enumerate(series.values()):
        style = f"stroke line{number % _SERIES}"
        chart.line(list(zip(x, y, strict=True)), style)
        if len(x) == 1:  # a line of one point has no length
            place = f'cx="{chart.x(x[0]):.1f}" cy="{chart.y(y[0]):.1f}"'
            chart.parts.append(f'<circle class="{style}" {place} r="2"/>')
    return chart.svg()


def _concentration(probability: np.ndarray, chosen: str, things: str) -> str:
    """Returns the share of what is chosen over the share of things, such as draws over rows, the likeliest first."""
    count = len(probability)
    falling = np.concatenate(([0.0], np.cumsum(np.sort(probability)[::-1])))
    places = np.unique(np.linspace(0, count, _POINTS).round().astype(np.int64))
    title = f"Share of {chosen} over the share of {things}, the likeliest first"
    xlabel = f"share of {things}, the likeliest first"
    curve = {chosen: (places / count, falling[places])}
    return lines(curve, xlabel, f"share of {chosen}", title, has_even=True)


def lanes(edges: np.ndarray, values: Mapping[str, np.ndarray], xlabel: str, title: str) -> str:
    """Returns a lane below each name: parts between ``edges``, ``[P + 1]``, stronger the higher their value, 0 to 1."""
    height = _TOP + _LANE * len(values) + _BOTTOM
    ends = float(edges[0]), float(edges[-1])
    chart = _Chart(title, ends, (0.0, 1.0), xlabel, None, left=_LANE_LEFT, width=WIDE, height=height)
    for number, (name, lane) in enumerate(values.items()):
        y = _TOP + number * _LANE + _LANE_NAME
        shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        chart.parts.append(_text(_LANE_LEFT, y - 5, shown, ""))
        for (start, stop), value in zip(pairwise(edges), lane, strict=True):
            if value > 0:
                x = chart.x(start)
                tip = f"{name}, {short(start)} to {short(stop)}: {value:.0%}"
                opacity = 0.15 + 0.85 * min(float(value), 1.0)  # what is there at all can be seen
                chart.parts.append(_rect(x, y, chart.x(stop) - x, _LANE - _LANE_NAME - 2, tip, opacity))
    return chart.svg()


def cells(values: np.ndarray, names: Sequence[str], title: str) -> str:
    """Returns a grid of cells, row after row: one for each of ``values``, ``[L]``, stronger the higher it is."""
    columns = max(1, min(len(values), int(np.ceil(np.sqrt(len(values) * 2.0)))))
    side = (WIDTH - 4) / max(columns, 12)
    gap = 1 if side > 5 else 0
    parts = []
    for number, (value, share, name) in enumerate(zip(values.tolist(), _shares(values), names, strict=True)):
        x = 2 + number % columns * side
        y = 2 + number // columns * side
        parts.append(_rect(x, y, side - gap, side - gap, f"{name}: {short(value)}", 0.08 + 0.92 * share))
    return _svg(parts, title, WIDTH, -(-len(values) // columns) * side + 4)


def _shares(values: np.ndarray) -> np.ndarray:
    """Returns values scaled to [0, 1], all 0.5 if they are equal."""
    span = np.ptp(values)
    return (values - values.min()) / span if span > 0 else np.full(len(values), 0.5)


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


class _Chart:
    """An SVG picture with an x axis and, unless ``ylabel`` is ``None``, a y axis."""

    def __init__(
        self,
        title: str,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        xlabel: str,
        ylabel: str | None,
        *,
        left: int = 52,
        width: int = WIDTH,
        height: int = HEIGHT,
        is_log: bool = False,
    ) -> None:
        low, high = x_range
        self._xs = (low, high) if high > low else (low - 0.5, low + 0.5)  # a single value stands in the middle
        self._ys = y_range if y_range[1] > y_range[0] else (y_range[0], y_range[0] + 1.0)
        self._left = left
        self._right = width - _RIGHT
        self.bottom = height - _BOTTOM
        self._frame = title, width, height
        ends = f'x1="{left}" x2="{self._right}"'
        self.parts: list[str] = []
        if ylabel is not None:
            for value in _ticks(*self._ys):
                y = self.y(value)
                self.parts += [
                    f'<line class="grid" {ends} y1="{y:.1f}" y2="{y:.1f}"/>',
                    _text(left - 5, y + 4, short(value), 'text-anchor="end"'),
                ]
            y = (_TOP + self.bottom) / 2
            self.parts.append(_text(11, y, ylabel, f'transform="rotate(-90 11 {y:.1f})" text-anchor="middle"'))
        for value in _ticks(*self._xs, whole=is_log):
            self.parts.append(_text(self.x(value), self.bottom + 15, short(10.0**value if is_log else value)))
        self.parts += [
            _text((left + self._right) / 2, self.bottom + 33, xlabel),
            f'<line class="axis" {ends} y1="{self.bottom}" y2="{self.bottom}"/>',
        ]

    def x(self, value: float) -> float:
        """Returns the pixel column of a value."""
        low, high = self._xs
        return self._left + (value - low) / (high - low) * (self._right - self._left)

    def y(self, value: float) -> float:
        """Returns the pixel row of a value."""
        low, high = self._ys
        return self.bottom - (value - low) / (high - low) * (self.bottom - _TOP)

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Adds a line through points, values of both axes."""
        places = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline class="{style}" points="{places}"/>')

    def svg(self) -> str:
        """Returns the picture as SVG."""
        return _svg(self.parts, *self._frame)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Returns round numbers from ``low`` to ``high``, with ``whole`` whole ones, if there are two."""
    step = 10.0 ** np.floor(np.log10((high - low) / _MOST_TICKS))
    if whole and np.floor(high) > np.ceil(low):
        step = max(step, 1.0)
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= _MOST_TICKS)
    first = np.ceil(low / step - 1e-9)
    last = np.floor(high / step + 1e-9)
    return [float(number * step) + 0.0 for number in np.arange(first, last + 1)]  # Adding 0 turns -0.0 into 0.0.


def _text(x: float, y: float, content: str, style: str = 'text-anchor="middle"') -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'


def _rect(x: float, y: float, width: float, height: float, tip: str, opacity: float = 1.0) -> str:
    # The narrowest and the lowest rectangle can still be seen.
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.2f}" height="{max(height, 0.5):.1f}"'
    return f'<rect class="fill0" {place} fill-opacity="{opacity:.2f}"><title>{escape(tip)}</title></rect>'


def _svg(parts: Sequence[str], title: str, width: int, height: float) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


# --- cards of levels and of replays ---

_MOST_CELLS = 1_200  # beyond that a cell has several levels
_LISTED_LEVELS = 10
_LISTED_EPISODES = 5
_MOST_DECADES = 6  # A logarithmic color scale covers this number.
_PARTS = 120  # The timeline has this number of parts.
_STRIPS = 3  # Episodes that are shown as film strips.
_FRAMES = 10  # Images of a film strip.
_GIVEN = "transitions given so far"


def _card(title: str, content: str, note: str = "", *, is_wide: bool = False) -> str:
    """Returns a part of the page. ``content`` and ``note`` are HTML."""
    wide = ' class="wide"' if is_wide else ""
    return f"<section{wide}><h3>{escape(title)}</h3>{content}{f'<p>{note}</p>' if note else ''}</section>"


def _legend(*names: str) -> str:
    keys = (f'<span class="key key{number}"></span>{escape(name)}' for number, name in enumerate(names))
    return f'<span class="legend">{"</span><span class=legend>".join(keys)}</span>'


def _with_bar(text: str, share: float | None) -> str:
    """Returns a text with a bar whose length is a share of the cell, or a dash if the share is not known."""
    if share is None:
        return "–"
    width = 100 * min(max(share, 0.0), 1.0)
    return f'{escape(text)}<span class="bar"><span style="width:{width:.1f}%"></span></span>'


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a table of rows of HTML cells by the heads of their columns."""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row.values())}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _distribution(
    title: str,
    xlabel: str,
    values: np.ndarray,
    weight: float,
    *,
    other: tuple[np.ndarray, np.ndarray | float] | None = None,
    ylabel: str = "share of rows",
    note: str = "",
    has_log: bool = True,
) -> str:
    """Returns a histogram of values, ``[N]``, of one ``weight`` each, and a line of ``other`` values with theirs."""
    together = values if other is None else np.concatenate((values, other[0]))
    if not len(together):
        return ""
    edges, is_log = edges_of(together, has_log=has_log)
    line = None
    if other is not None:
        line, _ = np.histogram(other[0], edges, weights=np.broadcast_to(other[1], other[0].shape))
    label = f"{xlabel} (logarithmic)" if is_log else xlabel
    bars = np.histogram(values, edges)[0] * weight
    return _card(title, histogram(edges, bars, label, ylabel, f"Histogram: {xlabel}", line, is_log=is_log), note)


def _cards_of_levels(contents: LevelContents) -> Iterator[str]:
    probability = contents.probability
    yield _heat_map_card("Scores by level", contents, contents.score, "score")
    yield _heat_map_card("Staleness by level", contents, contents.staleness, "staleness, in episodes")
    # The scale is logarithmic, because one level may have nearly all of the probability.
    logs = np.log10(probability.clip(min=probability.max() * 10.0**-_MOST_DECADES))
    shown = "logarithm of the probability to base 10"
    yield _heat_map_card("Replay probability by level", contents, logs, shown)
    effective = contents.effective_levels
    note = "" if effective is None else f"As if {effective:,.1f} of {len(contents):,} levels were equally likely."
    yield _card("Expected replays", _concentration(probability, "replays", "levels"), note)
    yield _distribution("Scores", "score", contents.score, 1.0, ylabel="levels")
    rows = [
        {
            "level": f"{contents.level_ids[row]}",
            "score": short(float(contents.score[row])),
            "staleness": f"{contents.staleness[row]:,}",
            "replay probability": f"{probability[row]:.2%}",
        }
        for row in np.argsort(-probability, kind="stable")[:_LISTED_LEVELS].tolist()
    ]
    yield _card("Likeliest levels", _table(rows))


def _heat_map_card(title: str, contents: LevelContents, values: np.ndarray, what: str) -> str:
    ids = contents.level_ids
    count = len(contents)
    groups = np.array_split(np.arange(count), min(count, _MOST_CELLS))
    means = np.array([values[group].mean() for group in groups])
    names = [f"level {ids[one[0]]}" if len(one) == 1 else f"levels {ids[one[0]]} to {ids[one[-1]]}" for one in groups]
    each = "A cell for each level" if len(groups) == count else f"A cell for about {count / len(groups):.0f} levels"
    values_shown = f"{what} from {short(means.min())} to {short(means.max())}"
    note = f"{each} with a score, ascending by id: {values_shown}, stronger color is more."
    return _card(title, cells(means, names, f"Heat map of levels: {what}"), escape(note))


def _cards_of_replay(contents: ReplayContents) -> Iterator[str]:
    draws = contents.draws
    retained = contents.retained
    ages = contents.ages
    each = 1 / len(contents)
    if ages is not None:
        other = None if draws is None else (ages, draws.probability)
        note = "" if draws is None else _legend("rows stored", "rows of the next draws, as expected")
        yield _distribution("Age", "age: transitions given since", ages, each, other=other, note=note)
    reward = contents.columns.get(REWARD)
    if reward is not None:
        finite = reward[np.isfinite(reward)]
        yield _distribution("Rewards", "reward", finite, 1 / max(len(finite), 1), has_log=False)
    if draws is not None and draws.priority is not None:
        positive = draws.priority[draws.priority > 0]  # on a logarithmic axis 0 has no place
        note = f"New rows get {short(draws.default_priority or 1.0)}."
        if len(positive) < len(contents):
            note += f" {len(contents) - len(positive):,} rows have priority 0 and are not in the picture."
        yield _distribution("Priorities", "priority, before its exponent", positive, each, note=note)
    if draws is not None:
        what = "priorities" if draws.priority is not None else "probabilities"
        note = (
            f"Expected from the {what} at this moment; how often each row was drawn is not stored. Effective sample "
            f"size {draws.effective_rows:,.0f} of {len(contents):,} rows: this many equally likely rows would repeat "
            "as often. The dashed line is a uniform draw."
        )
        if draws.of_tables is not None and any(one.share is None for one in contents.tables):
            note += " Tables have the shares that were drawn from them so far."
        yield _card("Expected draws", _concentration(draws.probability, "draws", "rows"), note)
    if retained is not None:
        yield from _retention(contents)
    if contents.tables:
        yield _tables(contents)
    yield _timeline(contents)
    ranked = highest_episodes(contents, _LISTED_EPISODES)
    if ranked is not None:
        yield _film_strips(contents, ranked)
        yield _episodes(contents, ranked)


def _retention(contents: ReplayContents) -> Iterator[str]:
    retained = contents.retained
    assert retained is not None
    known = retained.surprise[~np.isnan(retained.surprise)]
    newest = retained.newest_surprise
    if len(known):
        label = "root of the surprise: the magnitude of a TD error"
        other = np.sqrt(newest[newest > 0]), 1 / max(len(newest), 1)
        note = _legend("rows stored", "newest rows, as first in, first out would hold")
        yield _distribution("Surprise", label, np.sqrt(known[known > 0]), 1 / len(known), other=other, note=note)
    else:
        note = "No surprise is known yet: no row has had feedback, and there is no function for the first."
        yield _card("Surprise", "", note)
    edges, kept = retained.kept_by_arrival(_PARTS // 2)
    title = "Share of rows still stored, by when they were offered"
    note = (
        f"{retained.offered:,} rows were offered; {retained.offered - len(contents):,} of them are not stored: "
        f"{retained.refused:,} were refused at once and {retained.evicted:,} evicted later. Of those that left only "
        "these counts and times are known."
    )
    yield _card("Who stayed", histogram(edges, kept, _GIVEN, "share still stored", title), note)


def _tables(contents: ReplayContents) -> str:
    drawn = sum(one.drawn for one in contents.tables)
    rows = []
    for one in contents.tables:
        so_far = one.drawn / drawn if drawn else None
        rows.append(
            {
                "table": escape(one.name),
                "entries": _with_bar(f"{len(one.slots):,} of {one.capacity:,}", one.fill),
                "share of a batch": _with_bar(f"{one.share or 0.0:.1%}", one.share),
                "share drawn so far": _with_bar(f"{so_far or 0.0:.1%}", so_far),
                "entries that left": f"{one.appended - len(one.slots):,}",
                "steps that were events": "–" if one.events is None else f"{one.events:.2%}",
            }
        )
    return _card("Tables", _table(rows), "" if drawn else "Nothing was drawn yet.", is_wide=True)


def _timeline(contents: ReplayContents) -> str:
    written = contents.written
    given = contents.given
    if written is None or not given:
        return ""
    # What retention refused or evicted is also shown. Elsewhere, the time before the oldest row is empty
    first = 0 if contents.retained is not None else int(written.min())
    edges = np.unique(np.linspace(first, given, _PARTS + 1).round().astype(np.int64))
    if len(edges) < 2:
        return ""

    def counts(rows: np.ndarray) -> np.ndarray:
        return np.histogram(written[rows], edges)[0]

    there = np.diff(edges)
    tables = ((one.name, np.searchsorted(contents.slots, one.slots)) for one in contents.tables)
    shares = {name: counts(rows) / there for name, rows in tables}
    shares = shares or {"stored": counts(np.arange(len(contents))) / there}
    ended = contents.ended
    terminated = contents.columns.get(TERMINATED)
    marks = {} if ended is None else {"episode ends": ended}
    if ended is not None and terminated is not None:
        marks = {"terminated": terminated, "truncated": ended & ~terminated}
    reward = contents.columns.get(REWARD)
    if reward is not None and 0 < np.count_nonzero(reward) < 0.5 * len(reward):  # else every part has some
        marks |= {"reward > 0": reward > 0, "reward < 0": reward < 0}
    for name, rows in marks.items():
        marked = counts(rows)
        shares[name] = marked / max(int(marked.max()), 1)
    note = "Stronger color: a larger share of the transitions of that time is stored (in a table)."
    if ended is not None:
        note += " Of ends, rewards above and below 0 the strongest part has the most."
    kept = {name: values for name, values in shares.items() if values.any()}
    return _card("Timeline", lanes(edges, kept, _GIVEN, "Timeline of the stored rows"), note, is_wide=True)


def _episodes(contents: ReplayContents, ranked: RankedEpisodes) -> str:
    assert contents.written is not None and contents.given is not None
    rows = []
    for one in ranked.episodes:
        written = contents.written[one.places]
        first = int(written.min())
        last = int(written.max())
        row = {"number of its rows": f"{first:,} to {last:,}", "rows stored": f"{len(one.places):,}"}
        if ranked.by != "return":  # which is shown in any case
            row[ranked.by] = short(one.rank)
        row["sum of their rewards"] = "–" if one.episode_return is None else short(one.episode_return)
        rows.append(row | {"age of the last": f"{contents.given - 1 - last:,}"})
    note = f"The first of {ranked.total:,} episodes, ranked by {ranked.by}; of an episode, the rows that are stored."
    return _card(f"Episodes of the highest {ranked.by}", _table(rows), note, is_wide=True)


_Strip = tuple[StoredEpisode, np.ndarray, str, list[np.ndarray]]


def _strips(contents: ReplayContents, ranked: RankedEpisodes) -> Iterator[_Strip]:
    """Yields the first episodes, which of their rows are shown, and the images of these by column."""
    for one in ranked.episodes[:_STRIPS]:
        shown = shown_rows(one, _FRAMES)
        for name, images in contents.images.items():
            yield one, shown, name, images.of_rows(contents.slots[one.places[shown]])


def _film_strips(contents: ReplayContents, ranked: RankedEpisodes) -> str:
    strips = []
    for one, shown, column, images in _strips(contents, ranked):
        highest = int(np.argmax(one.value))
        figures = []
        for row, image in zip(shown.tolist(), images, strict=True):
            source = b64encode(png_of(image)).decode()
            mark = ' class="highest"' if row == highest else ""
            step = escape(f"{column}, row {row + 1} of {len(one.places)}")
            figures.append(
                f'<figure{mark}><img alt="{step}" src="data:image/png;base64,{source}">'
                f"<figcaption>{row + 1}: {short(float(one.value[row]))}</figcaption></figure>"
            )
        strips.append(f'<div class="strip">{"".join(figures)}</div>')
    if not strips:
        return ""
    what = "reward" if ranked.by == "return" else ranked.by.removeprefix("mean ")
    each = f" and column of images ({escape(', '.join(contents.images))})" if len(contents.images) > 1 else ""
    note = f"A line for each episode{each}; below an image the number of its row and the {what}. The highest is framed."
    return _card(f"Film strips: episodes of the highest {ranked.by}", "".join(strips), note, is_wide=True)


# --- the page ---

# Series in the order and near the colors of lightning_replay.inspection.plotting, lighter on a dark screen.
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
.legend { margin-right: 14px; white-space: nowrap; }
.key { display: inline-block; width: 12px; height: 12px; margin-right: 5px; border-radius: 2px; vertical-align: -1px; }
.strip { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 10px; } .strip figure { margin: 0; width: 84px; }
.strip img { width: 84px; image-rendering: pixelated; display: block; border: 2px solid transparent;
  border-radius: 3px; } .strip .highest img { border-color: var(--series1); }
.strip figcaption { font-size: 11px; color: var(--muted); text-align: center; }
svg { display: block; width: 100%; height: auto; font: 11.5px system-ui, sans-serif; } svg text { fill: var(--muted); }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--muted); } svg .fill0 { fill: var(--series0); }
svg .stroke { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .even { stroke: var(--muted); stroke-dasharray: 4 4; fill: none; }
@media (max-width: 520px) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 6px; }
  .legend { white-space: normal; } .wide svg text { font-size: 18px; } }
""" + "".join(
    f".key{n} {{ background: var(--series{n}); }} svg .line{n} {{ stroke: var(--series{n}); }}\n"
    for n in range(_SERIES)
)

History = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # Environment steps and values of each figure.


class Subject(NamedTuple):
    """A buffer on a page. ``size`` is in bytes on the disk, ``None`` of a buffer in use."""

    name: str
    contents: ReplayContents | LevelContents
    size: int | None = None


def page_of(title: str, subtitle: str, subjects: Sequence[Subject], history: History | None = None) -> str:
    """Returns the page: a heading, one buffer after the other, and the ``history`` of their figures over the run."""
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="sub">{escape(subtitle)}</p>']
    for subject in subjects:
        if subject.name:
            parts.append(f"<h2>{escape(subject.name)}</h2>")
        tiles = (
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
            for name, value in tiles_of(subject)
        )
        parts += [
            f'<div class="tiles">{"".join(tiles)}</div>',
            f'<div class="cards">{"".join(_cards_of(subject.contents))}</div>',
        ]
    if history:
        parts.append(f'<h2>Over the run</h2>\n<div class="cards">{"".join(_over_time(history))}</div>')
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _cards_of(contents: ReplayContents | LevelContents) -> Iterator[str]:
    counters = _list("Counters", {name: f"{value:,}" for name, value in contents.counters.items()})
    if isinstance(contents, LevelContents):
        yield from _cards_of_levels(contents) if len(contents) else ()
        yield counters
    else:
        yield from _cards_of_replay(contents) if len(contents) else ()
        yield counters
        yield _list("Columns", contents.layout)
        yield _list("Options", contents.options, is_wide=True)


def _list(title: str, entries: Mapping[str, str], *, is_wide: bool = False) -> str:
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in entries.items())
    return _card(title, f"<dl>{listed}</dl>" if listed else "<p>none</p>", is_wide=is_wide)


_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def tiles_of(subject: Subject) -> list[tuple[str, str]]:
    """Returns the most important figures of a buffer, as text by name."""
    contents = subject.contents
    figures = contents.figures()
    if isinstance(contents, LevelContents):
        of = "" if contents.capacity is None else f" of {contents.capacity:,}"
        tiles = [(f"levels with a score ({contents.kind})", f"{len(contents):,}{of}")]
        named = {
            "score_mean": "mean score",
            "staleness_mean": "mean staleness",
            "effective_levels": "effective number of levels",
        }
        tiles += [(name, short(figures[key])) for key, name in named.items() if key in figures]
    else:
        # Tables share slots, so that the storage has more of them than a full buffer uses.
        full = "slots in use, of" if contents.tables else "full, of"
        tiles = [("transitions", f"{len(contents):,}"), (f"{full} {contents.capacity:,}", f"{figures['fill']:.1%}")]
        if "age_mean" in figures:
            tiles.append((f"mean age, at most {short(figures['age_max'])}", short(figures["age_mean"])))
        if "effective_share" in figures:
            name = f"effective sample size, {figures['effective_share']:.1%} of the rows"
            tiles.append((name, short(figures["effective_sample_size"])))
        if "draws_of_top_tenth" in figures:
            tiles.append(("of the draws go to the likeliest tenth", f"{figures['draws_of_top_tenth']:.1%}"))
    if subject.size is not None:
        unit, name = next((one for one in _UNITS if subject.size >= one[0]), (1, "bytes"))
        tiles.append(("on the disk", f"{short(subject.size / unit)} {name}"))
    return tiles


def _over_time(history: History) -> Iterator[str]:
    """Yields a chart for each figure, and one for all tables together of what tables have."""
    groups: dict[str, dict[str, tuple[Sequence[float], Sequence[float]]]] = {}
    for name, series in history.items():
        head, _, rest = name.partition("/")  # tables/NAME/FIGURE, in which NAME may have slashes
        table, _, figure = rest.rpartition("/")
        group, member = (f"{head}: {figure}", table) if table else (name, name)
        groups.setdefault(group, {})[member] = series
    for group, members in groups.items():
        shown = dict(islice(members.items(), _SERIES))
        title = group.replace("_", " ")
        note = _legend(*shown) if len(shown) > 1 else ""
        yield _card(title, lines(shown, "environment steps", "", f"{title} over the run"), note)


# --- pictures for loggers ---

_GAP = 2  # Pixels between images.
_CELL = 12  # Pixels of a side of a cell.
_LEAST = np.array([237.0, 244.0, 250.0])  # A light blue.
_MOST = np.array([0.0, 84.0, 140.0])  # A dark blue.
_BACKGROUND = 128


def pictures_of(contents: ReplayContents | LevelContents) -> dict[str, np.ndarray]:
    """Returns pictures by name, uint8 ``[H, W, 3]`` each, as far as there are any.

    Of a replay with images ``film_strips``, a line for each of the three episodes of the highest priority and each
    column of images, see :func:`~lightning_replay.inspection.contents.highest_episodes`. Of levels ``score_by_level``
    and ``staleness_by_level``, a cell for each level in the order of their ids, darker for a higher value.
    """
    if isinstance(contents, LevelContents):
        named = {"score_by_level": contents.score, "staleness_by_level": contents.staleness}
        return {name: heat_map(values) for name, values in named.items() if len(values)}
    ranked = highest_episodes(contents, _STRIPS) if contents.images else None
    if ranked is None:
        return {}
    strips = []
    for *_, images in _strips(contents, ranked):
        height, width, _ = images[0].shape
        strip = np.full((height + _GAP, _FRAMES * (width + _GAP), 3), _BACKGROUND, np.uint8)
        for place, image in enumerate(images):
            strip[:height, place * (width + _GAP) : place * (width + _GAP) + width] = image
        strips.append(strip)
    widest = max(strip.shape[1] for strip in strips)
    padded = [
        np.pad(strip, ((0, 0), (0, widest - strip.shape[1]), (0, 0)), constant_values=_BACKGROUND) for strip in strips
    ]
    return {"film_strips": np.concatenate(padded)}


def heat_map(values: np.ndarray) -> np.ndarray:
    """Returns a grid of cells, uint8 ``[H, W, 3]``, row after row one for each of ``values``, ``[L]``, L > 0."""
    columns = int(np.ceil(np.sqrt(len(values) * 2.0)))
    rows = -(-len(values) // columns)
    colors = np.full((rows * columns, 3), float(_BACKGROUND))
    colors[: len(values)] = _LEAST + _shares(values)[:, None] * (_MOST - _LEAST)
    grid = colors.reshape(rows, columns, 3).astype(np.uint8)
    return grid.repeat(_CELL, 0).repeat(_CELL, 1)


# --- text ---

_QUANTILES = {"at least": 0.0, "first quarter": 0.25, "median": 0.5, "third quarter": 0.75, "at most": 1.0}
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
    lines = [
        *filter(None, [subject.name]),
        *(f"  {value} {name}" for name, value in tiles_of(subject)),
        *(f"  {name}: {count:,}" for name, count in contents.counters.items()),
    ]
    if isinstance(contents, ReplayContents):
        lines += _of_replay(contents)
    elif len(contents):
        lines += [f"  scores: {_quantiles(contents.score)}", f"  staleness: {_quantiles(contents.staleness)}"]
    else:
        lines.append("  no level has a score")
    return "\n".join([*lines, ""])


def _of_replay(contents: ReplayContents) -> Iterator[str]:
    if not len(contents):
        yield "  the buffer is empty"
    elif contents.ages is not None:
        yield f"  ages: {_quantiles(contents.ages)}"
    if contents.draws is not None and contents.draws.priority is not None:
        yield f"  priorities: {_quantiles(contents.draws.priority)}"
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


def _quantiles(values: np.ndarray) -> str:
    found = np.quantile(values.astype(np.float64), list(_QUANTILES.values()))
    return ", ".join(f"{short(value)} {name}" for value, name in zip(found, _QUANTILES, strict=True))
