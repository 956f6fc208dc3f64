# SPDX-License-Identifier: Apache-2.0
"""``replay_in_flight=False``: replays by score leave out the levels that are being played."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from lightning_replay.levels import Boltzmann, Greedy, LevelBuffer, Prioritization, Proportional, Rank
from tests.level_steps import buffer, column, play, scored

SCORES = {4: 0.2, 7: 0.5, 1: 0.1, 9: 0.4}


def played(seed: int = 0, **options: Any) -> LevelBuffer:
    """A buffer of four levels with a score, which replays only."""
    levels = buffer(sorted(SCORES), replay_in_flight=False, replay_probability=1.0, seed=seed, **options)
    for level_id, score in SCORES.items():
        play(levels, level_id, score)
    return levels


def test_ranks_are_those_among_the_levels_that_nobody_plays() -> None:
    levels = played(score_temperature=1.0, staleness_weight=0.0)
    levels.start(1, 7)
    assert column(levels, "probability") == pytest.approx({4: 3 / 11, 7: 0.0, 1: 2 / 11, 9: 6 / 11})


def test_staleness_takes_part_as_before() -> None:
    # begun in the episodes 1 (level 4), 5 (7), 3 (1) and 4 (9) of 5: staleness 4, 0, 2 and 1 of 7
    levels = played(score_temperature=1.0, staleness_weight=0.3)
    levels.start(1, 7)
    assert column(levels, "probability") == pytest.approx(
        {4: 0.7 * 3 / 11 + 0.3 * 4 / 7, 7: 0.0, 1: 0.7 * 2 / 11 + 0.3 * 2 / 7, 9: 0.7 * 6 / 11 + 0.3 / 7}
    )


def test_each_actor_gets_another_level_until_the_score_of_one_is_there() -> None:
    levels = played(prioritization=Greedy(), staleness_weight=0.0)
    assert [levels.next_level(actor) for actor in range(4)] == [7, 9, 4, 1]
    levels.update(2, 4, scored(0.3), episode_done=True)
    assert levels.next_level(2) == 4
    assert levels.next_level(5) == 7, "all are played: the highest score, as without the option"


@pytest.mark.parametrize("prioritization", [Rank(), Proportional(), Greedy(0.5), Boltzmann()])
def test_draws_follow_the_probabilities(prioritization: Prioritization) -> None:
    levels = played(prioritization=prioritization, score_temperature=1.0, staleness_weight=0.2)
    levels.start(1, 9)
    distribution = levels.probabilities()
    taken = levels.running.played
    counts = Counter(levels.table.draw(taken) for _ in range(20_000))
    observed = np.array([counts[row] for row in range(len(distribution))])
    expected = distribution["probability"].numpy()
    assert (observed[expected == 0.0] == 0).all()
    drawn = expected > 0.0
    assert chisquare(observed[drawn], 20_000 * expected[drawn]).pvalue > 1e-3
    torch.testing.assert_close(distribution["probability"].sum(), torch.tensor(1.0, dtype=torch.float64))


def test_new_levels_go_first_while_every_level_with_a_score_is_played() -> None:
    levels = buffer(3, replay_in_flight=False, replay_probability=1.0)
    play(levels, 0, 0.5)
    levels.start(0, 0)
    assert levels.replay_chance() == 0.0
    assert levels.next_level(1) in (1, 2)
    assert levels.next_level(2) in (1, 2)
    assert levels.replay_chance() == 1.0
    assert levels.next_level(3) in (0, 1, 2), "nothing is left that nobody plays"


def test_an_unbounded_set_plays_new_levels_then_too() -> None:
    levels = LevelBuffer(capacity=2, replay_in_flight=False, replay_probability=1.0, seed=0)
    play(levels, 5, 0.5)
    assert levels.next_level(1) == 5
    assert levels.next_level(2) != 5
