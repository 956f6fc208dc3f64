# SPDX-License-Identifier: Apache-2.0
"""Levels without a score: of a known set, drawn from an unbounded one, or edited and waiting to be played."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch

from lightning_replay.levels.level_ids import LEVEL_IDS, checked_level_id, checked_level_ids
from lightning_replay.validation import check_callable, check_option, checked_count

__all__ = [
    "EditedLevels",
    "KnownLevels",
    "LevelEditor",
    "LevelGenerator",
    "NewLevels",
    "fingerprint",
    "unseen_levels",
]

LevelGenerator = Callable[[torch.Generator], int]
LevelEditor = Callable[[int, torch.Generator], int]
_DRAWS = 1_000  # a generator that repeats known levels this often is taken to have no others


class NewLevels:
    """Draws levels of an unbounded set until one is neither stored nor being played; tracks none of them.

    Args:
        generate: draws an id; uniform below 2^31 if absent. It may repeat itself: after many known levels in a row, a
            known level is played again.
    """

    def __init__(self, generate: LevelGenerator | None) -> None:
        self._generate = generate

    @property
    def is_exhausted(self) -> bool:
        """Whether every level has a score."""
        return False

    @property
    def has_idle(self) -> bool:
        """Whether some level without a score is not being played."""
        return True

    def choose(self, generator: torch.Generator, is_known: Callable[[int], bool]) -> int:
        """Chooses a level without a score, if possible one that no actor plays.

        Args:
            generator: of the choice.
            is_known: whether a level has a score or is being played.
        """
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

    def end(self, level_id: int) -> None:
        """Marks a level without a score as played by no actor any more."""

    def scored(self, level_id: int) -> None:
        """Removes a level that got its first score."""

    def state_dict(self, played: Mapping[int, int]) -> dict[str, Any]:
        """State as tensors and plain values; ``played`` is the number of active episodes by level."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; raises ``ValueError`` for a state of other levels."""
        if state:
            raise ValueError("the saved levels are a known set; build the buffer with levels=... as it was")


class KnownLevels(NewLevels):
    """A set of levels, in which drawing, beginning and scoring a level take constant time.

    Args:
        level_ids: distinct, not negative.
    """

    def __init__(self, level_ids: list[int]) -> None:
        super().__init__(None)
        self._count = len(level_ids)
        self._fingerprint = fingerprint(level_ids)
        self._idle, self._played = _Bag(level_ids), _Bag([])

    @property
    def is_exhausted(self) -> bool:
        """Whether every level has a score."""
        return not self._idle.items and not self._played.items

    @property
    def has_idle(self) -> bool:
        """Whether some level without a score is not being played."""
        return bool(self._idle.items)

    def choose(self, generator: torch.Generator, is_known: Callable[[int], bool]) -> int:
        """Chooses a level that no actor plays, or one being played if there is no other."""
        bag = (self._idle if self._idle.items else self._played).items
        return bag[int(torch.randint(len(bag), (), generator=generator, device="cpu"))]

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
        """Levels without a score, in the order they are drawn from, and the set's fingerprint."""
        return {
            "fingerprint": self._fingerprint,
            "idle": torch.tensor(self._idle.items, dtype=torch.int64, device="cpu"),
            "played": torch.tensor(self._played.items, dtype=torch.int64, device="cpu"),
            "times": torch.tensor([played[level] for level in self._played.items], dtype=torch.int64, device="cpu"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; raises ``ValueError`` for a state of other levels."""
        if state.get("fingerprint") != self._fingerprint:
            raise ValueError(
                f"the saved levels are not the {self._count} levels this buffer was built with; build it with the same "
                "levels in the same order"
            )
        self._idle, self._played = _Bag(state["idle"].tolist()), _Bag(state["played"].tolist())


class EditedLevels:
    """Queue of levels that an editor made from replayed ones; a full queue drops its oldest.

    Args:
        capacity: most levels in the queue.
        is_known: whether a level has a score or is being played; such levels are not queued, and skipped when they
            became known while they waited.
    """

    def __init__(self, capacity: int, is_known: Callable[[int], bool]) -> None:
        self._is_known = is_known
        self._queue: deque[int] = deque(maxlen=capacity)

    @property
    def is_empty(self) -> bool:
        """Whether no level waits that is still unknown."""
        return all(map(self._is_known, self._queue))

    def put(self, level_id: int) -> None:
        """Queues a level unless it is known or in the queue."""
        if not self._is_known(level_id) and level_id not in self._queue:
            self._queue.append(level_id)

    def pop(self) -> int | None:
        """Removes and returns the oldest unknown level; ``None`` if there is none."""
        while self._queue:
            level_id = self._queue.popleft()
            if not self._is_known(level_id):
                return level_id
        return None

    def state_dict(self) -> list[int]:
        """Ids in the queue, oldest first."""
        return list(self._queue)

    def load_state_dict(self, state: Iterable[int]) -> None:
        """Restores :meth:`state_dict`."""
        self._queue = deque(state, maxlen=self._queue.maxlen)


def unseen_levels(
    levels: int | Iterable[int] | None, capacity: int | None, generate: LevelGenerator | None, *, is_edited: bool
) -> tuple[NewLevels, list[int], int]:
    """Returns the source of new levels, the ids of a known set, and the number of levels that may have a score.

    Arguments as those of :class:`~lightning_replay.levels.LevelBuffer`; ``is_edited``: whether it has an editor.

    Raises:
        TypeError: a capacity that is not a whole number.
        ValueError: arguments that contradict each other, or what :func:`checked_level_ids` refuses.
    """
    if generate is not None:
        check_callable("generate", generate, "a function from a torch.Generator to the id of a new level, or None")
    if levels is None:
        accepted = "a whole number of at least 1 for an unbounded level set, or give levels=..."
        if capacity is None:
            raise ValueError(f"capacity is None; it must be {accepted}")
        check_option("capacity", capacity, Integral, accepted, lowest=1)
        return NewLevels(generate), [], checked_count("capacity", capacity, of="levels")
    ids = checked_level_ids(levels)
    if capacity is not None and checked_count("capacity", capacity, of="levels") != len(ids):
        raise ValueError(f"capacity is {capacity} for {len(ids)} given levels, all of which are kept; leave it out")
    if is_edited or generate is not None:
        raise ValueError("editor and generate make other levels than those given; leave levels out for them")
    return KnownLevels(ids), ids, len(ids)


def fingerprint(level_ids: list[int]) -> str:
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
