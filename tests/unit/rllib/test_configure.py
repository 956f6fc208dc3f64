# SPDX-License-Identifier: Apache-2.0
"""One ``configure`` for transitions and for levels: either, both and neither."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig

import rllib_ext
from rllib_ext.hooks import EVENTS

OF_TRANSITIONS = {"on_algorithm_init", "on_environment_created", "on_train_result"}


def dqn() -> AlgorithmConfig:
    config = DQNConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    return config.training(replay_buffer_config=rllib_ext.replay_config("uniform", capacity=100))


def ppo() -> AlgorithmConfig:
    return PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)


def hooks(config: AlgorithmConfig) -> dict[str, Any]:
    given = {event: getattr(config, f"callbacks_{event}") for event in EVENTS}
    return {event: functions for event, functions in given.items() if functions}


def test_transitions_or_levels() -> None:
    transitions, levels = rllib_ext.configure(dqn()), rllib_ext.configure(ppo(), levels={"levels": 5})
    assert hooks(transitions).keys() == OF_TRANSITIONS and hooks(levels).keys() == {*EVENTS} - {"on_sample_end"}
    installed = [config.callbacks_on_algorithm_init[0].func.__name__ for config in (transitions, levels)]
    assert installed == ["install_replay", "install_levels"]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (dqn, {"levels": {"levels": 5}}, "DQN does not learn from whole episodes .* levels are replayed with PPO"),
        (ppo, {}, r"PPO has no replay buffer .* rllib_ext.configure\(config, levels=...\)"),
        (dqn, {"flush": True}, "flush is for levels, and none are given"),
        (dqn, {"held_out_levels": 5, "generalization_gap": False}, "held_out_levels, generalization_gap is for levels"),
        (ppo, {"levels": {"levels": 5}, "restore": False}, "restore is for the replay buffers of DQN, SAC and TQC"),
        (ppo, {"levels": {"levels": 5}, "assign_tasks": False}, "assign_tasks is for the replay buffers"),
    ],
)
def test_both_neither_and_options_of_the_other_kind_are_refused(config: Any, options: Any, message: str) -> None:
    given = config()
    with pytest.raises(ValueError, match=message):
        rllib_ext.configure(given, **options)
    assert not hooks(given)


def test_hooks_of_an_earlier_call_are_replaced_and_those_of_the_user_stay() -> None:
    def own(**ignored: Any) -> None: ...

    config = rllib_ext.configure(rllib_ext.configure(dqn().callbacks(on_train_result=own)))
    first, hook = config.callbacks_on_train_result
    assert first is own and hook.func.__name__ == "add_results" and pickle.loads(pickle.dumps(hook)).func is hook.func
