# SPDX-License-Identifier: Apache-2.0
"""Levels without a score: of a known set, or drawn from an unbounded one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightning_replay.levels.level_ids import LEVEL_IDS, checked_level_id

__all__ = ["LevelEditor", "LevelGenerator", "UnseenLevels", "fingerprint"]

LevelGenerator = Callable[[torch.Generator], int]
LevelEditor = Callable[[int, torch.Generator], int]
_DRAWS = 1_000  # a generator that repeats known levels this often is taken to have no others


class UnseenLevels:
    """Draws a level without a score, if possible one that no actor plays, in constant time.

    Of a known set it keeps the levels without a score; of an unbounded set nothing.

    Args:
        level_ids: of a known set, distinct; ``None`` if the level set is unbounded.
        generate: draws an id of an unbounded set; uniform below 2^31 if absent. It may repeat itself: after many known
            levels in a row, a known level is played again.
    """

    def __init__(self, level_ids: list[int] | None, generate: LevelGenerator | None = None) -> None:
        self._generate = generate
        self._count = None if level_ids is None else len(level_ids)
        self._fingerprint = None if level_ids is None else fingerprint(level_ids)
        self._idle, self._played = _Bag(level_ids or []), _Bag([])

    @property
    def is_exhausted(self) -> bool:
        """Whether every level has a score."""
        return self._count is not None and not self._idle.items and not self._played.items

    @property
    def has_idle(self) -> bool:
        """Whether some level without a score is not being played."""
        return self._count is None or bool(self._idle.items)

    def choose(self, generator: torch.Generator, is_known: Callable[[int], bool]) -> int:
        """Chooses a level; ``is_known`` is whether a level of an unbounded set has a score or is being played."""
        if self._count is not None:
            bag = self._idle.items or self._played.items
            return bag[int(torch.randint(len(bag), (), generator=generator, device="cpu"))]
        for _ in range(_DRAWS):
            if self._generate is None:
                level_id = int(torch.randint(LEVEL_IDS, (), generator=generator, device="cpu"))
            else:
                level_id = checked_level_id(self._generate(generator))
            if not is_known(level_id):
                break
        return level_id

    def begin(self, level_id: int) -> None:
        """Marks a level as being played."""
        if self._idle.discard(level_id):
            self._played.add(level_id)

    def end(self, level_id: int) -> None:
        """Marks a level without a score as played by no actor any more."""
        if self._played.discard(level_id):
            self._idle.add(level_id)

    def scored(self, level_id: int) -> None:
        """Removes a level that got its first score."""
        self._idle.discard(level_id)
        self._played.discard(level_id)

    def state_dict(self, played: Mapping[int, int]) -> dict[str, Any]:
        """Returns the levels without a score in the order they are drawn from, and the set's fingerprint.

        ``played`` is the number of active episodes by level.
        """
        if self._count is None:
            return {}
        columns = {
            "idle": self._idle.items,
            "played": self._played.items,
            "times": [played[level_id] for level_id in self._played.items],
        }
        tensors = {name: torch.tensor(ids, dtype=torch.int64, device="cpu") for name, ids in columns.items()}
        return {"fingerprint": self._fingerprint} | tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; raises ``ValueError`` for a state of other levels."""
        if self._count is None:
            if state:
                raise ValueError("the saved levels are a known set; build the buffer with levels=... as it was")
            return
        if state.get("fingerprint") != self._fingerprint:
            raise ValueError(
                f"the saved levels are not the {self._count} levels this buffer was built with; build it with the same "
                "levels in the same order"
            )
        self._idle, self._played = _Bag(state["idle"].tolist()), _Bag(state["played"].tolist())


def fingerprint(level_ids: Sequence[int]) -> str:
    """Returns a hash of ids in their order."""
    return hashlib.sha256(np.array(level_ids, np.int64).tobytes()).hexdigest()


class _Bag:
    """Distinct numbers, with removal and access by position in constant time."""

    def __init__(self, items: list[int]) -> None:
        self.items = list(items)
        self._position = {item: place for place, item in enumerate(self.items)}

    def add(self, item: int) -> None:
        self._position[item] = len(self.items)
        self.items.append(item)

    def discard(self, item: int) -> bool:
        """Removes an item and returns whether it was there."""
        place = self._position.pop(item, None)
        if place is None:
            return False
        last = self.items.pop()
        if last != item:
            self.items[place] = last
            self._position[last] = place
        return True
