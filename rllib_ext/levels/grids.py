# SPDX-License-Identifier: Apache-2.0
"""The grids of the level-replay paper as RLlib's convolutions take them; importing this module registers them.

``.environment("rllib_ext.levels.grids:MultiRoom-N4-Random-OneHot-v0")`` imports it wherever environments are made. They
need the extra ``grids``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import register, registry

_SIZES = np.array([11, 6, 4])  # kinds, colours and states of MiniGrid's cells
_MAZES = [f"ObstructedMazeGamut-{difficulty}" for difficulty in ("Easy", "Medium", "Hard")]


class OneHotGrid(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Encodes kind, colour and state, uint8 ``[W, H, 3]``, as one-hot vectors, float32 ``[W, H, 21]``."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        width, height, _ = env.observation_space.shape or (0, 0, 0)
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (width, height, int(_SIZES.sum())), np.float32)
        self._offsets = np.cumsum(_SIZES) - _SIZES

    def observation(self, observation: np.ndarray) -> np.ndarray:
        hot = np.zeros((*observation.shape[:2], int(_SIZES.sum())), np.float32)
        np.put_along_axis(hot, observation.astype(np.int64) + self._offsets, 1.0, axis=-1)
        return hot


def make(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """Makes an environment of :mod:`lightning_replay.envs`, named without its version, with one-hot observations."""
    return OneHotGrid(gymnasium.make(f"lightning_replay.envs:{name}-v0", **options))


for _name in ("MultiRoom-N4-Random", *_MAZES):
    if f"{_name}-OneHot-v0" not in registry:
        register(f"{_name}-OneHot-v0", entry_point=partial(make, _name))
