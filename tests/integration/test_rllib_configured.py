# SPDX-License-Identifier: Apache-2.0
"""Real algorithms after :func:`rllib_ext.configure`: the same batches, TD errors home, what it refuses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.cql import CQLConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.iql import IQLConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.algorithms.tqc import TQCConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner

import rllib_ext
from lightning_replay import recipes
from rllib_ext.rllib_compat import callbacks_on, values
from tests.stored import stored_rows

from .rllib_algorithms import (
    Counting,
    CountingMoves,
    EchoLearner,
    EchoSACLearner,
    Levels,
    built,
    small,
    trained,
    watch_columns,
    watch_td_errors,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]


class UserCallback(RLlibCallback):
    def on_train_result(self, *, algorithm: Any, **rest: Any) -> None:
        exponent = getattr(algorithm.local_replay_buffer.replay.sampler, "beta", None)
        algorithm.exponents = [*getattr(algorithm, "exponents", []), exponent]


class ScaleRewards(ConnectorV2):
    """A user's connector that changes real episodes."""

    def __call__(self, *, batch: Any, episodes: Any, **rest: Any) -> Any:
        for episode in episodes:
            episode.set_rewards(
                new_data=[10.0 * reward for reward in episode.get_rewards()], at_indices=slice(0, len(episode))
            )
        return batch


END = {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 1.0}}
REWARD = "lightning_replay.transforms.mixup_coefficients"  # not called
CLOCK = {"start": 0.0, "end": 1.0, "duration": 60, "clock": "env_steps"}
ANNEALED = {"class_path": "lightning_replay.schedules.Linear", "init_args": CLOCK}
CONFIGS = {
    "dqn": lambda: small(DQNConfig, "CartPole-v1", "prioritized").training(n_step=(1, 3)),
    "sac": lambda: small(SACConfig, "Pendulum-v1", "neighborhood_mixup", num_neighbors=4).learners(num_learners=1),
    "tqc": lambda: small(TQCConfig, "Pendulum-v1", "prioritized", importance_exponent=ANNEALED).training(n_step=3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_two_iterations(name: str) -> None:
    config = CONFIGS[name]().callbacks(UserCallback)
    algorithm = built(config)
    result = trained(algorithm)
    buffer = algorithm.local_replay_buffer
    assert len(algorithm.exponents) == 2
    if name == "tqc":  # by the buffer's own clock
        assert 0.0 < algorithm.exponents[0] < algorithm.exponents[1] == 1.0
    check_figures(config, buffer, result)


def test_without_configure_and_with_the_seed_of_the_config() -> None:
    states = []
    for seed in (3, 3, 4):
        config = small(DQNConfig, "CartPole-v1", "prioritized", layout="rows").training(n_step=(1, 3))
        algorithm = config.debugging(seed=seed).build_algo()
        buffer = algorithm.local_replay_buffer
        states.append(buffer.replay.state_dict()["sampler"]["generator"])
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])
    result = trained(algorithm)
    assert len(buffer) == result["env_runners"]["num_env_steps_sampled_lifetime"] >= 80
    assert result["replay_buffer"]["num_env_steps_stored"] == len(buffer)
    assert result["replay_buffer"]["num_env_steps_sampled_lifetime"] >= 16 * 40 / 3
    assert np.isfinite(result["learners"]["default_policy"]["total_loss"])
    assert buffer.replay.stats()["priorities_updated"] >= 16 * 10


ALONE: dict[str, Any] = {  # algorithm -> its config, an environment, and a Learner that returns numbers of rows
    "dqn": (DQNConfig, Counting, EchoLearner),
    "sac": (SACConfig, CountingMoves, EchoSACLearner),
}
OPTIONS: dict[str, dict[str, Any]] = {  # of recipes that need some
    "event_tables": {"tables": [{"name": "end", "condition": END, "history_length": 2, "capacity": 100}]},
    "groups": {"group_size": 1},  # RLlib stores rows as they come
    "hindsight": {"achieved_key": "observation", "desired_key": "observation", "reward": REWARD, "share": 0.0},
    "neighborhood_mixup": {"num_neighbors": 4},
    "noisy": {"keys": ["observation"]},  # actions of DQN are integers
    "parallel_curriculum": {"tasks": ["target", "near"], "capacity_per_task": 1000},
    "reverse_sweep": {"goal": END},
}
MIXES = ("continuous_transition", "mixup", "neighborhood_mixup", "s4rl")  # rows of no step
# Actions of DQN cannot be mixed. SAC, of which the buffer stores vectors of actions, has one recipe of plain rows.
RECIPES = [("dqn", recipe) for recipe in sorted(recipes.known()) if recipe not in ("sequences", *MIXES)]
RECIPES += [("sac", recipe) for recipe in ("prioritized", *MIXES)]


def alone(name: str, recipe: str, num_learners: int) -> AlgorithmConfig:
    """A config whose buffer is the only thing of this library that it was given."""
    algorithm, env, learner = ALONE[name]
    env = Levels if recipe == "parallel_curriculum" else env
    config = small(algorithm, env, recipe, **OPTIONS.get(recipe, {})).training(train_batch_size_per_learner=25)
    return config.learners(num_learners=num_learners, learner_class=learner)


def check_alone(algorithm: Any, num_learners: int) -> None:
    """Asserts that an algorithm is as after ``configure``, and that every TD error of its next draws comes home."""
    buffer = algorithm.local_replay_buffer
    assert buffer.num_learners == num_learners and buffer.options.layout == "flagged"
    home = watch_td_errors(buffer.replay)
    before = buffer.get_sampled_timesteps()
    result = trained(algorithm)
    drawn = buffer.get_sampled_timesteps() - before
    assert drawn >= 25 * max(num_learners, 1) * 10
    assert not buffer.replay.takes_feedback or (len(home) == drawn and all(home))
    assert result["replay_buffer"]["num_env_steps_stored"] == len(buffer) >= 80
    assert result["num_updates_lifetime"] > 1


@pytest.mark.parametrize(("name", "recipe"), RECIPES)
def test_replay_config_alone_is_as_after_configure(name: str, recipe: str) -> None:
    algorithm = alone(name, recipe, 0).build_algo()
    check_alone(algorithm, 0)


@pytest.mark.parametrize(("name", "num_learners"), [("dqn", 2), ("sac", 1)])
def test_replay_config_alone_with_remote_learners(name: str, num_learners: int, tmp_path: Path) -> None:
    """Starting Learners takes seconds, so one algorithm gets the buffers of all recipes with feedback in turn."""
    algorithm = alone(name, "prioritized", num_learners).build_algo()
    check_alone(algorithm, num_learners)
    saved = algorithm.save_to_path(tmp_path)
    rows = len(algorithm.local_replay_buffer)
    algorithm.train()
    algorithm.restore_from_path(saved)
    assert len(algorithm.local_replay_buffer) == rows
    for recipe in ("event_tables", "surprise_retention"):
        config = alone(name, recipe, num_learners)
        config.freeze()
        algorithm.config = config
        algorithm.local_replay_buffer = algorithm._create_local_replay_buffer_if_necessary(config)
        (prepare,) = callbacks_on(algorithm.config, "on_algorithm_init")
        prepare(algorithm=algorithm)
        check_alone(algorithm, num_learners)


def offline(env: Any) -> AlgorithmConfig:
    config = small(CQLConfig, env, "uniform").training(lr=None)
    config.reporting(min_sample_timesteps_per_iteration=0, min_train_timesteps_per_iteration=16)
    return config.offline_data(dataset_num_iters_per_learner=1)  # without it RLlib refuses the config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: small(DQNConfig, Counting, "uniform", num_shards=2), "class ShardedDQN, and DQN is being built"),
        (lambda: offline(CountingMoves), "class ReplayCQL, and CQL is being built"),
        (lambda: small(DQNConfig, Counting, "uniform", capacity=10), "capacity is 10, below the 16 rows"),
        (
            lambda: rllib_ext.configure(small(DQNConfig, Counting, "uniform")).callbacks(on_algorithm_init=print),
            r"replaced after rllib_ext.configure\(config\)",
        ),
        (
            lambda: small(DQNConfig, Counting, "parallel_curriculum", **OPTIONS["parallel_curriculum"]),
            r"no attribute 'task'.*configure\(config, assign_tasks=False\)",
        ),
    ],
)
def test_replay_config_alone_is_refused_where_it_is_not_enough(
    config: Callable[[], AlgorithmConfig], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config().build_algo()


def check_figures(config: Any, buffer: Any, result: dict[str, Any]) -> None:
    """Asserts that steps, rows, updates and priorities add up in the last result."""
    drawn_for_an_update = config.train_batch_size_per_learner * max(config.num_learners, 1)
    assert buffer.num_learners == config.num_learners
    assert len(buffer) == result["env_runners"]["num_env_steps_sampled_lifetime"] >= 80
    assert result["timesteps_total"] == result["num_env_steps_sampled_lifetime"] == len(buffer)
    assert result["num_updates_lifetime"] == buffer.get_sampled_timesteps() / drawn_for_an_update > 1
    metrics = result["replay_buffer"]  # computed at every tenth draw, and right in each result
    assert metrics["num_env_steps_stored"] == metrics["num_env_steps_added_lifetime"] == len(buffer)
    assert metrics["num_env_steps_sampled_lifetime"] == buffer.get_sampled_timesteps()
    learner = result["learners"]["default_policy"]
    assert np.isfinite(learner["total_loss"] if "total_loss" in learner else learner["qf_loss"])
    if buffer.replay.is_prioritized:
        assert buffer.replay.stats()["priorities_updated"] >= 16 * 10
        assert result["replay_buffer"]["num_stale_updates_dropped_lifetime"] == 0
    assert result["replay_buffer"]["drawn_age_max"] >= result["replay_buffer"]["drawn_age_mean"] > 0


def test_every_td_error_reaches_its_row() -> None:
    """The same with two Learners is in test_rllib_cluster.py."""
    config = small(DQNConfig, Counting, "prioritized").training(train_batch_size_per_learner=25)
    config.learners(learner_class=EchoLearner)
    algorithm = built(config)
    buffer = algorithm.local_replay_buffer
    home = watch_td_errors(algorithm.local_replay_buffer.replay)
    values(algorithm.learner_group.foreach_learner(watch_columns))
    for layout in ("flagged", "blocks", "rows"):
        home.clear()
        buffer.options.layout = layout
        result = trained(algorithm)
        assert len(home) >= 25 * 20 and all(home), layout
        assert stored_rows(buffer.replay)["next", "done"].float().mean() > 0.4
        check_figures(config, buffer, result)
    (seen,) = values(algorithm.learner_group.foreach_learner(lambda learner: learner.columns_seen))
    assert seen and all(writeable and not shared for writeable, shared in seen)


def test_every_layout_gives_the_learner_the_same_batch() -> None:
    batches = {}
    for layout in ("flagged", "blocks", "rows"):
        config = small(DQNConfig, Counting, "prioritized", layout=layout, seed=3).training(n_step=(1, 3))
        config.debugging(seed=0).training(num_steps_sampled_before_learning_starts=1000)  # no TD errors: equal draws
        algorithm = built(config)
        algorithm.train()
        buffer, learner = algorithm.local_replay_buffer, algorithm.learner_group._learner
        episodes = buffer.sample(num_items=64, n_step=(1, 3), gamma=0.9)
        places = buffer.modules["default_policy"]._expected[0]
        batch = learner._learner_connector(rl_module=learner.module, batch={}, episodes=episodes, shared_data={})
        order = np.lexsort((batch["default_policy"]["n_step"], places))  # a row drawn twice may differ in its length
        batches[layout] = {key: column[order] for key, column in batch["default_policy"].items()}
    flagged = batches.pop("flagged")
    for batch in batches.values():
        assert (
            set(batch) == set(flagged) >= {"obs", "new_obs", "actions", "rewards", "terminateds", "weights", "n_step"}
        )
        for key, column in flagged.items():
            assert torch.equal(column, batch[key]), key


def test_a_connector_of_the_user_gets_real_episodes(caplog: pytest.LogCaptureFixture) -> None:
    config = small(DQNConfig, Counting, "uniform").learners(learner_connector=lambda *spaces: ScaleRewards())
    with caplog.at_level(logging.WARNING, logger="rllib_ext.hooks"):
        algorithm = built(config)
    assert "Learner connectors of its own" in caplog.text
    trained(algorithm)
    learner = algorithm.learner_group._learner
    episodes = algorithm.local_replay_buffer.sample(num_items=8, n_step=1)
    batch = learner._learner_connector(rl_module=learner.module, batch={}, episodes=episodes, shared_data={})
    assert batch["default_policy"]["rewards"].tolist() == [10.0] * 8


def test_one_block_with_connectors_of_the_user_is_refused() -> None:
    config = small(DQNConfig, Counting, "uniform", layout="flagged")
    config = rllib_ext.configure(config.learners(learner_connector=lambda *spaces: ScaleRewards()))
    with pytest.raises(ValueError, match='layout is "flagged", and the config has Learner connectors of its own'):
        config.build_algo()


def test_a_buffer_of_a_grid_gets_the_fast_layout_and_a_given_layout_stays() -> None:
    config = rllib_ext.configure(small(DQNConfig, Counting, "uniform", layout="blocks"))
    algorithm = config.build_algo()
    assert algorithm.local_replay_buffer.options.layout == "blocks"
    config = config.copy(copy_frozen=False)
    config.replay_buffer_config = rllib_ext.replay_config("prioritized", capacity=500)  # what Tune puts in
    algorithm = config.build_algo()
    trained(algorithm)
    assert algorithm.local_replay_buffer.options.layout == "flagged"


def refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rllib_ext.configure(config)


def test_other_algorithms_stacks_and_buffers_are_refused() -> None:
    for algorithm in (IQLConfig, PPOConfig):
        refused(algorithm(), "has no replay buffer on the new API stack")
    old = {"enable_rl_module_and_learner": False, "enable_env_runner_and_connector_v2": False}
    refused(small(DQNConfig, "CartPole-v1", "uniform").api_stack(**old), "old API stack")
    refused(DQNConfig().environment("CartPole-v1"), r"is of type 'PrioritizedEpisodeReplayBuffer'.*replay_config")


class Arguments(gym.Env):
    """Has arguments of its own, where RLlib gives one dict."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.full(1, 1 / self.length, np.float32), {}


def test_an_environment_that_cannot_be_played_is_refused_before_any_runner_starts() -> None:
    config = small(DQNConfig, Arguments, "uniform").environment(env_config={"length": 4})
    refused(config, r"Arguments.* with env_config={'length': 4} cannot be made, reset and stepped: TypeError")
    rllib_ext.configure(config, check_environments=False)
    refused(small(DQNConfig, "CartPool-v1", "uniform"), "the environment 'CartPool-v1' .*Did you mean: `CartPole`")
    with pytest.raises(ModuleNotFoundError, match="my_module"):
        rllib_ext.configure(small(DQNConfig, "my_module:MyEnv-v0", "uniform"))


def test_the_extra_that_an_environment_of_gymnasium_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    with pytest.raises(ModuleNotFoundError, match=r"'LunarLander-v3' needs Box2D.* 'lightning-replay\[box2d\]'"):
        rllib_ext.configure(small(DQNConfig, "LunarLander-v3", "uniform"))


def test_a_name_that_only_this_process_has_registered_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    gym.register("OnlyHere-v0", Counting)
    try:
        with caplog.at_level(logging.WARNING, logger="rllib_ext.environments"):
            rllib_ext.configure(small(DQNConfig, "OnlyHere-v0", "uniform").env_runners(num_env_runners=0))
            assert not caplog.text
            rllib_ext.configure(small(DQNConfig, "OnlyHere-v0", "uniform").env_runners(num_env_runners=1))
    finally:
        del gym.registry["OnlyHere-v0"]
    assert "'OnlyHere-v0' is registered in this process; " in caplog.text
    assert f"'{Counting.__module__}:OnlyHere-v0'" in caplog.text


def test_too_few_cpus_are_counted() -> None:
    config = small(DQNConfig, "CartPole-v1", "uniform").env_runners(num_env_runners=7).learners(num_learners=2)
    refused(config, r"7 EnvRunners, 2 Learners .* need 9 CPUs and Ray has 8: build_algo\(\) would wait for ever")
    rllib_ext.configure(config, require_cpus=False)
    config.env_runners(num_env_runners=2).evaluation(evaluation_interval=1, evaluation_num_env_runners=5)
    refused(config, "need 9 CPUs")


class Images(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (42, 42, 1), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros((42, 42, 1), np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros((42, 42, 1), np.float32), 1.0, True, False, {}


def test_connectors_that_stack_frames_are_refused() -> None:
    config = small(DQNConfig, Images, "uniform").rl_module(model_config={"conv_filters": [[4, 8, 4], [8, 4, 2]]})
    config.env_runners(
        num_env_runners=0, env_to_module_connector=lambda *given, **more: FrameStackingEnvToModule(num_frames=4)
    )
    config.learners(learner_connector=lambda *spaces: FrameStackingLearner(num_frames=4))
    with pytest.raises(ValueError, match=r"FrameStackingLearner.*replay_config\(frame_stack=4\)"):
        built(config)
