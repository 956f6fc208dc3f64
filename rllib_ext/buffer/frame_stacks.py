# SPDX-License-Identifier: Apache-2.0
"""Stacks of frames among RLlib's observations: their column, their form, and the module that learns from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    from rllib_ext.episodes.columns import Columns


def image_column(image_key: Any) -> tuple[str, ...]:
    """Returns the column of the stacks.

    Args:
        image_key: the entry of Dict or Tuple observations that holds them, a name, a position or a sequence of these;
            ``None`` where the observation itself is the stack.

    Example:
        >>> image_column(None), image_column("camera"), image_column(["arm", 0])
        (('observation',), ('observation', 'camera'), ('observation', 'arm', '0'))
    """
    entries = () if image_key is None else image_key if isinstance(image_key, list | tuple) else (image_key,)
    return ("observation", *map(str, entries))


def check_stacks(storage: Any, observation: Columns) -> None:
    """Refuses observations, by the columns of the first rows, whose frames a storage cannot store once."""
    from lightning_replay.storage.frames import FrameStorage

    if not isinstance(storage, FrameStorage):
        return
    stack = storage.frame_stack
    leaf = next((leaf for leaf in observation.leaves if leaf.key == storage.image_key), None)
    if leaf is None:
        entries = ["/".join(leaf.key) for leaf in observation.leaves]
        raise ValueError(
            f"frame_stack is {stack}, and {'/'.join(storage.image_key)} is no stack of frames: the observations have "
            f"{', '.join(entries)}. Name the entry by image_key, as image_key='camera', and leave it out where the "
            "observation itself is the stack. Nothing was stored"
        )
    if leaf.dtype == np.uint8 and len(leaf.shape) in (3, 4) and leaf.shape[0] == stack and np.prod(leaf.shape):
        return
    raise ValueError(
        f"{'/'.join(leaf.key)} is {leaf.dtype} {list(leaf.shape)}, and frame_stack={stack} stores frames of stacks "
        f"uint8 [{stack}, H, W], oldest first. Give such observations to the algorithm: lightning_replay.envs:Atari-v0 "
        f"has them, and gymnasium.wrappers.FrameStackObservation(env, {stack}) makes them of images; leave out "
        "wrappers and connectors that make floats of them or put the frames last, as RLlib's "
        "wrap_atari_for_new_api_stack does (rllib_ext.configure gives DQN a module that takes bytes). "
        "Nothing was stored"
    )


def choose_module(config: AlgorithmConfig, samples: list[AlgorithmConfig]) -> None:
    """Gives DQN a module that takes bytes, where the observation itself is a stack whose frames are stored once.

    RLlib's own takes floats with the channels last, four times the memory. A module that the config names stays.

    Args:
        config: of any algorithm with a replay buffer; changed in place.
        samples: of its search spaces, or the config alone.
    """
    buffers = [sample.replay_buffer_config for sample in samples]
    every = [one for given in buffers for one in (given, *(given.get("modules") or {}).values()) if one]
    stacked = any(one.get("frame_stack") is not None and one.get("image_key") is None for one in every)
    if config._rl_module_spec is not None or not stacked:
        return
    from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec

    from rllib_ext.buffer.image_module import ImageDQNModule

    if samples[0].get_default_rl_module_spec().module_class is DefaultDQNTorchRLModule:
        config.rl_module(rl_module_spec=RLModuleSpec(module_class=ImageDQNModule))
