# SPDX-License-Identifier: Apache-2.0
"""On the EnvRunners: each episode's level is asked for before its environment is reset."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import ray

from lightning_replay.levels.environments.level_wrappers import LevelWrapper

LEVEL_ID = "level_id"  # in infos, and in the custom data of episodes
_ATTRIBUTE = "level_player"  # of EnvRunners


class PlayedLevel(LevelWrapper):
    """Plays the level it is told, and knows how far it is.

    Attributes:
        told: the level it was told last.
        episode_id: RLlib's, of the episode it was told it for.
        waits: whether that one has not begun.
        runs: whether it has begun and is not done.
    """

    told = 0
    episode_id: str | None = None
    waits = False
    runs = False

    def tell(self, level_id: int, episode_id: str) -> None:
        """Names the level of the next reset."""
        self.set_level(level_id)
        self.told = level_id
        self.episode_id, self.waits, self.runs = episode_id, True, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins the episode."""
        self.waits, self.runs = False, True
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """A step of the environment."""
        result = super().step(action)
        self.runs = not (result[2] or result[3])
        return result


class LevelPlayer:
    """Asks the level buffer for the levels of one EnvRunner.

    Args:
        server: the actor of a :class:`~rllib_ext.levels.server.LevelServer`.
    """

    def __init__(self, server: Any) -> None:
        self.server = server
        self._process = uuid.uuid4().hex

    def level_of(self, runner: int, env_index: int, env: PlayedLevel, episode_id: str) -> int:
        """The level of an episode that begins; that of the episode before, if it never began."""
        return int(
            ray.get(
                self.server.begin.remote(
                    (runner, env_index),
                    self._process,
                    episode_id,
                    instead_of=env.episode_id if env.waits else None,
                    broken_off=env.episode_id if env.runs else None,
                )
            )
        )


def follow(env_runner: Any, server: Any) -> None:
    """From now on the environments of an EnvRunner play the levels of this server."""
    if getattr(env_runner, _ATTRIBUTE, None) is None:
        setattr(env_runner, _ATTRIBUTE, LevelPlayer(server))


def wrap_environments(*, env_runner: Any, env: Any, **ignored: Any) -> None:
    """What RLlib calls as ``on_environment_created``: each environment of the vector can be told its level.

    Args:
        env_runner: whose environments were made.
        env: the vector of them.
        ignored: what else RLlib passes.
    """
    seed, runner = env_runner.config.seed, env_runner.worker_index or 0
    for index, single in enumerate(env.envs):
        own = None if seed is None else seed + runner * env.num_envs + index
        env.envs[index] = PlayedLevel(single, seed=own, check=False)


def begin_episode(
    *, episode: Any, env_runner: Any, env: Any, env_index: int, held_out: Sequence[int], **ignored: Any
) -> None:
    """What RLlib calls as ``on_episode_created``, before the environment is reset: names the level of the reset.

    Args:
        episode: without steps yet; its custom data gets ``level_id``.
        env_runner: that plays it.
        env: the vector of environments.
        env_index: the one that is reset.
        held_out: levels of environments that evaluate.
        ignored: what else RLlib passes.
    """
    played = env.envs[env_index]
    if env_runner.config.in_evaluation:
        from rllib_ext.levels.evaluation import test_of

        level_id = test_of(env_runner, held_out).level_of(env_index, played)
    else:
        player: LevelPlayer = getattr(env_runner, _ATTRIBUTE)
        level_id = player.level_of(env_runner.worker_index or 0, env_index, played, episode.id_)
    played.tell(level_id, episode.id_)
    episode.custom_data[LEVEL_ID] = level_id
