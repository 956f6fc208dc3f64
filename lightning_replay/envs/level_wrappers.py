# SPDX-License-Identifier: Apache-2.0
"""Gymnasium environments that play the level they are told, one by one and as vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import iterate

from lightning_replay.envs.level_check import (
    checked_level,
    checked_probes,
    require_levels_by_seed,
    require_levels_to_show,
    require_no_autoreset,
)
from lightning_replay.envs.vector_infos import everywhere, of_rows, overlaid

if TYPE_CHECKING:
    from lightning_replay.levels import LevelSource

__all__ = ["LevelVectorWrapper", "LevelWrapper", "make_level_vector"]


class LevelWrapper(gymnasium.Wrapper):
    """Every episode plays one level: the one named for this reset, else ``next_level()``.

    A level is set by ``reset(seed=level_id)``; where the environment or one of its wrappers has a method
    ``set_level(level_id)``, by that method and a ``reset()`` without a seed. What names the level of a reset is, in
    this order: ``options={"level_id": 7}``, :meth:`set_level`, ``seed``, ``next_level()``. A level buffer hears of
    ``next_level`` only: for a level named otherwise, call its ``start``.

    At the first reset the environment is checked to follow its level, which takes three resets more.

    Args:
        env: the environment to wrap.
        next_level: chooses a level at the start of an episode, such as
            ``functools.partial(levels.next_level, actor=0)``; ``None`` where each reset names its level.
        seed: of the environment's own generator where levels are set by ``set_level``; else the level is the seed.
        check: whether to check; or the ids of at least two levels to check with, where not all of 0 to 7 exist.

    Attributes:
        level_id: the level being played, ``None`` before the first reset; in every info too.

    Raises:
        ValueError: an environment that ignores its level; an id that is no integer from 0 to ``2**31 - 1``; a reset
            for which nothing chooses a level.
    """

    plays_level_ids = True  # how a vector environment tells that the seed of a reset will reach set_level

    def __init__(
        self,
        env: gymnasium.Env,
        next_level: Callable[[], int] | None = None,
        *,
        seed: int | None = None,
        check: bool | Sequence[int] = True,
    ) -> None:
        super().__init__(env)
        self.level_id: int | None = None
        self._next_level = next_level
        self._seed = seed
        self._probes = checked_probes(check)
        self._named: int | None = None
        self._set_level = env.get_wrapper_attr("set_level") if env.has_wrapper_attr("set_level") else None

    def set_level(self, level_id: int) -> None:
        """Names the level of the next reset."""
        self._named = checked_level(level_id)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode of the level that is named or chosen; ``info["level_id"]`` says which."""
        if self.level_id is None:
            self._begin()
        others = dict(options or {})
        level_id = self._choose(others.pop("level_id", None), seed)
        observation, info = self._play(level_id, others or None)
        self.level_id, self._named = level_id, None
        return observation, info | {"level_id": level_id}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """A step of the environment, whose info says of which level it is."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, info | {"level_id": self.level_id}

    def _begin(self) -> None:
        if self._set_level is not None and self._seed is not None:
            self.env.reset(seed=self._seed)
        if self._probes:
            require_levels_to_show(self._first_observations, self._probes, 1, str(self.env))

    def _choose(self, option: Any, seed: int | None) -> int:
        for level_id in (option, self._named, seed):
            if level_id is not None:
                return checked_level(level_id)
        if self._next_level is None:
            raise ValueError(
                "nothing chooses a level for this reset; give next_level= to LevelWrapper, call set_level(level_id) "
                "before, or reset(seed=level_id)"
            )
        return checked_level(self._next_level())

    def _first_observations(self, level_ids: list[int]) -> list[Any]:
        return [deepcopy(self._play(level_id, None)[0]) for level_id in level_ids]

    def _play(self, level_id: int, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        if self._set_level is None:
            return self.env.reset(seed=level_id, options=options)
        self._set_level(level_id)
        return self.env.reset(options=options)


class LevelVectorWrapper(VectorWrapper):
    """Sub-environment k plays the levels of actor k, and begins the next in the step that ends its episode.

    It resets what is done by itself, so the vector environment must not (``AutoresetMode.DISABLED``;
    :func:`make_level_vector` builds it). What it returns has the layout of ``AutoresetMode.SAME_STEP``: where an
    episode ended, the observation is the next one's first, and ``infos["final_obs"]`` and ``infos["final_info"]`` hold
    what the last step gave. Sub-environments are told their level by ``reset(seed=level_id)``; those with a
    ``set_level`` method need a :class:`LevelWrapper` each. To record returns, put Gymnasium's
    ``RecordEpisodeStatistics`` around each too.

    :meth:`reset` draws a level for every sub-environment and makes the level buffer forget the older episodes of these
    actors. So it also is what comes after a buffer was loaded; before a reset in between, hand in the steps collected.
    ``seed`` and ``options={"level_id": ...}`` name levels instead, and ``levels.start`` is told of these.

    At the first reset each sub-environment is checked to follow its level, which takes three resets more.

    Args:
        env: a vector environment that does not reset itself.
        levels: where each actor's next level comes from.
        actors: a name for each sub-environment; else 0, 1, 2, …
        check: whether to check; or the ids of at least two levels to check with, where not all of 0 to 7 exist.

    Infos:
        level_id: int64 ``[num_envs]``, the level that the returned observation belongs to.
        step_level_id: int64 ``[num_envs]``, in :meth:`step` only: the level of the episode that this step, with its
            reward and its end, belongs to. It is the ``level_id`` returned together with the observation acted on.
        final_obs, final_info: in :meth:`step` only, where an episode ended; ``_final_obs`` is bool ``[num_envs]``.

    Raises:
        ValueError: a vector environment that resets itself or is told levels by seed but has ``set_level``; as many
            actors as there are not sub-environments; an environment that ignores its level.

    Example:
        >>> from lightning_replay.levels import SequentialLevels
        >>> envs = make_level_vector("CartPole-v1", 2, SequentialLevels([7, 8, 9]))
        >>> observations, infos = envs.reset()
        >>> infos["level_id"]
        array([7, 8])
        >>> while not (infos := envs.step(np.array([0, 1]))[-1]).get("_final_obs", np.zeros(2)).any():
        ...     pass
        >>> infos["step_level_id"], infos["level_id"]
        (array([7, 8]), array([9, 8]))
    """

    def __init__(
        self,
        env: VectorEnv,
        levels: LevelSource,
        *,
        actors: Sequence[int | str] | None = None,
        check: bool | Sequence[int] = True,
    ) -> None:
        super().__init__(env)
        require_no_autoreset(env)
        require_levels_by_seed(env)
        self.levels = levels
        self.actors = list(range(env.num_envs)) if actors is None else list(actors)
        if len(set(self.actors)) != env.num_envs or len(self.actors) != env.num_envs:
            raise ValueError(f"actors is {self.actors}; a different name for each of {env.num_envs} sub-environments")
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self._probes = checked_probes(check)
        self._level_ids = np.zeros(env.num_envs, np.int64)
        self._has_begun = False

    @property
    def level_ids(self) -> np.ndarray:
        """The level that each sub-environment plays, int64 ``[num_envs]``."""
        if not self._has_begun:
            raise gymnasium.error.ResetNeeded("no level is played before the first reset(); call it once")
        return self._level_ids.copy()

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode everywhere, or where ``options["reset_mask"]`` is true, of levels drawn or named.

        Args:
            seed: the levels to play: one for each sub-environment, ``None`` where it is drawn; 7 means 7, 8, 9, …
            options: ``level_id``, the same as ``seed``; ``reset_mask``, bool ``[num_envs]``; the environments' own.
        """
        others = dict(options or {})
        mask = self._checked_mask(others.get("reset_mask"))
        named = self._named(others.pop("level_id", seed))
        if not self._has_begun and self._probes:
            require_levels_to_show(self._first_observations, self._probes, self.num_envs, str(self.env))
        self._choose(mask, named)
        for row in np.flatnonzero(mask):
            self.levels.abandon_all_but_newest(self.actors[row])
        observations, infos = self.env.reset(seed=self._level_ids.tolist(), options=others or None)
        self._has_begun = True
        return observations, infos | everywhere(level_id=self.level_ids)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """A step everywhere, and the next level's first observation where an episode ended."""
        played = self.level_ids
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        done = np.logical_or(terminated, truncated)
        if done.any():
            final = {"final_obs": self._final_observations(observations, done), "final_info": of_rows(infos, done)}
            self._choose(done, [None] * self.num_envs)
            observations, begun = self.env.reset(seed=self._level_ids.tolist(), options={"reset_mask": done.copy()})
            infos = overlaid(of_rows(infos, ~done), begun) | final | {f"_{key}": done.copy() for key in final}
        infos |= everywhere(level_id=self.level_ids, step_level_id=played)
        return observations, rewards, terminated, truncated, infos

    def _checked_mask(self, mask: np.ndarray | None) -> np.ndarray:
        if mask is None:
            return np.ones(self.num_envs, np.bool_)
        if not self._has_begun:
            raise gymnasium.error.ResetNeeded("the first reset() begins everywhere; call it once without reset_mask")
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ValueError(f"reset_mask is {mask!r}; a boolean array [{self.num_envs}] is accepted")
        return mask

    def _named(self, levels: Any) -> list[int | None]:
        if levels is None:
            return [None] * self.num_envs
        if isinstance(levels, int | np.integer):
            return [checked_level(levels + row) for row in range(self.num_envs)]
        if len(levels) != self.num_envs:
            raise ValueError(f"levels are named for {len(levels)} sub-environments; there are {self.num_envs}")
        return [None if level_id is None else checked_level(level_id) for level_id in levels]

    def _choose(self, mask: np.ndarray, named: list[int | None]) -> None:
        for row in np.flatnonzero(mask):
            actor, level_id = self.actors[row], named[row]
            if level_id is None:
                level_id = checked_level(self.levels.next_level(actor))
            else:
                self.levels.start(actor, level_id)
            self._level_ids[row] = level_id

    def _first_observations(self, level_ids: list[int]) -> list[Any]:
        observations, _ = self.env.reset(seed=level_ids)
        return [deepcopy(row) for row in iterate(self.env.observation_space, observations)]

    def _final_observations(self, observations: Any, done: np.ndarray) -> np.ndarray:
        final = np.full(self.num_envs, None, dtype=object)
        for row, observation in enumerate(iterate(self.env.observation_space, observations)):
            if done[row]:
                final[row] = deepcopy(observation)
        return final


def make_level_vector(
    env: str | Callable[[], gymnasium.Env],
    num_envs: int,
    levels: LevelSource,
    *,
    actors: Sequence[int | str] | None = None,
    asynchronous: bool = False,
    seed: int | None = None,
    check: bool | Sequence[int] = True,
) -> LevelVectorWrapper:
    """A vector of one environment that plays the levels it is given, by seed or by ``set_level``.

    Args:
        env: what ``gymnasium.make`` knows, or a function that makes one environment.
        num_envs: sub-environments, each an actor.
        levels: where each actor's next level comes from.
        actors: a name for each sub-environment; else 0, 1, 2, …
        asynchronous: one process for each sub-environment.
        seed: of the environments' own generators (plus 0, 1, 2, …) where levels are set by ``set_level``.
        check: whether to check that the environment follows its level; see :class:`LevelVectorWrapper`.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}; at least one sub-environment is needed")
    make = partial(gymnasium.make, env) if isinstance(env, str) else env
    seeds = [None if seed is None else seed + row for row in range(num_envs)]
    makers = [partial(_make_level_environment, make, own) for own in seeds]
    vector = (AsyncVectorEnv if asynchronous else SyncVectorEnv)(makers, autoreset_mode=AutoresetMode.DISABLED)
    return LevelVectorWrapper(vector, levels, actors=actors, check=check)


def _make_level_environment(make: Callable[[], gymnasium.Env], seed: int | None) -> LevelWrapper:
    return LevelWrapper(make(), seed=seed, check=False)
