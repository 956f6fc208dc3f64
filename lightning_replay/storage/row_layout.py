# SPDX-License-Identifier: Apache-2.0
"""Places of the columns of a transition inside one packed row of bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

Key = tuple[str, ...]
Leaf = tuple[Key, torch.dtype, torch.Size]  # a column, and dtype and shape of one row

WORD_BYTES = 8
ROW_ALIGNMENT_BYTES = 64

#: Builds a TensorDict without checking what was laid out here; the checked constructor where a release lacks it.
assemble_unchecked = getattr(TensorDict, "_new_unsafe", TensorDict)


class _Group(NamedTuple):
    """The columns of one dtype, which lie side by side and are cut apart by a single split."""

    dtype: torch.dtype
    sizes: list[int]  # elements of each part of a row
    first: int  # the part of the first column
    columns: list[tuple[Key, torch.Size, bool]]  # with the shape per row, and whether it is a vector
    scalar_at: int | None  # the element of a single column of numbers


class RowLayout:
    """Packs columns into one row: widest dtypes first, so each is aligned, padded to 64 bytes.

    Args:
        leaves: key, dtype and shape per row of every column, in the order of the transition.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.columns = {key: (dtype, shape) for key, dtype, shape in leaves}
        self.tree = nest(self.columns)
        num_bytes = sum(shape.numel() * dtype.itemsize for _, dtype, shape in leaves)
        self.row_bytes = -(-num_bytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
        self._groups: list[_Group] = []
        by_width = sorted(leaves, key=lambda leaf: (-leaf[1].itemsize, str(leaf[1])))
        offset = 0
        for dtype in dict.fromkeys(leaf[1] for leaf in by_width):
            columns = [(key, shape, len(shape) == 1) for key, kind, shape in by_width if kind == dtype]
            sizes = [shape.numel() for _, shape, _ in columns]
            before = offset // dtype.itemsize
            after = self.row_bytes // dtype.itemsize - before - sum(sizes)
            # Empty parts are left out: each costs as much as a column.
            parts = [*([before] if before else []), *sizes, *([after] if after else [])]
            scalar_at = before if len(columns) == 1 and not columns[0][1] else None
            self._groups.append(_Group(dtype, parts, int(before > 0), columns, scalar_at))
            offset += sum(sizes) * dtype.itemsize

    def unpack(self, rows: Tensor, batch_size: torch.Size, extra: dict[str, Tensor] | None = None) -> TensorDict:
        """Returns the TensorDict whose leaves are views of packed rows.

        Args:
            rows: int64 ``[N, words]``, contiguous.
            batch_size: ``[N]``, or ``[B, 2]`` with ``B * 2 == N``.
            extra: further entries of the TensorDict.
        """
        return gather_branch(self.tree, self.leaves(rows, batch_size), batch_size, rows.device, extra)

    def leaves(self, rows: Tensor, batch_size: torch.Size) -> dict[Key, Tensor]:
        """Returns the columns of packed rows by key, as views; see :meth:`unpack`."""
        leaves: dict[Key, Tensor] = {}
        for dtype, sizes, first, columns, scalar_at in self._groups:
            typed = rows.view(dtype)
            if len(batch_size) != 1:
                typed = typed.view(*batch_size, -1)
            if scalar_at is not None:
                leaves[columns[0][0]] = typed.select(-1, scalar_at)
                continue
            # "Unsafe" for autograd only, and rows copied out of a storage have no gradient; a third cheaper.
            parts = typed.unsafe_split_with_sizes(sizes, dim=-1)
            for (key, shape, is_vector), part in zip(columns, parts[first:], strict=False):
                leaves[key] = part if is_vector else part.view(*batch_size, *shape)
        return leaves

    def without(self, key: Key) -> RowLayout:
        """Returns the layout of the same rows whose :meth:`leaves` may lack ``key``: if no other has its dtype."""
        layout = copy.copy(self)
        layout._groups = [group for group in self._groups if [column[0] for column in group.columns] != [key]]
        return layout

    def description(self) -> list[dict[str, Any]]:
        """Returns plain values from which :meth:`from_description` builds the same layout."""
        return [
            {"key": list(key), "dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
            for key, (dtype, shape) in self.columns.items()
        ]

    @classmethod
    def from_description(cls, description: Sequence[dict[str, Any]]) -> RowLayout:
        """Returns the layout that :meth:`description` described.

        Raises:
            TypeError: a dtype that is none.
        """
        leaves = []
        for leaf in description:
            dtype = getattr(torch, leaf["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"the column {'/'.join(leaf['key'])} has no dtype of torch")
            leaves.append((tuple(leaf["key"]), dtype, torch.Size(leaf["shape"])))
        return cls(leaves)


def shown(key: Key) -> str:
    """Returns a key for an error: a name alone, or a tuple of nested names."""
    return repr(key if len(key) > 1 else key[0])


def nest(columns: Iterable[Key]) -> dict[str, Any]:
    """Returns the tree of keys: a branch is a dictionary, a leaf its full key."""
    tree: dict[str, Any] = {}
    for key in columns:
        branch = tree
        for part in key[:-1]:
            branch = branch.setdefault(part, {})
        branch[key[-1]] = key
    return tree


def gather_branch(
    tree: dict[str, Any],
    leaves: dict[Key, Tensor],
    batch_size: torch.Size,
    device: torch.device,
    extra: dict[str, Tensor] | None = None,
) -> TensorDict:
    """Returns the TensorDict of a tree of :func:`nest` whose leaves are given by their keys."""
    source: dict[str, Any] = {}
    for name, node in tree.items():
        source[name] = leaves[node] if type(node) is tuple else gather_branch(node, leaves, batch_size, device)
    if extra:
        source.update(extra)
    return assemble_unchecked(source, batch_size=batch_size, device=device)


def leaves_of(row: TensorDictBase) -> list[Leaf]:
    """Returns key, dtype and shape of every leaf of a single transition (batch size ``[]``).

    Raises:
        TypeError: a leaf is not a dense tensor of a fixed-size dtype.
    """
    leaves: list[Leaf] = []
    for name, value in row.items():
        if isinstance(value, TensorDictBase):
            leaves += [((name, *key), dtype, shape) for key, dtype, shape in leaves_of(value)]
        elif not isinstance(value, Tensor) or value.is_sparse or value.is_nested:
            raise TypeError(
                f"column {name!r} is a {type(value).__name__}; a packed row holds dense tensors of a fixed shape. "
                "Leave the column out, or use one of TorchRL's storages"
            )
        else:
            leaves.append(((name,), value.dtype, value.shape))
    return leaves
