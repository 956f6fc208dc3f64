# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG, whose colours are those of the page: light or dark as the reader has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

import numpy as np

__all__ = ["STYLE", "cells", "concentration", "histogram", "lanes", "lines", "short"]

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
