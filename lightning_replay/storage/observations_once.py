# SPDX-License-Identifier: Apache-2.0
"""Packed rows whose observations are stored once each, although they are next observations of the rows before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.deferred_checks import DeferredChecks
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.columns import GENERATION, NOT_STORED, WITHOUT_NUMPY, Column, as_tensor
from lightning_replay.storage.device_next_observations import DeviceNextObservations
from lightning_replay.storage.next_observations import NextObservations, check_places
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.storage.rows import (
    OBSERVATION,
    WORD_BYTES,
    Key,
    RowLayout,
    gather_branch,
    leaves_of,
    nest,
    observation_keys,
    paired_keys,
    shown,
)

__all__ = ["ObservationStorage"]


class _Given(NamedTuple):
    """Places of columns among the values of given rows, in the order in which they are packed."""

    own: list[int]
    following: list[int]
    others: list[int]
    padding: int  # Bytes after an observation, up to the next word.


class NextColumn:
    """A column of next observations, which is no column of the rows: read by slots, in the given form."""

    def __init__(self, storage: ObservationStorage, key: Key, form: Callable[[Tensor], Any]) -> None:
        self._storage = storage
        self._key = key
        self._form = form

    def __getitem__(self, slots: Any) -> Any:
        """Returns the rows of an int, a slice or int64 ``[N]``, as a tensor if slots are one."""
        if isinstance(slots, int | np.integer):
            return self[slots : slots + 1][0]
        given = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        index = as_tensor(given) % self._storage.capacity  # -1 is no row
        column = self._storage.column(self._key, index)
        assert column is not None
        values = self._form(column)
        return as_tensor(values) if isinstance(slots, Tensor) else values


@rebuildable
class ObservationStorage(PackedStorage):
    """Keeps an observation that is the next observation of another row once, whatever its dtype and its entries.

    Rows are written and drawn as with :class:`~lightning_replay.storage.PackedStorage`, bit for bit. Every column that
    is stored at the root and under ``"next"``, with one dtype and shape, belongs to the observation, flags and rewards
    left out. All of them together are compared, bit for bit: a new row that starts with what a stored row ended with
    keeps both. Neither ``trajectory`` nor the order of rows matters. So this works with any writer, with environments
    side by side, and with returns over several steps that are formed before they are stored.

    The next observation of a row that no row continues is kept beside the rows. Such a row stands at the end of an
    episode or at the newest step of a running one, or the row after it left first. This memory is taken as such rows
    come, also with ``memmap``.

    Args:
        capacity: rows.
        device: device of the rows.
        memmap: a directory for a scratch file that holds the rows.

    Raises:
        ValueError: at the first rows: no column that is also under ``"next"``.

    Example:
        >>> from tensordict import TensorDict
        >>> storage, states = ObservationStorage(10), torch.arange(4.0).view(4, 1)
        >>> rows = TensorDict({"observation": states[:3], "next": {"observation": states[1:]}}, [3])
        >>> storage.set(slice(0, 3), rows)
        >>> storage.stats()["last_observations"], storage.get(torch.tensor([1, 2]))["next", "observation"].flatten()
        (1, tensor([2., 3.]))
    """

    exact = True
    _of_columns = (
        *PackedStorage._of_columns,
        *("_next", "_observation", "_outer_layout", "_start", "_given"),
    )
    _next: NextObservations | DeviceNextObservations | None
    _observation: RowLayout | None  # of the columns of an observation, without "next"
    _outer_layout: RowLayout | None  # of rows with both observations
    _start: int  # the word of a row at which its observation begins
    _given: _Given | None

    def __init__(self, capacity: int, *, device: str | torch.device = "cpu", memmap: str | None = None) -> None:
        super().__init__(capacity, device=device, memmap=memmap)
        self.follows_there: bool = self._there is not None

    def defer_reads(self, checks: DeferredChecks | None) -> None:
        super().defer_reads(checks)
        if checks is not None and self.follows_there:
            checks.register(self._number_there, self._receive)

    def _number_there(self) -> Tensor:
        if isinstance(self._next, DeviceNextObservations):
            return self._next.number.reshape(1)
        return torch.zeros(1, dtype=torch.int64, device=self.device)

    def _receive(self, numbers: list[int]) -> None:
        if isinstance(self._next, DeviceNextObservations):
            self._next.receive(numbers[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, of the places of next observations, and of those kept beside the rows, or 0 before any."""
        return super().nbytes + (0 if self._next is None else self._next.nbytes)

    def stats(self) -> dict[str, Any]:
        """Returns how many next observations are kept beside the rows, because no stored row starts with them."""
        return {"last_observations": 0 if self._next is None else self._next.count}

    def write(self, slots: slice | Tensor, values: Sequence[Column], *, grow: bool = True) -> None:
        """Writes the values of :meth:`checked_values` into a slice or int64 ``[N]`` of slots."""
        assert self._next is not None and self._given is not None
        first = self._words([values[place] for place in self._given.own])
        second = self._words([values[place] for place in self._given.following])
        others = [values[place] for place in self._given.others]
        with self.snapshots.lock:
            self._next.link(slots, first, second)
            super().write(slots, [first, *others], grow=grow)

    def _words(self, values: list[Any]) -> Any:
        """Returns the columns ``[N, ...]`` of an observation as words ``[N, W]``, int64, as an array on the CPU."""
        assert self._given is not None
        if self.follows_there:
            there = [as_tensor(value).detach().to(self.device, non_blocking=True) for value in values]
            flat = [value.contiguous().view(len(value), -1).view(torch.uint8) for value in there]
            rest = flat[0].new_zeros(len(flat[0]), self._given.padding)
            return torch.cat([*flat, rest], 1).view(torch.int64)
        parts = [_bytes_of(value) for value in values]
        if len(parts) == 1 and not self._given.padding:
            return parts[0].view(np.int64)
        padding = np.zeros((len(parts[0]), self._given.padding), dtype=np.uint8)
        return np.concatenate([*parts, padding], axis=1).view(np.int64)

    def get(self, index: Any, extra: dict[str, Tensor] | None = None) -> Any:
        """Returns rows as a copy, with both observations. Raises ``RuntimeError`` if it is empty."""
        if self._outer_layout is None:
            raise RuntimeError("the storage is empty; call extend first")
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim == 0:
            return self._get_by(index)
        rows = self.packed_rows(index if index.ndim == 1 else index.flatten())
        read = self._outer_layout.unpack(rows, index.shape, extra)
        return self._indexed(read, index) if self._is_torchrls else read

    def packed_rows(self, slots: Tensor) -> Tensor:
        """Returns a copy of the rows in these slots, int64 ``[N, words]``, the next observation behind the others.

        :meta private:
        """
        if self._next is None:
            raise RuntimeError("the storage is empty; call extend first")
        rows = self._next.gather(slots, self.all_packed.shape[1])
        self.check_read()
        return rows

    def read_in_place(self, slots: Tensor) -> tuple[RowLayout, Tensor, Tensor]:
        """Returns a copy of the rows in slots, int64 ``[B, 2]``, with both observations, their layout, and places.

        :meta private:
        """
        rows = self.packed_rows(slots.flatten())
        assert self._outer_layout is not None
        slots = slots.to(rows.device)
        places = torch.arange(len(rows), device=rows.device).view(slots.shape)
        return self._outer_layout, rows, torch.where(slots == slots[:, :1], places[:, :1], places)

    def column(self, key: NestedKey, index: Tensor) -> Tensor | None:
        """Returns one column ``[N, ...]`` of the rows ``index``, or ``None`` when it is not stored."""
        name: Key = (key,) if isinstance(key, str) else tuple(key)
        below = [] if self._observation is None else self._observation.order
        if name[0] != "next" or not any(own[: len(name) - 1] == name[1:] for own in below):
            return super().column(key, index)
        if name[1:] not in below:
            return self.get(index).get(name)  # a branch
        assert self._next is not None and self._observation is not None
        words = self._next.gather(index.flatten())
        self.check_read()
        return self._observation.leaves(words, index.shape)[name[1:]]

    def observation_pairs(self, form: Callable[[Tensor], Any]) -> list[tuple[Any, Any]]:
        """Returns each column of observations and the next ones in the given form, both to be indexed by slots.

        :meta private:
        """
        keys = observation_keys(self.row_columns)
        return [(form(self.readable_rows.get(key)), NextColumn(self, ("next", *key), form)) for key in keys]

    def _init(self, data: TensorDictBase) -> None:
        kinds = {key: (dtype, shape) for key, dtype, shape in leaves_of(data[0]) if key not in NOT_STORED}
        if not paired_keys(kinds):
            raise ValueError(
                "observations are stored once, and no column is also under 'next' with its dtype and shape; there are "
                f"{', '.join(map(shown, kinds))}. Nothing was stored. Give rows with an observation and the next one, "
                "or leave observations='once' out"
            )
        if OBSERVATION in kinds:
            raise ValueError(f"the column {OBSERVATION[0]!r} is the storage's own; rename it. Nothing was stored")
        self._allocate_all(kinds)

    def _allocate_all(self, kinds: dict[Key, tuple[torch.dtype, torch.Size]]) -> None:
        observation, layout = _layouts(kinds)
        self._allocate(layout)
        assert self._rows is not None
        width = observation.row_bytes // WORD_BYTES
        count = self._rows.shape[:1]
        columns = layout.leaves(self._rows, count)
        self._start = int(columns.pop(OBSERVATION).storage_offset() - self._rows.storage_offset())
        columns |= observation.leaves(self._rows.narrow(1, self._start, width), count)
        self._views = {key if len(key) > 1 else key[0]: column for key, column in columns.items()}
        self._storage = gather_branch(nest(columns), columns, count, self._rows.device)
        following = [("next", *key) for key in observation.order]
        order = [*kinds]
        self._observation = observation
        self._outer_layout = layout.with_next(OBSERVATION, observation, [*order, GENERATION])
        self._next = (
            DeviceNextObservations(self._rows, self._start, width, lambda: self.deferred is not None)
            if self.follows_there
            else NextObservations(self._rows, self._start, width)
        )
        self._given = _Given(
            [order.index(key) for key in observation.order],
            [order.index(key) for key in following],
            [order.index(key) for key in layout.columns if key not in (OBSERVATION, GENERATION)],
            observation.row_bytes - sum(kinds[key][1].numel() * kinds[key][0].itemsize for key in following),
        )
        both = [*observation.order, *following]
        self._expect(kinds, [key for key in both if kinds[key][0] not in WITHOUT_NUMPY and not self.follows_there])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of packed rows, places of next observations, and observations no stored row starts with."""
        state = super().state_dict()
        if self._next is None:
            return state | {"columns": None, "places": None, "last_observations": None}
        places, last = self._next.saved(self._len)
        columns = RowLayout([(key, *kind) for key, kind in self.row_columns.items()]).description()
        return state | {"columns": columns, "places": places, "last_observations": last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_writable()
        self._saved_layout(state_dict)
        places, last = state_dict["places"], state_dict["last_observations"]
        if state_dict["layout"] is not None:
            kinds = RowLayout.from_description(state_dict["columns"]).columns
            observation, layout = _layouts(kinds)
            if layout.description() != state_dict["layout"]:
                raise ValueError("the saved rows have other columns than the saved layout; load another save")
            check_places(places, last, state_dict["length"], observation.row_bytes // WORD_BYTES)
            if [*self.row_columns.items()] != [*kinds.items()]:
                self._allocate_all(kinds)
        super().load_state_dict(state_dict)
        if self._next is None:
            return
        if places is None:
            self._next.clear()
        else:
            self._next.load(places, last)

    def _empty(self) -> None:
        super()._empty()
        if self._next is not None:
            self._next.clear()


def _layouts(kinds: Mapping[Key, tuple[torch.dtype, torch.Size]]) -> tuple[RowLayout, RowLayout]:
    """Returns the layout of an observation in words, and of rows that hold it as one column."""
    own = paired_keys(kinds)
    both = {*own, *(("next", *key) for key in own)}
    observation = RowLayout([(key, *kinds[key]) for key in kinds if key in own], WORD_BYTES)
    words = (OBSERVATION, torch.int64, torch.Size([observation.row_bytes // WORD_BYTES]))
    others = [(key, *kind) for key, kind in kinds.items() if key not in both]
    return observation, RowLayout([words, *others, (GENERATION, torch.int64, torch.Size([]))])


def _bytes_of(value: Column) -> np.ndarray:
    """Returns a column ``[N, ...]`` as bytes ``[N, bytes]``, copied if loops would be compiled again."""
    if not isinstance(value, np.ndarray):
        value = value.contiguous().view(torch.uint8).numpy()  # NumPy has no bfloat16.
    flat = (value if value.flags.carray else value.copy()).reshape(len(value), -1)
    return flat.view(np.uint8)
