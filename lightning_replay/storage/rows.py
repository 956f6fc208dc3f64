# SPDX-License-Identifier: Apache-2.0
"""Places of the columns of a transition inside one packed row of bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay.saving.spec import DTYPES
from lightning_replay.torchrl_compat import assemble_unchecked

Key = tuple[str, ...]
Leaf = tuple[Key, torch.dtype, torch.Size]  # a column, and dtype and shape of one row

WORD_BYTES = 8
ROW_ALIGNMENT_BYTES = 64
# int32 [2 k], of several columns of images [columns, 2 k]: the observation's frames, then the next one's. 0 is none
FRAMES: Key = ("frames_of_stacks",)
OBSERVATION: Key = ("observation_words",)  # int64 [words], the columns of an observation that is stored once
_GAP: Key = ()  # Between columns of one dtype.
_NO_OBSERVATIONS = frozenset(("reward", "done", "terminated", "truncated", "is_init"))


class _Group(NamedTuple):
    """The columns of one dtype, which lie side by side and are cut apart by a single split."""

    dtype: torch.dtype
    sizes: list[int]  # elements of each part of a row
    columns: slice  # the parts that are columns
    shapes: list[torch.Size] | None  # per row, or None if all are vectors
    scalar_at: int | None  # the element of a single column of numbers


class RowLayout:
    """Packs columns, in the order of the transition, into one row: widest dtypes first, padded to ``alignment_bytes``.

    Attributes:
        order: the columns in the order in which they lie in a row.
    """

    def __init__(self, leaves: Sequence[Leaf], alignment_bytes: int = ROW_ALIGNMENT_BYTES) -> None:
        self.columns: dict[Key, tuple[torch.dtype, torch.Size]] = {key: (dtype, shape) for key, dtype, shape in leaves}
        offsets: dict[Key, int] = {}
        num_bytes = 0
        for key, dtype, shape in sorted(leaves, key=lambda leaf: (-leaf[1].itemsize, str(leaf[1]))):
            offsets[key] = num_bytes
            num_bytes += shape.numel() * dtype.itemsize
        self.row_bytes: int = -(-num_bytes // alignment_bytes) * alignment_bytes
        self._place(offsets)
        self._branches = _branches(nest(self.columns), self.order)

    def _place(self, offsets: Mapping[Key, int]) -> None:
        """Sets the first byte of each column in a row, in ascending order."""
        self._offsets = offsets
        self._groups: list[_Group] = []
        self.order: list[Key] = []
        for dtype in dict.fromkeys(self.columns[key][0] for key in offsets):
            parts: list[int] = []
            keys: list[Key] = []
            shapes: list[torch.Size] = []
            end = first = 0
            for key in (key for key in offsets if self.columns[key][0] == dtype):
                shape = self.columns[key][1]
                begin = offsets[key] // dtype.itemsize
                # Empty parts are left out: each costs as much as a column.
                if begin > end:
                    parts.append(begin - end)
                    if keys:
                        keys.append(_GAP)
                        shapes.append(torch.Size([begin - end]))
                    else:
                        first = 1
                parts.append(shape.numel())
                keys.append(key)
                shapes.append(shape)
                end = begin + shape.numel()
            after = self.row_bytes // dtype.itemsize - end
            scalar_at = begin if len(keys) == 1 and not shapes[0] else None
            are_vectors = all(len(shape) == 1 for shape in shapes)
            columns = slice(first, first + len(keys))
            parts += [after] if after else []
            self._groups.append(_Group(dtype, parts, columns, None if are_vectors else shapes, scalar_at))
            self.order += keys

    def unpack(
        self,
        rows: Tensor,
        batch_size: torch.Size,
        extra: dict[str, Tensor] | None = None,
        outside: Sequence[Tensor] = (),
    ) -> TensorDict:
        """Returns the TensorDict ``[N]`` or ``[B, 2]`` whose leaves are views of rows, contiguous int64 ``[N, words]``.

        ``extra`` are further entries, and ``outside`` the columns that are kept elsewhere, see :meth:`replacing`.
        """
        values: list[Any] = [*self.views(rows, batch_size), *outside]
        device = rows.device
        for branch in self._branches[:-1]:
            entries = {name: values[place] for name, place in branch}
            values.append(assemble_unchecked(entries, batch_size, device))
        entries = {name: values[place] for name, place in self._branches[-1]}
        if extra:
            entries.update(extra)
        return assemble_unchecked(entries, batch_size, device)

    def leaves(self, rows: Tensor, batch_size: torch.Size) -> dict[Key, Tensor]:
        """Returns the columns of packed rows by key, as views. See :meth:`unpack`."""
        views = zip(self.order, self.views(rows, batch_size), strict=True)
        return {key: view for key, view in views if key != _GAP}

    def views(self, rows: Tensor, batch_size: torch.Size) -> list[Tensor]:
        """Returns the columns of packed rows, as views in their :attr:`order`. See :meth:`unpack`."""
        views: list[Tensor] = []
        is_flat = len(batch_size) == 1
        for dtype, sizes, columns, shapes, scalar_at in self._groups:
            typed = rows if dtype is torch.int64 else rows.view(dtype)
            if not is_flat:
                typed = typed.view(*batch_size, -1)
            if scalar_at is not None:
                views.append(typed.select(-1, scalar_at))
                continue
            # "Unsafe" for autograd only, and rows copied out of a storage have no gradient. It is a third cheaper.
            parts: Sequence[Tensor] = typed.unsafe_split_with_sizes(sizes, -1)[columns]
            if shapes is not None:
                parts = [part.view(*batch_size, *shape) for part, shape in zip(parts, shapes, strict=True)]
            views += parts
        return views

    def replacing(self, key: Key, outside: Sequence[Key], order: Sequence[Key]) -> RowLayout:
        """Returns the layout of rows that are unpacked in ``order``, with columns ``outside`` in place of ``key``."""
        layout, kind = copy.copy(self), self.columns[key][0]
        if not any(dtype == kind for other, (dtype, _) in self.columns.items() if other != key):
            # The only column of its dtype need not be cut out of the rows.
            layout._groups = [group for group in self._groups if group.dtype != kind]
            layout.order = [other for other in self.order if other != key]
        layout._branches = _branches(nest(order), [*layout.order, *outside])
        return layout

    def with_next(self, key: Key, inner: RowLayout, order: Sequence[Key]) -> RowLayout:
        """Returns the layout of rows with another row of ``inner`` behind each, whose columns are under ``"next"``.

        The column ``key`` holds the first row of ``inner``. Rows are unpacked in ``order``.
        """
        layout = copy.copy(self)
        layout.columns = {other: kind for other, kind in self.columns.items() if other != key}
        offsets = {other: self._offsets[other] for other in layout.columns}
        for own, kind in inner.columns.items():
            layout.columns[own] = layout.columns["next", *own] = kind
            offsets[own] = self._offsets[key] + inner._offsets[own]
            offsets["next", *own] = self.row_bytes + inner._offsets[own]
        layout.row_bytes = self.row_bytes + inner.row_bytes
        layout._place(dict(sorted(offsets.items(), key=lambda item: item[1])))
        layout._branches = _branches(nest(order), layout.order)
        return layout

    def description(self) -> list[dict[str, Any]]:
        return [
            {"key": list(key), "dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
            for key, (dtype, shape) in self.columns.items()
        ]

    @classmethod
    def from_description(cls, description: Sequence[dict[str, Any]]) -> RowLayout:
        """Returns the layout that :meth:`description` described. Raises ``TypeError`` for a dtype that is none."""
        leaves = []
        for leaf in description:
            if leaf["dtype"] not in DTYPES:
                raise TypeError(f"the column {'/'.join(leaf['key'])} has no dtype of torch")
            leaves.append((tuple(leaf["key"]), DTYPES[leaf["dtype"]], torch.Size(leaf["shape"])))
        return cls(leaves)


def observation_keys(columns: Mapping[Key, tuple[Any, Any]]) -> list[Key]:
    """Returns the columns of observations that are also stored, with the same dtype and shape, under ``"next"``.

    Those named ``observation``, or below it. Without such a name all but flags and rewards. Rows that hold returns over
    several steps have none, because the next row starts before they end.
    """
    if ("steps_to_next_obs",) in columns:
        return []
    both = paired_keys(columns)
    return [key for key in both if any(part.startswith("observation") for part in key)] or both


def paired_keys(columns: Mapping[Key, tuple[Any, Any]]) -> list[Key]:
    """Returns the columns that are also under ``"next"``, with the same dtype and shape, flags and rewards left out."""
    return sorted(
        key
        for key, kind in columns.items()
        if columns.get(("next", *key)) == kind and key[-1] not in _NO_OBSERVATIONS and 0 not in kind[1]
    )


def observation_pairs(rows: TensorDictBase) -> list[tuple[Tensor, Tensor]]:
    """Returns the columns ``[N, ...]`` of each observation and of the one under ``"next"``, as views.

    Frames that are stored once are given as their numbers, which are equal if the frames are.
    """
    leaves = {(key,) if isinstance(key, str) else key: value for key, value in rows.items(True, True)}
    keys = observation_keys({key: (value.dtype, value.shape) for key, value in leaves.items()})
    pairs = [(leaves[key], leaves["next", *key]) for key in keys]
    if FRAMES in leaves:
        numbers = leaves[FRAMES]
        # Each column of images alone: half of all at once could be flattened only as a copy.
        for frames in numbers.unbind(1) if numbers.ndim > 2 else [numbers]:
            first, second = frames.unflatten(-1, (2, -1)).unbind(1)
            pairs.append((first, second))
    return pairs


def frames_by_column(state: Mapping[str, Any]) -> list[tuple[Key, Any, Sequence[int]]]:
    """Returns key, frames ``[F, bytes]`` and shape of one of each column of images in the state of a storage."""
    if state.get("frames") is None:
        return []
    columns = [state["image_keys"], state["frames"], state["frame_shape"], state["unstacked"]]
    if len({len(column) for column in columns}) != 1:
        raise ValueError("the saved storage names other image columns than it has frames for; load another save")
    return list(zip(map(tuple, columns[0]), columns[1], columns[2], strict=True))


def shown(key: Key) -> str:
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


def _branches(tree: dict[str, Any], order: Sequence[Key]) -> list[list[tuple[str, int]]]:
    # The branches of a tree of nest, inner ones first: names, and places in a list of the columns in ``order`` and then
    # of the branches as they are returned.
    branches: list[list[tuple[str, int]]] = []

    def add(node: dict[str, Any]) -> int:
        entries = [(name, add(below) if type(below) is dict else order.index(below)) for name, below in node.items()]
        branches.append(entries)
        return len(order) + len(branches) - 1

    add(tree)
    return branches


def gather_branch(
    tree: dict[str, Any], leaves: dict[Key, Tensor], batch_size: torch.Size, device: torch.device
) -> TensorDict:
    source = {
        name: leaves[node] if type(node) is tuple else gather_branch(node, leaves, batch_size, device)
        for name, node in tree.items()
    }
    return assemble_unchecked(source, batch_size, device)


def leaves_of(row: TensorDictBase) -> list[Leaf]:
    """Returns key, dtype and shape of each leaf of one transition. Raises ``TypeError`` if one is no dense tensor."""
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


def each_part(value: Any, function: Callable[[Any], Any]) -> Any:
    """Returns the same tree of dictionaries with the function's value in place of each array."""
    if isinstance(value, Mapping):
        return {str(name): each_part(part, function) for name, part in value.items()}
    if isinstance(value, tuple):
        return {str(place): each_part(part, function) for place, part in enumerate(value)}
    return function(value)
