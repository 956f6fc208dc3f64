# SPDX-License-Identifier: Apache-2.0
"""Gymnasium environments that play named levels, single and as vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from lightning_replay.envs.step_check import checked_reset, checked_step
from lightning_replay.levels.environments.level_check import (
    checked_level,
    checked_probes,
    require_level_source,
    require_levels_to_show,
)
from lightning_replay.levels.environments.level_vectors import LevelVectorWrapper
from lightning_replay.validation import check_option, checked_count, checked_flag

if TYPE_CHECKING:  # at run time this would import torch
    from lightning_replay.levels.selector import LevelSelector

__all__ = ["LevelVectorWrapper", "LevelWrapper", "make_level_vector"]


class LevelWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Plays one level per episode: the one named for the reset, otherwise ``next_level()``.

    A level is set by ``reset(seed=level_id)``, or by ``set_level(level_id)`` and a ``reset()`` without a seed if the
    environment or one of its wrappers has that method. The level of a reset is taken, in this order, from
    ``options={"level_id": 7}``, :meth:`set_level`, ``seed``, ``next_level()``. A level buffer counts an episode in
    ``next_level``; for a level named otherwise, call its ``start``.

    The first reset checks that the environment follows its level, which takes three more resets.

    Args:
        env: the environment to wrap.
        next_level: chooses a level at the start of an episode, such as
            ``functools.partial(levels.next_level, actor=0)``; ``None`` if each reset names its level.
        seed: of the environment's own generator if levels are set by ``set_level``; otherwise the level is the seed.
        check: whether to check; or the ids of at least two levels to check with, if not all of 0 to 7 exist.

    Attributes:
        level_id: of the level being played, ``None`` before the first reset; also in every info.

    Raises:
        TypeError: an id that is not a whole number.
        ValueError: an environment that ignores its level; an id outside 0 to ``2**31 - 1``; a reset without a level.
    """

    plays_level_ids = True  # require_level_vector looks it up through all wrappers

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        next_level: Callable[[], int] | None = None,
        *,
        seed: int | None = None,
        check: bool | Sequence[int] = True,
    ) -> None:
        super().__init__(env)
        self.level_id: int | None = None
        self._next_level = next_level
        self._seed = None if seed is None else checked_count("seed", seed, 0)
        self._probes = checked_probes(check)
        self._named: int | None = None
        self._set_level = env.get_wrapper_attr("set_level") if env.has_wrapper_attr("set_level") else None

    def set_level(self, level_id: int) -> None:
        self._named = checked_level(level_id)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode on the named or chosen level, which is in ``info["level_id"]``."""
        if self.level_id is None and self._probes:
            require_levels_to_show(self._first_observations, self._probes, 1, str(self.env))
        others = dict(options or {})
        named = next((one for one in (others.pop("level_id", None), self._named, seed) if one is not None), None)
        if named is None:
            if self._next_level is None:
                raise ValueError(
                    "nothing chooses a level for this reset; give next_level= to LevelWrapper, call "
                    "set_level(level_id) before, or reset(seed=level_id)"
                )
            named = self._next_level()
        level_id = checked_level(named)
        observation, info = self._play(level_id, others or None)
        self.level_id, self._named = level_id, None
        return observation, info | {"level_id": level_id}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = checked_step(self.env.step(action), self.env)
        return observation, reward, terminated, truncated, info | {"level_id": self.level_id}

    def _first_observations(self, level_ids: list[int]) -> list[Any]:
        return [deepcopy(self._play(level_id, None)[0]) for level_id in level_ids]

    def _play(self, level_id: int, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        if self._set_level is None:
            return checked_reset(self.env.reset(seed=level_id, options=options), self.env)
        self._set_level(level_id)
        if self._seed is not None:  # of the generator, once, in a reset of its own: some environments play their seed
            self.env.reset(seed=self._seed)
            self._seed = None
            self._set_level(level_id)
        return checked_reset(self.env.reset(options=options), self.env)


def make_level_vector(
    env: str | Callable[[], gymnasium.Env[Any, Any]],
    num_envs: int,
    levels: LevelSelector,
    *,
    actors: Sequence[int | str] | None = None,
    asynchronous: bool = False,
    context: str | None = None,
    seed: int | None = None,
    check: bool | Sequence[int] = True,
) -> LevelVectorWrapper:
    """Builds a vector environment that plays levels, set by seed or by ``set_level``.

    Args:
        env: an id for ``gymnasium.make``, or a function that makes one environment.
        num_envs: number of sub-environments, each an actor.
        levels: chooses each actor's next level.
        actors: a name for each sub-environment; 0, 1, 2, … if absent.
        asynchronous: one process for each sub-environment.
        context: start method of these processes; ``None`` is that of ``multiprocessing``. ``"spawn"`` takes seconds
            each and needs ``if __name__ == "__main__"``.
        seed: of the environments' own generators (plus 0, 1, 2, …) if levels are set by ``set_level``.
        check: whether to check that the environment follows its level; see :class:`LevelVectorWrapper`.

    Raises:
        TypeError: an environment instead of its id or maker, ``levels`` that are not a level selector; what
            :class:`LevelWrapper` refuses.
        ValueError: no sub-environment; what :class:`LevelVectorWrapper` refuses.
    """
    check_option("num_envs", num_envs, Integral, "a whole number of sub-environments, at least 1", lowest=1)
    checked_flag("asynchronous", asynchronous)
    if seed is not None:
        checked_count("seed", seed, 0)
    require_level_source(levels)
    if not isinstance(env, str) and not callable(env):
        raise TypeError(f"env is {env!r}; give its id, or a function that makes one, such as lambda: MyEnv(size=5)")
    make = partial(gymnasium.make, env) if isinstance(env, str) else env
    seeds = [None if seed is None else seed + row for row in range(num_envs)]
    makers = [partial(_make_level_environment, make, own) for own in seeds]
    vector: VectorEnv[Any, Any, Any]
    if asynchronous:
        vector = AsyncVectorEnv(makers, context=context, autoreset_mode=AutoresetMode.DISABLED)
    else:
        vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    return LevelVectorWrapper(vector, levels, actors=actors, check=check)


class _LevelOfVector(LevelWrapper):
    """Has its level in the infos of resets and last steps alone: the vector adds the rest, merging costs 4 µs each."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = checked_step(self.env.step(action), self.env)
        if terminated or truncated:
            info = info | {"level_id": self.level_id}
        return observation, reward, terminated, truncated, info


def _make_level_environment(make: Callable[[], gymnasium.Env[Any, Any]], seed: int | None) -> LevelWrapper:
    return _LevelOfVector(make(), seed=seed, check=False)
