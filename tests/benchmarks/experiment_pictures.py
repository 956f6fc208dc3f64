# SPDX-License-Identifier: Apache-2.0
"""Pictures of experiments: means of several seeds with bands of one standard error, in one or more panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lightning_replay.analysis.plotting import band_note, count_on, draw_band, line_style, make_figure, save_figure

Panels = Mapping[str, Mapping[str, np.ndarray]]


def draw_panels(
    panels: Panels,
    at: Sequence[int],
    path: Path,
    title: str,
    xlabel: str,
    ylabel: str | None = None,
    ylim: tuple[float, float] | None = None,
) -> None:
    """Means of curves ``[seeds, P]`` with bands of one standard error, two panels side by side, as a small PNG file.

    A method has the same line in all panels. The legend, below them, names the number of seeds.

    Args:
        panels: by their names, the curves of each method.
        at: where the points of all curves are, ``[P]``.
        path: of the picture.
        title: above all panels.
        xlabel: what ``at`` counts.
        ylabel: the measure, if it is the same in all panels; otherwise their names are the measures.
        ylim: of all panels.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = {"rows": rows, "columns": columns, "height": 1.4 + (3.4 if columns == 1 else 2.8) * rows}
    figure, grid = make_figure("the picture of an experiment", **size, sharey=ylabel is not None)
    methods = list(dict.fromkeys(method for curves in panels.values() for method in curves))
    counts = {method: len(values) for curves in panels.values() for method, values in curves.items()}
    is_even = len(set(counts.values())) == 1
    lines = {}
    for axes, (name, curves) in zip(grid.flat, panels.items(), strict=True):
        for method, values in curves.items():
            label = method if is_even else f"{method}, {counts[method]} seed(s)"
            lines[label] = draw_band(axes, at, values, label, **line_style(methods.index(method)))
        axes.set_xlabel(xlabel)
        axes.set_ylabel(name if ylabel is None else ylabel)
        if ylabel is not None:
            axes.set_title(name, fontsize="medium")
            axes.label_outer()
        if ylim is not None:
            axes.set_ylim(*ylim)
        count_on(axes.xaxis)
    note = band_note(*set(counts.values())) if is_even else "mean over seeds, band: ± 1 standard error"
    columns = 1 if len(lines) == 1 else 2 if max(map(len, lines)) > 20 else 3
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=columns, fontsize="small", title=note)
    figure.suptitle(title)
    save_figure(figure, path)
    shrink(path)


def block_means(curves: np.ndarray, at: Sequence[int], size: int) -> tuple[np.ndarray, list[int]]:
    """Means of ``size`` consecutive points of curves ``[seeds, P]``, and the last place of each; a rest is left out."""
    blocks = curves.shape[1] // size
    means = curves[:, : blocks * size].reshape(len(curves), blocks, size).mean(2)
    return means, list(at[size - 1 :: size])


def shrink(path: Path) -> None:
    """Rewrites a picture with a palette of 256 colours, which takes a third of the bytes."""
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
