# SPDX-License-Identifier: Apache-2.0
"""Configs that hold search spaces of Tune: what is checked before the trials, and that the spaces stay."""

from __future__ import annotations

import logging
import pickle
import re
from typing import Any

import pytest
from ray import tune
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig

import rllib_ext
from rllib_ext.buffer.images import ImageDQNModule
from rllib_ext.environments import has_search_space, sampled_configs, samples_of
from rllib_ext.hooks import EVENTS

GOAL = {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 1.0}}


def dqn(replay: dict[str, Any] | None = None, **training: Any) -> DQNConfig:
    replay = rllib_ext.replay_config("prioritized", capacity=500) if replay is None else replay
    config = DQNConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    return config.training(replay_buffer_config=replay, **training)


def ppo(**training: Any) -> PPOConfig:
    return PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).training(**training)


def replay(recipe: Any = "prioritized", **options: Any) -> dict[str, Any]:
    return rllib_ext.replay_config(recipe, **{"capacity": 500, **options})


def as_attribute(config: DQNConfig, **values: Any) -> DQNConfig:
    for name, value in values.items():
        setattr(config, name, value)
    return config


ACCEPTED = {
    "learning rate": lambda: dqn(lr=tune.loguniform(1e-4, 1e-2)),
    "batch": lambda: dqn(train_batch_size_per_learner=tune.choice([16, 32])),
    "n_step": lambda: dqn(n_step=tune.grid_search([1, 3])),
    "an interval of lengths": lambda: dqn(n_step=tune.choice([(1, 3), 5])),
    "EnvRunners": lambda: dqn().env_runners(num_env_runners=tune.randint(0, 5)),
    "environments": lambda: as_attribute(dqn(), num_envs_per_env_runner=tune.choice([1, 4])),
    "seed": lambda: dqn().debugging(seed=tune.grid_search([0, 1, 2])),
    "arguments of the environment": lambda: dqn().environment(
        "CartPole-v1", env_config={"sutton_barto_reward": tune.choice([True, False])}
    ),
    "option": lambda: dqn(replay(priority_exponent=tune.uniform(0.3, 0.9))),
    "capacity": lambda: dqn(replay(capacity=tune.choice([100, 500]))),
    "recipe": lambda: dqn(replay(tune.choice(["prioritized", "uniform"]))),
    "argument of a class": lambda: dqn(
        replay(
            importance_exponent={
                "class_path": "lightning_replay.schedules.Linear",
                "init_args": {"start": tune.uniform(0.2, 0.5), "end": 1.0, "duration": 100},
            }
        )
    ),
    "module": lambda: dqn(replay(modules={"prey": {"priority_exponent": tune.uniform(0.0, 1.0)}})),
    "function of other settings": lambda: dqn(
        replay(priority_exponent=tune.sample_from(lambda spec: 100 * spec.config.lr)), lr=tune.uniform(1e-3, 5e-3)
    ),
    "whole buffers": lambda: as_attribute(
        dqn(), replay_buffer_config=tune.grid_search([replay(), replay("neighborhood_mixup", discrete="same_action")])
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_search_space_is_accepted_and_stays(name: str) -> None:
    config = ACCEPTED[name]()
    space = {name: value for name, value in vars(config).items() if has_search_space({name: value}) or name == "lr"}
    assert rllib_ext.configure(config, require_cpus=False) is config
    assert space and all(vars(config)[name] is value for name, value in space.items() if name != "replay_buffer_config")
    assert len({str(sample) for sample in samples_of(space)}) > 1


def test_a_sample_has_the_types_a_trial_gets() -> None:
    config = rllib_ext.configure(dqn(replay(priority_exponent=tune.uniform(0.3, 0.9)), lr=tune.loguniform(1e-4, 1e-2)))
    samples = sampled_configs(config)
    assert len(samples) == 8 and type(samples[0]) is DQNConfig
    assert all(0.3 <= one.replay_buffer_config["priority_exponent"] <= 0.9 for one in samples)
    assert len({one.lr for one in samples}) == 8 and all(1e-4 <= one.lr <= 1e-2 for one in samples)
    assert sampled_configs(dqn())[0].lr == dqn().lr


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (lambda: replay(priority_exponent=tune.uniform(-3.0, -1.0)), "priority_exponent is -.*; it must be"),
        (lambda: replay(tune.choice(["prioritised"])), "there is no recipe 'prioritised'"),
        (lambda: replay(priority_exponnt=0.5, importance_exponent=tune.uniform(0, 1)), "has no option 'priority_expo"),
        (lambda: rllib_ext.configure(dqn(train_batch_size_per_learner=tune.choice([501, 900]))), "capacity is 500, be"),
        (lambda: rllib_ext.configure(dqn(lr=tune.uniform(0, 1)).env_runners(num_env_runners=400)), "the trial would"),
        (lambda: rllib_ext.configure(dqn(lr=tune.sample_from(lambda spec: spec.config.none))), "'lr'.*as spec.config"),
        (
            lambda: rllib_ext.configure(dqn(tune.grid_search([replay(), replay()]))),
            r"config.replay_buffer_config = tune",
        ),
        (
            lambda: rllib_ext.configure(ppo(), levels={"levels": 20, "staleness_weight": tune.uniform(2, 5)}),
            "staleness_weight is .*; it must be a number in",
        ),
        (
            lambda: rllib_ext.configure(
                ppo().learners(num_learners=tune.choice([2, 3])), levels={"levels": 20}, flush=True, require_cpus=False
            ),
            "flush=True makes scores of unfinished episodes",
        ),
    ],
)
def test_what_no_value_of_the_space_can_fulfil_is_refused_now(written: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        written()


def test_values_of_which_some_are_refused_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = dqn(replay(capacity=tune.grid_search([500, 400, 20])))
    with caplog.at_level(logging.WARNING, logger="rllib_ext.environments"):
        rllib_ext.configure(config)
    message = "1 of 3 samples of the search space are refused, and such trials will fail: capacity is 20, below the 32"
    assert message in caplog.text


def test_trials_of_different_tasks_are_refused() -> None:
    buffers = [rllib_ext.replay_config("parallel_curriculum", capacity_per_task=500, tasks=["far", "near"]), replay()]
    with pytest.raises(ValueError, match=re.escape("different tasks, such as ['far', 'near'] and []")):
        rllib_ext.configure(as_attribute(dqn(), replay_buffer_config=tune.grid_search(buffers)))


def test_frames_of_any_trial_choose_the_module() -> None:
    config = as_attribute(dqn(), replay_buffer_config=tune.grid_search([replay(), replay(frame_stack=4)]))
    assert rllib_ext.configure(config)._rl_module_spec.module_class is ImageDQNModule


def test_tables_have_room_for_the_largest_trial() -> None:
    tables = [{"name": "goal", "condition": GOAL, "history_length": 5, "capacity": 50}]
    config = dqn(rllib_ext.replay_config("event_tables", capacity=500, tables=tables))
    config.env_runners(num_env_runners=tune.grid_search([1, 100]))
    assert rllib_ext.configure(config, require_cpus=False).replay_buffer_config["max_trajectories"] == 200


def test_levels_given_by_arguments_become_a_setting_where_tune_finds_them() -> None:
    levels = {"levels": 20, "staleness_weight": tune.uniform(0.1, 0.5)}
    config = rllib_ext.configure(ppo(), levels=levels)
    (hook,) = config.callbacks_on_algorithm_init
    assert config.levels is levels and hook.keywords["packed"] is None
    assert all(0.1 <= one.levels["staleness_weight"] <= 0.5 for one in sampled_configs(config))
    rllib_ext.configure(config, levels={"levels": 20})
    (hook,) = config.callbacks_on_algorithm_init
    assert "levels" not in vars(config) and hook.keywords["packed"] is not None and hook.keywords["held_out"] is None


OF_TRANSITIONS = {"on_algorithm_init", "on_environment_created", "on_train_result"}


def hooks(config: AlgorithmConfig) -> dict[str, Any]:
    given = {event: getattr(config, f"callbacks_{event}") for event in EVENTS}
    return {event: functions for event, functions in given.items() if functions}


def test_transitions_or_levels() -> None:
    transitions, levels = rllib_ext.configure(dqn()), rllib_ext.configure(ppo(), levels={"levels": 5})
    assert hooks(transitions).keys() == OF_TRANSITIONS and hooks(levels).keys() == {*EVENTS}
    installed = [config.callbacks_on_algorithm_init[0].func.__name__ for config in (transitions, levels)]
    assert installed == ["install_replay", "install_levels"]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (dqn, {"levels": {"levels": 5}}, "DQN does not learn from whole episodes .* levels are replayed with PPO"),
        (ppo, {}, r"PPO has no replay buffer .* rllib_ext.configure\(config, levels=...\)"),
        (dqn, {"flush": True}, "flush is for levels, and none are given"),
        (dqn, {"held_out_levels": 5, "generalization_gap": False}, "held_out_levels, generalization_gap is for levels"),
        (ppo, {"levels": {"levels": 5}, "restore": False}, "restore is for the replay buffers of DQN, SAC, TQC"),
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
