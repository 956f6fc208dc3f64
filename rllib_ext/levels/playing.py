# SPDX-License-Identifier: Apache-2.0
"""Callbacks of EnvRunners that choose each episode's level before its environment is reset."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import ray

from lightning_replay.envs.step_check import MAX_EPISODE_STEPS, LimitedEpisodes
from rllib_ext.levels.environments import LEVEL_ID, PlayedLevel
from rllib_ext.levels.evaluation import test_of
from rllib_ext.rllib_compat import Attached

_SERVER = Attached[tuple[Any, str]]("level_server")  # the actor of a LevelServer, and an id of this process


def attach_player(env_runner: Any, server: Any) -> None:
    """Attaches the actor of a :class:`~rllib_ext.levels.server.LevelServer` to an EnvRunner that has none."""
    if _SERVER.of(env_runner) is None:
        _SERVER.set(env_runner, (server, uuid.uuid4().hex))


def wrap_environments(*, env_runner: Any, env: Any, **ignored: Any) -> None:
    """Wraps the environments of an EnvRunner into :class:`PlayedLevel`; the callback ``on_environment_created``.

    Evaluation waits for whole episodes, which are limited there.
    """
    seed, runner = env_runner.config.seed, env_runner.worker_index or 0
    for index, single in enumerate(env.envs):
        if env_runner.config.in_evaluation:
            single = LimitedEpisodes(single, MAX_EPISODE_STEPS)
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
