# SPDX-License-Identifier: Apache-2.0
"""What is read of a segment and by which scores, and rollouts cut where episodes end."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from lightning_replay.levels import LevelBuffer, segments, update_rollout
from lightning_replay.levels import scores as level_scores
from lightning_replay.levels.episodes import Segment
from tests.level_steps import buffer, first_reward, segment


def test_rewards_and_values_are_read_once_as_lists():
    steps = segment([1.0, 0.5], [0.25, 2.0], terminated=False, last_value=4.0)
    read = Segment(steps, episode_done=True)
    assert (read.length, read.reward_sum) == (2, 1.5)
    assert read.columns == ([1.0, 0.5], [0.25, 2.0], [2.0, 4.0], [False, False], [False, True])
    columns = steps.apply(lambda leaf: leaf.unsqueeze(-1))
    assert Segment(columns, episode_done=True).columns == read.columns, "columns [T, 1] are accepted"


def test_steps_without_values_or_with_several_each_are_left_to_the_users_score():
    steps = segment([1.0, 0.5])
    assert Segment(steps.exclude("state_value"), episode_done=True).columns is None
    several = steps.clone().set("state_value", torch.zeros(2, 3))
    assert Segment(several, episode_done=True).columns is None
    levels = buffer(score=lambda steps: float(steps["state_value"].sum()) + 0.5)
    levels.start(0, 4)
    assert levels.update(0, 4, several, episode_done=True) == 0.5
    steps = segment([1.0]).set(("next", "terminated"), torch.tensor([False]))
    assert Segment(steps.exclude(("next", "truncated")), episode_done=True).length == 1


@pytest.mark.parametrize(
    "score",
    [
        level_scores.L1ValueLoss(0.9, 0.5),
        level_scores.PositiveValueLoss(0.9, 0.5),
        level_scores.SignedGae(0.9, 0.5),
        level_scores.OneStepTdError(0.9),
    ],
)
def test_the_buffer_scores_as_the_score_alone_does(score):
    steps = segment([1.0, 0.0, 2.0], [0.25, 2.0, 1.0], terminated=False, last_value=4.0)
    levels = buffer(score=score)
    levels.start(0, 4)
    assert levels.update(0, 4, steps, episode_done=True) == float(score(steps))
    levels.start(0, 4)
    with pytest.raises(KeyError, match="state_value"):
        levels.update(0, 4, steps.exclude("state_value"), episode_done=True)
    levels.update(0, 4, steps, episode_done=True)


def test_actions_without_a_chance_are_no_fault_of_a_segment():
    levels = buffer(score=level_scores.PolicyEntropy())
    levels.start(0, 4)
    steps = segment([1.0], logits=[[0.0, 0.0, -math.inf]])
    assert levels.update(0, 4, steps, episode_done=True) == pytest.approx(math.log(2) / math.log(3))


class Doubled(level_scores.L1ValueLoss):
    def __call__(self, steps):
        return 2 * super().__call__(steps)


def test_a_subclass_that_calls_a_score_otherwise_is_called():
    steps = segment([1.0, 0.0], [0.25, 2.0])
    levels = buffer(score=Doubled(0.9, 0.5))
    levels.start(0, 4)
    plain = level_scores.L1ValueLoss(0.9, 0.5)(steps)
    assert levels.update(0, 4, steps, episode_done=True) == 2 * float(plain)


@pytest.mark.parametrize("column", ["done", "reward", "terminated", "truncated"])
def test_columns_of_several_numbers_a_step_are_named(column):
    steps = segment([1.0, 0.0])
    steps["next", column] = torch.zeros(2, 2, dtype=steps["next", column].dtype)
    with pytest.raises(ValueError, match=rf"of 2 steps {column} has shape \[2, 2\]; give \[T\]"):
        Segment(steps, episode_done=True)


def rollout(rewards: list[list[float]], done: list[list[bool]]) -> TensorDict:
    reward, ends = torch.tensor(rewards).unsqueeze(-1), torch.tensor(done).unsqueeze(-1)
    shape = list(ends.shape[:2])
    following = {"reward": reward, "done": ends, "terminated": ends, "state_value": torch.zeros_like(reward)}
    return TensorDict(
        {"state_value": torch.zeros_like(reward), "observation": torch.zeros(*shape, 5), "next": following}, shape
    )


def test_episodes_are_given_actor_after_actor():
    #         step 0      1      2
    # actor a:  4 -------- 4 end  6 ->       actor b:  5 -> -> -> end (with the rollout)
    steps = rollout([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[False, True, False], [False, False, True]])
    played = torch.tensor([[4, 4, 6], [5, 5, 5]])
    cut = list(segments(steps, played, actors=["a", "b"]))
    assert [(actor, level, piece["next", "reward"].flatten().tolist(), done) for actor, level, piece, done in cut] == [
        ("a", 4, [1.0, 2.0], True),
        ("a", 6, [3.0], False),
        ("b", 5, [4.0, 5.0, 6.0], True),
    ]
    levels = LevelBuffer(10, score=first_reward, seed=0)
    for actor, level in (("a", 4), ("a", 6), ("b", 5)):
        levels.start(actor, level)
    update_rollout(levels, steps, played, actors=["a", "b"])
    assert levels.probabilities()["score"].tolist() == [1.5, 5.0]
    assert levels.in_flight("a") == [6]
    assert levels.in_flight("b") == []


class Novelty(level_scores.SegmentScore):
    """Reads columns that no score of the library reads."""

    def __call__(self, steps: TensorDict) -> float:
        return float(steps["observation"].sum() + steps["next", "bonus"].sum())


@pytest.mark.parametrize("score", [Novelty(), lambda steps: float(steps["observation"].sum() + steps["next"]["bonus"])])
@pytest.mark.parametrize("whole", [False, True])
def test_a_score_of_your_own_reads_any_column(score, whole):
    steps = rollout([[1.0], [2.0]], [[True], [True]])
    steps["observation"] += torch.tensor([[1.0], [3.0]]).unsqueeze(-1)
    steps["next", "bonus"] = torch.tensor([[0.5], [0.25]])
    levels = LevelBuffer(10, score=score, seed=0)
    for actor in (0, 1):
        levels.start(actor, 4 + actor)
    if whole:
        update_rollout(levels, steps, torch.tensor([[4], [5]]))
    else:
        for actor, level, piece, done in segments(steps, torch.tensor([[4], [5]])):
            levels.update(actor, level, piece, done)
    assert levels.probabilities()["score"].tolist() == [5.5, 15.25]


@pytest.mark.parametrize(
    ("played", "actors", "message"),
    [
        ([[4, 4], [5, 6]], None, r"are one episode on the levels \[5, 6\]"),
        ([[4, 4], [5, 5]], None, "actor 1 plays no level"),
        ([[4, 4, 4], [5, 5, 5]], None, r"give \[actors, T\] for both"),
        ([[4, 5], [4, 5], [4, 5]], None, r"give \[actors, T\] for both"),
        ([[4, 4], [5, 5]], ["a", "b", "c"], "there are 3 actors"),
    ],
)
def test_a_rollout_that_is_refused_teaches_nothing(played, actors, message):
    steps = rollout([[1.0, 2.0], [1.0, 2.0]], [[False, False], [False, False]])
    levels = LevelBuffer(10, score=first_reward, seed=0)
    levels.start(0, 4)
    with pytest.raises(ValueError, match=message):
        update_rollout(levels, steps, torch.tensor(played), actors)
    assert levels.running.of(0)[0].steps == 0
