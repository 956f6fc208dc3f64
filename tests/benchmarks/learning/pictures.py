# SPDX-License-Identifier: Apache-2.0
"""Pictures of experiments: means of several seeds with bands of one standard error, in one or more panels."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from lightning_replay.inspection.plotting import count_on, fill_band, line_style, make_figure, save_figure
from tests.benchmarks.learning.experiment import Experiment
from tests.benchmarks.learning.recorder import SeedRun

TITLE_WIDTH, LABEL_WIDTH = 36, 24  # letters for each column of panels, and along the height of one
NARROW_WIDTH = 4.4  # inches of a column of panels alone: text of 10 points is readable on a telephone


def draw_band(axes: Any, x: ArrayLike, curves: ArrayLike, label: str, **line_options: Any) -> Any:
    """Draws the mean of curves over seeds, with a band of one standard error of the mean, and returns the line.

    ``curves`` are ``[seeds, P]`` at ``x``, ``[P]``. A single curve has no band. Where one of the curves is NaN, mean
    and band have a gap. :func:`band_note` describes the band; ``line_options`` are further ones of ``axes.plot``.
    """
    values, at = np.asarray(curves, dtype=np.float64), np.asarray(x)
    if values.ndim != 2 or not len(values) or values.shape[1:] != at.shape:
        raise ValueError(
            f"curves have the shape {list(values.shape)} and x {list(at.shape)}; give [seeds, P] of at least one seed, "
            "and [P]. A single curve is curve[None]."
        )
    mean = values.mean(0)
    (line,) = axes.plot(at, mean, label=label, **line_options)
    if len(values) > 1:
        fill_band(axes, at, mean, values.std(0, ddof=1) / np.sqrt(len(values)), line)
    return line


def band_note(seeds: int) -> str:
    """Returns a description of the lines and bands of :func:`draw_band`, for a title or a legend.

    Example:
        >>> band_note(8)
        'mean of 8 seeds, band: ± 1 standard error'
    """
    return "one seed" if seeds == 1 else f"mean of {seeds} seeds, band: ± 1 standard error"


def draw_panels(
    experiment: Experiment, runs: Mapping[str, Mapping[int, SeedRun]], path: Path, *, columns: int = 2
) -> None:
    """Draws the panels of an experiment as a small PNG file.

    An arm has the same line in all panels. The legend, below them, names the number of seeds. Panels of arms that
    were not run are left out; without any panel no file is written.

    Args:
        experiment: names the panels.
        runs: by arm and seed.
        path: of the picture.
        columns: of panels at most; one is for narrow screens.
    """
    panels = [panel for panel in experiment.panels if any(runs[arm] for arm in panel.arms or experiment.arms)]
    if not panels:
        return
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    arms = [arm for arm in experiment.arms if runs[arm] and any(arm in (panel.arms or [arm]) for panel in panels)]
    counts = {arm: len(runs[arm]) for arm in arms}
    is_even = len(set(counts.values())) == 1
    labels = {arm: arm if is_even else f"{arm}, {counts[arm]} seed(s)" for arm in arms}
    entries = min(len(arms), columns + (max(map(len, labels.values())) <= 20))  # of the legend, side by side
    size = (1.4 + 2.8 * rows, 7.0) if columns > 1 else (0.8 + 2.4 * rows + 0.2 * -(-len(arms) // entries), NARROW_WIDTH)
    figure, grid = make_figure("the picture of an experiment", rows, columns, *size)
    lines = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        for arm in (arm for arm in arms if arm in (panel.arms or arms)):
            at, curves = curves_of(runs[arm], panel.curve, panel.block)
            lines[labels[arm]] = draw_band(axes, at, curves, labels[arm], **line_style(arms.index(arm)))
        axes.set(xlabel=textwrap.fill(experiment.xlabel, TITLE_WIDTH), ylabel=textwrap.fill(panel.label, LABEL_WIDTH))
        axes.set_title(panel.title, fontsize="medium")
        count_on(axes.xaxis)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    note = band_note(*set(counts.values())) if is_even else "mean over seeds, band: ± 1 standard error"
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=entries, fontsize="small", title=note)
    figure.suptitle(textwrap.fill(experiment.title, TITLE_WIDTH * grid.shape[1]))
    save_figure(figure, path)
    shrink(path)


def curves_of(runs: Mapping[int, SeedRun], curve: str, block: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps ``[P]`` and a curve of all seeds ``[seeds, P]``, each the mean of ``block`` points.

    An incomplete last block is left out; a block lies at its last point.
    """
    steps = np.array(next(iter(runs.values())).steps)
    curves = np.array([run.curves[curve] for run in runs.values()])
    block = min(block, len(steps))
    blocks = len(steps) // block
    means = curves[:, : blocks * block].reshape(len(curves), blocks, block).mean(2)
    return steps[block - 1 :: block][:blocks], means


def shrink(path: Path) -> None:
    """Rewrites a picture with a palette of 128 colours, which takes a quarter of the bytes, and keeps its inches."""
    image = Image.open(path)
    image.convert("RGB").quantize(128).save(path, optimize=True, dpi=image.info["dpi"])
