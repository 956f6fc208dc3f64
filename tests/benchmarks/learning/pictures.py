# SPDX-License-Identifier: Apache-2.0
"""Pictures of experiments: means of several seeds with bands of one standard error, in one or more panels."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from lightning_replay.inspection.plotting import band_note, count_on, draw_band, line_style, make_figure, save_figure
from tests.benchmarks.learning.experiment import Experiment
from tests.benchmarks.learning.recorder import SeedRun

TITLE_WIDTH = 36  # letters for each column of panels


def draw_panels(experiment: Experiment, runs: Mapping[str, Mapping[int, SeedRun]], path: Path) -> None:
    """Draws the panels of an experiment, two side by side, as a small PNG file.

    An arm has the same line in all panels. The legend, below them, names the number of seeds. Panels of arms that
    were not run are left out; without any panel no file is written.

    Args:
        experiment: names the panels.
        runs: by arm and seed.
        path: of the picture.
    """
    panels = [panel for panel in experiment.panels if any(runs[arm] for arm in panel.arms or experiment.arms)]
    if not panels:
        return
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = make_figure(
        "the picture of an experiment", rows, columns, height=1.4 + (3.4 if columns == 1 else 2.8) * rows
    )
    arms = [arm for arm in experiment.arms if runs[arm] and any(arm in (panel.arms or [arm]) for panel in panels)]
    counts = {arm: len(runs[arm]) for arm in arms}
    is_even = len(set(counts.values())) == 1
    lines = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        for arm in (arm for arm in arms if arm in (panel.arms or arms)):
            at, curves = curves_of(runs[arm], panel.curve, panel.block)
            label = arm if is_even else f"{arm}, {counts[arm]} seed(s)"
            lines[label] = draw_band(axes, at, curves, label, **line_style(arms.index(arm)))
        axes.set(xlabel=textwrap.fill(experiment.xlabel, TITLE_WIDTH), ylabel=panel.label)
        axes.set_title(panel.title, fontsize="medium")
        count_on(axes.xaxis)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    note = band_note(*set(counts.values())) if is_even else "mean over seeds, band: ± 1 standard error"
    columns = 1 if len(lines) == 1 else 2 if max(map(len, lines)) > 20 else 3
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=columns, fontsize="small", title=note)
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
    """Rewrites a picture with a palette of 256 colours, which takes a third of the bytes."""
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
