# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from ray.rllib.algorithms.ppo import PPOConfig

import rllib_ext
from lightning_replay import recipes
from lightning_replay.schedules import Linear
from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer

from .episodes import numbered, sampled

GOAL = {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 1.0}}


@pytest.mark.parametrize("recipe", sorted(recipes.known()))
def test_every_recipe_is_known(recipe: str) -> None:
    options: dict[str, Any] = {
        "event_tables": {"tables": [{"name": "goal", "condition": GOAL, "history_length": 5, "capacity": 50}]},
        "parallel_curriculum": {"tasks": ["target", "near"]},
        "reverse_sweep": {"goal": GOAL},
    }.get(recipe, {})
    options["capacity_per_task" if "tasks" in options else "capacity"] = 100
    assert rllib_ext.replay_config(recipe, **options) == {
        "type": RecipeEpisodeReplayBuffer,
        "recipe": recipe,
        **options,
    }


def test_options_are_those_of_the_recipe() -> None:
    config = rllib_ext.replay_config(
        "prioritized", capacity=50, importance_exponent=Linear(0.4, 1.0, 100), layout="rows"
    )
    options = copy.deepcopy(config)
    assert options.pop("type") is RecipeEpisodeReplayBuffer
    buffer = RecipeEpisodeReplayBuffer(**options)
    buffer.add(numbered("a", 5))
    assert len(buffer.sample(num_items=3)) == 3


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no recipe 'prioritised'; known are continuous_transition, .*uniform"):
        rllib_ext.replay_config("prioritised", capacity=100)


def test_unknown_options_are_refused_by_name() -> None:
    message = (
        "recipe 'uniform' has no option 'alpha', 'beta'; accepted are capacity, device, memmap, frame_stack, "
        "image_key, frame_capacity, check_finite, check_continuity, seed, for the whole buffer layout, "
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        rllib_ext.replay_config("uniform", capacity=100, alpha=0.6, beta=0.4)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [("n_steps", "n_step="), ("discount", "gamma="), ("batch_size", "train_batch_size"), ("prefetch", "num_prefetch")],
)
def test_what_is_set_in_rllib_is_not_an_option(option: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"{option} is not an option of replay_config.*{remedy}"):
        rllib_ext.replay_config("uniform", capacity=100, **{option: 3})


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("uniform", {}, "recipe 'uniform' needs capacity"),
        ("uniform", {"capacity": 0}, "capacity"),
        ("uniform", {"capacity": -5}, "capacity"),
        ("uniform", {"capacity": 10, "layout": "columns"}, "layout is 'columns'; it must be one of 'flagged'"),
        ("uniform", {"capacity": 10, "num_learners": -1}, "num_learners is -1"),
        ("prioritized", {"capacity": 10, "priority_exponent": -1.0}, "priority_exponent"),
        ("neighborhood_mixup", {"capacity": 10, "num_neighbors": 0}, "num_neighbors"),
        ("neighborhood_mixup", {"capacity": 10, "mixup_concentration": 0.0}, "mixup_concentration"),
    ],
)
def test_bad_values_are_refused_when_the_config_is_written(recipe: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rllib_ext.replay_config(recipe, **options)


def test_discrete_actions_given_to_neighborhood_mixup_are_refused_at_the_first_rows() -> None:
    buffer = RecipeEpisodeReplayBuffer("neighborhood_mixup", capacity=100)
    with pytest.raises(ValueError, match=r"discrete|same_action"):
        buffer.add(numbered("a", 5))


def test_noise_is_put_where_the_config_says() -> None:
    options = {"capacity": 100, "keys": ["observation", ["next", "reward"]], "kind": "multiplicative", "sigma": 0.01}
    buffer = RecipeEpisodeReplayBuffer("noisy", **options, layout="rows", seed=0)
    buffer.add(numbered("a", 5, offset=1.0))
    for episode in buffer.sample(num_items=20):
        reward, before, after = (float(x) for x in (episode.rewards[0], *(o[0] for o in episode.observations)))
        step = round(after) - 1  # observation offset + t, reward alike, and offset + t + 1 after it
        assert after == step + 1 and before != step and reward != step
        assert before == pytest.approx(step, rel=0.06) and reward == pytest.approx(step, rel=0.06)
    paper = RecipeEpisodeReplayBuffer("noisy", capacity=100, seed=0)
    paper.add(numbered("a", 5))
    with pytest.raises(ValueError, match="'action' has dtype torch.int64.*name other keys with keys="):
        paper.sample(num_items=2)


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


def test_parts_by_class_path_with_arguments() -> None:
    config = rllib_ext.replay_config(
        capacity=64,
        seed=1,
        sampler={
            "class_path": "lightning_replay.samplers.NeighborhoodMixupSampler",
            "init_args": {
                "num_neighbors": 3,
                "first": {
                    "class_path": "lightning_replay.samplers.PrioritizedSampler",
                    "init_args": {
                        "priority_exponent": 0.7,
                        "importance_exponent": {
                            "class_path": "lightning_replay.schedules.Linear",
                            "init_args": {"start": 0.4, "end": 1.0, "duration": 10},
                        },
                    },
                },
            },
        },
        transform=["lightning_replay.transforms.MixPairs"],
        writer="lightning_replay.writers.FirstInFirstOutWriter",
    )
    options = copy.deepcopy(config)
    options.pop("type")
    sampler = RecipeEpisodeReplayBuffer(**options).replay.sampler
    assert (sampler.num_neighbors, sampler.first.priority_exponent, sampler.first.max_size) == (3, 0.7, 64)
    assert sampler.first.importance_exponent(10) == 1.0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "needs a recipe .*, or a sampler, writer or transform"),
        ({"sampler": "lightning_replay.samplers.Nothing"}, ValueError, "which cannot be imported"),
        ({"sampler": "Nothing"}, ValueError, "which cannot be imported"),
        ({"sampler": "lightning_replay.recipes.uniform"}, ValueError, "which is no class but a function"),
        ({"sampler": "lightning_replay.transforms.MixPairs"}, TypeError, "a TorchRL Sampler is accepted"),
        (
            {"sampler": {"class_path": "lightning_replay.samplers.UniformSampler", "init_args": {"alpha": 1}}},
            ValueError,
            "UniformSampler has no argument 'alpha'; accepted are",
        ),
        ({"sampler": {"class_path": "x.Y", "arguments": {}}}, ValueError, "beside class_path only init_args"),
        ({"sampler": "lightning_replay.samplers.UniformSampler", "alpha": 1}, ValueError, "no option 'alpha'"),
        ({"recipe": "uniform", "sampler": "a.B"}, ValueError, "recipe 'uniform' chooses sampler itself"),
    ],
)
def test_parts_that_cannot_be_built_are_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rllib_ext.replay_config(**{"capacity": 50, **options})


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (PPOConfig(), ValueError, r"PPO has no replay buffer .* rllib_ext.configure\(config, levels=...\)"),
        ({"a": 1}, TypeError, r"config is \{'a': 1\}; DQNConfig\(\)"),
    ],
)
def test_configs_without_a_replay_buffer_are_told_where_to_go(config: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        rllib_ext.configure(config)
