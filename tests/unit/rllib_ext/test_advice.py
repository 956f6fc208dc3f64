# SPDX-License-Identifier: Apache-2.0
"""What errors of the RLlib integration advise works: each remedy is executed, as far as ``configure`` goes."""

from __future__ import annotations

from typing import Any

import pytest
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.cql import CQLConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.connectors.env_to_module import FlattenObservations

import rllib_ext
from lightning_replay import recipes
from rllib_ext import replay_config
from rllib_ext.checks import check_recurrent
from tests.advice import Advice, advice, assert_leads_on

BITS = "lightning_replay.envs:BitFlipping-v0"  # observes a dictionary
MEMORY = {"use_lstm": True, "max_seq_len": 4}
SURPRISE = {"class_path": "lightning_replay.writers.RetentionWriter", "init_args": {}}
CONTINUOUS = "Pendulum-v1"


def kept(capacity: int, batch_size: int) -> Any:
    """A recipe as a user writes it."""
    return recipes.surprise_retention(capacity, batch_size)


def plain(capacity: int, batch_size: int) -> Any:
    return recipes.uniform(capacity, batch_size)


def config(kind: Any = DQNConfig, env: str = "CartPole-v1", model: Any = None, **training: Any) -> Any:
    made = kind().environment(env).env_runners(num_env_runners=0).training(**training)
    return made.rl_module(model_config=model) if model else made


def prepared(recipe: str = "uniform", made: Any = None, **options: Any) -> Any:
    """The config with this replay, prepared."""
    made = config() if made is None else made
    return rllib_ext.configure(
        made.training(replay_buffer_config=replay_config(recipe, **({"capacity": 500} | options)))
    )


def remembering(recipe: str = "uniform", made: Any = None, **options: Any) -> None:
    """The same with a recurrent module, which the algorithm checks once its modules are there."""
    made = config(model=MEMORY) if made is None else made
    check_recurrent(prepared(recipe, made, **options), ["default_policy"])


def levels(made: Any, **options: Any) -> Any:
    return rllib_ext.configure(made, levels={"levels": 4}, check_environments=False, **options)


def flattened(made: Any) -> Any:
    return made.env_runners(env_to_module_connector=lambda env, spaces, device: FlattenObservations())


def offline() -> Any:
    return config(CQLConfig, CONTINUOUS, lr=None).reporting(
        min_sample_timesteps_per_iteration=0, min_train_timesteps_per_iteration=10
    )


CASES = [
    advice(
        "PPO with a replay",
        lambda: rllib_ext.configure(config(PPOConfig)),
        r"DQN, SAC, TQC and CQL have one. Levels .* PPO, APPO and IMPALA, rllib_ext.configure\(config, levels=...\)",
        prepared,
        lambda: prepared(made=config(SACConfig, CONTINUOUS)),
        lambda: levels(config(PPOConfig)),
        lambda: levels(config(APPOConfig)),
    ),
    advice(
        "levels with DQN",
        lambda: levels(config()),
        "levels are replayed with PPO, APPO and IMPALA",
        lambda: levels(config(PPOConfig)),
    ),
    advice(
        "levels in other processes",
        lambda: levels(config(PPOConfig).env_runners(gym_env_vectorize_mode="async")),
        'give "sync"',
        lambda: levels(config(PPOConfig).env_runners(gym_env_vectorize_mode="sync")),
    ),
    advice(
        "levels that are only scored, with APPO",
        lambda: rllib_ext.configure(
            config(APPOConfig), levels={"levels": 4, "train_on_new_levels": False}, check_environments=False
        ),
        "Use PPO, or train on all levels",
        lambda: rllib_ext.configure(
            config(PPOConfig), levels={"levels": 4, "train_on_new_levels": False}, check_environments=False
        ),
    ),
    advice(
        "the old stack",
        lambda: prepared(
            made=config().api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
        ),
        r"Remove .api_stack\(...\), or set both of its options to True",
        prepared,
        lambda: prepared(
            made=config().api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
        ),
    ),
    advice(
        "configure before training",
        lambda: rllib_ext.configure(config()),
        r"\.training\(replay_buffer_config=rllib_ext.replay_config\(",
        prepared,
    ),
    advice(
        "a return of this library",
        lambda: prepared(n_steps=3),
        r"RLlib has it: \.training\(n_step=",
        lambda: prepared(made=config(n_step=3)),
    ),
    advice(
        "the discount of this library",
        lambda: prepared(discount=0.9),
        r"\.training\(gamma=",
        lambda: prepared(made=config(gamma=0.9)),
    ),
    advice(
        "an option that is misspelt",
        lambda: prepared("prioritized", priority_exponents=0.6),
        "Did you mean 'priority_exponent'",
        lambda: prepared("prioritized", priority_exponent=0.6),
    ),
    advice(
        "no capacity",
        lambda: prepared(capacity=None) and replay_config("uniform"),
        "capacity=100_000",
        lambda: replay_config("uniform", capacity=100_000),
    ),
    advice(
        "no recipe",
        lambda: replay_config(capacity=100),
        r"needs a recipe \(see lightning_replay.recipes\), or a sampler, writer or transform",
        lambda: replay_config("uniform", capacity=100),
        lambda: replay_config(capacity=100, writer=SURPRISE),
    ),
    advice(
        "sequences",
        lambda: prepared("sequences", length=4),
        r'by max_seq_len in their model_config .* Use replay_config\("uniform", ...\) or replay_config\("prioritized"',
        lambda: prepared("uniform", config(model=MEMORY)),
        lambda: prepared("prioritized", config(model=MEMORY)),
    ),
    advice(
        "retention in a recipe of one's own",
        lambda: prepared("tests.unit.rllib_ext.test_advice.kept"),
        r"Leave the recipe out and name the parts: replay_config\(capacity=..., writer=\{'class_path': ...\}\)",
        lambda: replay_config(capacity=100, writer=SURPRISE),
    ),
    advice(
        "a capacity below a round",
        lambda: prepared(capacity=30, made=config().env_runners(rollout_fragment_length=40)),
        "Raise the capacity to that of several rounds",
        lambda: prepared(capacity=160, made=config().env_runners(rollout_fragment_length=40)),
    ),
    advice(
        "a capacity below a batch",
        lambda: prepared(capacity=30, made=config(train_batch_size_per_learner=32)),
        "Raise the capacity or lower train_batch_size_per_learner",
        lambda: prepared(capacity=32, made=config(train_batch_size_per_learner=32)),
        lambda: prepared(capacity=30, made=config(train_batch_size_per_learner=30)),
    ),
    advice(
        "memory with returns",
        lambda: remembering(made=config(model=MEMORY, n_step=3)),
        "Set it to 1",
        lambda: remembering(made=config(model=MEMORY, n_step=1)),
    ),
    advice(
        "memory with pairs",
        lambda: remembering("neighborhood_mixup", discrete="same_action"),
        r'Use replay_config\("uniform", ...\) or replay_config\("prioritized", ...\), or a module without state',
        remembering,
        lambda: remembering("prioritized"),
        lambda: prepared("neighborhood_mixup", discrete="same_action"),
    ),
    advice(
        "memory without a length",
        lambda: remembering(made=config(model={"use_lstm": True, "max_seq_len": 0})),
        r'Give .rl_module\(model_config=\{"max_seq_len": 20, ...\}\)',
        lambda: remembering(made=config(model={"use_lstm": True, "max_seq_len": 20})),
    ),
    advice(
        "memory with SAC",
        lambda: remembering(made=config(SACConfig, CONTINUOUS, MEMORY)),
        r"Train with DQN, where actions are discrete, or use modules without state \(use_lstm=False\)",
        remembering,
        lambda: prepared(made=config(SACConfig, CONTINUOUS, {"use_lstm": False})),
    ),
    advice(
        "memory with shards",
        lambda: remembering(num_shards=2),
        "Leave num_shards out, or use a module without state",
        remembering,
        lambda: prepared(num_shards=2),
    ),
    advice(
        "options of shards without shards",
        lambda: prepared(num_cpus_per_shard=1),
        "Add num_shards=4, or leave it out",
        lambda: prepared(num_cpus_per_shard=0, num_shards=4, made=config().env_runners(rollout_fragment_length=4)),
        prepared,
    ),
    advice(
        "a layout of rows with shards",
        lambda: prepared(num_shards=2, layout="rows"),
        "Leave layout out, or num_shards",
        lambda: prepared(layout="rows"),
        lambda: prepared(num_shards=2, made=config().env_runners(rollout_fragment_length=4)),
    ),
    advice(
        "dictionaries",
        lambda: prepared("hindsight", config(env=BITS), env=BITS),
        r"\.env_runners\(env_to_module_connector=lambda env, spaces, device: FlattenObservations\(\)\)",
        lambda: prepared("hindsight", flattened(config(env=BITS)), env=BITS),
    ),
    advice(
        "CQL with priorities",
        lambda: prepared("prioritized", offline()),
        r'Use replay_config\("uniform", ...\), or another recipe without priorities',
        lambda: prepared("uniform", offline()),
        lambda: prepared("mixup", offline()),
    ),
    advice(
        "tasks without a curriculum",
        lambda: prepared(progress={"class_path": "lightning_replay.schedulers.MeanReturn"}),
        r'progress is for the tasks of a curriculum: replay_config\("parallel_curriculum", ...\)',
        lambda: replay_config("parallel_curriculum", tasks=["a", "b"], capacity_per_task=100),
    ),
]


@pytest.mark.filterwarnings("ignore")  # of RLlib
@pytest.mark.parametrize("one", CASES)
def test_the_advice_of_the_error_works(one: Advice) -> None:
    assert_leads_on(one)


def test_a_recipe_of_ones_own_need_not_take_the_seed_of_the_config() -> None:
    made = prepared("tests.unit.rllib_ext.test_advice.plain", config().debugging(seed=3))
    options = dict(made.replay_buffer_config)
    kind = options.pop("type")
    one, two, other = (
        kind(**(options | {"seed": seed})).modules["default_policy"].replay.generator_fingerprint()
        for seed in (3, 3, 4)
    )
    assert one == two != other
