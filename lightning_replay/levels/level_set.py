# SPDX-License-Identifier: Apache-2.0
"""Levels of any kind, such as prompts, task dictionaries, maps and files, by id."""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
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
        levels: Objects, one for each level.
        groups: Name for each object, such as the family of a prompt; or a function from an object to one. See
            :meth:`~lightning_replay.levels.LevelBuffer.group_stats`.
        weights: Prior weights, above 0, one for each object: factors of the probabilities of new levels, and of those
            by score.
        key: from an object to plain values that identify it, for objects that are neither text, numbers, arrays, paths
            nor lists and dictionaries of them.

    Raises:
        ValueError: no objects; another number of groups or weights; a weight that is not above 0.

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
    ) -> None:
        check_kind("levels", levels, Iterable, "objects, one for each level")
        self._objects = list(levels)
        if not self._objects:
            raise ValueError("levels has no object; give at least one")
        if key is not None and not callable(key):
            raise TypeError(f"key is {key!r}; it must be a function from a level to plain values that identify it")
        self._key = key
        if any(isinstance(level, Mapping) and "level_id" in level for level in self._objects):
            raise ValueError("a level has an entry 'level_id', which is the place of the level; give it another name")
        if isinstance(groups, str):
            raise TypeError(f"groups is {groups!r}; give one name for each level, or a function from a level to one")
        named = map(groups, self._objects) if callable(groups) else groups
        self.groups: list[str] | None = None if named is None else list(map(str, named))
        self.weights: np.ndarray | None = None
        if weights is not None:
            self.weights = np.array(checked_numbers("weights", np.asarray(weights).tolist()))
            if self.weights.min() <= 0:
                raise ValueError(f"weights has {self.weights.min()}; each must be above 0")
        for name, given in (("groups", self.groups), ("weights", self.weights)):
            if given is not None and len(given) != len(self):
                raise ValueError(f"{name} has {len(given)} entries for {len(self)} levels; give one for each")

    def __len__(self) -> int:
        return len(self._objects)

    def level(self, level_id: SupportsIndex) -> Any:
        """Returns the object of an id as it was given."""
        place = operator.index(level_id)
        if not 0 <= place < len(self):
            raise IndexError(f"level {place} is none of the levels 0 to {len(self) - 1}")
        return self._objects[place]

    def __getitem__(self, level_id: Any) -> Any:
        level = self.level(level_id)
        return {**(level if isinstance(level, Mapping) else {"level": level}), "level_id": operator.index(level_id)}

    def __repr__(self) -> str:
        return f"LevelSet({len(self)} levels)"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the objects, or of what ``key`` returns for them, in hexadecimal."""
        found = hashlib.sha256()
        for plain in self._plain(self._key):
            found.update(json.dumps(plain, sort_keys=True, default=_digest).encode() + b"\n")
        return found.hexdigest()

    def _plain(self, key: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        for place, level in enumerate(self._objects):
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
            TypeError: an object has other values.
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
