# SPDX-License-Identifier: Apache-2.0
"""Figures of one style, drawn with matplotlib, which is imported when the first one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from lightning_replay.options import checked_local_path, missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Okabe and Ito, "Color Universal Design", 2008, without their yellow, which is hard to see on white
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--")  # beyond the last color
_DPI = 120
_MOST_POINTS = 100  # A line has at most this number of points; more rows are averaged in groups.
_MOST_GROUPS = 50
_LEAST_IN_A_GROUP = 5
_MOST_DECADES = 6  # of a color scale; smaller values get its lowest color


def import_matplotlib(picture: str) -> Any:
    """Returns ``matplotlib``, or raises ``MissingExtraError`` with the name of the ``picture``."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise missing_extra(picture, "matplotlib", "plots") from error
    return matplotlib


def make_figure(
    picture: str, rows: int = 1, columns: int = 1, height: float = 4.0, width: float = 7.0, **options: Any
) -> tuple[Any, Any]:
    """Returns a figure with a light grid and color-blind-safe colors, and its ``Axes`` as array ``[rows, columns]``.

    It draws into files alone: the display of ``pyplot``, such as that of a notebook, stays as it is. Sizes are in
    inches: text of 10 points in 7 of them is readable on a page that shows the picture 700 pixels wide.
    """
    import_matplotlib(picture)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    styles = [line_style(number) for number in range(len(COLORS) * len(_LINES))]
    for axes in panels.flat:
        axes.set_prop_cycle(**{name: [style[name] for style in styles] for name in styles[0]})
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    return figure, panels


def line_style(number: int) -> dict[str, str]:
    """Returns color and dashes of line ``number`` of a panel, for lines that look alike in several panels.

    Example:
        >>> line_style(0), line_style(7)
        ({'color': '#0072B2', 'linestyle': '-'}, {'color': '#0072B2', 'linestyle': '--'})
    """
    dashes, color = divmod(number, len(COLORS))
    return {"color": COLORS[color], "linestyle": _LINES[dashes % len(_LINES)]}


def fill_band(axes: Axes, x: ArrayLike, mean: np.ndarray, spread: np.ndarray, line: Line2D) -> None:
    """Fills ``mean ± spread``, all ``[P]``, in the color of a line."""
    axes.fill_between(x, mean - spread, mean + spread, color=line.get_color(), alpha=0.2, linewidth=0)


def consecutive_groups(points: ArrayLike) -> list[np.ndarray]:
    """Splits points ``[P, ...]`` of a line: up to 100 into a group each, more into at most 50 groups of at least 5."""
    rows = np.asarray(points, dtype=np.float64)
    many = len(rows) > _MOST_POINTS
    return np.array_split(rows, min(_MOST_GROUPS, len(rows) // _LEAST_IN_A_GROUP) if many else max(1, len(rows)))


def count_on(axis: Axis) -> None:
    """Shortens counts on an axis: 20k and 1.5M for 20,000 and 1,500,000."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.set_major_formatter(EngFormatter(sep=""))


def log_colors(values: ArrayLike) -> tuple[np.ndarray, Any]:
    """Returns values ``[P]``, not negative, to draw on a logarithmic color scale, and matplotlib's ``LogNorm``."""
    from matplotlib.colors import LogNorm

    given = np.asarray(values, dtype=np.float64)
    largest = float(given.max()) or 1.0
    lowest = max(float(given[given > 0].min(initial=largest)), largest * 10.0**-_MOST_DECADES)
    # matplotlib draws no scale of length 0
    return given.clip(lowest), LogNorm(min(lowest, largest / 10), largest)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes a figure in the format of the suffix, and creates its folder if absent."""
    path = checked_local_path("path", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
