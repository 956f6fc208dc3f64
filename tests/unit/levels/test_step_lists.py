# SPDX-License-Identifier: Apache-2.0
"""Steps of a level vector as lists: what torch-ac's loop gets, and the rollout that levels learn from."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from lightning_replay.levels import LevelBuffer, SequentialLevels, StepLists, scores, update_rollout
from lightning_replay.levels.environments import LevelVectorWrapper, make_level_vector


class Lane(gymnasium.Env[Any, Any]):
    """Observes its level n and the time; the reward is n. It ends after 1 + n % 3 steps, if n is odd by a limit."""

    observation_space: Any = spaces.Box(0, 999, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self) -> None:
        self.level = self.time = 0

    def _seen(self) -> np.ndarray:
        return np.array([self.level, self.time], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.level = self.level if seed is None else seed
        self.time = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        is_end = self.time == 1 + self.level % 3
        return self._seen(), float(self.level), is_end and self.level % 2 == 0, is_end and self.level % 2 == 1, {}


def vector(levels: Any, num_envs: int = 2, **options: Any) -> LevelVectorWrapper:
    return make_level_vector(Lane, num_envs, levels, check=False, **options)


def test_steps_are_lists_and_a_rollout_has_them_by_environment() -> None:
    """Levels 6 and 7 end after 1 and 2 steps; 8 follows in the first environment after 1, and 9 in the second."""
    steps = StepLists(vector(SequentialLevels(range(6, 99))))
    assert [one.tolist() for one in steps.reset()] == [[6, 0], [7, 0]]
    first = steps.step([0, 1])
    assert [one.tolist() for one in first[0]] == [[8, 0], [7, 1]]
    assert first[1:4] == ([6.0, 7.0], [True, False], [False, False])
    assert [one["step_level_id"][place] for place, one in enumerate(first[4])] == [6, 7]
    steps.step(np.array([0, 1]))
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    rollout = steps.rollout(value, torch.tensor([5.0, 6.0]))
    assert rollout["level_id"].tolist() == [[6, 8], [7, 7]]
    assert rollout["next", "reward"].tolist() == [[6, 8], [7, 7]]
    assert rollout["next", "terminated"].tolist() == [[True, False], [False, False]]
    assert rollout["next", "truncated"].tolist() == [[False, False], [False, True]]
    assert rollout["state_value"].tolist() == [[1, 3], [2, 4]]
    assert rollout["next", "state_value"].tolist() == [[3, 5], [4, 4]]  # the last one was cut
    steps.step([0, 0])
    assert steps.rollout(torch.zeros(1, 2), torch.zeros(2))["level_id"].tolist() == [[8], [9]]


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_levels_learn_the_same_as_from_the_vector_itself(asynchronous: bool) -> None:
    def levels() -> LevelBuffer:
        return LevelBuffer(range(20), score=scores.L1ValueLoss(0.9, 0.95), score_temperature=0.5, seed=0)

    ours, plain = levels(), levels()
    lists, envs = StepLists(vector(ours, 3, asynchronous=asynchronous)), vector(plain, 3)
    lists.reset()
    envs.reset()
    for _ in range(4):
        value, last = torch.rand(5, 3), torch.rand(3)
        columns: list[Any] = []
        for _ in range(5):
            lists.step([0, 0, 0])
            _, reward, terminated, truncated, infos = envs.step(np.zeros(3, np.int64))
            columns.append([infos["step_level_id"], reward, terminated, truncated])
        rollout = lists.rollout(value, last)
        update_rollout(ours, rollout, rollout["level_id"])
        level, reward, terminated, truncated = (
            torch.from_numpy(np.stack(one, 1)) for one in zip(*columns, strict=True)
        )
        after = torch.where(truncated, value.T, torch.cat([value[1:], last[None]]).T)
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        following = {"reward": reward, "state_value": after, **ends}
        update_rollout(plain, TensorDict({"state_value": value.T, "next": following}, level.shape), level)
    assert ours.stats() == plain.stats() and len(ours) > 3
    lists.envs.close()


def test_a_vector_may_return_the_same_arrays_at_each_step() -> None:
    steps = StepLists(vector(SequentialLevels(range(6, 99))))
    steps.reset()
    rewards, step = np.zeros(2), steps.envs.env.step

    def reusing(actions: Any) -> Any:
        observations, reward, *others = step(actions)
        rewards[:] = reward
        return observations, rewards, *others

    steps.envs.env.step = reusing
    for _ in range(2):
        steps.step([0, 0])
    assert steps.rollout(torch.zeros(2, 2), torch.zeros(2))["next", "reward"].tolist() == [[6, 8], [7, 7]]


def test_wrong_values_are_refused_and_the_steps_stay() -> None:
    steps = StepLists(vector(SequentialLevels(range(6, 99))))
    steps.reset()
    steps.step([0, 0])
    message = r"state_value is \[2, 1\] and last_value \[2\]; give \[1, 2\] and \[2\], values of the steps since"
    with pytest.raises(ValueError, match=message):
        steps.rollout(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(ValueError, match=r"last_value \[3\]; give"):
        steps.rollout(torch.zeros(1, 2), torch.zeros(3))
    assert steps.rollout(torch.zeros(1, 2), torch.zeros(2))["level_id"].tolist() == [[6], [7]]
    with pytest.raises(ValueError, match="no step was taken since the last rollout"):
        steps.rollout(torch.zeros(1, 2), torch.zeros(2))


def test_only_a_level_vector_is_accepted() -> None:
    with pytest.raises(TypeError, match="envs is .*; it must be the vector that make_level_vector"):
        StepLists(gymnasium.make_vec("CartPole-v1", 2))  # type: ignore[arg-type]
