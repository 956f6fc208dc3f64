# SPDX-License-Identifier: Apache-2.0
"""Stacks of frames from episodes: stored once, drawn as they came, refused where they are no stacks of bytes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

import rllib_ext
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.images import ImageDQNModule
from tests.unit.rllib_ext.episodes import numbered

K = 3
NETWORK = {"conv_filters": [[4, 3, 2]], "fcnet_hiddens": [8], "head_fcnet_hiddens": [8], "num_atoms": 1}
NETWORK |= {"dueling": True, "double_q": True, "epsilon": 0.1, "std_init": 0.1}


def stack(newest: int, wrap: Any = lambda image: image) -> Any:
    """Frames ``newest - 2 .. newest`` (none before 0) of a game whose frame v is filled with v."""
    frames = [np.full((5, 4), max(newest - place, 0), np.uint8) for place in reversed(range(K))]
    return wrap(np.stack(frames))


def game(name: str, length: int, start: int = 0, wrap: Any = lambda image: image, **ends: bool) -> SingleAgentEpisode:
    observations = [stack(t, wrap) for t in range(start, start + length + 1)]
    return numbered(name, length, start=start, observations=observations, **ends)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["uniform", "prioritized", "surprise_retention"])
@pytest.mark.parametrize("n_step", [1, 2])
def test_drawn_stacks_are_those_the_episodes_had(recipe: str, n_step: int) -> None:
    buffer = RecipeEpisodeReplayBuffer(recipe, capacity=60, frame_stack=K, seed=0)
    buffer.form_returns(n_step, 1.0)
    for start in range(0, 40, 4):
        buffer.add(game("a", 4, start, terminated=start == 36))
    assert len(buffer) == 40 and buffer.replay.storage.frames_held == 41
    episodes = buffer.sample(num_items=100, n_step=n_step, gamma=1.0)
    for episode in episodes:
        rows = slice(0, len(episode))
        first, following = episode.get_observations(rows), episode.get_observations(slice(1, len(episode) + 1))
        steps = episode.get_extra_model_outputs("n_step", rows)
        assert first.dtype == following.dtype == np.uint8
        for before, after, taken, reward in zip(first, following, steps, episode.get_rewards(rows), strict=True):
            number = int(before.max())
            assert reward == sum(range(number, number + taken))
            np.testing.assert_array_equal(before, stack(number))
            np.testing.assert_array_equal(after, stack(number + taken))


@pytest.mark.parametrize(
    ("image_key", "wrap"),
    [
        ("camera", lambda image: {"camera": image, "arm": np.ones(2, np.float32)}),
        (("arm", 1), lambda image: {"arm": (np.ones(2, np.float32), image)}),
    ],
)
def test_an_entry_of_a_dict_is_named(image_key: Any, wrap: Any) -> None:
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=60, frame_stack=K, image_key=image_key, seed=0)
    buffer.add(game("a", 20, wrap=wrap))
    (block,) = buffer.sample(num_items=30)
    drawn = block.get_observations(slice(0, 30))
    images = drawn["camera"] if image_key == "camera" else drawn["arm"][1]
    for image in images:
        np.testing.assert_array_equal(image, stack(int(image.max())))
    assert buffer.replay.storage.frames_held == 21


def test_several_entries_of_a_dict_are_stored_once_each() -> None:
    def cameras(image: np.ndarray) -> dict[str, Any]:
        return {"front": image, "arm": (np.ones(2, np.float32), image[:, :2] + 7), "state": np.zeros(3, np.float32)}

    buffer = RecipeEpisodeReplayBuffer(
        "prioritized", capacity=60, frame_stack=K, image_key=["front", ["arm", "1"]], seed=0
    )
    buffer.add(game("a", 20, wrap=cameras))
    (block,) = buffer.sample(num_items=30)
    drawn = block.get_observations(slice(0, 30))
    for front, wrist in zip(drawn["front"], drawn["arm"][1], strict=True):
        np.testing.assert_array_equal(front, stack(int(front.max())))
        np.testing.assert_array_equal(wrist, front[:, :2] + 7)
    storage = buffer.replay.storage
    assert storage.frames_held == 21 and storage.frame_bytes == 5 * 4 + 2 * 4
    single = RecipeEpisodeReplayBuffer("uniform", capacity=60, frame_stack=1, image_key=["front"], seed=0)
    single.add(game("a", 20, wrap=lambda image: {"front": np.moveaxis(image, 0, -1)}))
    (block,) = single.sample(num_items=30)
    assert block.get_observations(slice(0, 30))["front"].shape == (30, 5, 4, K)
    assert single.replay.storage.frames_held == 21
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=60, frame_stack=K, image_key=("front", "arm"))
    with pytest.raises(ValueError, match=r"/front/arm is no stack.*several by a list.*nested one by a tuple"):
        buffer.add(game("a", 4, wrap=cameras))


@pytest.mark.parametrize(
    ("options", "wrap", "message"),
    [
        ({}, lambda image: image.astype(np.float32), r"is float32 \[3, 5, 4\], and .* uint8 \[3, H, W\], oldest first"),
        ({}, lambda image: np.moveaxis(image, 0, -1), r"is uint8 \[5, 4, 3\].*lightning_replay.envs:Atari-v0"),
        ({"frame_stack": 4}, lambda image: image, r"uint8 \[3, 5, 4\], and .*FrameStackObservation\(env, 4\)"),
        ({}, lambda image: image[:, :, 0], r"observation is uint8 \[3, 5\]"),
        ({}, lambda image: {"camera": image}, "the observations have observation/camera. Name the entry by image_key"),
        ({"image_key": "camera"}, lambda image: {"eye": image}, "/camera is no stack.* have observation/eye"),
        ({"image_key": "camera"}, lambda image: image, "leave it out where the observation itself is the stack"),
    ],
)
def test_what_is_no_stack_of_bytes_is_refused_at_the_first_rows(options: Any, wrap: Any, message: str) -> None:
    buffer = RecipeEpisodeReplayBuffer("uniform", **{"capacity": 60, "frame_stack": K, **options})
    with pytest.raises(ValueError, match=message):
        buffer.add(game("a", 5, wrap=wrap))
    assert len(buffer) == 0
    if not options:
        buffer.add(game("a", 5))
        assert len(buffer) == 5


def test_rows_released_for_room_are_not_closed() -> None:
    #  frames    a 8 9 10 11    b 9 10 11 12    c 98 99 100 101: of the 6 there is room for c needs 4, so a and b leave
    options = {"capacity": 20, "frame_stack": K, "frame_capacity": 6, "seed": 0}
    buffer = RecipeEpisodeReplayBuffer("uniform", **options)
    buffer.add([game("a", 1, start=10), game("b", 1, start=11)])
    assert len(buffer) == 2
    buffer.add(game("c", 1, start=100))
    assert buffer.replay.storage.occupancy.slots().tolist() == [2]
    buffer.modules["default_policy"].replay.end_episodes()
    assert buffer.replay.storage.all_rows["next", "truncated"][:3].flatten().tolist() == [False, False, True]


def built_module(kind: type, space: gym.Space) -> Any:
    torch.manual_seed(0)
    module = kind(
        observation_space=space, action_space=gym.spaces.Discrete(3), inference_only=False, model_config=NETWORK
    )
    module.make_target_networks()
    return module


@pytest.mark.parametrize(("brightest", "shape"), [(255, (K, 12, 10)), (1, (K, 12, 10)), (255, (12, 10, K))])
def test_the_module_sees_bytes_as_rllibs_own_sees_floats_with_the_channels_last(brightest: int, shape: Any) -> None:
    """A single image, ``frame_stack=1``, may have its channels last already."""
    generator = np.random.default_rng(0)
    images = generator.integers(brightest + 1, size=(2, 6, *shape), dtype=np.uint8)
    ours = built_module(ImageDQNModule, gym.spaces.Box(0, brightest, shape, np.uint8))
    theirs = built_module(DefaultDQNTorchRLModule, gym.spaces.Box(0, 1, (12, 10, K), np.float32))
    theirs.load_state_dict(ours.state_dict())
    bytes_given = dict(zip((Columns.OBS, Columns.NEXT_OBS), torch.from_numpy(images), strict=True))
    last = {key: column.movedim(1, -1) if shape[0] == K else column for key, column in bytes_given.items()}
    floats_given = {key: column.float() / brightest for key, column in last.items()}
    for key, column in ours.forward_train(bytes_given).items():
        torch.testing.assert_close(column, theirs.forward_train(floats_given)[key])


def configured(config: Any, **options: Any) -> Any:
    replay = rllib_ext.replay_config("uniform", capacity=100, **options)
    config.environment("CartPole-v1").training(replay_buffer_config=replay)
    return rllib_ext.configure(config, require_cpus=False)


def test_dqn_gets_the_module_where_the_observation_is_the_stack() -> None:
    def chosen(config: Any) -> Any:
        return config.rl_module_spec.module_class

    assert chosen(configured(DQNConfig(), frame_stack=K)) is ImageDQNModule
    assert chosen(configured(DQNConfig())) is DefaultDQNTorchRLModule
    assert chosen(configured(DQNConfig(), frame_stack=K, image_key="camera")) is DefaultDQNTorchRLModule
    assert chosen(configured(DQNConfig(), modules={"a": {"frame_stack": K}})) is ImageDQNModule

    class Mine(DefaultDQNTorchRLModule):
        pass

    own = DQNConfig().rl_module(rl_module_spec=RLModuleSpec(module_class=Mine))
    assert chosen(configured(own, frame_stack=K)) is Mine
    sac = SACConfig().training(train_batch_size_per_learner=16)
    assert chosen(configured(sac, frame_stack=K)) is not ImageDQNModule
