# SPDX-License-Identifier: Apache-2.0
"""First pictures of pages, narrow forms of figures, and the card of shared links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.benchmarks.learning.command import RESULTS
from tests.benchmarks.learning.runner import all_experiments
from tests.benchmarks.site_pictures import DOCS, IMAGES, LEADS, NARROW, draw_card, two_arms

PICTURE = re.compile(r"^!\[([^\]]+)\]\(([^)]+)\)$", re.MULTILINE)


@pytest.mark.parametrize("page", LEADS)
def test_the_first_picture_of_a_page_is_its_method_beside_uniform(page: str) -> None:
    _, target = PICTURE.search((DOCS / f"{page}.md").read_text()).groups()
    assert target == f"images/lead_{page}.png" and (DOCS / target).exists()


def test_every_page_of_a_method_has_a_lead() -> None:
    methods = re.search(r":caption: Methods\n\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL).group(1)
    names = [line.rpartition("<")[2].strip("> ") for line in methods.splitlines()]
    one_each = {name for name in names if not name.startswith("levels-")}  # parts of the page on levels
    assert one_each - {"frames", "samplers-and-transforms"} <= set(LEADS)


def test_a_lead_has_the_kept_runs_of_two_arms() -> None:
    lead = LEADS["curriculum"]
    experiment, runs = two_arms(lead, all_experiments()[lead.experiment])
    assert [panel.curve for panel in experiment.panels] == ["target"] and list(experiment.arms) == list(lead.arms)
    assert experiment.arms["easy to hard"] == all_experiments()["half-field"].arms["easy to hard"]
    without, ordered = (runs[label] for label in lead.arms)
    assert list(without) == list(ordered) == list(range(300, 308))
    assert all(run.curves["target"][-1] < 0.1 for run in without.values())
    assert all(run.curves["target"][-1] > 0.8 for run in ordered.values())


def test_figures_of_pages_have_a_narrow_form_where_panels_lie_side_by_side() -> None:
    experiments, shown = all_experiments(), set()
    for page in DOCS.glob("*.md"):
        shown |= {target.rpartition("/")[2].removesuffix(".png") for _, target in PICTURE.findall(page.read_text())}
    several = {name for name in shown & set(experiments) if len(experiments[name].panels) > 1}
    assert several == {path.stem.removesuffix(NARROW) for path in RESULTS.glob(f"*{NARROW}.png")}
    for path in [*RESULTS.glob(f"*{NARROW}.png"), *IMAGES.glob("lead_*.png"), *IMAGES.glob(f"*{NARROW}.png")]:
        with Image.open(path) as image:
            assert image.width / image.info["dpi"][0] < 4.5, path  # inches, so that text of 10 points is readable


def test_the_card_shows_three_methods_in_the_size_of_its_tags(tmp_path: Path, saved_figures: list[Any]) -> None:
    draw_card(all_experiments(), tmp_path / "card.png")
    (figure,) = saved_figures
    assert [axes.get_title() for axes in figure.axes] == ["event tables", "neighbourhood mixup", "level replay"]
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["uniform", "event tables"]
    for path in (tmp_path / "card.png", IMAGES / "card.png"):
        with Image.open(path) as image:
            assert image.size == (1200, 630)
