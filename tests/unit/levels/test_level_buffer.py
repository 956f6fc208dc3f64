# SPDX-License-Identifier: Apache-2.0
"""The level buffer by hand: numeric cases, rules one at a time."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from lightning_replay.levels import (
    Boltzmann,
    Greedy,
    LevelBuffer,
    LevelSelector,
    Prioritization,
    Proportional,
    Rank,
    SequentialLevels,
    Top,
    UniformLevels,
)
from lightning_replay.levels import scores as level_scores
from tests.attack.states import fingerprint
from tests.level_steps import buffer, column, first_reward, play, scored, segment

FIXTURES = Path(__file__).parents[2] / "fixtures"
SEGMENTATION = json.loads((FIXTURES / "plr_rollout_segmentation.json").read_text())
STALENESS = json.loads((FIXTURES / "plr_staleness.json").read_text())


@pytest.mark.parametrize("case", STALENESS["cases"], ids=lambda case: case["name"])
def test_staleness_as_in_the_numeric_cases(case):
    levels = buffer(case["inputs"]["levels"])
    for level_id, expected in zip(case["inputs"]["sampled_level_per_episode"], case["expected"], strict=True):
        play(levels, level_id, 0.5)
        assert column(levels, "staleness") == {
            int(level): stale for level, stale in expected["staleness_of_sampled_levels"].items()
        }


@pytest.mark.parametrize("case", SEGMENTATION["cases"], ids=lambda case: case["name"])
def test_episodes_across_rollouts_as_in_the_numeric_cases(case):
    inputs = case["inputs"]
    levels = LevelBuffer(
        inputs["level_ids"], score=level_scores.L1ValueLoss(inputs["gamma"], inputs["gae_lambda"]), seed=0
    )
    running: dict[int, int | None] = {0: None, 1: None}
    for rollout, expected in zip(inputs["rollouts"], case["expected"], strict=True):
        for actor in range(inputs["actors"]):
            for level_id, steps, done in pieces(rollout, actor):
                if running[actor] is None:
                    levels.start(actor, level_id)
                levels.update(actor, level_id, steps, done)
                running[actor] = None if done else level_id
        compare(levels, expected["after_scoring"], inputs["level_ids"])
        if inputs["mode"] == "flush":
            levels.flush()
        compare(levels, expected["after_policy_update"], inputs["level_ids"])


def pieces(rollout: dict, actor: int):
    """Level, steps and end of each piece of an episode of one actor."""
    ends = [bool(row[actor]) for row in rollout["terminal"]]
    start = 0
    for stop in range(1, len(ends) + 1):
        if ends[stop - 1] or stop == len(ends):
            values = [row[actor] for row in rollout["values"]]
            last = [*values, rollout["value_after_last_step"][actor]][stop]
            steps = segment(
                [row[actor] for row in rollout["rewards"][start:stop]],
                values[start:stop],
                done=ends[stop - 1],
                last_value=last,
            )
            yield rollout["level_of_step"][start][actor], steps, ends[stop - 1]
            start = stop


def compare(levels: LevelBuffer, expected: dict, level_ids: list[int]) -> None:
    scores = column(levels, "score")
    assert [level in scores for level in level_ids] == expected["visited"]
    for level, score in zip(level_ids, expected["scores"], strict=True):
        assert scores.get(level, 0.0) == pytest.approx(score, abs=SEGMENTATION["tolerance_abs"])
    for actor, (means, counts) in enumerate(zip(expected["partial_mean"], expected["partial_steps"], strict=True)):
        partial = {one.level_id: one for one in levels.running.of(actor)}
        for level, mean, count in zip(level_ids, means, counts, strict=True):
            assert (partial[level].steps if level in partial else 0) == count
            assert (partial[level].mean if level in partial else 0.0) == pytest.approx(mean, abs=1e-7)


def test_a_flushed_mean_of_zero_is_no_score():
    """Advantages of -2 and -1 are positive value losses of 0; those of 3 and -1 have the mean 3/2."""
    levels = buffer(3, score=level_scores.PositiveValueLoss(discount=1.0, gae_lambda=0.0))
    levels.start(0, 1)
    assert levels.update(0, 1, segment([1.0]), episode_done=True) == 1.0
    levels.start(0, 1)
    levels.start(1, 2)
    for actor, level_id in ((0, 1), (1, 2)):
        levels.update(actor, level_id, segment([-2.0, -1.0], done=False), episode_done=False)
    levels.flush()
    assert column(levels, "score") == {1: 1.0}, "level 1 keeps its score, level 2 stays new"
    assert [(one.mean, one.steps) for one in levels.running] == [(0.0, 0)] * 2, "the rest is scored alone"
    assert levels.update(1, 2, segment([3.0, -1.0], done=False), episode_done=False) is None
    levels.flush()
    assert column(levels, "score") == {1: 1.0, 2: 1.5}
    assert levels.update(0, 1, segment([0.0]), episode_done=True) == 0.0, "at its end an episode's 0 counts"
    assert column(levels, "score") == {1: 0.0, 2: 1.5}


def test_ranks_and_staleness_by_hand():
    # scores 0.5 > 0.2 > 0.1 give 1, 1/2, 1/3 of 11/6; played in the episodes 1, 2, 3 of 3: staleness 2, 1, 0 of 3
    levels = buffer(score_temperature=1.0, staleness_weight=0.3)
    for level_id, score in ((4, 0.2), (7, 0.5), (1, 0.1)):
        play(levels, level_id, score)
    assert column(levels, "probability") == pytest.approx(
        {4: 0.7 * 3 / 11 + 0.3 * 2 / 3, 7: 0.7 * 6 / 11 + 0.3 / 3, 1: 0.7 * 2 / 11}
    )
    assert len(levels) == 3
    assert levels.episodes == 3


@pytest.mark.parametrize("prioritization", [Rank(), Proportional(), Greedy()])
def test_scores_of_nothing_but_zero_give_every_level_a_chance(prioritization):
    levels = buffer(3, prioritization=prioritization, staleness_weight=0.0)
    for level_id in range(3):
        play(levels, level_id, 0.0)
    if not isinstance(prioritization, Rank):
        assert column(levels, "probability") == pytest.approx(dict.fromkeys(range(3), 1 / 3))
    for _ in range(20):
        assert levels.next_level(0) in range(3)


def test_abandoned_levels_are_new_again():
    levels = buffer(2, replay_probability=0.0)
    assert {levels.next_level(0), levels.next_level(1)} == {0, 1}
    given_up = levels.in_flight(0)[0]
    assert levels.next_level(2) in (0, 1), "all are played, so one is played twice"
    levels.abandon(2)
    assert levels.abandon(0) == 1
    assert levels.abandon("nobody") == 0
    for _ in range(8):
        assert levels.next_level(3) == given_up, "nobody else plays it"
        levels.abandon(3)


def test_the_chance_of_a_replay_by_hand():
    """Four levels, a gate of half of them: 0 with none or one of four; 1/2; 3/4; none left, or none but played ones."""
    levels = buffer(4, min_fill=0.5)
    assert levels and UniformLevels(None), "`levels or others` means these"
    generator = levels.table.generator.get_state()
    chances = [levels.replay_chance()]
    for level_id in range(3):
        play(levels, level_id, 0.5)
        chances.append(levels.replay_chance())
    levels.start("other", 3)
    assert [*chances, levels.replay_chance()] == [0.0, 0.0, 0.5, 0.75, 1.0], "the last new level is being played"
    levels.abandon("other")
    assert levels.replay_chance() == 0.75
    play(levels, 3, 0.5)
    assert levels.replay_chance() == 1.0
    assert torch.equal(levels.table.generator.get_state(), generator)


@pytest.mark.parametrize(("given", "expected"), [(None, 0.5), (0.95, 0.95), (0, 0.0), (1, 1.0)])
def test_the_chance_of_a_replay_where_it_is_given_or_levels_have_no_end(given: float | None, expected: float):
    levels = LevelBuffer(capacity=4, score=first_reward, replay_probability=given, seed=0)
    assert levels.replay_chance() == 0.0
    play(levels, 7, 0.5)
    assert levels.replay_chance() == expected
    known = buffer(4, replay_probability=given)
    play(known, 2, 0.5)
    assert known.replay_chance() == (0.25 if given is None else expected)


def test_a_replayed_level_is_edited_and_its_child_goes_first_scored_but_not_learned_from():
    levels = LevelBuffer(
        capacity=4, score=first_reward, replay_probability=1.0, editor=lambda parent, generator: parent + 100, seed=0
    )
    play(levels, 7, 0.5)
    assert levels.replay_chance() == 1.0
    play(levels, 7, 0.5)
    assert levels.replay_chance() == 0.0, "107 waits"
    levels.start(1, 107)
    assert levels.replay_chance() == 1.0, "107 was begun by hand, so it does not wait any more"
    assert levels.next_level(0) == 7
    levels = LevelBuffer(
        capacity=4, score=first_reward, replay_probability=1.0, editor=lambda parent, generator: parent + 100, seed=0
    )
    play(levels, 7, 0.5)
    assert levels.next_level(0) == 7, "new levels have no children"
    levels.update(0, 7, scored(0.5), episode_done=True)
    state = levels.state_dict()
    assert levels.next_level(1) == 107
    assert not levels.trains_on(1, 107)
    levels.update(1, 107, scored(0.4), episode_done=True)
    assert set(column(levels, "score")) == {7, 107}
    levels.load_state_dict(state)
    assert levels.next_level(1) == 107, "children that wait are saved"


def test_scores_are_averaged_with_a_step_size_and_the_first_with_zero_or_taken_whole():
    levels = buffer(score_step_size=0.25)
    assert play(levels, 2, 1.0) == 1.0
    assert play(levels, 2, 0.0) == 0.75
    # Steps of 1/4: 1/4 of 1; 3/4 of 1/4 and nothing; and the same of a flushed mean.
    levels = buffer(score_step_size=0.25, first_score="smooth")
    assert play(levels, 2, 1.0) == 0.25
    assert play(levels, 2, 0.0) == 0.1875
    levels.start(1, 3)
    levels.update(1, 3, scored(-2.0, done=False), episode_done=False)
    levels.flush()
    assert column(levels, "score") == {2: 0.1875, 3: -0.5}, "a flushed mean below 0 is a score"
    saved = levels.state_dict()
    levels = buffer(score_step_size=0.25)
    levels.load_state_dict(saved)
    assert play(levels, 4, 1.0) == 1.0, "an option of the constructor, not of the state"
    assert play(levels, 2, 0.1875) == 0.1875, "a level that has a score is not new again"
    assert play(buffer(first_score="smooth"), 2, 0.7) == 0.7, "a step of 1 replaces"


@pytest.mark.parametrize(("first_score", "kept"), [("replace", {12: 0.7}), ("smooth", {11: 0.4})])
def test_levels_without_end_compete_with_the_score_they_get(first_score: str, kept: dict[int, float]):
    """Steps of 1/2. Level 11 has 0.8, then 0.6, or 0.4 twice; level 12 comes with 0.7, or 0.35."""
    levels = LevelBuffer(capacity=1, score=first_reward, score_step_size=0.5, first_score=first_score, seed=0)
    for level_id, score in ((11, 0.8), (11, 0.4), (12, 0.7)):
        play(levels, level_id, score)
    assert column(levels, "score") == pytest.approx(kept)


def test_a_full_buffer_replaces_its_least_probable_level_if_the_new_score_is_higher():
    # staleness_weight 1: the least stale level is the least probable one
    levels = LevelBuffer(capacity=2, score=first_reward, staleness_weight=1.0, seed=0)
    for level_id, score in ((11, 0.9), (12, 0.1), (13, 0.1)):
        play(levels, level_id, score)
    assert set(column(levels, "score")) == {11, 12}, "0.1 is not below 0.1"
    play(levels, 14, 0.2)
    assert column(levels, "score") == {11: 0.9, 14: 0.2}
    play(levels, 15, 0.15)
    assert set(column(levels, "score")) == {11, 14}
    assert levels.stats()["refused"] == 2


def test_robust_replay_learns_from_replayed_levels_only():
    levels = buffer(3, train_on_new_levels=False)
    levels.start(0, 1)
    assert not levels.trains_on(0, 1)
    levels.update(0, 1, scored(0.5), episode_done=True)
    levels.start(0, 1)
    assert levels.trains_on(0, 1)
    ordinary = buffer()
    assert ordinary.trains_on(0, ordinary.next_level(0))


def test_the_best_return_of_a_level_is_remembered_until_it_leaves():
    # 0.5 so far; then the episode ends with 1.5; the second episode returns 0.25 against 1.5
    levels = buffer(score=level_scores.MaxMC())
    levels.start(0, 2)
    levels.update(0, 2, segment([0.5], [0.25], done=False), episode_done=False)
    assert levels.running.of(0)[0].mean == 0.25
    assert levels.update(0, 2, segment([1.0], [0.5]), episode_done=True) == 0.5 * (0.25 + 1.0)
    levels.load_state_dict(levels.state_dict())
    levels.start(0, 2)
    assert levels.update(0, 2, segment([0.25], [0.0]), episode_done=True) == 1.5
    levels = LevelBuffer(capacity=1, score=level_scores.MaxMC(), seed=0)
    for level_id in range(20):
        levels.start(0, level_id)
        levels.update(0, level_id, segment([float(level_id % 7)], [0.0]), episode_done=True)
    remembered = levels.state_dict()["scoring"]["best_returns"]["level_id"]
    assert remembered.tolist() == levels.probabilities()["level_id"].tolist()


@pytest.mark.parametrize("source", [UniformLevels(range(4), seed=0), SequentialLevels([5, 3, 9])])
def test_baselines_follow_the_same_interface(source: LevelSelector):
    chosen = [source.next_level(actor) for actor in range(3)]
    assert source.update(0, chosen[0], scored(0.5), episode_done=True) is None
    assert source.trains_on(1, chosen[1])
    source.flush()
    state = source.state_dict()
    following = [source.next_level("more") for _ in range(10)]
    source.load_state_dict(state)
    assert [source.next_level("more") for _ in range(10)] == following
    assert source.probabilities().shape == (0,)
    assert source.episodes == 13
    if isinstance(source, SequentialLevels):
        assert [*chosen, *following[:3]] == [5, 3, 9, 5, 3, 9]


def test_a_save_is_read_by_torch_without_pickled_objects(tmp_path):
    levels = buffer()
    play(levels, 2, 0.5)
    levels.next_level(3)
    torch.save(levels.state_dict(), tmp_path / "state.pt")
    other = buffer(seed=1)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert column(other, "score") == {2: 0.5}
    assert [other.next_level(0) for _ in range(10)] == [levels.next_level(0) for _ in range(10)]


@pytest.mark.parametrize(
    ("prioritization", "score_of"),
    [(Proportional(), lambda log: math.exp(log / 10)), (Boltzmann(), lambda log: log / 10)],
    ids=["proportional", "boltzmann"],
)
def test_what_weights_are_measured_from_survives_a_save(prioritization, score_of, tmp_path):
    """The highest weight ever, of logarithm 400, though no level has it any more: sums are rounded as before."""
    levels = buffer(6, prioritization=prioritization, score_temperature=0.1, staleness_weight=0.3)
    for level_id, log in [(0, 400), (1, 390), (0, 240), (1, 250), (2, 249), (3, 248.5)]:
        play(levels, level_id, score_of(log))
    state = levels.state_dict()
    assert state["sampler"]["prioritization"] == {"reference": pytest.approx(400)}
    levels.save(tmp_path)
    again = buffer(6, prioritization=prioritization, score_temperature=0.1, staleness_weight=0.3, seed=1)
    again.load(tmp_path)
    assert fingerprint(again.state_dict()) == fingerprint(state)
    assert [again.next_level(0) for _ in range(50)] == [levels.next_level(0) for _ in range(50)]


# replay_in_flight=False: replays by score leave out the levels that are being played
SCORES = {4: 0.2, 7: 0.5, 1: 0.1, 9: 0.4}


def played(seed: int = 0, **options: Any) -> LevelBuffer:
    """A buffer of four levels with a score, which replays only."""
    levels = buffer(sorted(SCORES), replay_in_flight=False, replay_probability=1.0, seed=seed, **options)
    for level_id, score in SCORES.items():
        play(levels, level_id, score)
    return levels


def test_levels_that_are_played_are_left_out_and_staleness_takes_part_as_before() -> None:
    # begun in the episodes 1 (level 4), 5 (7), 3 (1) and 4 (9) of 5: staleness 4, 0, 2 and 1 of 7
    levels = played(score_temperature=1.0, staleness_weight=0.3)
    levels.start(1, 7)
    assert column(levels, "probability") == pytest.approx(
        {4: 0.7 * 3 / 11 + 0.3 * 4 / 7, 7: 0.0, 1: 0.7 * 2 / 11 + 0.3 * 2 / 7, 9: 0.7 * 6 / 11 + 0.3 / 7}
    )
    levels = played(prioritization=Greedy(), staleness_weight=0.0)
    assert [levels.next_level(actor) for actor in range(4)] == [7, 9, 4, 1]
    levels.update(2, 4, scored(0.3), episode_done=True)
    assert levels.next_level(2) == 4
    assert levels.next_level(5) == 7, "all are played: the highest score, as without the option"


@pytest.mark.slow
@pytest.mark.parametrize("prioritization", [Rank(), Proportional(), Greedy(0.5), Boltzmann()])
def test_draws_follow_the_probabilities(prioritization: Prioritization) -> None:
    levels = played(prioritization=prioritization, score_temperature=1.0, staleness_weight=0.2)
    levels.start(1, 9)
    distribution = levels.probabilities()
    taken = levels.running.played
    counts = Counter(levels.table.draw(taken) for _ in range(10_000))
    observed = np.array([counts[row] for row in range(len(distribution))])
    expected = distribution["probability"].numpy()
    assert (observed[expected == 0.0] == 0).all()
    drawn = expected > 0.0
    assert chisquare(observed[drawn], 10_000 * expected[drawn]).pvalue > 1e-3
    torch.testing.assert_close(distribution["probability"].sum(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize(("prioritization", "lowest"), [(Rank(), 0.9), (Top(5), 0.2), (Greedy(), 0.002)])
@pytest.mark.parametrize("seed", range(5))
def test_ties_are_drawn_by_the_probabilities_that_are_shown(
    prioritization: Prioritization, lowest: float, seed: int
) -> None:
    options = {"prioritization": prioritization, "score_temperature": 0.01, "staleness_weight": 0.0}
    levels = LevelBuffer(400, seed=seed, **options)  # all levels are recorded at one time
    levels.record(range(400), np.random.default_rng(seed).integers(0, 3, 400).astype(np.float64))
    shown = dict(zip(*(levels.probabilities()[key].tolist() for key in ("level_id", "probability")), strict=True))
    for _ in range(20):
        drawn = levels.table.level_ids[levels.table.draw(())]
        assert shown[drawn] >= lowest


def test_new_levels_go_first_while_every_level_with_a_score_is_played() -> None:
    levels = buffer(3, replay_in_flight=False, replay_probability=1.0)
    play(levels, 0, 0.5)
    levels.start(0, 0)
    assert levels.replay_chance() == 0.0
    assert levels.next_level(1) in (1, 2)
    assert levels.next_level(2) in (1, 2)
    assert levels.replay_chance() == 1.0
    assert levels.next_level(3) in (0, 1, 2), "nothing is left that nobody plays"
    levels = LevelBuffer(capacity=2, replay_in_flight=False, replay_probability=1.0, seed=0)
    play(levels, 5, 0.5)
    assert levels.next_level(1) == 5
    assert levels.next_level(2) != 5
