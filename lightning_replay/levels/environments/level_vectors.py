# SPDX-License-Identifier: Apache-2.0
"""Vector environments of Gymnasium whose sub-environments play the levels chosen for them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import iterate

from lightning_replay.levels.environments.level_check import (
    checked_level,
    checked_probes,
    require_level_source,
    require_level_vector,
    require_levels_to_show,
)
from lightning_replay.levels.level_ids import checked_actor

if TYPE_CHECKING:  # at run time this would import torch
    from lightning_replay.levels.selector import LevelSelector

__all__ = ["LevelVectorWrapper"]


class LevelVectorWrapper(VectorWrapper):
    """Sub-environment k plays the levels of actor k, and begins the next in the step that ends its episode.

    It resets sub-environments itself, so the vector environment must not (``AutoresetMode.DISABLED``;
    :func:`~lightning_replay.levels.environments.level_wrappers.make_level_vector` builds it). Steps have the layout of
    ``AutoresetMode.SAME_STEP``: where an episode ended, the observation is the next one's first, and
    ``infos["final_obs"]`` and ``infos["final_info"]`` hold those of the last step. Sub-environments get their level by
    ``reset(seed=level_id)``; those with a ``set_level`` method need a
    :class:`~lightning_replay.levels.environments.level_wrappers.LevelWrapper` each, and those whose returns are
    recorded Gymnasium's ``RecordEpisodeStatistics``.

    :meth:`reset` draws a level for every sub-environment and abandons the older active episodes of these actors.
    Therefore call it also after a level buffer was loaded; before a reset in between, update the levels with the steps
    collected. ``seed`` and ``options={"level_id": ...}`` name levels instead, for which ``levels.start`` is called.

    The first reset checks that each sub-environment follows its level, which takes three more resets.

    Args:
        env: a vector environment that does not reset itself.
        levels: chooses each actor's next level.
        actors: a name for each sub-environment; 0, 1, 2, … if absent.
        check: whether to check; or the ids of at least two levels to check with, if not all of 0 to 7 exist.

    Infos:
        level_id: int64 ``[num_envs]``, the level that the returned observation belongs to.
        step_level_id: int64 ``[num_envs]``, in :meth:`step` only: the level that the step, its reward and its end
            belong to, which was ``level_id`` together with the observation acted on.
        final_obs, final_info: in :meth:`step` only, where an episode ended; ``_final_obs`` is bool ``[num_envs]``.

    Raises:
        TypeError: ``levels`` is not a level selector.
        ValueError: a vector environment that resets itself or has ``set_level`` but gets levels by seed; another
            number of actors than of sub-environments; an environment that ignores its level.

    Example:
        >>> from lightning_replay.levels.environments.level_wrappers import make_level_vector
        >>> from lightning_replay.levels import SequentialLevels
        >>> envs = make_level_vector("CartPole-v1", 2, SequentialLevels(range(7, 20)))
        >>> observations, infos = envs.reset()
        >>> infos["level_id"]
        array([7, 8])
        >>> while not (infos := envs.step(np.array([0, 1]))[-1]).get("_final_obs", np.zeros(2)).any():
        ...     pass
        >>> infos["step_level_id"], infos["level_id"]
        (array([7, 8]), array([ 9, 10]))
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        levels: LevelSelector,
        *,
        actors: Sequence[int | str] | None = None,
        check: bool | Sequence[int] = True,
    ) -> None:
        super().__init__(env)
        require_level_source(levels)
        require_level_vector(env)
        self.levels = levels
        names = range(env.num_envs) if actors is None else actors
        self.actors: list[int | str] = [checked_actor(actor) for actor in names]
        if len(set(self.actors)) != env.num_envs or len(self.actors) != env.num_envs:
            raise ValueError(f"actors is {self.actors}; a different name for each of {env.num_envs} sub-environments")
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self._probes = checked_probes(check)
        self._level_ids = np.zeros(env.num_envs, np.int64)
        self._has_begun = False

    @property
    def level_ids(self) -> np.ndarray:
        """Level of each sub-environment, int64 ``[num_envs]``."""
        if not self._has_begun:
            raise gymnasium.error.ResetNeeded("no level is played before the first reset(); call it once")
        return self._level_ids.copy()

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode on drawn or named levels, everywhere or where ``options["reset_mask"]`` is true.

        Args:
            seed: the levels to play: one for each sub-environment, ``None`` where it is drawn; 7 means 7, 8, 9, …
            options: ``level_id``, the same as ``seed``; ``reset_mask``, bool ``[num_envs]``; the environments' own.
        """
        others = dict(options or {})
        mask = others.get("reset_mask")
        if mask is None:
            mask = np.ones(self.num_envs, np.bool_)
        elif not self._has_begun:
            raise gymnasium.error.ResetNeeded("the first reset() begins everywhere; call it once without reset_mask")
        elif not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ValueError(f"reset_mask is {mask!r}; a boolean array [{self.num_envs}] is accepted")
        named = self._named(others.pop("level_id", seed))
        if not self._has_begun and self._probes:
            require_levels_to_show(self._first_observations, self._probes, self.num_envs, str(self.env))
        chosen = self._choose(mask, named)
        for row in np.flatnonzero(mask):
            self.levels.abandon_all_but_newest(self.actors[row])
        observations, infos = self._reset(chosen.tolist(), others or None)
        self._level_ids, self._has_begun = chosen, True
        return observations, infos | everywhere(level_id=self.level_ids)

    def step(  # type: ignore[override]  # Gymnasium's wrapper returns type variables that nothing binds
        self, actions: Any
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Takes a step; where an episode ended, the observation is the first of the next level."""
        played = self.level_ids
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        done = np.logical_or(terminated, truncated)
        if np.count_nonzero(done):  # a tenth of any() for a few environments
            final = {"final_obs": self._final_observations(observations, done), "final_info": of_rows(infos, done)}
            self._level_ids = self._choose(done, [None] * self.num_envs)
            observations, begun = self._reset(self._level_ids.tolist(), {"reset_mask": done.copy()})
            infos = overlaid(of_rows(infos, ~done), begun) | final | {f"_{key}": done.copy() for key in final}
        infos |= everywhere(level_id=self.level_ids, step_level_id=played)
        return observations, rewards, terminated, truncated, infos

    def _reset(self, level_ids: list[int], options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        # Gymnasium's vectors take a list; their base class declares a number.
        return self.env.reset(seed=level_ids, options=options)  # type: ignore[arg-type]

    def _named(self, levels: Any) -> list[int | None]:
        """Returns the level of each sub-environment, ``None`` where it is drawn."""
        if levels is None:
            return [None] * self.num_envs
        if isinstance(levels, int | np.integer):
            levels = [levels + row for row in range(self.num_envs)]
        if len(levels) != self.num_envs:
            raise ValueError(f"levels are named for {len(levels)} sub-environments; there are {self.num_envs}")
        return [None if level is None else self.levels.checked(checked_level(level)) for level in levels]

    def _choose(self, mask: np.ndarray, named: list[int | None]) -> np.ndarray:
        chosen = self._level_ids.copy()
        for row in np.flatnonzero(mask):
            actor, level_id = self.actors[row], named[row]
            if level_id is None:
                level_id = checked_level(self.levels.next_level(actor))
            else:
                self.levels.start(actor, level_id)
            chosen[row] = level_id
        return chosen

    def _first_observations(self, level_ids: list[int]) -> list[Any]:
        observations, _ = self._reset(level_ids)
        return [deepcopy(row) for row in iterate(self.env.observation_space, observations)]

    def _final_observations(self, observations: Any, done: np.ndarray) -> np.ndarray:
        final = np.full(self.num_envs, None, dtype=object)
        for row, observation in enumerate(iterate(self.env.observation_space, observations)):
            if done[row]:
                final[row] = deepcopy(observation)
        return final


def of_rows(infos: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Restricts infos to some sub-environments, bool ``[num_envs]``; a key without a mask ``_key`` is of all."""
    kept: dict[str, Any] = {}
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        mask = rows & infos.get(f"_{key}", True)
        if mask.any():
            kept[key] = of_rows(value, rows) if isinstance(value, dict) else value
            kept[f"_{key}"] = mask
    return kept


def overlaid(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merges two infos; ``above`` takes precedence where both have a sub-environment. Neither is changed."""
    merged = dict(below)
    for key, value in above.items():
        if key.startswith("_") and key[1:] in above:
            continue
        mask = above.get(f"_{key}")
        if mask is None or key not in below or not isinstance(value, dict | np.ndarray):
            merged[key] = value
        elif isinstance(value, dict):
            merged[key] = overlaid(below[key], value)
        else:
            merged[key] = below[key].astype(np.result_type(below[key], value))
            merged[key][mask] = value[mask]
        if mask is not None:
            merged[f"_{key}"] = mask | below.get(f"_{key}", False)
    return merged


def everywhere(**values: np.ndarray) -> dict[str, np.ndarray]:
    """Builds entries of vector infos with a mask of all sub-environments."""
    return values | {f"_{key}": np.ones(len(value), np.bool_) for key, value in values.items()}
