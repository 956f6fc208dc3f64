# SPDX-License-Identifier: Apache-2.0
"""The short form of every attack but that on a cluster; ``make attack`` runs the long one."""

from __future__ import annotations

import pytest

from tests.attack import contents, datasets, endurance, flips, histories, kills, names, neighbors, overlaps, threads
from tests.attack.report import Report
from tests.attack.subjects import (
    LevelsSubject,
    LightningSubject,
    ReplaySubject,
    RllibCommandSubject,
    RllibSubject,
    Subject,
)
from tests.attack.variants import VARIANTS, Variant
from tests.recordings import RECORDINGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # from Python 3.12 on
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
]


def no_findings(report: Report) -> None:
    assert not report.findings, report.findings[0]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_histories(variant: Variant) -> None:
    report = histories.attack(seed=1, count=12, variants=[variant])
    no_findings(report)
    assert report.figures["refused calls"] > 2


@pytest.mark.parametrize("kind", [ReplaySubject, LevelsSubject])
def test_kills(kind: type[Subject]) -> None:
    no_findings(kills.attack(kind, seed=1, kills=3))


@pytest.mark.parametrize("kind", [ReplaySubject, LevelsSubject])
def test_damages(kind: type[Subject]) -> None:
    report = flips.attack(lambda folder: kind(folder, 1), kind.name, count=40)
    no_findings(report)
    assert report.figures["refused as damaged"] > 10


def test_damages_of_every_recipe() -> None:
    no_findings(flips.attack_recipes(seed=1, count=2))


def test_forged_names() -> None:
    report = names.attack_recipes(seed=1, count=40, variants=VARIANTS[::5])
    no_findings(report)
    assert report.figures["refused"] > 100
    no_findings(names.attack(lambda folder: LevelsSubject(folder, 1), "levels", count=40))


@pytest.mark.parametrize("variant", VARIANTS[::5], ids=str)
def test_forged_contents(variant: Variant) -> None:
    report = contents.attack(seed=1, count=16, variants=[variant])
    no_findings(report)
    assert report.figures["loaded"] and report.figures["refused"]


@pytest.mark.parametrize("name", RECORDINGS)
def test_hostile_data_sets(name: str) -> None:
    report = datasets.attack(RECORDINGS[name], seed=1, count=60)
    no_findings(report)
    assert report.figures["refused in a sentence"] > 20


def test_neighbors() -> None:
    report = neighbors.attack(seed=1, count=2)
    no_findings(report)
    assert report.figures["saves"] > 60 and report.figures["refused saves"] > 30


def test_a_lightning_checkpoint() -> None:
    no_findings(kills.attack(LightningSubject, seed=1, kills=2))
    no_findings(flips.attack(lambda folder: LightningSubject(folder, 1), "lightning", count=10))
    no_findings(names.attack(lambda folder: LightningSubject(folder, 1), "lightning", count=10))


def test_a_checkpoint_of_rllib(shared_ray: None) -> None:
    no_findings(kills.attack(RllibSubject, seed=1, kills=2))
    no_findings(flips.attack(lambda folder: RllibSubject(folder, 1), "rllib", count=4))
    no_findings(names.attack(lambda folder: RllibSubject(folder, 1), "rllib", count=10))


def test_a_checkpoint_of_the_rllib_command(shared_ray: None) -> None:
    no_findings(kills.attack(RllibCommandSubject, seed=1, kills=4))


@pytest.mark.parametrize("kind", [overlaps.Rows, overlaps.Scores])
def test_overlaps(kind: type[overlaps.Contents]) -> None:
    report = overlaps.attack(kind, seconds=1.2)
    no_findings(report)
    assert report.figures["different saves loaded"] > 1


@pytest.mark.parametrize("variant", VARIANTS[::4], ids=str)
def test_threads(variant: Variant) -> None:
    no_findings(threads.attack(seed=1, seconds=0.3, variants=[variant]))


@pytest.mark.parametrize("name", ["levels", "uniform()", "event_tables()"])
def test_endurance(name: str) -> None:
    no_findings(endurance.attack(name, rows=2_000 if name == "levels" else 150_000))
