# SPDX-License-Identifier: Apache-2.0
"""Effective numbers of levels by hand, and the warning where nearly one level is replayed."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay.levels import Boltzmann, Greedy, LevelBuffer, LevelSampler, LevelWriter, Proportional, Rank, plr
from lightning_replay.levels.prioritization import ReplayConcentration
from tests.level_steps import buffer, play

PUBLISHED = {"score_temperature": 0.1, "staleness_weight": 0.1}
NARROW = "took the same level as the replay before"


def ranked(count: int, **options: object) -> LevelBuffer:
    """Levels 0, 1, ..., of falling scores, played in this order; every further episode is a replay."""
    levels = buffer(count, **options)
    for level_id in range(count):
        play(levels, level_id, 1.0 / (1 + level_id))
    return levels


def replay(levels: LevelBuffer, count: int) -> None:
    """Replays whose episodes do not end."""
    for _ in range(count):
        levels.next_level(0)
        levels.abandon(0)


def test_the_options_of_the_paper_are_one_call():
    made = plr(4), LevelBuffer(4, **PUBLISHED, replay_in_flight=True), LevelBuffer(4)
    for levels in made:
        for level_id in range(4):
            play(levels, level_id, 1.0 / (1 + level_id))
    of_paper, by_options, by_default = (levels.stats()["effective_levels"] for levels in made)
    assert of_paper == by_options < by_default
    assert not plr(4, replay_in_flight=False).replay_in_flight


def test_at_the_temperature_of_the_paper_many_levels_are_as_few_as_one():
    # 0.9 of 1 / zeta(10), and 0.1 spread thinly
    stats = ranked(400, **PUBLISHED).stats()
    assert stats["effective_levels"] == pytest.approx(1.0 / 0.9**2, abs=0.01)
    zeta_of_10, zeta_of_20 = math.pi**10 / 93_555, 1.000000953962
    by_score = ranked(400, score_temperature=0.1, staleness_weight=0.0).stats()
    assert by_score["probability_max"] == pytest.approx(1.0 / zeta_of_10, rel=1e-12)
    assert by_score["effective_levels"] == pytest.approx(zeta_of_10**2 / zeta_of_20, rel=1e-11)
    assert set(buffer(3).stats()) == {"levels", "episodes", "in_flight", "expired", "replayed", "refused", "replaced"}
    assert LevelSampler().stats() == {}


def test_warns_once_where_nearly_one_level_is_replayed():
    levels = ranked(20, **PUBLISHED)
    replay(levels, 999)
    with pytest.warns(UserWarning, match=NARROW) as caught:
        replay(levels, 1)
    replay(levels, 3_000)  # a second warning would be an error
    (text,) = (str(one.message) for one in caught)
    assert "Rank() at score_temperature=0.1 " in text
    assert "although 20 have a score" in text and "Give a higher score_temperature" in text
    assert re.search(r"as if only 1\.[23] levels were replayed", text)  # 1 / 0.9 ** 2 is 1.235


@pytest.mark.parametrize("prioritization", [Rank(), Proportional(), Boltzmann()])
def test_warns_whatever_the_temperature_is_of(prioritization):
    levels = ranked(30, prioritization=prioritization, score_temperature=0.05)
    with pytest.warns(UserWarning, match=rf"{type(prioritization).__name__}\(\) at score_temperature=0.05 "):
        replay(levels, 1_000)


@pytest.mark.parametrize(("repeats", "warns"), [(200, False), (201, True)])
def test_five_levels_are_enough(repeats, warns):
    concentration = ReplayConcentration(Rank())
    drawn = [0] * (repeats + 1) + [1 + n % 2 for n in range(999 - repeats)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for row in drawn:
            concentration.add((row, 0), scored=20)
    assert [f"{repeats} took the same level" in str(one.message) for one in caught] == [True] * warns


def test_warns_when_replays_become_narrow_later_or_enough_levels_have_a_score():
    levels = buffer(40, prioritization=Boltzmann(), **PUBLISHED)
    for level_id in range(40):
        play(levels, level_id, 0.0)
    replay(levels, 1_500)
    play(levels, 3, 5.0)
    replay(levels, 499)  # 499 of 1,000 at e ** 50 to 1: narrow already
    with pytest.warns(UserWarning, match=NARROW):
        replay(levels, 1)
    levels = buffer(1_000, replay_probability=1.0, **PUBLISHED)
    for level_id in range(19):
        play(levels, level_id, 1.0 / (1 + level_id))
    replay(levels, 3_000)
    play(levels, 19, 0.001)
    with pytest.warns(UserWarning, match="although 20 have a score"):
        replay(levels, 1_000)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (40, {"prioritization": Greedy()}),
        (40, {"prioritization": Greedy(epsilon=0.1)}),
        (19, {"score_temperature": 0.1}),
        (40, {"score_temperature": 1.0}),
        (40, {"score_temperature": 0.1, "staleness_weight": 0.7}),  # 0.3 ** 2 is less than 1 / 5
        (40, {"score_temperature": 0.1, "staleness_weight": 1.0}),
    ],
)
def test_does_not_warn_where_it_is_meant_or_replays_are_broad(count, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay(ranked(count, **options), 3_000)


def test_does_not_warn_of_equal_levels_that_take_turns_or_take_a_row():
    """At any one time one level has nearly all probability; the next replay is of another all the same."""
    levels = buffer(40, score_temperature=0.1, staleness_weight=0.0)
    for level_id in range(40):
        play(levels, level_id, 0.5)
    assert levels.stats()["effective_levels"] == pytest.approx(1.0, abs=0.01)
    replay(levels, 3_000)
    sampler = LevelSampler(score_temperature=0.01, staleness_weight=0.0)
    for row in range(20):
        sampler.put(row, -float(row), timestamp=0)
    for n in range(2_000):
        assert sampler.draw() == 0
        sampler.put(0, float(n), timestamp=0, is_another_level=True)


def test_torchrls_buffer_warns_too():
    sampler = LevelSampler(**PUBLISHED, seed=0)
    rows = TensorDictReplayBuffer(
        storage=LazyTensorStorage(32), sampler=sampler, writer=LevelWriter(sampler), batch_size=250
    )
    rows.extend(TensorDict({"level_id": torch.arange(32), "score": torch.linspace(1, 0, 32)}, [32]))
    for _ in range(3):
        rows.sample()
    with pytest.warns(UserWarning, match=NARROW):
        rows.sample()
