# SPDX-License-Identifier: Apache-2.0
"""Callbacks of EnvRunners that choose each episode's level before its environment is reset."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import ray

from rllib_ext.levels.environments import LEVEL_ID, PlayedLevel
from rllib_ext.levels.evaluation import test_of
from rllib_ext.rllib_compat import Attached


class LevelPlayer:
    """Gets the levels of one EnvRunner from the level buffer.

    Args:
        server: the actor of a :class:`~rllib_ext.levels.server.LevelServer`.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._process = uuid.uuid4().hex

    def level_of(self, runner: int, env_index: int, env: PlayedLevel, episode_id: str) -> int:
        """Returns the level of an episode that begins; that of the episode before, if it never began."""
        return int(
            ray.get(
                self._server.begin.remote(
                    (runner, env_index),
                    self._process,
                    episode_id,
                    instead_of=env.episode_id if env.is_waiting else None,
                    broken_off=env.episode_id if env.is_running else None,
                )
            )
        )


_PLAYER = Attached[LevelPlayer]("level_player")


def attach_player(env_runner: Any, server: Any) -> None:
    """Attaches a :class:`LevelPlayer` to an EnvRunner that has none."""
    if _PLAYER.of(env_runner) is None:
        _PLAYER.set(env_runner, LevelPlayer(server))


def wrap_environments(*, env_runner: Any, env: Any, **ignored: Any) -> None:
    """Wraps the environments of an EnvRunner into :class:`PlayedLevel`; the callback ``on_environment_created``."""
    seed, runner = env_runner.config.seed, env_runner.worker_index or 0
    for index, single in enumerate(env.envs):
        own = None if seed is None else seed + runner * env.num_envs + index
        env.envs[index] = PlayedLevel(single, seed=own, check=False)


def begin_episode(
    *, episode: Any, env_runner: Any, env: Any, env_index: int, held_out: Sequence[int], **ignored: Any
) -> None:
    """Sets the level of an episode, also in its custom data; the callback ``on_episode_created``, before the reset.

    Environments that evaluate play levels of ``held_out``.
    """
    played = env.envs[env_index]
    if env_runner.config.in_evaluation:
        level_id = test_of(env_runner, held_out).level_of(env_index, played)
    else:
        player = _PLAYER.of(env_runner)
        assert player is not None
        level_id = player.level_of(env_runner.worker_index or 0, env_index, played, episode.id_)
    played.set_next(level_id, episode.id_)
    episode.custom_data[LEVEL_ID] = level_id
