# SPDX-License-Identifier: Apache-2.0
"""A DQN module that takes stacks of frames as they are stored: bytes, the frames first."""

from __future__ import annotations

from typing import Any, TypeGuard

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.dqn.dqn_catalog import DQNCatalog
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.core.columns import Columns


class ImageCatalog(DQNCatalog):
    """Builds the networks for images as RLlib's convolutions take them: floats from 0 to 1, channels last.

    Arguments are RLlib's; observation spaces other than uint8 ``[channels, H, W]`` stay as they are.
    """

    def __init__(self, observation_space: gym.Space[Any], *args: Any, **kwargs: Any) -> None:
        if is_image(observation_space):
            channels, height, width = observation_space.shape
            observation_space = gym.spaces.Box(0.0, 1.0, (height, width, channels), np.float32)
        super().__init__(observation_space, *args, **kwargs)


class ImageDQNModule(DefaultDQNTorchRLModule):
    """RLlib's DQN module for observations uint8 ``[channels, H, W]``, which its own convolutions do not take.

    Images are bytes on EnvRunners, in the buffer and on the way to the Learners, and become floats in the network.
    :func:`rllib_ext.configure` chooses this module where frames are stored once; by hand:
    ``.rl_module(rl_module_spec=RLModuleSpec(module_class=ImageDQNModule))``. Other observations are not changed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["catalog_class"] = kwargs.get("catalog_class") or ImageCatalog
        super().__init__(*args, **kwargs)

    def _qf_forward_helper(self, batch: dict[str, Any], encoder: Any, head: Any) -> dict[str, Any]:
        if is_image(self.observation_space):
            brightest = float(self.observation_space.high.max())
            images = batch[Columns.OBS].movedim(-3, -1).to(torch.float32) / brightest
            batch = {**batch, Columns.OBS: images}
        return super()._qf_forward_helper(batch, encoder, head)


def is_image(space: gym.Space[Any]) -> TypeGuard[gym.spaces.Box]:
    """Returns whether observations of this space are bytes ``[channels, H, W]``."""
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3
