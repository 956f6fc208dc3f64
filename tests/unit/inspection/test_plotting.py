# SPDX-License-Identifier: Apache-2.0
"""Parts of figures, read from the figure and not from its pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_replay.inspection import plotting
from tests.benchmarks.learning.pictures import band_note, draw_band

pyplot = pytest.importorskip("matplotlib.pyplot")


def test_a_band_is_one_standard_error_around_the_mean() -> None:
    _, panels = plotting.make_figure("a test")
    axes = panels[0, 0]
    #   by hand, second point: mean 4, deviations -3 0 3, standard deviation 3, standard error sqrt(3)
    line = draw_band(axes, [10, 20], [[0.0, 1.0], [0.0, 4.0], [0.0, 7.0]], "three")
    assert line.get_xdata().tolist() == [10, 20] and line.get_ydata().tolist() == [0.0, 4.0]
    (band,) = axes.collections
    edges = band.get_paths()[0].vertices
    assert sorted({y for x, y in edges.tolist() if x == 20}) == pytest.approx([4 - 3**0.5, 4 + 3**0.5])
    assert {y for x, y in edges.tolist() if x == 10} == {0.0}
    assert (
        pyplot.matplotlib.colors.to_hex(band.get_facecolor()[0])
        == line.get_color().lower()
        == plotting.COLORS[0].lower()
    )
    assert line.get_label() == "three" and band_note(3) == "mean of 3 seeds, band: ± 1 standard error"
    _, panels = plotting.make_figure("a test")
    draw_band(panels[0, 0], [1, 2], [[3.0, 4.0]], "one")
    assert not panels[0, 0].collections and band_note(1) == "one seed"
    gap = draw_band(panels[0, 0], [1, 2], [[np.nan, 4.0], [1.0, 4.0]], "two", color="red")
    assert np.isnan(gap.get_ydata()).tolist() == [True, False] and gap.get_color() == "red"


def test_every_line_of_a_panel_looks_different() -> None:
    _, panels = plotting.make_figure("a test", rows=1, columns=2)
    assert panels.shape == (1, 2)
    lines = [draw_band(panels[0, 1], [0, 1], [[0, number]], str(number)) for number in range(2 * len(plotting.COLORS))]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("values", "drawn", "scale"),
    [
        ([0.9, 0.05, 0.001], [0.9, 0.05, 0.001], (0.001, 0.9)),
        ([1.0, 0.1, 0.0], [1.0, 0.1, 0.1], (0.1, 1.0)),
        ([1.0, 1e-9], [1.0, 1e-6], (1e-6, 1.0)),
        ([0.5, 0.5], [0.5, 0.5], (0.05, 0.5)),
        ([0.0], [1.0], (0.1, 1.0)),
    ],
    ids=["one dominates", "zero", "too small", "all equal", "nothing"],
)
def test_logarithmic_colours(values, drawn, scale) -> None:
    found, norm = plotting.log_colors(values)
    assert isinstance(norm, pyplot.matplotlib.colors.LogNorm)
    assert found.tolist() == pytest.approx(drawn) and (norm.vmin, norm.vmax) == pytest.approx(scale)


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (100, [1] * 100), (101, [6] + [5] * 19), (1_010, [21] * 10 + [20] * 40)]
)
def test_many_points_are_split_into_few_groups(count: int, sizes: list[int]) -> None:
    groups = plotting.consecutive_groups([(step, 0.5) for step in range(count)])
    assert [len(group) for group in groups] == sizes
    assert np.concatenate(groups)[:, 0].tolist() == list(range(count))


def test_counts_on_an_axis_are_short(tmp_path: Path) -> None:
    figure, panels = plotting.make_figure("a test", height=2.0)
    draw_band(panels[0, 0], [0, 1_500_000], [[0, 1]], "line")
    plotting.count_on(panels[0, 0].xaxis)
    figure.canvas.draw()
    assert {"0", "300k", "1.2M", "1.5M"} <= {label.get_text() for label in panels[0, 0].get_xticklabels()}
    plotting.save_figure(figure, tmp_path / "new" / "picture.png")
    assert pyplot.imread(tmp_path / "new" / "picture.png").shape[:2] == (240, 840)


def test_the_display_of_a_notebook_stays_as_it_is(tmp_path: Path) -> None:
    before = pyplot.get_backend()
    pyplot.switch_backend("svg")
    figure, _ = plotting.make_figure("a test")
    plotting.save_figure(figure, tmp_path / "picture.png")
    assert pyplot.get_backend() == "svg" and not pyplot.get_fignums()
    pyplot.switch_backend(before)
