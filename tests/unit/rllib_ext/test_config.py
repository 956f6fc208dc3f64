# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env import MultiAgentEnv

import rllib_ext
from lightning_replay.sharded.options import ShardOptions
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.n_step import SampledReturns
from tests.wrong_options import WrongOption, assert_refused, by_option, wrong_options

from .episodes import buffer_of, sampled


@pytest.mark.parametrize(
    ("option", "remedy"), [("n_steps", "n_step="), ("discount", "gamma="), ("batch_size", "train_batch_size")]
)
def test_what_is_set_in_rllib_is_not_an_option(option: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"{option} is not an option of replay_config.*{remedy}"):
        rllib_ext.replay_config("uniform", capacity=100, **{option: 3})


def test_neighbours_are_found_in_the_named_entries_of_dict_observations() -> None:
    space = spaces.Dict({"camera": spaces.Box(0, 255, (4, 4, 1), np.uint8), "position": spaces.Box(-1, 1, (2,))})
    episode = sampled(space, spaces.Box(-1, 1, (1,)), 20)
    options = {"capacity": 100, "layout": "rows", "num_neighbors": 3, "seed": 0}
    buffer = RecipeEpisodeReplayBuffer("neighborhood_mixup", **options)
    with pytest.raises(ValueError, match=r"\('observation', 'camera'\) has .* an image; .* with feature_keys="):
        buffer.add(episode)
    named = [["observation", "position"], "action"]
    buffer = RecipeEpisodeReplayBuffer("neighborhood_mixup", feature_keys=named, **options)
    buffer.add(episode)
    with pytest.raises(ValueError, match=r"\('observation', 'camera'\) has dtype torch.uint8; MixPairs .* with keys="):
        buffer.sample(num_items=2)
    keys = [*named, ["next", "observation", "position"], ["next", "reward"]]
    buffer = RecipeEpisodeReplayBuffer("neighborhood_mixup", feature_keys=named, keys=keys, **options)
    buffer.add(episode)
    stored = episode.get_observations(slice(0, 20))
    mixed = 0
    for row in buffer.sample(num_items=50):
        observation = row.get_observations(0)
        assert (stored["camera"] == observation["camera"]).all((1, 2, 3)).any()  # whole, of the first of the pair
        mixed += not (stored["position"] == observation["position"]).all(1).any()
    assert mixed > 25


BITS = "lightning_replay.envs:BitFlipping-v0"  # observes a dictionary


class OwnModule(DefaultDQNTorchRLModule):
    """As if it took dictionaries."""


@pytest.mark.parametrize("kind", [DQNConfig, SACConfig])
def test_dictionaries_are_refused_where_rllib_has_no_module_for_them(kind: Any) -> None:
    config = kind().environment(BITS).env_runners(num_env_runners=0)
    config.training(replay_buffer_config=rllib_ext.replay_config("hindsight", capacity=2000, env=BITS))
    with pytest.raises(ValueError, match=r"the observations of 'l.*BitFlipping-v0' are a Dict, .* FlattenObservations"):
        rllib_ext.configure(config)
    rllib_ext.configure(config.copy(), check_environments=False)
    rllib_ext.configure(config.copy().rl_module(rl_module_spec=RLModuleSpec(module_class=OwnModule)))
    rllib_ext.configure(config.env_runners(env_to_module_connector=lambda env, spaces, device: FlattenObservations()))


class Table(gymnasium.Env[Any, Any]):
    """Observes a matrix, alone."""

    observation_space, action_space = spaces.Box(-1, 1, (3, 2), np.float32), spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros((3, 2), np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros((3, 2), np.float32), 0.0, False, False, {}


class Tables(MultiAgentEnv):
    """Two agents that observe a matrix each."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.agents = self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys(self.agents, Table.observation_space)
        self.action_spaces = dict.fromkeys(self.agents, Table.action_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return dict.fromkeys(self.agents, np.zeros((3, 2), np.float32)), {}


@pytest.mark.parametrize(("env", "options"), [(Table, {}), (Tables, {"multi_agent": True})])
def test_matrices_are_refused_until_they_are_flattened(env: Any, options: dict[str, bool]) -> None:
    config = DQNConfig().environment(env).env_runners(num_env_runners=0)
    config.training(replay_buffer_config=rllib_ext.replay_config("uniform", capacity=2000))
    if options:
        config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent, episode, **rest: agent)
    advice = re.escape(f"FlattenObservations({'multi_agent=True' if options else ''})")
    with pytest.raises(ValueError, match=rf"the observations of .*Table.* are a Box \[3, 2\], .* {advice}"):
        rllib_ext.configure(config)
    flatten = partial(FlattenObservations, **options)
    rllib_ext.configure(config.env_runners(env_to_module_connector=lambda env, spaces, device: flatten()))


def part(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_replay.{name}", "init_args": arguments}


def test_parts_by_class_path_with_arguments() -> None:
    exponent = part("schedules.Linear", start=0.4, end=1.0, duration=10)
    prioritized = part("samplers.PrioritizedSampler", priority_exponent=0.7, importance_exponent=exponent)
    config = rllib_ext.replay_config(
        capacity=64,
        seed=1,
        sampler=part("samplers.NeighborhoodMixupSampler", num_neighbors=3, base_sampler=prioritized),
        transform=["lightning_replay.transforms.MixPairs"],
        writer="lightning_replay.writers.FirstInFirstOutWriter",
    )
    sampler = buffer_of(config).replay.sampler
    assert (sampler.num_neighbors, sampler.base_sampler.priority_exponent, sampler.base_sampler.max_size) == (
        3,
        0.7,
        64,
    )
    assert sampler.base_sampler.importance_exponent(10) == 1.0


def test_the_share_of_mixed_rows_follows_the_steps_that_were_added() -> None:
    schedule = part("schedules.Linear", start=0.0, end=1.0, duration=20, clock="env_steps")
    transform = part("transforms.MixPairs", fraction=schedule)
    sampler = "lightning_replay.samplers.NeighborhoodMixupSampler"
    for config in (
        rllib_ext.replay_config("neighborhood_mixup", capacity=64, num_neighbors=3, fraction=schedule, seed=0),
        rllib_ext.replay_config(capacity=64, sampler=sampler, transform=transform, seed=0),
    ):
        buffer = buffer_of(config)
        (mixing,) = buffer.replay.transform
        for added in (0, 5, 10):
            assert mixing.fraction == added / 20
            episode = sampled(spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-1.0, 1.0, (1,)), 5)
            episode.id_ = f"episode {added}"
            buffer.add([episode])


UNIFORM = "lightning_replay.samplers.UniformSampler"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "needs a recipe .*, or a sampler, writer or transform"),
        ({"sampler": "lightning_replay.samplers.Nothing"}, ValueError, "which cannot be imported"),
        ({"sampler": "Nothing"}, TypeError, "it must be a TorchRL Sampler, or its class path"),
        ({"sampler": "lightning_replay.recipes.uniform"}, ValueError, "which is no class but a function"),
        ({"sampler": "lightning_replay.transforms.MixPairs"}, TypeError, "it must be a TorchRL Sampler"),
        ({"sampler": {"class_path": UNIFORM, "init_args": {"alpha": 1}}}, TypeError, "has no argument 'alpha'; acc"),
        ({"sampler": {"class_path": "x.Y", "arguments": {}}}, ValueError, "accepted are class_path and init_args"),
        ({"sampler": UNIFORM, "alpha": 1}, ValueError, "no option 'alpha'"),
        ({"recipe": "uniform", "sampler": "a.B"}, ValueError, "recipe 'uniform' has no option 'sampler'"),
    ],
)
def test_parts_that_cannot_be_built_are_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rllib_ext.replay_config(**{"capacity": 50, **options})


PER = {"recipe": "prioritized", "capacity": 100}
PARTS = {"capacity": 100}
SAMPLER = {"class_path": "lightning_replay.samplers.PrioritizedSampler"}
DQN = DQNConfig().environment("CartPole-v1").training(replay_buffer_config=rllib_ext.replay_config(**PER))
PPO = PPOConfig().environment("CartPole-v1")
SMOOTHING = ["metrics_num_episodes_for_smoothing"]
NOT_FOLLOWED = ["beta", "gamma", "n_step", "batch_length_T", "min_batch_length_T"]  # RLlib's own, which it checks


def wrong() -> list[WrongOption]:
    levels = {"config": PPO, "levels": {"levels": 20}}
    return [
        *wrong_options(rllib_ext.configure, {"config": DQN}, leave_out=["held_out_levels"]),
        *wrong_options(rllib_ext.configure, levels, leave_out=["held_out_levels"]),
        *wrong_options(rllib_ext.RecipeEpisodeReplayBuffer, PER, leave_out=SMOOTHING),
        *(one for one in wrong_options(ShardOptions, {"num_shards": 2}) if one[2:4] != ("num_prefetch", 0)),
        *wrong_options(rllib_ext.RecipeEpisodeReplayBuffer(**PER).sample, {}, leave_out=NOT_FOLLOWED),
    ]


WRONG = by_option(wrong())


@pytest.mark.parametrize("option", WRONG)
def test_is_refused_by_name(option: str) -> None:
    for one in WRONG[option]:
        assert_refused(one)


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
