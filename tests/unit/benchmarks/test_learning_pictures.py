# SPDX-License-Identifier: Apache-2.0
"""Pictures of experiments, read from the figure, and the verdicts of the results that are kept in the repository."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.benchmarks.learning.command import RESULTS
from tests.benchmarks.learning.evidence import REPLACED
from tests.benchmarks.learning.experiment import Experiment, Panel, hash_of, last_of
from tests.benchmarks.learning.page import Results
from tests.benchmarks.learning.pictures import curves_of, draw_panels
from tests.benchmarks.learning.recorder import SeedRun
from tests.benchmarks.learning.runner import all_experiments

EXPERIMENT = Experiment(
    name="two-arms",
    title="title",
    claim="",
    task="",
    length="{steps} steps",
    arms={"one": {}, "two": {}},
    settings={"steps": 3},
    seeds=range(3),
    pilot_seeds=(),
    measure=last_of("success", 1, "success"),
    panels=(Panel("success", "success", title="both"), Panel("success", "success", ("two",), "the second")),
    xlabel="steps",
    run=lambda settings, seeds, out: None,
)


def run_of(*points: float) -> SeedRun:
    return SeedRun([10 * (number + 1) for number in range(len(points))], {"success": np.array(points)}, {})


def test_an_arm_has_the_same_line_in_all_panels(tmp_path: Path, saved_figures: list[Any]) -> None:
    runs = {"one": {seed: run_of(0.0, 0.5) for seed in range(3)}, "two": {seed: run_of(0.0, seed) for seed in range(3)}}
    draw_panels(EXPERIMENT, runs, tmp_path / "picture.png")
    (figure,) = saved_figures
    (legend,) = figure.legends
    assert figure.get_suptitle() == "title"
    assert legend.get_title().get_text() == "mean of 3 seeds, band: ± 1 standard error"
    lines = [[(line.get_label(), line.get_color()) for line in axes.get_lines()] for axes in figure.axes]
    assert [name for name, _ in lines[0]] == ["one", "two"] and lines[1] == lines[0][1:]
    assert [len(axes.collections) for axes in figure.axes] == [2, 1]
    assert figure.axes[0].get_lines()[1].get_ydata().tolist() == [0.0, 1.0]
    assert [(axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) for axes in figure.axes] == [
        ("steps", "success", "both"),
        ("steps", "success", "the second"),
    ]
    assert (tmp_path / "picture.png").stat().st_size < 100_000


def test_a_narrow_picture_has_its_panels_below_one_another(tmp_path: Path, saved_figures: list[Any]) -> None:
    runs = {arm: {0: run_of(0.0, 0.5)} for arm in EXPERIMENT.arms}
    draw_panels(EXPERIMENT, runs, tmp_path / "wide.png")
    draw_panels(EXPERIMENT, runs, tmp_path / "narrow.png", columns=1)
    wide, narrow = saved_figures
    assert [figure.get_figwidth() for figure in saved_figures] == [7.0, 4.4]
    (left, _), (upper, lower) = wide.axes, narrow.axes
    assert left.get_position().x1 < 0.5 < lower.get_position().x1 and lower.get_position().y1 < upper.get_position().y0
    with Image.open(tmp_path / "narrow.png") as image:
        assert image.size == (528, 696) and round(image.info["dpi"][0]) == 120


def test_arms_of_different_numbers_of_seeds_name_theirs(tmp_path: Path, saved_figures: list[Any]) -> None:
    runs = {"one": {0: run_of(0.0, 0.0)}, "two": {seed: run_of(1.0, 1.0) for seed in range(3)}}
    draw_panels(dataclasses.replace(EXPERIMENT, panels=EXPERIMENT.panels[:1]), runs, tmp_path / "a.png")
    (figure,) = saved_figures
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one, 1 seed(s)", "two, 3 seed(s)"]
    assert figure.legends[0].get_title().get_text() == "mean over seeds, band: ± 1 standard error"


def test_panels_of_arms_that_were_not_run_are_left_out(tmp_path: Path, saved_figures: list[Any]) -> None:
    runs = {"one": {0: run_of(0.0, 0.5)}, "two": {}}
    draw_panels(EXPERIMENT, runs, tmp_path / "a.png")
    draw_panels(dataclasses.replace(EXPERIMENT, panels=EXPERIMENT.panels[1:]), runs, tmp_path / "none.png")
    (figure,) = saved_figures
    assert [axes.get_title() for axes in figure.axes] == ["both"]
    assert not (tmp_path / "none.png").exists()


def test_means_of_blocks_leave_a_rest_out() -> None:
    runs = {0: run_of(1.0, 3.0, 5.0, 7.0, 9.0), 1: run_of(0.0, 0.0, 2.0, 2.0, 9.0)}
    at, means = curves_of(runs, "success", block=2)
    assert means.tolist() == [[2.0, 6.0], [0.0, 2.0]] and at.tolist() == [20, 40]


# By name, what the runner wrote.
KEPT = {path.stem: content for path in RESULTS.glob("*.json") if "units" in (content := json.loads(path.read_text()))}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KEPT if name not in REPLACED])
def test_kept_verdicts_are_those_of_the_kept_runs(name: str) -> None:
    experiment, content = all_experiments()[name], KEPT[name]
    results = Results(experiment, content["units"], content["seeds"])
    assert [each.text for each in results.comparisons(experiment.measure)] == content["verdicts"]
    page = (RESULTS / f"{name}.md").read_text()
    assert all(verdict in page for verdict in content["verdicts"])
    words = {"title": experiment.title, "task": experiment.task, "claim": experiment.claim}
    assert {name: content[name] for name in words} == words, "run `make experiments FLAGS=--redraw`"
    assert all(text in page for text in (*words.values(), experiment.notes))
    assert content["settings"] == json.loads(json.dumps(experiment.settings)) and results.seeds == list(
        experiment.seeds
    )
    assert content["arms"] == json.loads(json.dumps(dict(experiment.arms)))
    assert all(unit["settings_hash"] == hash_of(experiment.settings_of(unit["arm"])) for unit in results.units)
