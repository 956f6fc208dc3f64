# SPDX-License-Identifier: Apache-2.0
"""Callbacks of EnvRunners that choose each episode's level."""

from __future__ import annotations

import functools
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray

from lightning_replay.envs.building import MAX_EPISODE_STEPS, LimitedEpisodes
from rllib_ext.levels.evaluation import LEVEL_ID, DrawnLevel, PlayedLevel, test_of
from rllib_ext.rllib_compat import Attached, ongoing_episode

_SUPPLY = Attached["LevelSupply"]("level_supply")


class LevelSupply:
    """Draws the levels of an EnvRunner without waiting for them, one call for each round of sampling.

    The first step of a round draws by the newest scores. It draws as many levels as the last round had episodes, minus
    the leftover levels. If levels run out, each further call draws a quarter of this number. Leftover levels come first
    in the next round.
    """

    def __init__(self, server: Any, env_runner: Any) -> None:
        self._server, self._runner, self._process = server, env_runner.worker_index or 0, uuid.uuid4().hex
        self._ahead: deque[DrawnLevel] = deque()
        self._broken_off: list[str] = []
        self.begun: int = 0  # episodes of this round
        # Levels of the round before. In the first round each environment draws one level at a time.
        self.begun_before: int = 4 * env_runner.config.num_envs_per_env_runner
        self.is_due: bool = False  # whether a round is to begin

    def take(self, broken_off: str | None) -> DrawnLevel:
        """Returns the level of an episode that is to begin, in place of one that ended without being done, if any."""
        self._broken_off += [broken_off] if broken_off else []
        self.begun += 1
        if not self._ahead:
            self._draw(max(-(-self.begun_before // 4), 1))
        return self._ahead.popleft()

    def begin_round(self) -> None:
        """Draws the levels of the next round in one call."""
        self.is_due = False
        self._draw(self.begun_before - len(self._ahead))

    def _draw(self, count: int) -> None:
        names = [uuid.uuid4().hex for _ in range(count)]
        if names or self._broken_off:
            answer = self._server.draw.remote(self._runner, self._process, names, self._broken_off)
            self._broken_off = []
            levels = functools.cache(lambda: ray.get(answer))
            self._ahead.extend((one, functools.partial(lambda at: levels()[at], n)) for n, one in enumerate(names))


def attach_player(env_runner: Any, server: Any) -> None:
    """Attaches the actor of a :class:`~rllib_ext.levels.server.LevelServer` to an EnvRunner that has none."""
    if _SUPPLY.of(env_runner) is None:
        _SUPPLY.set(env_runner, LevelSupply(server, env_runner))


def end_round(*, env_runner: Any, **ignored: Any) -> None:
    """Notes the end of a round of sampling. The callback ``on_sample_end``."""
    supply = _SUPPLY.of(env_runner)
    if supply is not None:  # not in evaluation
        supply.begun_before = supply.begun
        supply.begun = 0
        supply.is_due = True


def wrap_environments(*, env_runner: Any, env: Any, **ignored: Any) -> None:
    """Wraps the environments of an EnvRunner into :class:`PlayedLevel`. The callback ``on_environment_created``."""
    seed = env_runner.config.seed
    runner = env_runner.worker_index or 0
    for index, single in enumerate(env.envs):
        if env_runner.config.in_evaluation:
            single = LimitedEpisodes(single, MAX_EPISODE_STEPS)  # evaluation waits for whole episodes
        own = None if seed is None else seed + runner * env.num_envs + index
        env.envs[index] = PlayedLevel(single, seed=own, check=False)


def begin_episode(
    *, episode: Any, env_runner: Any, env: Any, env_index: int, held_out: Sequence[int], **ignored: Any
) -> None:
    """Sets the level of an episode, in evaluation one of ``held_out``. The callback ``on_episode_created``."""
    played: PlayedLevel = env.envs[env_index]
    if env_runner.config.in_evaluation:
        level_id = test_of(env_runner, held_out).level_of(env_index, played)
        drawn: DrawnLevel = episode.id_, lambda: level_id
    else:
        supply = played.supply = _SUPPLY.of(env_runner)
        assert supply is not None
        # an episode that never began passes its level on
        drawn = played.drawn if played.is_waiting else supply.take(played.drawn[0] if played.is_running else None)
    episode.id_ = drawn[0]

    def choose() -> int:
        """Returns the level of the next episode of one environment."""
        # If a fragment has ended, another object has taken the place of the episode.
        ongoing_episode(env_runner, env_index).custom_data[LEVEL_ID] = drawn[1]()
        return drawn[1]()

    played.drawn = drawn
    played.choose = choose
    played.is_waiting = True
    played.is_running = False
