# SPDX-License-Identifier: Apache-2.0
"""Packed rows whose sequences of different lengths lie end to end, and are drawn padded or jagged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.free_memory import allocate_rows
from lightning_replay.options import checked_count, checked_flag, checked_keys
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.columns import GENERATION, NOT_STORED, Column, as_tensor
from lightning_replay.storage.occupancy import SlotSet, are_within
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.storage.rows import WORD_BYTES, Key, Leaf, RowLayout, leaves_of, shown

__all__ = ["RaggedStorage"]

#: int64 ``[2]``, of one row: the number of its first element, counted since the first row, and its length.
SPAN: Key = ("ragged_span",)
MASK: Key = ("mask",)  # bool [B, longest] of a padded batch
_RELEASED = -1  # in place of the first element


@rebuildable
class RaggedStorage(PackedStorage):
    """Keeps columns whose rows have different lengths, such as tokens, packed end to end.

    Rows are written and drawn as with :class:`~lightning_replay.storage.PackedStorage`, except for the columns under
    ``ragged``. A ragged column is a nested tensor (``torch.jagged`` or strided), or ``[N, L, ...]`` if all rows have
    the length L. ``extend_columns`` also accepts a list of N tensors ``[L, ...]``, or of N lists of numbers. The ragged
    columns of a row share its length, which may be 0. They may differ in dtype and in the shape of an element.

    A drawn batch is padded with zeros to its longest row, and has ``mask``. With ``jagged`` its ragged columns are
    jagged nested tensors, which share their offsets.

    Rows leave first in, first out. If the elements of new rows do not fit, the oldest rows leave until they fit, whole
    groups of a :class:`~lightning_replay.samplers.GroupSampler`. Rows that alone have more than ``element_capacity``
    elements are refused. Inverse transforms and checks of finite values do not see elements: in place of the ragged
    columns they get ``ragged_span``, int64 ``[N, 2]``.

    Args:
        capacity: rows.
        ragged: keys of the ragged columns. A nested key is a tuple.
        element_capacity: most elements kept of each ragged column, over all rows. A CPU's memory is taken as they come.
        jagged: return jagged nested tensors instead of padded ones.
        device: device of rows and elements. A draw from another device than the CPU waits for the lengths.
        memmap: a directory for scratch files that hold rows and elements.

    Sampled keys:
        mask: bool ``[B, longest]``, true for elements and false for padding. It is absent with ``jagged``.

    Raises:
        MemoryError: at the first rows, when rows and elements do not fit.
        ValueError: sizes that are not positive, no keys, a key given twice, a ragged column of other lengths, dtype
            or shape of an element, or too many elements. Nothing is stored.
        TypeError: a ragged column that is missing, or whose rows differ in more than length.

    Example:
        >>> from tensordict import TensorDict
        >>> storage = RaggedStorage(10, ["tokens"], element_capacity=100)
        >>> tokens = torch.nested.nested_tensor([torch.tensor([5, 6, 7]), torch.tensor([8])], layout=torch.jagged)
        >>> storage.set(slice(0, 2), TensorDict({"tokens": tokens, "score": torch.tensor([0.5, 1.0])}, [2]))
        >>> batch = storage.get(torch.tensor([1, 0]))
        >>> batch["tokens"].tolist(), batch["mask"].sum(1).tolist(), storage.stats()["elements_held"]
        ([[8, 0, 0], [5, 6, 7]], [1, 3], 4)
    """

    draws_there: bool = False  # The length of a batch is read on the CPU.
    _of_columns = (*PackedStorage._of_columns, "_arenas", "_kinds", "_spans", "_outer_layout")
    _kinds: list[Leaf] | None  # of the other columns, and of the elements of the ragged ones
    _arenas: list[Tensor] | None  # the elements [element_capacity, ...] of each column. New ones overwrite the oldest
    _spans: Tensor | None  # int64 [capacity, 2], a column of the rows
    _outer_layout: RowLayout | None  # of rows with the ragged columns in place of their span

    def __init__(
        self,
        capacity: int,
        ragged: Sequence[str | tuple[str, ...]],
        *,
        element_capacity: int,
        jagged: bool = False,
        device: str | torch.device = "cpu",
        memmap: str | None = None,
    ) -> None:
        super().__init__(capacity, device=device, memmap=memmap)
        self.ragged_keys: Sequence[Key] = checked_keys("ragged", ragged)
        if len(set(self.ragged_keys)) < max(len(self.ragged_keys), 1):
            raise ValueError(f"ragged is {ragged!r}; it must have at least one key, and each once")
        self.element_capacity: int = checked_count("element_capacity", element_capacity, of="elements")
        self.jagged: bool = checked_flag("jagged", jagged)
        self._given: list[Tensor] = []  # elements [E, ...] of each ragged column of rows on their way in
        self._first_given = 0  # the number of the first of them in spans on their way in
        self._num_written = 0  # elements ever written: the number of the next one

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and of the room for elements, or 0 before the first rows."""
        return super().nbytes + sum(arena.nbytes for arena in self._arenas or [])

    def stats(self) -> dict[str, Any]:
        """Returns the elements of the rows that are held, in each ragged column, and the most elements kept."""
        held = 0 if self._spans is None else int(self._spans[self.occupancy.slots().to(self.device), 1].sum())
        return {"elements_held": held, "element_capacity": self.element_capacity}

    @contextmanager
    def flattened(self, rows: TensorDictBase) -> Iterator[TensorDictBase]:
        """Gives the body rows ``[N]`` with a span in place of the ragged columns. Elements are kept until it ends.

        :meta private:
        """
        try:
            if not self._given and isinstance(rows, TensorDictBase) and rows.ndim == 1 and len(rows):
                rows = self._flat(rows)
            yield rows  # Other rows are refused later.
        finally:
            self._given = []

    def _flat(self, rows: TensorDictBase) -> TensorDictBase:
        if taken := [key for key in (SPAN, MASK) if rows.get(key, None) is not None]:
            raise ValueError(
                f"the column {shown(taken[0])} is a name that batches with ragged columns need; rename it, or leave it "
                "out. Nothing was stored"
            )
        parts = [_end_to_end(key, rows.get(key, None)) for key in self.ragged_keys]
        elements = [part for part, _ in parts]
        lengths = parts[0][1]
        for key, (_, others) in zip(self.ragged_keys, parts, strict=True):
            if not torch.equal(lengths, others):
                raise ValueError(
                    f"the rows have {lengths.tolist()[:8]} elements under {shown(self.ragged_keys[0])} and "
                    f"{others.tolist()[:8]} under {shown(key)}; the columns of ragged share the length of each row. "
                    "Nothing was stored; pad the shorter column, or join both and mark the part in another column"
                )
        if len(elements[0]) > self.element_capacity:
            raise ValueError(
                f"the rows have {len(elements[0]):,} elements and element_capacity is {self.element_capacity:,}; "
                "nothing was stored. Give fewer rows at once, or raise element_capacity"
            )
        for key, given, stored in zip(self.ragged_keys, elements, self._arenas or [], strict=False):
            if (given.dtype, given.shape[1:]) != (stored.dtype, stored.shape[1:]):
                raise ValueError(
                    f"elements of {shown(key)} are {given.dtype} {list(given.shape[1:])}, and those stored "
                    f"{stored.dtype} {list(stored.shape[1:])}; convert them, or start a new buffer. Nothing was stored"
                )
        self._given = elements
        self._first_given += self.element_capacity  # above all numbers of earlier calls
        first = self._first_given + lengths.cumsum(0) - lengths
        return rows.exclude(*self.ragged_keys).set(SPAN, torch.stack([first, lengths], 1).to(elements[0].device))

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        with self.flattened(data) as flat:
            super().set(cursor, flat, set_cursor=set_cursor)

    def _check(self, values: Sequence[Column]) -> None:
        if not self._given or bool((as_tensor(values[-1])[:, 0] < self._first_given).any()):
            raise ValueError(
                "a transform kept back rows with ragged columns until a later call, and their elements are gone; leave "
                "the transform out, or store these columns padded. Nothing was stored"
            )
        super()._check(values)

    def write(self, slots: slice | Tensor, values: Sequence[Column], *, grow: bool = True) -> None:
        """Writes :meth:`checked_values` into a slice or int64 ``[N]``. The oldest rows leave until all elements fit."""
        first, lengths = as_tensor(values[-1]).cpu().unbind(1)
        total = int(lengths.sum())
        self._release_below(self._num_written + total - self.element_capacity)
        with self.snapshots.lock:
            self.begin_write(slice(0, 0))  # the elements are changed first
            before = lengths.cumsum(0) - lengths
            steps = torch.arange(total, device="cpu")
            source = torch.repeat_interleave(first - self._first_given - before, lengths) + steps
            target = (self._num_written + steps) % self.element_capacity
            for arena, given in zip(self._arenas or [], self._given, strict=True):
                arena[target.to(arena.device)] = given[source.to(given.device)].to(arena.device)
            spans = torch.stack([self._num_written + before, lengths], 1)
            super().write(slots, [*values[:-1], spans.numpy()], grow=grow)
            self._num_written += total

    def _release_below(self, least: int) -> None:
        """Evicts rows whose elements begin below the number ``least``, and the rows that leave with them."""
        if least <= 0 or self._spans is None:
            return
        first = self._spans[: self._len, 0]
        slots = ((first > _RELEASED) & (first < least)).nonzero().flatten().cpu()
        if not len(slots):
            return
        if self.rows_together > 1:
            groups = (slots // self.rows_together).unique()
            slots = (
                groups.unsqueeze(1) * self.rows_together + torch.arange(self.rows_together, device="cpu")
            ).flatten()
        with self.snapshots.lock:
            self.begin_write(slots)
            self._next_generation(slots)
            if self._live is None:
                self._live = SlotSet(self.capacity, self._len)
            self._live.remove(slots.numpy())
            self._spans[slots.to(self._spans.device)] = torch.tensor([_RELEASED, 0], device=self._spans.device)
        self._tell_released(slots)

    def get(self, index: Any, extra: dict[str, Tensor] | None = None) -> Any:
        """Returns rows as a copy with their ragged columns.

        Raises ``RuntimeError`` if it is empty, or a row was released.
        """
        if self._outer_layout is None or self._spans is None:
            raise RuntimeError("the storage is empty; call extend first")
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim == 0:
            return self._get_by(index)
        rows = self.packed_rows(index.flatten())
        first, lengths = self._spans[index.flatten().to(self._spans.device)].unbind(1)
        if self._live is not None and bool((first == _RELEASED).any()):
            raise RuntimeError(
                "a slot was drawn whose row was released to make room for elements; use a sampler of "
                "lightning_replay.samplers, which draws rows that are held"
            )
        ragged = self._gather(first, lengths, index.shape)
        self.check_read()
        read = self._outer_layout.unpack(rows, index.shape, extra, ragged)
        return self._indexed(read, index) if self._is_torchrls else read

    def _gather(self, first: Tensor, lengths: Tensor, shape: torch.Size) -> list[Tensor]:
        """Returns the ragged columns, padded ``[*shape, longest, ...]`` with the mask, or jagged ``[N, ...]``."""
        longest = int(lengths.max()) if len(lengths) else 0
        steps = torch.arange(longest, device=lengths.device)
        mask = steps < lengths.unsqueeze(1)
        places = ((first.unsqueeze(1) + steps) % self.element_capacity)[mask]
        drawn = [arena.index_select(0, places) for arena in self._arenas or []]
        if self.jagged:
            if len(shape) != 1:
                raise ValueError(
                    "jagged is True and the sampler draws pairs or sequences of rows; leave jagged out, so that their "
                    "columns are padded, or use a sampler of rows"
                )
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            return [torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=longest) for values in drawn]
        padded = [values.new_zeros(*mask.shape, *values.shape[1:]).index_put((mask,), values) for values in drawn]
        return [column.view(*shape, *column.shape[1:]) for column in (*padded, mask)]

    def column(self, key: NestedKey, index: Tensor) -> Tensor | None:
        """Returns one column ``[N, ...]`` of the rows ``index``, a ragged one as it is drawn (``None`` without it)."""
        name: Key = (key,) if isinstance(key, str) else tuple(key)
        return self.get(index).get(key) if name in self.ragged_keys else super().column(key, index)

    def _init(self, data: TensorDictBase) -> None:
        self._allocate_all(
            [leaf for leaf in leaves_of(data[0]) if leaf[0] not in (*NOT_STORED, SPAN)],
            [(key, given.dtype, given.shape[1:]) for key, given in zip(self.ragged_keys, self._given, strict=True)],
        )

    def _allocate_all(self, leaves: list[Leaf], kinds: list[Leaf]) -> None:
        # Elements and rows get memory, or neither does.
        own = (SPAN, torch.int64, torch.Size([2])), (GENERATION, torch.int64, torch.Size([]))
        layout = RowLayout([*leaves, *own])
        elements = [self.element_capacity * shape.numel() for _, _, shape in kinds]
        words = [-(-count * dtype.itemsize // WORD_BYTES) for count, (_, dtype, _) in zip(elements, kinds, strict=True)]
        beside, device = self.capacity * layout.row_bytes, torch.device(self.device)
        breakdown = f"{self.element_capacity:,} elements, {beside:,} bytes of rows"
        room = allocate_rows(sum(words), 1, device, self._memmap, breakdown, as_written=True, beside=beside)
        self._allocate(layout)
        assert self._storage is not None and self.layout is not None
        self._kinds = [*leaves, *kinds]
        self._arenas = [
            part.view(dtype)[:count].view(self.element_capacity, *shape)
            for part, count, (_, dtype, shape) in zip(room.view(-1).split(words), elements, kinds, strict=True)
        ]
        self._spans = self._storage.get(SPAN)
        self._spans[:, 0] = _RELEASED
        drawn = self.ragged_keys if self.jagged else [*self.ragged_keys, MASK]
        order = [*(key for key, _, _ in leaves), *drawn, GENERATION]
        self._outer_layout = self.layout.replacing(SPAN, drawn, order)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of packed rows, and a copy of the elements of each ragged column."""
        return super().state_dict() | {
            "elements": [arena[: self._num_written].clone() for arena in self._arenas or []],
            "num_written": self._num_written,
            "ragged_keys": [list(key) for key in self.ragged_keys],
            "live": None if self._live is None else self._live.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_writable()
        layout = self._saved_layout(state_dict)
        elements = state_dict["elements"]
        if layout is not None:
            self._check_saved(layout, state_dict)
            kinds = [(key, saved.dtype, saved.shape[1:]) for key, saved in zip(self.ragged_keys, elements, strict=True)]
            leaves = [(key, *kind) for key, kind in layout.columns.items() if key not in (SPAN, GENERATION)]
            if self._kinds != [*leaves, *kinds]:
                self._allocate_all(leaves, kinds)
        super().load_state_dict(state_dict)
        live = state_dict["live"]
        self._live = None if live is None else SlotSet.from_state(self.capacity, live)
        self._num_written = state_dict["num_written"]
        if self._spans is not None:
            self._spans[self._len :, 0] = _RELEASED
        for arena, saved in zip(self._arenas or [], elements, strict=False):
            arena[: len(saved)] = saved.to(arena.device)

    def _check_saved(self, layout: RowLayout, state: Mapping[str, Any]) -> None:
        """Refuses other ragged columns or another room than here, and rows whose elements are not saved."""
        written, counts = int(state["num_written"]), [len(saved) for saved in state["elements"]]
        keys = [tuple(key) for key in state["ragged_keys"]]
        if keys != self.ragged_keys or counts != [min(written, self.element_capacity)] * len(keys):
            raise ValueError(
                f"the saved storage has {counts} elements of the ragged columns {keys}, and this one room for "
                f"{self.element_capacity:,} of {self.ragged_keys}; build it with the saved ragged and element_capacity"
            )
        rows, live = state["rows"], state["live"]
        first, lengths = layout.leaves(rows, rows.shape[:1])[SPAN].unbind(1)
        is_saved = (first >= max(0, written - self.element_capacity)) & (lengths >= 0) & (first + lengths <= written)
        if not bool((is_saved | (first == _RELEASED)).all()) or (
            live is not None and not are_within(live.cpu().numpy(), int(state["length"]))
        ):
            raise ValueError("the saved rows and elements do not fit; load another save")

    def _empty(self) -> None:
        super()._empty()
        self._live = None
        if self._spans is not None:
            self._spans[:, 0] = _RELEASED


def _end_to_end(key: Key, value: Any) -> tuple[Tensor, Tensor]:
    """Returns the elements ``[E, ...]`` of a ragged column, and the length of each row, int64 ``[N]`` on the CPU."""
    if value is None:
        raise TypeError(
            f"the option ragged names the column {shown(key)}, and the rows do not have it; give it as a nested "
            "tensor, a tensor [N, L, ...], or in extend_columns a list of tensors. Nothing was stored"
        )
    rows = [*value.detach().unbind()] if isinstance(value, Tensor) else []
    if len({row.shape[1:] for row in rows}) != 1 or not rows[0].ndim:
        raise TypeError(
            f"the option ragged names the column {shown(key)}, and its rows differ in more than length "
            f"(given: {type(value).__name__}); give a nested tensor, a tensor [N, L, ...], or in extend_columns a list "
            "of tensors. Nothing was stored"
        )
    return torch.cat(rows), torch.tensor([len(row) for row in rows], device="cpu")
