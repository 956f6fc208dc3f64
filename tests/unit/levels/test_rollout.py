# SPDX-License-Identifier: Apache-2.0
"""Rollouts cut where episodes end."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from lightning_replay.levels import LevelBuffer, segments, update_rollout
from tests.level_steps import first_reward


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


def test_what_does_not_fit_is_refused():
    steps = rollout([[1.0, 2.0]], [[False, False]])
    levels = LevelBuffer(10, seed=0)
    with pytest.raises(ValueError, match=r"give \[actors, T\] for both"):
        update_rollout(levels, steps, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="there are 2 actors"):
        update_rollout(levels, steps, torch.zeros(1, 2, dtype=torch.int64), actors=["a", "b"])
    with pytest.raises(ValueError, match="actor 0 plays no level"):
        update_rollout(levels, steps, torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="are one episode on the levels \\[3, 4\\]"):
        update_rollout(levels, steps, torch.tensor([[3, 4]]))


def test_a_rollout_that_is_refused_teaches_nothing():
    steps = rollout([[1.0, 2.0], [1.0, 2.0]], [[False, False], [False, False]])
    levels = LevelBuffer(10, score=first_reward, seed=0)
    levels.start(0, 4)
    for played in ([[4, 4], [5, 6]], [[4, 4], [5, 5]]):
        with pytest.raises(ValueError, match=r"are one episode on|actor 1 plays no level"):
            update_rollout(levels, steps, torch.tensor(played))
        assert levels.running.of(0)[0].steps == 0
    with pytest.raises(ValueError, match=r"give \[actors, T\]"):
        update_rollout(levels, rollout([[1.0] * 3] * 2, [[False] * 3] * 2), torch.tensor([[4, 5], [4, 5], [4, 5]]))
