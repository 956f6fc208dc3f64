# SPDX-License-Identifier: Apache-2.0
"""Pictures of experiments, drawn from saved runs without training, and read from the figure."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts, no package

from experiment_pictures import block_means, draw_panels
from experiment_tables import RESULTS
from redraw import MODULES

FIRST_LINE_ENDS_AT = {  # the first method of the first panel, from results/<name>.md
    "half_field": ("uniform schedule", 0.50),
    "three_rooms": ("uniform", 14 / 32),  # the others never got near-optimal
}


@pytest.mark.parametrize("name", list(FIRST_LINE_ENDS_AT))
def test_saved_runs_are_drawn_again(name: str, tmp_path: Path, saved_figures: list[Any]) -> None:
    content = json.loads((RESULTS / f"{name}.json").read_text())
    importlib.import_module(MODULES[name]).draw_runs(content, tmp_path / "picture.png")
    (figure,) = saved_figures
    assert figure.get_suptitle()
    (legend,) = figure.legends
    seeds = {"half_field": 5, "three_rooms": 32}[name]
    assert legend.get_title().get_text() == f"mean of {seeds} seeds, band: ± 1 standard error"
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    bands = [band for axes in figure.axes for band in axes.collections]
    assert len(bands) == len(lines) and {text.get_text() for text in legend.get_texts()} == {
        line.get_label() for line in lines
    }
    styles = {(line.get_label(), line.get_color(), line.get_linestyle()) for line in lines}
    assert len(styles) == len(legend.get_texts()), "a method has the same line in all panels"
    assert len({style[1:] for style in styles}) == len(styles), "two methods have different lines"
    bottom = figure.axes[-1]
    assert bottom.get_xlabel() in ("episodes", "updates", "environment steps") and figure.axes[0].get_ylabel()
    label, end = FIRST_LINE_ENDS_AT[name]
    assert lines[0].get_label() == label and lines[0].get_ydata()[-1] == pytest.approx(end, abs=0.01)
    assert (tmp_path / "picture.png").stat().st_size < 100_000


def test_all_saved_runs_can_be_drawn_again() -> None:
    runs = {path.stem for path in RESULTS.glob("*.png")} - {"end_to_end"}  # of a speed benchmark, which draws it
    assert runs == set(MODULES) and all((RESULTS / f"{name}.json").exists() for name in runs)


def test_methods_of_different_numbers_of_seeds_name_theirs(tmp_path: Path, saved_figures: list[Any]) -> None:
    curves = {"one": np.zeros((1, 2)), "two": np.ones((3, 2))}
    draw_panels({"success": curves}, [1, 2], tmp_path / "a.png", "title", "steps")
    (figure,) = saved_figures
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one, 1 seed(s)", "two, 3 seed(s)"]
    assert figure.legends[0].get_title().get_text() == "mean over seeds, band: ± 1 standard error"
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("steps", "success")


def test_means_of_blocks_leave_a_rest_out() -> None:
    means, at = block_means(np.array([[1.0, 3.0, 5.0, 7.0, 9.0], [0.0, 0.0, 2.0, 2.0, 9.0]]), range(10, 60, 10), 2)
    assert means.tolist() == [[2.0, 6.0], [0.0, 2.0]] and at == [20, 40]
