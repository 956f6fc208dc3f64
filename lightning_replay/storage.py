# SPDX-License-Identifier: Apache-2.0
"""Transitions as packed rows of bytes: one gather per batch, every leaf a view of it."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import Storage

from lightning_replay.memory import allocate_rows
from lightning_replay.recorded import recorded
from lightning_replay.row_layout import WORD_BYTES, Key, RowLayout, leaves_of
from lightning_replay.state_files import read_state, write_state
from lightning_replay.stored_column import GENERATION, StoredColumn, collect_leaves
from lightning_replay.tables import Tables


@recorded
class PackedStorage(LazyTensorStorage):
    """Keeps all columns of a transition, whatever their dtype, side by side in one aligned row.

    A batch is one ``index_select`` of rows; its leaves are dtype views of the result, so they are strided
    (``reshape`` them rather than ``view`` across the batch dimension). The columns are fixed by the first rows
    written; rows with other keys, shapes or dtypes are refused and nothing is stored. Memory is taken then, and
    refused if less is free.

    A TorchRL storage: any TorchRL sampler, writer and buffer works with it. Every row also holds
    ``generation``, int64: how often its slot has been written, so that a late priority update for a slot
    that was reused meanwhile can be told apart.

    Args:
        capacity: rows.
        device: where the rows are kept.
        memmap: a directory for a scratch file that holds the rows, for buffers larger than memory; the file
            disappears with the process (``save`` is what lasts).

    Raises:
        MemoryError: at the first rows, when the rows do not fit.
        ValueError: ``capacity`` is not positive; ``memmap`` on another device than the CPU; columns that change.
    """

    def __init__(self, capacity: int, *, device: str | torch.device = "cpu", memmap: str | None = None) -> None:
        if not isinstance(capacity, Integral) or isinstance(capacity, bool) or capacity <= 0:
            raise ValueError(f"capacity must be a positive whole number of transitions; got {capacity!r}")
        if memmap is not None and torch.device(device).type != "cpu":
            raise ValueError(f"memmap keeps rows on disk and needs device='cpu'; got device={device!r}")
        self.capacity: int = int(capacity)
        super().__init__(max_size=self.capacity, device=device)
        self._memmap: str | None = memmap
        self._layout: RowLayout | None = None
        self._rows: Tensor | None = None
        self._generation: Tensor | None = None
        self._columns: list[StoredColumn] | None = None
        self._given: dict[Key, tuple[torch.dtype, torch.Size]] = {}  # what rows must have
        self._given_tree: dict[str, Any] = {}
        # Where rows come from; None until the first ones since this storage was built or loaded.
        self._given_device: torch.device | None = None
        self.tables: Tables | None = None  # set by a writer into tables

    def __len__(self) -> int:
        return self._len  # TorchRL's asks torch.compile to step aside, which costs 5 us a call

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, 0 before the first rows fixed the columns."""
        return 0 if self._rows is None else self._rows.numel() * WORD_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, padding included, 0 before the first rows."""
        return 0 if self._layout is None else self._layout.row_bytes

    @property
    def all_rows(self) -> TensorDictBase:
        """Every slot, written or not, as views: TensorDict ``[capacity]``; writing into it changes the storage."""
        if self._storage is None:
            raise RuntimeError("the storage is empty; call extend first")
        return self._storage

    @property
    def layout(self) -> RowLayout | None:
        """Where each column lies in a row; ``None`` before the first rows."""
        return self._layout

    @property
    def num_held(self) -> int:
        """Rows that are stored; a subclass may release some below the length."""
        return self._len

    @property
    def rows_at_once(self) -> int:
        """Most rows that a single write can store, whatever they are."""
        return self.capacity

    def column(self, key: NestedKey, index: Tensor) -> Tensor | None:
        """One column ``[N, ...]`` of the rows ``index``; ``None`` when it is not stored."""
        column = self.all_rows.get(key, None)
        return None if column is None else column[index]

    def generation_of(self, index: Tensor) -> Tensor:
        """How often each slot has been written, int64 of the shape of ``index``."""
        if self._generation is None:
            return torch.zeros_like(index)
        slots = index.flatten().to(self._generation.device)
        return self._generation.index_select(0, slots).view(index.shape)

    def get(self, index: Any, extra: dict[str, Tensor] | None = None) -> Any:
        """Rows at ``index``.

        Args:
            index: int64 ``[B]`` or ``[B, 2]`` (one packed gather), or anything else that indexes a TensorDict.
            extra: further entries of the TensorDict; for int64 indices.

        Returns:
            TensorDict with batch size of the shape of ``index``; a copy for tensors, views otherwise.
        """
        if self._layout is None or self._rows is None:
            raise RuntimeError("the storage is empty; call extend first")
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim == 0:
            return super().get(index)
        slots = index if index.ndim == 1 else index.flatten()
        if slots.device != self._rows.device:  # TorchRL's samplers draw on the CPU
            slots = slots.to(self._rows.device)
        rows = self._rows.index_select(0, slots)
        return self._layout.unpack(rows, index.shape, extra)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes transitions into slots and counts one more generation of each.

        Args:
            cursor: int, slice, range, or int64 ``[N]`` without duplicates.
            data: TensorDict ``[N]`` (``[]`` for an int cursor); ``generation`` in it is ignored.

        Raises:
            ValueError: keys, shapes, dtypes or device are not those of the first rows; nothing is written.
        """
        if isinstance(data, list):
            data = torch.stack(data)
        if isinstance(cursor, int):
            data, cursor = data.unsqueeze(0), slice(cursor, cursor + 1)
        slots = _as_slots(cursor)
        values = self.checked_values(data)
        if set_cursor:
            self._set_last_cursor(cursor)
        self.write(slots, values, grow=set_cursor)

    def checked_values(self, data: TensorDictBase) -> list[Tensor]:
        """The values of rows ``[N]`` in the order of the columns, once they are known to fit.

        Raises:
            ValueError: keys, shapes, dtypes or device are not those of the first rows.
        """
        if self._columns is None or self._layout is None:
            self._init(data)
            assert self._columns is not None and self._layout is not None
        if self._given_device is None:
            self._given_device = next((leaf.device for leaf in data.values(True, True)), None)
        by_key: dict[Key, Tensor] = {}
        if not collect_leaves(data, self._given_tree, by_key):
            raise self._mismatch(data)
        values = []
        for key, (dtype, shape) in self._given.items():
            value = by_key[key]
            if value.dtype != dtype or value.shape[1:] != shape or value.device != self._given_device:
                raise self._mismatch(data)
            values.append(value.detach() if value.requires_grad else value)
        return values

    def write(self, slots: slice | Tensor, values: list[Tensor], *, grow: bool = True) -> None:
        """Writes the values of :meth:`checked_values` into a slice or int64 ``[N]`` of slots."""
        assert self._columns is not None and self._generation is not None
        for column, value in zip(self._columns, values, strict=True):
            column.put(slots, value)
        if self._generation.device.type == "cpu":
            self._generation.numpy()[slots if isinstance(slots, slice) else slots.numpy()] += 1
        else:
            self._generation[slots] += 1
        if grow:
            highest = slots.stop if isinstance(slots, slice) else int(slots.max()) + 1
            self._len = max(len(self), highest)
        self._bump_mutation_revision()

    def _init(self, data: TensorDictBase) -> None:
        leaves = [leaf for leaf in leaves_of(data[0]) if leaf[0] != GENERATION]
        self._allocate(RowLayout([*leaves, (GENERATION, torch.int64, torch.Size([]))]))

    def _allocate(self, layout: RowLayout) -> None:
        breakdown = f"{self.capacity:,} rows of {layout.row_bytes:,} bytes"
        words = layout.row_bytes // WORD_BYTES
        device = torch.device(self.device)
        self._rows = allocate_rows(self.capacity, words, device, self._memmap, breakdown)
        self._layout = layout
        self._storage = layout.unpack(self._rows, torch.Size([self.capacity]))
        self._generation = self._storage.get("generation")
        self._columns = [
            StoredColumn(key, column.dtype, column.shape, self._storage.get(key))
            for key, column in layout.columns.items()
            if key != GENERATION
        ]
        self._given = {column.key: (column.dtype, column.shape) for column in self._columns}
        self._given_tree = layout.tree
        self.initialized = True

    def _mismatch(self, data: TensorDictBase) -> ValueError:
        given = {leaf[0]: (leaf[1], tuple(leaf[2])) for leaf in leaves_of(data[0])}
        stored = {key: (dtype, tuple(shape)) for key, (dtype, shape) in self._given.items()}
        given.pop(GENERATION, None)
        different = [
            f"{'/'.join(name)}: stored {stored.get(name, 'no such column')}, given {given.get(name, 'no such column')}"
            for name in sorted(stored.keys() | given.keys())
            if stored.get(name) != given.get(name)
        ] or [f"device: first {self._given_device}, now {data.get(next(iter(given))).device}"]
        return ValueError(
            "transitions must have the columns of the first ones stored; nothing was written. "
            f"Different: {'; '.join(different)}. Convert them, or start a new buffer"
        )

    def state_dict(self) -> dict[str, Any]:
        """Rows written so far (a view, not a copy) and the layout that says what their bytes are."""
        if self._layout is None or self._rows is None:
            return {"capacity": self.capacity, "length": 0, "layout": None, "rows": None}
        layout = self._layout.description()
        return {"capacity": self.capacity, "length": self._len, "layout": layout, "rows": self._rows[: self._len]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave.

        Raises:
            ValueError: another capacity was saved; nothing is changed then.
        """
        if state_dict["capacity"] != self.capacity:
            raise ValueError(
                f"the saved storage has capacity {state_dict['capacity']} and this one {self.capacity}; "
                "build the buffer with the saved capacity"
            )
        length = state_dict["length"]
        layout = state_dict["layout"]
        if layout is not None:
            if self._layout is None or self._layout.description() != layout:
                self._allocate(RowLayout.from_description(layout))
            assert self._rows is not None
            self._rows[:length] = state_dict["rows"].to(self._rows.device)
        self._given_device = None
        self._len = length
        self._bump_mutation_revision()

    def dumps(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` into the directory ``path``."""
        write_state(path, self.state_dict())

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        self.load_state_dict(read_state(path))

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "PackedStorage cannot be shared between processes; use TorchRL's LazyMemmapStorage for that, "
                "or keep the buffer in one process"
            )
        state = super().__getstate__()
        state["packed"] = self.state_dict()
        # Views do not survive a copy as views: they are laid out anew.
        return state | dict.fromkeys(("_rows", "_storage", "_generation", "_columns", "_layout"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state.pop("packed")
        super().__setstate__(state)
        self.load_state_dict(packed)

    def _empty(self) -> None:
        if self._generation is not None:
            self._generation[: self._len] += 1  # updates on their way to rows forgotten now are late
        self._len = 0
        self._bump_mutation_revision()

    def __repr__(self) -> str:
        return f"PackedStorage(capacity={self.capacity}, length={len(self)}, row_bytes={self.row_bytes})"


def stored_slots(storage: Storage) -> Tensor:
    """Slots of a storage without tables that hold a row, int64 ``[n]``, ascending, on the CPU."""
    live = getattr(storage, "live_slots", None)
    return torch.arange(len(storage)) if live is None else live.state().sort().values


def stored_before(storage: Storage, new: Tensor) -> Tensor:
    """Slots that held a row before those in ``new``, int64 ``[N]``, were written; ascending, on the device of these."""
    earlier = torch.zeros(storage.max_size, dtype=torch.bool, device=new.device)
    earlier[stored_slots(storage).to(new.device)] = True
    earlier[new] = False
    return earlier.nonzero().squeeze(1)


def read_columns(storage: Storage, index: Tensor, keys: Sequence[NestedKey]) -> list[Tensor]:
    """Single columns ``[N, ...]`` of the rows ``index`` of any TorchRL tensor storage.

    Raises:
        KeyError: a key is not stored; the message names the stored ones.
    """
    packed = isinstance(storage, PackedStorage)
    everything = storage.all_rows if packed else storage.get(slice(0, len(storage)))
    if not isinstance(everything, TensorDictBase):
        raise TypeError(
            f"columns cannot be read from a {type(storage).__name__}; use PackedStorage or LazyTensorStorage"
        )
    columns = []
    for key in keys:
        column = storage.column(key, index) if packed else everything.get(key, None)
        if column is None:
            stored = list(everything.keys(include_nested=True, leaves_only=True))
            raise KeyError(f"no column {key!r} is stored; stored are {stored}")
        columns.append(column if packed else column[index])
    return columns


def _as_slots(cursor: Any) -> slice | Tensor:
    if isinstance(cursor, range):
        return slice(cursor.start, cursor.stop, cursor.step)
    if isinstance(cursor, slice):
        return cursor
    return torch.as_tensor(cursor, dtype=torch.int64)
