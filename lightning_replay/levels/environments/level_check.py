# SPDX-License-Identifier: Apache-2.0
"""Checks that environments play the levels chosen for them, by their resets and first observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, VectorEnv

from lightning_replay.levels.level_ids import LEVEL_IDS
from lightning_replay.validation import check_option, checked_entries

__all__ = [
    "LEVEL_IDS",
    "checked_level",
    "checked_probes",
    "require_level_source",
    "require_level_vector",
    "require_levels_to_show",
]

_ACCEPTED = (
    "Accepted are environments whose reset(seed=level_id) fixes the layout of the episode (they draw it from "
    "self.np_random after super().reset(seed=seed)), and those with a method set_level(level_id), which is called "
    "before reset. Correct the environment, or give check=False if its level does not show in the first observation"
)


def checked_level(level_id: Any) -> int:
    """Returns a level's id as an int; refuses other numbers than whole ones from 0 to ``2**31 - 1``."""
    check_option("level_id", level_id, Integral, "a whole number from 0 to 2**31 - 1", 0, LEVEL_IDS - 1)
    return int(level_id)


def require_level_source(levels: Any) -> None:
    """Raises ``TypeError`` unless ``levels`` is a level selector."""
    if not callable(getattr(levels, "next_level", None)):  # importing the class itself would import torch
        raise TypeError(
            f"levels is {levels!r}; accepted are LevelBuffer(...), UniformLevels(...) and SequentialLevels(...) of "
            "lightning_replay.levels, which choose the level each sub-environment plays next"
        )


def checked_probes(check: bool | Sequence[int]) -> tuple[int, ...]:
    """Returns the levels to check with: none for ``False``, 0 to 7 for ``True``, otherwise two or more given ones."""
    if isinstance(check, bool):
        return tuple(range(8)) if check else ()
    accepted = "True, False or at least two different ids of levels"
    probes = tuple(dict.fromkeys(map(checked_level, checked_entries("check", check, accepted))))
    if len(probes) < 2:
        raise ValueError(f"check is {check!r}; it must be {accepted}")
    return probes


def require_levels_to_show(
    first_observations: Callable[[list[int]], list[Any]], probes: Sequence[int], num_envs: int, name: str
) -> None:
    """Checks that a level's first observations repeat and that levels differ; three resets for a correct environment.

    Args:
        first_observations: resets each environment to its level and returns one observation each.
        probes: the levels to compare, at least two.
        num_envs: number of environments that reset at once.
        name: of the environment, for the error.
    """
    rounds = [[probes[(row + shift) % len(probes)] for row in range(num_envs)] for shift in range(len(probes))]
    first, again = first_observations(rounds[0]), first_observations(rounds[0])
    for level_id, before, after in zip(rounds[0], first, again, strict=True):
        if not data_equivalence(before, after):
            raise ValueError(
                f"{name} does not follow its level: level {level_id}, begun twice, gave two different first "
                f"observations. {_ACCEPTED}"
            )
    alike = list(range(num_envs))
    for level_ids in rounds[1:]:
        following = first_observations(level_ids)
        alike = [row for row in alike if data_equivalence(first[row], following[row], exact=True)]
        if not alike:
            return
    raise ValueError(
        f"{name} ignores its level: the levels {', '.join(map(str, sorted(probes)))} all gave the same first "
        f"observation. {_ACCEPTED}"
    )


def require_level_vector(env: VectorEnv[Any, Any, Any]) -> None:
    """Raises ``ValueError`` for a vector environment in which levels cannot be set by ``reset(seed=...)``.

    It resets its sub-environments by itself, or these have a ``set_level`` that no :class:`LevelWrapper` calls.
    """
    # all vectors of one environment class share the metadata, which holds the mode of the vector built last
    mode = getattr(env.unwrapped, "autoreset_mode", env.metadata.get("autoreset_mode"))
    if mode != AutoresetMode.DISABLED:
        raise ValueError(
            f"{env} resets its sub-environments by itself (autoreset_mode is {mode}), before a level can be chosen; "
            "AutoresetMode.DISABLED is accepted: build it with make_level_vector(env, num_envs, levels), or give "
            "autoreset_mode=AutoresetMode.DISABLED to SyncVectorEnv or AsyncVectorEnv"
        )
    call = getattr(env.unwrapped, "call", None)
    if call is None:
        return
    sets = call("has_wrapper_attr", "set_level")
    wrapped = call("has_wrapper_attr", "plays_level_ids")
    if any(has and not reaches for has, reaches in zip(sets, wrapped, strict=True)):
        raise ValueError(
            f"the sub-environments of {env} have a method set_level, which a seed does not reach; build the vector by "
            "make_level_vector(env, num_envs, levels), or put LevelWrapper(env, check=False) around each of them"
        )
