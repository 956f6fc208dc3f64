# SPDX-License-Identifier: Apache-2.0
"""Callbacks of EnvRunners that choose each episode's level, and the grids of the level-replay paper."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import ray
from gymnasium.envs.registration import register, registry

from lightning_replay.envs.building import MAX_EPISODE_STEPS, LimitedEpisodes
from rllib_ext.levels.evaluation import LEVEL_ID, PlayedLevel, test_of
from rllib_ext.rllib_compat import Attached

_SERVER = Attached[tuple[Any, str]]("level_server")  # the actor of a LevelServer, and an id of this process


def attach_player(env_runner: Any, server: Any) -> None:
    """Attaches the actor of a :class:`~rllib_ext.levels.server.LevelServer` to an EnvRunner that has none."""
    if _SERVER.of(env_runner) is None:
        _SERVER.set(env_runner, (server, uuid.uuid4().hex))


def wrap_environments(*, env_runner: Any, env: Any, **ignored: Any) -> None:
    """Wraps the environments of an EnvRunner into :class:`PlayedLevel`; the callback ``on_environment_created``."""
    seed, runner = env_runner.config.seed, env_runner.worker_index or 0
    for index, single in enumerate(env.envs):
        if env_runner.config.in_evaluation:
            single = LimitedEpisodes(single, MAX_EPISODE_STEPS)  # evaluation waits for whole episodes
        own = None if seed is None else seed + runner * env.num_envs + index
        env.envs[index] = PlayedLevel(single, seed=own, check=False)


def begin_episode(
    *, episode: Any, env_runner: Any, env: Any, env_index: int, held_out: Sequence[int], **ignored: Any
) -> None:
    """Sets the level of an episode, in evaluation one of ``held_out``; the callback ``on_episode_created``."""
    played = env.envs[env_index]
    if env_runner.config.in_evaluation:
        level_id = test_of(env_runner, held_out).level_of(env_index, played)
    else:
        attached = _SERVER.of(env_runner)
        assert attached is not None
        server, process = attached
        waiting = played.episode_id if played.is_waiting else None  # an episode that never began passes its level on
        broken_off = played.episode_id if played.is_running else None
        player = (env_runner.worker_index or 0, env_index)
        level_id = int(
            ray.get(server.begin.remote(player, process, episode.id_, instead_of=waiting, broken_off=broken_off))
        )
    played.set_next(level_id, episode.id_)
    episode.custom_data[LEVEL_ID] = level_id


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
