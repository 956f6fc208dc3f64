# SPDX-License-Identifier: Apache-2.0
"""A known set of levels that grows and shrinks during a run, and what a save tells of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lightning_replay.levels.level_ids import checked_level_ids
from lightning_replay.levels.level_set import LevelSet
from lightning_replay.options import check_kind


class KnownLevels:
    """Ids of the levels that may be drawn, and of the retired levels.

    Args:
        levels: Distinct ids, their number for 0, 1, 2, ..., or a :class:`LevelSet`.
    """

    def __init__(self, levels: int | Iterable[int] | LevelSet) -> None:
        self.levels: LevelSet | None = levels if isinstance(levels, LevelSet) else None
        self.ids: list[int]  #: Levels that may be drawn, in the order in which they were given.
        self.members: set[int]  #: The same.
        self.retired: set[int]
        self.added: set[int]  #: Ids, and not objects, that were added after the construction.
        self.set_sets(checked_level_ids(levels), set(), set())
        if self.levels is not None:
            self.levels.check_savable(map(self.levels.level, self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, levels: Any, groups: Any = None, weights: Any = None) -> list[int]:
        """Adds objects to the level set, or ids, and returns the new ids."""
        if self.levels is not None:
            check_kind("levels", levels, Iterable, "objects, one for each new level")
            objects = list(levels)
            self.levels.check_savable(objects)
            new = self.levels.add(objects, groups=groups, weights=weights)
        else:
            if groups is not None or weights is not None:
                raise ValueError("groups and weights are of the objects of a LevelSet, and these levels are ids")
            if not isinstance(levels, Iterable):
                raise TypeError(f"levels is {levels!r}; give the ids of the new levels, [n]")
            new = checked_level_ids(levels)
            if known := [one for one in new if one in self.members or one in self.retired]:
                raise ValueError(f"levels has {known[:5]}, which are or were levels of this set; give other ids")
            self.added.update(new)
        self.ids += new
        self.members.update(new)
        return new

    def retire(self, level_ids: Iterable[int]) -> set[int]:
        """Removes levels for good, and returns the ids among them that were members."""
        leaving = self.members.intersection(level_ids)
        self.set_sets([one for one in self.ids if one not in leaving], self.retired | leaving, self.added)
        return leaving

    @property
    def fingerprint(self) -> str:
        """Digest of the names, or of the objects if they have no names. It is empty for ids."""
        if self.levels is None or self.levels.names is None:
            return "" if self.levels is None else self.levels.digest
        return hashlib.sha256("\n".join(self.levels.names).encode()).hexdigest()

    def sets(self) -> tuple[list[int], set[int], set[int]]:
        """Returns copies of the ids, of the retired, and of the added ones."""
        return self.ids[:], self.retired.copy(), self.added.copy()

    def set_sets(self, level_ids: list[int], retired: set[int], added: set[int]) -> None:
        """Sets what :meth:`sets` returned."""
        self.added = added
        self.ids = level_ids
        self.members = set(level_ids)
        self.retired = retired

    def state_dict(self) -> dict[str, Any]:
        """Returns the ids, and the names or a digest of the objects that they stand for."""
        return {
            "ids": torch.tensor(self.ids, dtype=torch.int64, device="cpu"),
            "retired": torch.tensor(sorted(self.retired), dtype=torch.int64, device="cpu"),
            "added": torch.tensor(sorted(self.added), dtype=torch.int64, device="cpu"),
            "names": None if self.levels is None else self.levels.names,
            "objects": 0 if self.levels is None else len(self.levels),
            "digest": "" if self.levels is None else self.levels.digest,
        }

    def translation(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Returns the present id of each saved level, retired ones included, that has one.

        Ids that were added before the save are taken from it. Objects must be in the level set already.

        Raises:
            ValueError: The save is of ids and not of objects, of ids that were not given, or of other objects.
        """
        saved = [*state["ids"].tolist(), *state["retired"].tolist()]
        names = state["names"]
        if (self.levels is None) != (not state["objects"]):
            raise ValueError("the saved levels are ids and these are objects, or the other way round; give the same")
        if self.levels is None:
            there = self.members | self.retired | {*state["added"].tolist()}
            if missing := [one for one in state["ids"].tolist() if one not in there]:
                raise ValueError(
                    f"the saved levels {missing[:5]} are not among the {len(self.ids)} given; give them too, and "
                    "retire them after the load"
                )
            return {one: one for one in saved}
        if names is not None and self.levels.names is not None:
            place = {name: number for number, name in enumerate(self.levels.names)}
            return {one: place[names[one]] for one in saved if names[one] in place}
        count = int(state["objects"])
        if count > len(self.levels) or self.levels.digest_of(count) != state["digest"]:
            raise ValueError(
                f"the first {count} of the {len(self.levels)} levels are not the saved ones; give the same in the same "
                "order, and further ones after them, or a LevelSet with name="
            )
        return {one: one for one in saved}

    def load_state_dict(self, state: Mapping[str, Any], translation: Mapping[int, int]) -> None:
        """Retires the levels that were retired in the save. Levels that it does not know stay."""
        was_retired = {translation[one] for one in state["retired"].tolist() if one in translation}
        # The saved order decides the places from which levels are drawn.
        saved = [translation[one] for one in state["ids"].tolist() if one in translation]
        every = dict.fromkeys([*saved, *self.ids, *sorted(self.retired)])
        self.set_sets([one for one in every if one not in was_retired], was_retired, {*state["added"].tolist()})
