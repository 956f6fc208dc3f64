# SPDX-License-Identifier: Apache-2.0
"""Definitions of learning experiments: wrong ones are refused, and those of the files are sound."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.benchmarks.learning.experiment import Experiment, combination, final
from tests.benchmarks.learning.runner import all_experiments
from tests.benchmarks.learning.units import Unit

EXPERIMENT = Experiment(
    name="walk",
    title="Random walks",
    claim="drift moves.",
    task="A walk.",
    length="{steps:,} steps of {size}",
    arms={"no drift": {"drift": 0.0}, "drift": {"drift": 1.0}, "back": {"drift": -1.0}},
    settings={"steps": 5_000, "size": 0.5},
    seeds=range(4),
    pilot_seeds=(10, 11),
    measure=final("place", "place at the end"),
    run=lambda settings, seeds, out: out.final(place=[0.0 for _ in seeds]),
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Walk it"}, "small letters"),
        ({"seeds": (1, 1)}, "repetitions"),
        ({"pilot_seeds": (3,)}, r"\[3\] are pilot seeds and count too"),
        ({"comparisons": (("drift", "slip"),)}, r"name \['slip'\]; arms are"),
        ({"headline": (("no drift", "drift"),)}, "choose at most 4 of the comparisons"),
        ({"headline": (("drift", "no drift"),) * 5}, "choose at most 4 of the comparisons"),
        ({"length": "5 steps"}, "name settings in braces"),
        ({"length": "{stride} steps"}, "names 'stride', which is no setting"),
        ({"arms": {"a b": {}, "a-b": {}}}, "names of arms must differ"),
        ({"also": (final("speed", "place at the end"),)}, "names of measures must differ"),
    ],
)
def test_wrong_experiments_are_refused(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(EXPERIMENT, **({"panels": ()} | changes))


def test_the_length_is_that_of_the_settings() -> None:
    assert EXPERIMENT.run_length == "5,000 steps of 0.5"
    assert dataclasses.replace(EXPERIMENT, settings={"steps": 1, "size": 2}).run_length == "1 steps of 2"


def test_the_headlines_are_the_first_four_comparisons_or_those_that_are_given() -> None:
    assert EXPERIMENT.headlines == [("drift", "no drift"), ("back", "no drift")]
    arms = {str(number): {} for number in range(6)}
    many = dataclasses.replace(EXPERIMENT, arms=arms)
    assert list(many.headlines) == [(str(number), "0") for number in range(1, 5)]
    assert dataclasses.replace(many, headline=[("5", "0")]).headlines == [("5", "0")]


def test_a_combination_is_compared_with_its_parts() -> None:
    pairs = combination("a", "b")
    assert pairs["comparisons"] == [
        ("a", "uniform"),
        ("b", "uniform"),
        ("both", "uniform"),
        ("both", "a"),
        ("both", "b"),
    ]
    assert pairs["headline"] == [("a", "uniform"), ("b", "uniform"), ("both", "a"), ("both", "b")]


def test_every_experiment_has_a_name_of_its_own_and_settings_that_are_json() -> None:
    experiments = all_experiments()
    assert {"locks", "rooms", "nmer-short"} <= set(experiments)
    for experiment in experiments.values():
        for arm in experiment.arms:
            Unit(experiment, arm, (0,), Path()).settings  # noqa: B018
