# SPDX-License-Identifier: Apache-2.0
"""Draws pictures of the site from the kept results: first pictures of pages, narrow forms of figures, a card for links.

python -m tests.benchmarks.site_pictures
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_replay.inspection.plotting import count_on, make_figure, save_figure
from tests.benchmarks.learning.command import RESULTS
from tests.benchmarks.learning.experiment import Experiment
from tests.benchmarks.learning.page import Results
from tests.benchmarks.learning.pictures import curves_of, draw_band, draw_panels, shrink
from tests.benchmarks.learning.recorder import SeedRun
from tests.benchmarks.learning.runner import all_experiments

DOCS = Path(__file__).resolve().parents[2] / "docs"
IMAGES = DOCS / "images"
NARROW = "-narrow"  # NAME-narrow.png beside NAME.png, which docs/page_parts.py looks for
Runs = dict[str, dict[int, SeedRun]]


class Lead(NamedTuple):
    """First picture of a method's page: the first panel of an experiment, with two of its arms."""

    experiment: str
    title: str
    arms: Mapping[str, str]  # by label: without the method, then with it


LEADS: Mapping[str, Lead] = {  # by the name of the page
    "prioritized": Lead(
        "rooms", "Three rooms, tabular Q-learning", {"uniform": "uniform", "prioritized": "prioritized"}
    ),
    "age": Lead(
        "age-few-half-cheetah",
        "HalfCheetah, TD3, 16 environments",
        {"uniform": "uniform", "truncated geometric": "truncated geometric"},
    ),
    "mixup": Lead(
        "nmer-short",
        "HalfCheetah, TD3 at replay ratio 20",
        {"uniform": "uniform", "neighbourhood mixup": "neighbourhood mixup"},
    ),
    "event-tables": Lead(
        "event-tables",
        "Three rooms, double DQN",
        {"uniform": "uniform", "event tables": "event tables: gap and goal"},
    ),
    "curriculum": Lead(
        "half-field",
        "Soccer from the hardest start, MP-DQN",
        {"no curriculum": "no curriculum", "easy to hard": "easy to hard"},
    ),
    "retention": Lead(
        "kl-retention",
        "MinAtar Breakout, Rainbow, 500 rows",
        {"first in, first out": "FIFO", "retention": "retention"},
    ),
    "goals": Lead("goals", "PointMaze, SAC", {"uniform": "uniform", "hindsight": "hindsight"}),
    "demonstrations": Lead(
        "halves", "MountainCarContinuous, SAC", {"online rows alone": "online alone", "half demonstrated": "halves"}
    ),
    "memory": Lead(
        "memory",
        "A cue to remember for 20 steps",
        {"DQN, single rows": "DQN, single rows", "recurrent, sequences": "RecurrentDQN, sequences"},
    ),
    "levels": Lead(
        "multi-room",
        "MultiRoom, PPO, temperature 1",
        {"uniform levels": "uniform", "level replay": "level replay, temperature 1"},
    ),
}
CARD = ("event-tables", "mixup", "levels")
CARD_TITLE = "lightning-replay"
CARD_TEXT = "Experience replay and level replay\nfor TorchRL, Lightning and Ray RLlib"


def runs_of(experiment: Experiment) -> Runs:
    """Returns the kept runs of an experiment by arm and seed."""
    content = json.loads((RESULTS / f"{experiment.name}.json").read_text())
    return Results(experiment, content["units"], content["seeds"]).runs


def two_arms(lead: Lead, experiment: Experiment) -> tuple[Experiment, Runs]:
    """Returns an experiment reduced to what its lead shows, and its runs by label."""
    reduced = dataclasses.replace(
        experiment,
        title=lead.title,
        arms={label: experiment.arms[arm] for label, arm in lead.arms.items()},
        panels=[dataclasses.replace(experiment.panels[0], arms=(), title="")],
        comparisons=None,
        headline=(),
    )
    kept = runs_of(experiment)
    return reduced, {label: kept[arm] for label, arm in lead.arms.items()}


def draw_leads(experiments: Mapping[str, Experiment]) -> None:
    """Draws each method beside uniform replay, as ``lead_PAGE.png``."""
    for page, lead in LEADS.items():
        draw_panels(*two_arms(lead, experiments[lead.experiment]), IMAGES / f"lead_{page}.png")


def draw_narrow(experiments: Mapping[str, Experiment]) -> None:
    """Draws panels below one another, as ``NAME-narrow.png``, where a page shows them side by side."""
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    for name in sorted(set(re.findall(r"/results/([\w-]+)\.png", pages)) & set(experiments)):
        if len(experiments[name].panels) > 1:
            draw_panels(experiments[name], runs_of(experiments[name]), RESULTS / f"{name}{NARROW}.png", columns=1)


def draw_card(experiments: Mapping[str, Experiment], path: Path) -> None:
    """Draws name, purpose and three of the leads, 1,200 by 630 pixels: what a link to a page shows elsewhere."""
    figure, panels = make_figure("the card", 1, len(CARD), 5.25, 10.0)
    figure.get_layout_engine().set(rect=(0.02, 0.03, 0.96, 0.54), wspace=0.06)
    figure.text(0.03, 0.84, CARD_TITLE, fontsize=40, fontweight="bold")
    figure.text(0.03, 0.65, CARD_TEXT, fontsize=20, linespacing=1.3)
    for axes, page in zip(panels[0], CARD, strict=True):
        experiment, runs = two_arms(LEADS[page], experiments[LEADS[page].experiment])
        for label in experiment.arms:
            draw_band(axes, *curves_of(runs[label], experiment.panels[0].curve, experiment.panels[0].block), label)
        count_on(axes.xaxis)
        axes.set_title(list(experiment.arms)[1], fontsize=15, color=axes.get_lines()[1].get_color())
        axes.tick_params(labelsize=11)
    panels[0, 0].legend(loc="upper left", fontsize=12, handles=panels[0, 0].get_lines()[:1])
    save_figure(figure, path)
    shrink(path)


def main() -> None:
    """Draws them all."""
    experiments = all_experiments()
    draw_leads(experiments)
    draw_narrow(experiments)
    draw_card(experiments, IMAGES / "card.png")


if __name__ == "__main__":
    main()
