# SPDX-License-Identifier: Apache-2.0
"""Stacks of frames among RLlib's observations: their column, their form, and the module that learns from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.dqn.dqn_catalog import DQNCatalog
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.core.columns import Columns as RLlibColumns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rllib_ext.rllib_compat import module_spec_of

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    from rllib_ext.episodes import Columns


def image_columns(image_key: Any) -> Any:
    """Returns the columns of entries of the observations: a tuple names a nested one, a list several, ``None`` all."""
    if isinstance(image_key, list):
        return [image_columns(tuple(entry) if isinstance(entry, list) else entry) for entry in image_key]
    entries = () if image_key is None else image_key if isinstance(image_key, tuple) else (image_key,)
    return ("observation", *map(str, entries))


def check_stacks(storage: Any, observation: Columns) -> None:
    """Refuses observations, by the columns of the first rows, whose frames a storage cannot store once."""
    from lightning_replay.storage.frames import FrameStorage

    if not isinstance(storage, FrameStorage):
        return
    stack = storage.frame_stack
    leaves = {leaf.key: leaf for leaf in observation.leaves}
    for name, leaf in (("/".join(key), leaves.get(key)) for key in storage.image_keys):
        if leaf is None:
            raise ValueError(
                f"frame_stack is {stack}, and {name} is no stack of frames: the observations have "
                f"{', '.join(map('/'.join, leaves))}. Name the entry by image_key, as image_key='camera', several by a "
                "list and a nested one by a tuple (in YAML a list in the list), and leave it out where the observation "
                "itself is the stack. Nothing was stored"
            )
        if leaf.dtype != np.uint8 or not storage.takes_shape(leaf.shape):
            raise ValueError(
                f"{name} is {leaf.dtype} {list(leaf.shape)}, and frame_stack={stack} stores frames of stacks uint8 "
                f"[{stack}, H, W], oldest first (frame_stack=1 also images without that axis). Give such observations "
                "to the algorithm: lightning_replay.envs:Atari-v0 has them, and gymnasium.wrappers."
                f"FrameStackObservation(env, {stack}) makes them of images; leave out wrappers and connectors that "
                "make floats of them or put the frames last, as RLlib's wrap_atari_for_new_api_stack does "
                "(rllib_ext.configure gives DQN a module that takes bytes). Nothing was stored"
            )


def choose_module(config: AlgorithmConfig, samples: list[AlgorithmConfig]) -> None:
    """Gives DQN a module that takes bytes, if the observation itself is a stack whose frames are stored once."""
    # RLlib's own takes floats with the channels last, four times the memory. A module that the config names stays.
    buffers = [sample.replay_buffer_config for sample in samples]
    every = [one for given in buffers for one in (given, *(given.get("modules") or {}).values()) if one]
    stacked = any(one.get("frame_stack") is not None and one.get("image_key") is None for one in every)
    if module_spec_of(config) is not None or not stacked:
        return
    if samples[0].get_default_rl_module_spec().module_class is DefaultDQNTorchRLModule:
        config.rl_module(rl_module_spec=RLModuleSpec(module_class=ImageDQNModule))


class ImageCatalog(DQNCatalog):
    """Builds the networks for images as RLlib's convolutions take them: floats from 0 to 1, channels last."""

    def __init__(self, observation_space: gym.Space[Any], *args: Any, **kwargs: Any) -> None:
        if is_image(observation_space):
            channels, *sides = shape = observation_space.shape
            shape = shape if has_channels_last(observation_space) else (*sides, channels)
            observation_space = gym.spaces.Box(0.0, 1.0, shape, np.float32)
        super().__init__(observation_space, *args, **kwargs)


class ImageDQNModule(DefaultDQNTorchRLModule):
    """RLlib's DQN module for observations uint8 ``[K, H, W]`` or ``[H, W, C]``, which its convolutions do not take.

    Images are bytes on EnvRunners, in the buffer, and on the way to the Learners, and become floats in the network.
    :func:`rllib_ext.configure` chooses this module if frames are stored once. By hand:
    ``.rl_module(rl_module_spec=RLModuleSpec(module_class=ImageDQNModule))``. Other observations are not changed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["catalog_class"] = kwargs.get("catalog_class") or ImageCatalog
        super().__init__(*args, **kwargs)

    def _qf_forward_helper(self, batch: dict[str, Any], encoder: Any, head: Any) -> dict[str, Any]:
        if is_image(self.observation_space):
            # Floats only here: as bytes, images take a quarter of the memory everywhere before.
            brightest = float(self.observation_space.high.max())
            images = batch[RLlibColumns.OBS]
            images = images if has_channels_last(self.observation_space) else images.movedim(-3, -1)
            batch = {**batch, RLlibColumns.OBS: images.to(torch.float32) / brightest}
        return super()._qf_forward_helper(batch, encoder, head)


def is_image(space: gym.Space[Any]) -> TypeGuard[gym.spaces.Box]:
    """Returns whether observations of this space are bytes ``[K, H, W]`` or ``[H, W, C]``."""
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def has_channels_last(space: gym.spaces.Box) -> bool:
    """Returns whether the last axis of a single image holds the channels."""
    return space.shape[-1] < space.shape[0]
