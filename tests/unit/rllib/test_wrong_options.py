# SPDX-License-Identifier: Apache-2.0
"""What the functions of RLlib's side refuse, and that what a part refuses reaches the user with the option's name."""

from __future__ import annotations

from typing import Any

import pytest
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig

import rllib_ext
from rllib_ext.buffer.n_step import SampledReturns
from tests.wrong_options import WrongOption, assert_refused, wrong_options

PER = {"recipe": "prioritized", "capacity": 100}
PARTS = {"capacity": 100}
SAMPLER = {"class_path": "lightning_replay.samplers.PrioritizedSampler"}
DQN = DQNConfig().environment("CartPole-v1").training(replay_buffer_config=rllib_ext.replay_config(**PER))
PPO = PPOConfig().environment("CartPole-v1")
NOT_FOLLOWED = ["beta", "gamma", "n_step", "batch_length_T", "min_batch_length_T"]  # RLlib's own, which it checks


def wrong() -> list[WrongOption]:
    levels = {"config": PPO, "levels": {"levels": 20}}
    return [
        *wrong_options(rllib_ext.configure, {"config": DQN}, leave_out=["held_out_levels"]),
        *wrong_options(rllib_ext.configure, levels, leave_out=["held_out_levels"]),
        *wrong_options(rllib_ext.RecipeEpisodeReplayBuffer, PER, leave_out=["metrics_num_episodes_for_smoothing"]),
        *wrong_options(rllib_ext.RecipeEpisodeReplayBuffer(**PER).sample, {}, leave_out=NOT_FOLLOWED),
    ]


@pytest.mark.parametrize("wrong", wrong(), ids=repr)
def test_is_refused_by_name(wrong) -> None:
    assert_refused(wrong)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (PER | {"importance_exponent": 7}, ValueError, r"importance_exponent is 7; it must be a number in \[0, 1\]"),
        (PER | {"priority_exponent": "0.6"}, TypeError, "priority_exponent is '0.6'; it must be a finite number"),
        (PER | {"seed": "a", "modules": {"pursuer": {}}}, TypeError, "seed is 'a'; it must be a whole number"),
        (PER | {"layout": 3}, ValueError, "layout is 3; it must be one of 'flagged', 'blocks', 'rows'"),
        (PER | {"modules": ["pursuer"]}, TypeError, r"modules is \['pursuer'\]; it must be options by the name"),
        (PER | {"modules": {"pursuer": 10}}, TypeError, r"modules\['pursuer'\] is 10; it must be options by name"),
        (PER | {"modules": {"a": {"priority_exponent": -1}}}, ValueError, "priority_exponent is -1; it must be"),
        (PER | {"info_keys": "goal"}, TypeError, "info_keys is 'goal'; it must be a sequence"),
        (PER | {"alpha": 0.6}, ValueError, "'prioritized' has no option 'alpha'; accepted are capacity, priority_exp"),
        (PARTS | {"sampler": {**SAMPLER, "init_args": {"beta": 1}}}, TypeError, "importance_exp"),
        (PARTS | {"sampler": {**SAMPLER, "init_args": {"importance_exponent": 7}}}, ValueError, "exponent is 7"),
        ({"recipe": "surprise_retention", "capacity": 90, "frame_stack": 2.5}, TypeError, "frame_stack is 2.5"),
    ],
)
def test_what_a_part_refuses_reaches_the_user(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rllib_ext.replay_config(**options)


@pytest.mark.parametrize("held_out_levels", [True, 2.5, "x", ["a"], [1.5], [True, 5]])
def test_held_out_levels_of_another_kind(held_out_levels: Any) -> None:
    with pytest.raises(TypeError, match=r"held_out_levels(\[0\])? is .*; it must be"):
        rllib_ext.configure(PPO, levels={"levels": 20}, held_out_levels=held_out_levels)


def test_arguments_of_levels_are_given_by_name() -> None:
    with pytest.raises(ValueError, match="levels is .*'init_args': 5}; accepted are .* arguments by name"):
        rllib_ext.configure(PPO, levels={"class_path": "lightning_replay.levels.UniformLevels", "init_args": 5})


@pytest.mark.parametrize(
    ("n_step", "error"),
    [(2.5, TypeError), ("3", TypeError), (True, TypeError), (0, ValueError), ((1, 2, 3), ValueError), ((), ValueError)],
)
def test_lengths_of_returns(n_step: Any, error: type[Exception]) -> None:
    returns = SampledReturns(seed=0)
    with pytest.raises(error, match="n_step"):
        returns.set_length(n_step, 0.9)
    returns.set_length([2, 3], 0.9)
    assert returns.n_steps == 3
