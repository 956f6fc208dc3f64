# SPDX-License-Identifier: Apache-2.0
"""Mistakes that are easily made with environments, agents and data modules, and what their errors name."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from lightning_replay.agents import DQN, TD3
from lightning_replay.envs.building import CheckedSteps
from lightning_replay.levels import UniformLevels
from lightning_replay.lit import Evaluate, LevelDataModule, ReplayDataModule
from lightning_replay.lit.data import source_of
from lightning_replay.lit.rollouts import episode_returns, make_environment
from tests.unit.lit.level_toys import Stairs, Valuer
from tests.unit.lit.toys import Counting, Tiny, make_replay, make_trainer

OLD_STEP = (np.zeros(2), 1.0, False, {})


class OddReturns(gymnasium.Env):
    """Returns other values from its step and its reset than the class behind it."""

    def __init__(self, stepped=None, begun=None) -> None:
        super().__init__()
        self.stepped, self.begun = stepped, begun

    def reset(self, *, seed=None, options=None):
        returned = super().reset(seed=seed)
        return returned if self.begun is None else self.begun

    def step(self, action):
        returned = super().step(action)
        return returned if self.stepped is None else self.stepped


class Odd(OddReturns, Counting):
    """An environment of transitions."""


class OddStairs(OddReturns, Stairs):
    """An environment of levels."""


REWARDS = [np.array([1.0, 2.0]), [1.0], None, np.array("1.0")]
NO_NUMBER = [({"stepped": (np.zeros(2), reward, False, False, {})}, "it must be one number") for reward in REWARDS]
FOUR = r"step of <Odd.*> returned the types ndarray, float, bool, dict; Gymnasium's returns \(observation, reward, term"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stepped": OLD_STEP}, TypeError, FOUR + ".* the package shimmy"),
        ({"stepped": (np.zeros(2), 1.0, False, False, None)}, TypeError, "bool, bool, NoneType; .* dictionary as info"),
        ({"begun": np.zeros(2)}, TypeError, r"reset of <Odd.*> returned a ndarray; .* \(observation, info"),
        ({"stepped": (np.zeros(3), 1.0, False, False, {})}, ValueError, r"step of .* shape \[3\], and .*shape \[2\]"),
        *((options, TypeError, "<Odd.*> returned the reward .*; " + message) for options, message in NO_NUMBER),
        ({"begun": (np.zeros((1, 2)), {})}, ValueError, r"reset of .* observation of shape \[1, 2\], and its .* \[2\]"),
    ],
)
def test_what_an_environment_returns_is_gymnasiums(options, error, message, tmp_path) -> None:
    data = ReplayDataModule(Odd, make_replay(), env_steps=60, warmup_steps=20, num_envs=2, env_kwargs=options)
    with pytest.raises(error, match=message):
        make_trainer(tmp_path).fit(Tiny(), datamodule=data)
    assert len(data.replay) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stepped": OLD_STEP}, FOUR), ({"begun": np.zeros(2)}, "reset of <Odd.*> returned a ndarray"), *NO_NUMBER],
)
def test_evaluation_and_levels_look_at_it_too(options, message) -> None:
    with pytest.raises(TypeError, match=message):
        list(episode_returns(Tiny(), Odd(**options), episodes=1, seed=0))
    data = LevelDataModule(OddStairs, UniformLevels(5), env_steps=60, num_envs=2, check=False, env_kwargs=options)
    with pytest.raises(TypeError, match=message.replace("Odd", "OddStairs")):
        data.collection.collect(Valuer(), 3)


def test_lists_are_observations_of_their_shape() -> None:
    checked = CheckedSteps(Odd(stepped=([0.0, 1.0], 1.0, False, False, {})))
    assert checked.reset(seed=0)[0].tolist() == [0.0, 0.0]
    assert checked.step(0)[0] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (lambda: None, "which returned None; it must build and return one gymnasium.Env"),
        (lambda: SyncVectorEnv([Counting]), "returned a gymnasium.vector.*SyncVectorEnv; .* num_envs steps several"),
        (lambda: object(), "returned a builtins.object; .* the package shimmy"),
    ],
)
def test_what_builds_no_environment_is_refused(env, message) -> None:
    with pytest.raises(TypeError, match=message):
        make_environment(env, {})


@pytest.mark.parametrize(
    ("agent", "env_kwargs", "message"),
    [
        (
            DQN(4, 5),
            {"num_actions": 3},
            r"_size=4, num_actions=5, and .* leave these out: DQN\(\) reads them",
        ),
        (TD3(2, [-1.0, 0.0], [1.0, 1.0]), {}, r"low=2 number\(s\), .*high=2 num.*, and .*low=1 number\(s\)"),
        (TD3(2, [-1.0], [1.0]), {"num_actions": 3}, r"TD3 got the action space Discrete\(3\)"),
    ],
)
def test_an_agent_of_other_sizes_than_the_environment_is_refused(agent, env_kwargs, message, tmp_path) -> None:
    data = ReplayDataModule(Counting, make_replay(), env_steps=30, warmup_steps=20, env_kwargs=env_kwargs)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).fit(agent, datamodule=data)
    assert data.env_steps_done == 0


def test_an_agent_may_use_narrower_bounds_than_the_environment(tmp_path) -> None:
    data = ReplayDataModule(Counting, make_replay(), env_steps=22, warmup_steps=20)
    make_trainer(tmp_path).fit(TD3(2, [0], [0.5]), datamodule=data)
    assert data.updates_done == 2


def test_a_callback_without_a_data_module_names_what_is_missing(tmp_path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.datamodule = None
    with pytest.raises(TypeError, match=r"^Evaluate counts .* data module is None, which does not; fit with"):
        source_of(trainer, Evaluate())
