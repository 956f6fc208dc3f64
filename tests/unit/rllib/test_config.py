# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import rllib_ext
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer

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


def part(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_replay.{name}", "init_args": arguments}


def test_parts_by_class_path_with_arguments() -> None:
    exponent = part("schedules.Linear", start=0.4, end=1.0, duration=10)
    prioritized = part("samplers.PrioritizedSampler", priority_exponent=0.7, importance_exponent=exponent)
    config = rllib_ext.replay_config(
        capacity=64,
        seed=1,
        sampler=part("samplers.NeighborhoodMixupSampler", num_neighbors=3, first=prioritized),
        transform=["lightning_replay.transforms.MixPairs"],
        writer="lightning_replay.writers.FirstInFirstOutWriter",
    )
    sampler = buffer_of(config).replay.sampler
    assert (sampler.num_neighbors, sampler.first.priority_exponent, sampler.first.max_size) == (3, 0.7, 64)
    assert sampler.first.importance_exponent(10) == 1.0


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
