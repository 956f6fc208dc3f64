# SPDX-License-Identifier: Apache-2.0
"""Ids of levels and actors: their checks, and the fingerprint of a set, without torch."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from numbers import Integral
from typing import Any

from lightning_replay.levels.level_set import LevelSet
from lightning_replay.options import LARGEST_COUNT, check_option, checked_count, plain_number

Actor = int | str

LEVEL_IDS = 2**31  # every environment accepts seeds below it
#: Level and steps of the episodes that a LevelWrapper broke off, while it calls ``next_level``. A variable of the
#: context, since between the two there may be any function of a user.
broken_off: ContextVar[Sequence[tuple[int | None, int]]] = ContextVar("broken_off", default=())
_MOST_HELD_OUT = 1_000_000  # each is looked up among the training levels


def checked_level_ids(levels: int | Iterable[int] | LevelSet) -> list[int]:
    """Returns the ids of a known set, or raises an error for repeated ids or objects without a :class:`LevelSet`."""
    if isinstance(levels, LevelSet):
        return list(range(len(levels)))
    if isinstance(levels, Iterable):
        ids = list(levels)
        if any(isinstance(level, str | Mapping) for level in ids):
            raise TypeError(f"levels has {ids[0]!r}; put objects into LevelSet(levels), or give whole numbers")
        ids = [checked_level_id(level) for level in ids]
    else:
        accepted = f"distinct whole numbers, or their number, at most {LARGEST_COUNT}, for 0, 1, 2, ..."
        check_option("levels", levels, Integral, accepted, highest=LARGEST_COUNT)
        ids = list(range(operator.index(levels)))
    if not ids:
        raise ValueError(f"levels is {levels!r}; give at least one level, or levels=None and a capacity")
    if len(set(ids)) < len(ids):
        twice = next(level for level, times in Counter(ids).items() if times > 1)
        raise ValueError(f"level {twice} is given twice; each level has one id")
    return ids


def checked_level_id(level_id: object) -> int:
    """Returns an id as an ``int``. It must be a whole number from 0 on."""
    return checked_count("level_id", plain_number(level_id), 0)


def checked_held_out(levels: int | Iterable[int]) -> Sequence[int]:
    """Returns the ids to test on. A number stands for as many of the largest ids."""
    accepted = f"how many, from 1 to {_MOST_HELD_OUT}, or different ids from 0 to 2**31 - 1"
    if isinstance(levels, str) or not isinstance(levels, Iterable):
        check_option("held_out_levels", levels, Integral, accepted, 1, _MOST_HELD_OUT)
        return range(LEVEL_IDS - int(levels), LEVEL_IDS)  # the largest: levels to train on are numbered from 0
    ids = list(levels)
    for place, one in enumerate(ids):
        check_option(f"held_out_levels[{place}]", one, Integral, "a whole number from 0 to 2**31 - 1", 0, LEVEL_IDS - 1)
    if not ids or len({*ids}) < len(ids):
        raise ValueError(f"held_out_levels is {levels!r}; it must be {accepted}")
    return [int(one) for one in ids]


def checked_actor(actor: Any) -> Actor:
    """Returns the number or name of an actor, or raises ``TypeError`` for other objects."""
    if isinstance(actor, str):
        return actor
    try:
        return operator.index(actor)
    except TypeError:
        raise TypeError(f"an actor is a number or a name; got {actor!r}") from None
