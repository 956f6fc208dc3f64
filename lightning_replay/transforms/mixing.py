# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of mixup: over nested batches leaf by leaf, over packed rows on a CPU block by block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import unravel_key
from torch import Tensor

from lightning_replay.storage.row_layout import WORD_BYTES, Key, RowLayout, assemble_unchecked
from lightning_replay.transforms.numba_kernels import mix_pairs

_NOTHING: dict[str, Any] = {}
_TERMINATED: Key = ("next", "terminated")


class Mixing:
    """Mixes the leaves ``[B, 2, ...]`` of a batch into ``[B, ...]``.

    ``found`` counts the keys of the tree it had; ``has_others`` is whether columns at or under them were not floating.
    """

    def __init__(self, coefficient: Tensor, untouched: Tensor | None) -> None:
        self.found: int = 0
        self.has_others: bool = False
        self._coefficient = coefficient
        self._untouched = untouched
        self._shaped: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor | None]] = {}

    def mix(self, node: TensorDictBase, tree: dict[str, Any] | None, source: dict[str, Any]) -> TensorDictBase:
        """Mixes the columns of ``tree``, all where it is None, into ``source``; others are those of the first rows."""
        for name, value in node.items():
            inner = None if tree is None else tree.get(name, _NOTHING)
            self.found += inner is None and tree is not None
            if name == "index":
                source[name] = value
            elif isinstance(value, Tensor):
                mixes = inner is None and value.is_floating_point()
                self.has_others |= inner is None and not mixes
                source[name] = self._mix_leaf(value) if mixes else value.select(1, 0)
            elif isinstance(value, TensorDictBase):
                source[name] = self.mix(value, inner, {})
            else:
                source[name] = value[:, 0]
        return assemble_unchecked(source, node.batch_size[:1], node.device)

    def _mix_leaf(self, pairs: Tensor) -> Tensor:
        kind = (pairs.dtype, pairs.ndim)
        if kind not in self._shaped:
            shape = (-1,) + (1,) * (pairs.ndim - 2)
            untouched = None if self._untouched is None else self._untouched.reshape(shape)
            self._shaped[kind] = self._coefficient.to(pairs.dtype).reshape(shape), untouched
        weight, untouched = self._shaped[kind]
        first, second = pairs.unbind(1)
        # In this order a weight of 1 returns the first exactly, and so do two equal rows.
        mixed = torch.lerp(second, first, weight)
        # A weight of 1 does not remove the NaN or infinity of a partner.
        return mixed if untouched is None else torch.where(untouched, first, mixed)


class _Place(NamedTuple):
    """Elements of one dtype in a row."""

    dtype: torch.dtype
    start: int
    length: int


class PackedMixing:
    """Mixes pairs of packed rows of one layout in a compiled loop; columns side by side in a row are one block.

    Args:
        layout: of the rows.
        keys: the columns that are mixed; a key stands for all under it, of which flags stay.
    """

    def __init__(self, layout: RowLayout, keys: set[Key]) -> None:
        self.layout = layout
        under = {column: any(_is_under(column, key) for key in keys) for column in layout.columns}
        row = layout.leaves(
            torch.empty(1, layout.row_bytes // WORD_BYTES, dtype=torch.int64, device="cpu"), torch.Size([1])
        )
        self._places = {key: _Place(leaf.dtype, int(leaf.storage_offset()), leaf.numel()) for key, leaf in row.items()}
        mixed = [place for key, place in self._places.items() if under[key] and place.dtype.is_floating_point]
        self._blocks: list[_Place] = []
        for place in sorted(mixed, key=lambda place: (str(place.dtype), place.start)):
            last = self._blocks[-1] if self._blocks else None
            if last is not None and (last.dtype, last.start + last.length) == place[:2]:
                place = _Place(last.dtype, last.start, last.length + place.length)
                self._blocks.pop()
            self._blocks.append(place)
        # What the loop does not do: refuse columns, compare the stored discounts of returns, mix other floats.
        self.is_covered: bool = (
            all(any(_is_under(column, key) for column in layout.columns) for key in keys)
            and all(can_be_mixed(key, place.dtype, keys) for key, place in self._places.items() if under[key])
            and (_TERMINATED in self._places and ("discount",) not in self._places)
            and {place.dtype for place in self._blocks} <= {torch.float32}
        )
        self._bounds = np.array([[place.start, place.start + place.length] for place in self._blocks], dtype=np.int64)

    def gather_mixed(self, rows: Tensor, index: Tensor, coefficient: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers and mixes pairs in one compiled loop, on a CPU.

        Args:
            rows: int64 ``[N, words]``.
            index: int64 ``[B, 2]``.
            coefficient: float32 ``[B]``.

        Returns:
            Rows ``[B, words]``, and the coefficients, 1 for pairs left as their first row.

        Raises:
            IndexError: an index that is no slot, of a user's sampler.
        """
        mixed, coefficient = rows.new_empty(len(index), rows.shape[1]), coefficient.clone()
        stored, (_, start, length) = rows.numpy(), self._places[_TERMINATED]
        is_mixed = mix_pairs(
            stored.view(np.float32),
            stored.view(np.uint8),
            index.numpy(),
            self._bounds.reshape(-1, 2),
            (start, start + length),
            coefficient.numpy(),
            mixed.numpy().view(np.float32),
        )
        if not is_mixed:
            lowest, highest = (int(bound) for bound in index.aminmax())
            raise IndexError(
                f"pairs were drawn of slots from {lowest} to {highest}, of a storage with slots from 0 to "
                f"{len(rows) - 1}; nothing was mixed. Let the sampler draw slots below len(storage)"
            )
        return mixed, coefficient


def _is_under(column: Key, key: Key) -> bool:
    return column[: len(key)] == key


def can_be_mixed(column: Key, dtype: torch.dtype, keys: set[Key]) -> bool:
    """Returns whether a column at or under one of ``keys`` can be mixed, or is a flag under it, which stays."""
    return dtype.is_floating_point or (dtype == torch.bool and column not in keys)


def tree_of(paths: set[tuple[str, ...]]) -> dict[str, Any]:
    """Returns the names of all paths as nested dictionaries, ``None`` at the end of each path."""
    tree: dict[str, Any] = {}
    for path in paths:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = None
    return tree


def columns_under(batch: TensorDictBase, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the columns at or under ``path``, each with its own path; none where it is missing."""
    found = batch.get(path, None)
    if isinstance(found, TensorDictBase):
        return [(unravel_key((*path, key)), value) for key, value in found.items(True, True)]
    return [] if found is None else [(path, found)]


def listed(paths: Iterable[tuple[str, ...]]) -> str:
    """Returns keys as they appear in errors."""
    return ", ".join(repr(path if len(path) > 1 else path[0]) for path in sorted(paths))
