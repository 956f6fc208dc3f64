# SPDX-License-Identifier: Apache-2.0
"""Levels of any kind, such as prompts, task dictionaries, maps and files, by id."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np

from lightning_replay.options import check_kind, checked_numbers

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LevelSet"]


class LevelSet(Sequence[dict[str, Any]]):
    """Objects as levels: the object at position ``i`` is level ``i``. Also a map-style dataset of a DataLoader.

    Item ``i`` is a dictionary with ``level_id`` and the entries of an object that is a mapping, or else the object
    as ``level``. States of level buffers refer to the objects by :attr:`digest`, and :meth:`save` writes the objects.

    Args:
        levels: Objects, one for each level. They must not change later.
        groups: Name for each object, such as the family of a prompt, or a function from an object to a name. See
            :meth:`~lightning_replay.levels.LevelBuffer.group_stats`.
        weights: Prior weights, above 0, one for each object: factors of the probabilities of new levels, and of the
            probabilities by score.
        key: Function from an object to plain values that identify it. It is for objects that are neither text, numbers,
            arrays, paths, nor lists and dictionaries of them.
        name: Column of the ids in a data set, or a function from an object to its id: text or a whole number. Saves
            then refer to the objects by these names, so that the set may grow, shrink, and change its order.

    Raises:
        ValueError: No objects, another number of groups or weights, a weight that is not above 0, or a name given
            twice.

    Example:
        >>> prompts = LevelSet([{"question": "1 + 1 ="}, {"question": "2 + 3 ="}], groups=["easy", "hard"])
        >>> prompts[1]
        {'question': '2 + 3 =', 'level_id': 1}
    """

    def __init__(
        self,
        levels: Iterable[Any],
        *,
        groups: Sequence[str] | Callable[[Any], str] | None = None,
        weights: Sequence[float] | None = None,
        key: Callable[[Any], Any] | None = None,
        name: str | Callable[[Any], str | int] | None = None,
    ) -> None:
        if key is not None and not callable(key):
            raise TypeError(f"key is {key!r}; it must be a function from a level to plain values that identify it")
        if name is not None and not callable(name) and not isinstance(name, str):
            raise TypeError(f"name is {name!r}; it must be a column, or a function from a level to its name")
        self._key = key
        self._name = name
        self._group = groups if callable(groups) else None
        self._objects: list[Any] = []
        self._digests: dict[int, str] = {}
        #: Group of each level, if groups were given.
        self.groups: list[str] | None = None if groups is None else []
        #: Weight of each level, float64, if weights were given.
        self.weights: np.ndarray | None = None if weights is None else np.zeros(0)
        #: Name of each level by which saves refer to it, if ``name`` was given.
        self.names: list[str] | None = None if name is None else []
        self.add(levels, groups=None if callable(groups) else groups, weights=weights)

    def add(
        self, levels: Iterable[Any], *, groups: Sequence[str] | None = None, weights: Sequence[float] | None = None
    ) -> list[int]:
        """Appends objects and returns their ids, which are their places.

        A :class:`~lightning_replay.levels.LevelBuffer` of this set has a separate ``add``, which calls this method.

        Args:
            levels: Objects, one for each new level.
            groups: Name for each object, if the set has groups that no function makes.
            weights: Weight of each object, if the set has weights, 1 if absent.

        Raises:
            ValueError: As the constructor. Nothing is added.
        """
        check_kind("levels", levels, Iterable, "objects, one for each level")
        if isinstance(levels, Mapping | str):
            raise TypeError(f"levels is {levels!r:.80}; give a list of objects, one for each level")
        new = list(levels)
        if not new:
            raise ValueError("levels has no object; give at least one")
        if any(isinstance(level, Mapping) and "level_id" in level for level in new):
            raise ValueError("a level has an entry 'level_id', which is the place of the level; give it another name")
        if isinstance(groups, str):
            raise TypeError(f"groups is {groups!r}; give one name for each level, or a function from a level to one")
        if self._group is not None and groups is None:
            groups = list(map(self._group, new))
        if self.weights is not None and weights is None:
            weights = [1.0] * len(new)
        for option, given, has_any in (("groups", groups, self.groups), ("weights", weights, self.weights)):
            if (given is None) != (has_any is None):
                raise ValueError(
                    f"{option} is {given}, and this set was built {'with' if given is None else 'without'}"
                )
            if given is not None and len(given) != len(new):
                raise ValueError(f"{option} has {len(given)} entries for {len(new)} levels; give one for each")
        numbers = None
        if weights is not None:
            numbers = np.array(checked_numbers("weights", np.asarray(weights).tolist()))
            if numbers.min() <= 0:
                raise ValueError(f"weights has {numbers.min()}; each must be above 0")
        if self.names is not None:
            self.names += self._checked_names(new)
        if self.groups is not None and groups is not None:
            self.groups += map(str, groups)
        if self.weights is not None and numbers is not None:
            self.weights = np.append(self.weights, numbers)
        self._objects += new
        return list(range(len(self) - len(new), len(self)))

    def _checked_names(self, levels: list[Any]) -> list[str]:
        names = []
        for number, level in enumerate(levels):
            if isinstance(self._name, str):
                if not isinstance(level, Mapping) or self._name not in level:
                    raise ValueError(
                        f"name is {self._name!r} and object {number} is {level!r}, which has no such entry"
                    )
                name = level[self._name]
            else:
                assert self._name is not None
                name = self._name(level)
            if not isinstance(name, str | Integral):
                raise TypeError(f"the name of level {number} is {name!r}; it must be text or a whole number")
            names.append(str(name))
        times = Counter([*(self.names or ()), *names])
        if twice := [name for name in names if times[name] > 1]:
            raise ValueError(f"the name {twice[0]!r} is given twice; each level has one name")
        return names

    def __len__(self) -> int:
        return len(self._objects)

    def level(self, level_id: SupportsIndex) -> Any:
        """Returns the object of an id as it was given."""
        place = operator.index(level_id)
        if not 0 <= place < len(self):
            raise IndexError(
                f"level {place} is none of the levels 0 to {len(self) - 1}. Workers of a DataLoader do not have levels "
                "that are added during an iteration; use num_workers=0, or add levels between iterations"
            )
        return self._objects[place]

    def __getitem__(self, level_id: Any) -> Any:
        level = self.level(level_id)
        return {**(level if isinstance(level, Mapping) else {"level": level}), "level_id": operator.index(level_id)}

    def __repr__(self) -> str:
        return f"LevelSet({len(self)} levels)"

    @property
    def digest(self) -> str:
        """SHA-256 of the objects, or of what ``key`` returns for them, in hexadecimal."""
        return self.digest_of(len(self))

    def digest_of(self, count: int) -> str:
        """Returns the digest of the first ``count`` levels.

        :meta private:
        """
        if count not in self._digests:
            found = hashlib.sha256()
            for plain in itertools.islice(self._plain(self._key), count):
                found.update(json.dumps(plain, sort_keys=True, default=_digest).encode() + b"\n")
            self._digests[count] = found.hexdigest()
        return self._digests[count]

    def check_savable(self, levels: Iterable[Any]) -> None:
        """Refuses, by a ``TypeError``, objects to be added that no save could tell apart.

        :meta private:
        """
        if self.names is None:
            for _ in self._plain(self._key, levels):
                pass

    def _plain(self, key: Callable[[Any], Any] | None = None, levels: Iterable[Any] | None = None) -> Iterator[Any]:
        for place, level in enumerate(self._objects if levels is None else levels):
            try:
                yield _plain(level if key is None else key(level))
            except TypeError as error:
                raise TypeError(
                    f"level {place} is {level!r}, of which {error}: a save takes text, numbers, arrays, paths, and "
                    "lists and dictionaries by text of them; give key=, a function from a level to such values"
                ) from None

    def save(self, path: str | Path) -> None:
        """Writes objects, groups, and weights into ``path``, a directory or a URL of fsspec.

        Arrays are written as tensors, and paths as text.

        Raises:
            TypeError: An object has other values.
        """
        from lightning_replay.saving import write_state

        weights = None if self.weights is None else self.weights.tolist()
        write_state(path, {"levels": [*self._plain()], "groups": self.groups, "weights": weights}, of="LevelSet")

    @classmethod
    def load(cls, path: str | Path, key: Callable[[Any], Any] | None = None) -> Self:
        """Reads what :meth:`save` wrote."""
        from lightning_replay.saving import read_state

        state = read_state(path)
        return cls(state["levels"], groups=state["groups"], weights=state["weights"], key=key)


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"the names {list(value)[:3]} of a dictionary are not all text")
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"a {type(value).__name__} is no plain value")
    import torch  # here, since processes that only step environments do without

    return torch.from_numpy(array.copy())


def _digest(tensor: Tensor) -> Any:
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(tensor.numpy().tobytes()).hexdigest()]
