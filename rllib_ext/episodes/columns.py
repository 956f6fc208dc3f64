# SPDX-License-Identifier: Apache-2.0
"""Nested observations and actions as flat columns whose names, dtypes and shapes the first rows fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

Struct = Any  # an array, or dicts and tuples of arrays, all with the same first dimension


class Leaf(NamedTuple):
    """One column: its key in the TensorDict, and dtype and shape that later rows must fit."""

    key: tuple[str, ...]
    dtype: np.dtype
    shape: tuple[int, ...]


class Columns:
    """Flattens a batch of nested values into columns, and restores the nesting.

    Dict spaces give one key per entry, Tuple spaces the positions as keys, both nested under ``name``. Later rows are
    cast to the first rows' dtypes within their kind (int32 to int64, float64 to float32) and refused otherwise.

    Args:
        name: first part of every key, ``observation`` or ``action``.
        struct: the first rows, arrays ``[n, ...]`` in dicts and tuples.

    Example:
        >>> columns = Columns("observation", {"camera": np.zeros((2, 8)), "arm": (np.zeros(2), np.ones(2))})
        >>> [leaf.key for leaf in columns.leaves]
        [('observation', 'camera'), ('observation', 'arm', '0'), ('observation', 'arm', '1')]
    """

    def __init__(self, name: str, struct: Struct) -> None:
        self.name = name
        self.leaves: list[Leaf] = []
        self._nesting = self._describe(struct, (name,))
        if not self.leaves:
            raise ValueError(f"{name} has no entries: {struct!r}. Give a space with at least one Box or Discrete part.")

    def flatten(self, struct: Struct) -> list[np.ndarray]:
        """Returns one array per leaf, in the dtypes of the first rows, and refuses what does not fit them."""
        arrays = list(self._walk(struct, self._nesting, self.name))
        return [_fit(np.asarray(array), leaf) for array, leaf in zip(arrays, self.leaves, strict=True)]

    def unflatten(self, arrays: list[Any]) -> Struct:
        return self._rebuild(self._nesting, iter(arrays))

    def state(self) -> dict[str, Any]:
        leaves = [[list(leaf.key), leaf.dtype.str, list(leaf.shape)] for leaf in self.leaves]
        return {"name": self.name, "struct": self._nesting, "leaves": leaves}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Columns:
        columns = cls.__new__(cls)
        columns.name, columns._nesting = state["name"], state["struct"]
        columns.leaves = [Leaf(tuple(key), np.dtype(dtype), tuple(shape)) for key, dtype, shape in state["leaves"]]
        return columns

    def _describe(self, struct: Struct, key: tuple[str, ...]) -> Any:
        """Returns the nesting as plain values; appends the leaves on the way."""
        if isinstance(struct, dict):
            return {"dict": [[name, self._describe(part, (*key, str(name)))] for name, part in struct.items()]}
        if isinstance(struct, tuple):
            return {"tuple": [self._describe(part, (*key, str(place))) for place, part in enumerate(struct)]}
        array = np.asarray(struct)
        if array.dtype.kind not in "biufc":
            raise ValueError(
                f"{'/'.join(key)} holds values of type {array.dtype}; stored are booleans, integers and floats "
                "(Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them). Convert it in a connector."
            )
        self.leaves.append(Leaf(key, array.dtype, array.shape[1:]))
        return "leaf"

    def _walk(self, struct: Struct, nesting: Any, name: str) -> Iterator[Any]:
        if nesting == "leaf":
            yield struct
            return
        kind, parts = next(iter(nesting.items()))
        if kind == "dict":
            fits = isinstance(struct, dict) and set(struct) == {key for key, _ in parts}
            expected = f"the entries {[key for key, _ in parts]}"
        else:
            fits = isinstance(struct, tuple) and len(struct) == len(parts)
            expected = f"{len(parts)} parts"
        if not fits:
            given = list(struct) if isinstance(struct, dict) else type(struct).__name__
            raise ValueError(f"{name} is {given}; the first rows had {expected}. One buffer stores rows of one space.")
        for key, part in parts if kind == "dict" else enumerate(parts):
            yield from self._walk(struct[key], part, f"{name}/{key}")

    def _rebuild(self, nesting: Any, arrays: Iterator[Any]) -> Struct:
        if nesting == "leaf":
            return next(arrays)
        kind, parts = next(iter(nesting.items()))
        if kind == "dict":
            return {key: self._rebuild(part, arrays) for key, part in parts}
        return tuple(self._rebuild(part, arrays) for part in parts)


def _fit(array: np.ndarray, leaf: Leaf) -> np.ndarray:
    if array.shape[1:] != leaf.shape:
        raise ValueError(
            f"{'/'.join(leaf.key)} has shape {array.shape[1:]}; the first rows had {leaf.shape}. "
            "One buffer stores rows of one space."
        )
    if array.dtype == leaf.dtype:
        return array
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        raise ValueError(
            f"{'/'.join(leaf.key)} has dtype {array.dtype}; the first rows had {leaf.dtype}, which cannot hold it. "
            "Let every environment return the dtype of its space."
        )
    return array.astype(leaf.dtype)
