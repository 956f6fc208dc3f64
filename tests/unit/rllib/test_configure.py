# SPDX-License-Identifier: Apache-2.0
"""One ``configure`` for transitions and for levels: either, both, neither, and its former second name."""

from __future__ import annotations

import functools
import importlib
import pickle
from typing import Any

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig

import rllib_ext
from lightning_replay.levels import UniformLevels
from rllib_ext.hooks import EVENTS
from rllib_ext.levels import building

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
    for config in (transitions, levels):
        (install,) = config.callbacks_on_algorithm_init
        assert install.func is importlib.import_module("rllib_ext.hooks").install


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


def test_levels_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    monkeypatch.setattr(building, "call", lambda kind, arguments, name: builds.append(kind) or kind(**arguments))
    rllib_ext.configure(
        ppo(), levels={"class_path": "lightning_replay.levels.UniformLevels", "init_args": {"levels": 5}}
    )
    assert builds == [UniformLevels]


@pytest.mark.filterwarnings("ignore:.* has moved:DeprecationWarning")
@pytest.mark.parametrize(
    "path",
    [
        *("rllib_ext.install:install", "rllib_ext.levels.install:install", "rllib_ext.levels.install:add_results"),
        *("rllib_ext.task_assignment:begin_episode", "rllib_ext.task_assignment:tell_recreated"),
        *("rllib_ext.levels.install:tell_recreated", "rllib_ext.levels.evaluation:measure_gap"),
        *("rllib_ext.levels.evaluation:note_return", "rllib_ext.levels.evaluation:check_evaluation"),
        *("rllib_ext.levels.playing:wrap_environments", "rllib_ext.levels.playing:begin_episode"),
        *("rllib_ext.clocks:add_clocks", "rllib_ext.flags:flags_connector"),
        "rllib_ext.levels.config:built_levels",
        *("rllib_ext.episode_buffer:RecipeEpisodeReplayBuffer", "rllib_ext.image_module:ImageDQNModule"),
    ],
)
def test_functions_in_configs_of_earlier_versions_are_found(path: str) -> None:
    module, _, name = path.partition(":")
    found = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert found.__name__ in (name, "sync_recreated", "add_results") and found.__module__.startswith("rllib_ext.")


def test_hooks_of_earlier_versions_are_replaced() -> None:
    former = importlib.import_module("rllib_ext.hooks").add_clocks
    config = rllib_ext.configure(dqn().callbacks(on_train_result=functools.partial(former)))
    (hook,) = config.callbacks_on_train_result
    assert hook.func.__name__ == "add_results"
