# SPDX-License-Identifier: Apache-2.0
"""Transitions as packed rows of bytes: one gather per batch, every leaf a view of it."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import ListStorage, Storage

from lightning_replay.deferred_checks import DeferredChecks
from lightning_replay.forking import ForkGuard
from lightning_replay.free_memory import allocate_rows
from lightning_replay.options import checked_count
from lightning_replay.parts import BufferHooks
from lightning_replay.saving import load_state, write_state
from lightning_replay.saving.files import check_writable
from lightning_replay.saving.snapshot import Snapshots
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.columns import (
    GENERATION,
    INDEX,
    MASKS,
    MOST_SINGLE_BYTES,
    NOT_STORED,
    Column,
    RowReader,
    SingleRow,
    StoredColumn,
    TransitionCheck,
    checked_device,
    refuse_ragged,
)
from lightning_replay.storage.occupancy import (
    FirstSlots,
    KnowsOccupancy,
    Occupancy,
    SlotSet,
    checked_least_generation,
)
from lightning_replay.storage.rows import WORD_BYTES, Key, RowLayout, leaves_of, observation_pairs, shown
from lightning_replay.torchrl_compat import attached_buffers, writer_of


# memmap: a save from another machine does not decide the place of files
@functools.partial(rebuildable, chosen_when_loaded=("memmap",))
class PackedStorage(KnowsOccupancy, LazyTensorStorage):
    """Keeps all columns of a transition, whatever their dtype, side by side in one aligned row.

    A batch is one ``index_select`` of rows. Its leaves are dtype views of the result, so they are strided
    (``reshape`` them rather than ``view`` across the batch dimension). The first rows written fix the columns. Rows
    with other keys, shapes or dtypes are refused and nothing is stored. Memory is taken then, and refused if less is
    free.

    Every row also holds ``generation``, int64: how often its slot has been written or emptied, by which stale priority
    updates for reused slots are recognized. It continues to count through ``empty``, saving and loading. After a load
    into a used storage, new rows have larger generations than any row before.

    A TorchRL storage of one dimension, for TorchRL's samplers, writers and buffers. In its buffers rows have ``index``,
    their slot, in place of ``generation``. What TorchRL concatenates with other rows must have this column too: the
    offline half of an ``OfflineToOnlineReplayBuffer`` is a ``TensorDictReplayBuffer``, or has a ``PackedStorage``.
    ``index``, ``generation``, ``index_generation``, and ``priority_weight`` are ignored in rows that are given.

    Args:
        capacity: rows.
        device: device of the rows.
        memmap: a directory for a scratch file that holds the rows, for buffers larger than memory. The file
            disappears with the process, unlike what ``save`` writes.

    Raises:
        MemoryError: at the first rows, when the rows do not fit.
        TypeError: ``capacity`` is no whole number, ``device`` no device of torch.
        ValueError: ``capacity`` is not positive, a device that keeps no data or is not there, ``memmap`` on another
            device than the CPU, or columns that change.
        RuntimeError: a write in a forked process into rows on disk, which are the parent's.
    """

    exact: bool = True
    #: Whether the frames of images are stored once each, in room that can be full.
    #:
    #: :meta private:
    stores_frames: bool = False
    #: Number of rows that leave together, if rows leave before they are overwritten.
    #:
    #: :meta private:
    rows_together: int = 1
    #: Keys of columns whose rows have different lengths.
    #:
    #: :meta private:
    ragged_keys: Sequence[Key] = ()
    #: Whether next observations are found on the device of the rows, in memory that moves when it grows.
    #:
    #: :meta private:
    follows_there: bool = False
    #: Refusals that a replay that draws on the device reads later, or ``None`` if all are raised at once.
    #:
    #: :meta private:
    deferred: DeferredChecks | None = None
    #: Whether a replay can draw slots on the device of the rows.
    #:
    #: :meta private:
    draws_there: bool = True
    _keeps_there = False  # Whether generations are kept only on the device of the rows.
    _mutation_revision = 0  # a plain number, for TorchRL's samplers that keep what they read of the rows
    # Set with the columns by the first rows or a load. They are views, which do not survive a copy as views.
    _of_columns: tuple[str, ...] = (
        *("layout", "generations", "_rows", "_storage", "_generation", "_columns", "_single", "_reader"),
        *("_columns_check", "_live"),
    )
    layout: RowLayout | None  # Places of the columns in a row, or ``None`` before the first rows.
    # Generations of all slots, int64 ``[capacity]``, on the CPU a view of the rows, or ``None`` before the first rows.
    generations: np.ndarray | None
    # Dtype and shape of the columns of given rows, in the order of :meth:`checked_values`.
    row_columns: Mapping[Key, tuple[torch.dtype, torch.Size]]
    _rows: Tensor | None
    _generation: Tensor | None
    _columns: list[StoredColumn] | None
    _views: dict[NestedKey, Tensor]  # the columns, found faster than in a TensorDict
    _single: SingleRow | None
    _reader: RowReader | None
    _columns_check: Callable[[Sequence[Column]], None] | None
    _live: SlotSet | None  # from the first release on, unless tables hold the rows
    _masks: list[int]  # places of the columns that mark padding
    _len: int

    def __init__(self, capacity: int, *, device: str | torch.device = "cpu", memmap: str | None = None) -> None:
        self.capacity: int = checked_count("capacity", capacity, of="transitions")
        self.rows_at_once: int = self.capacity  # Most rows that a single write can store, whatever they are.
        known = checked_device(device)
        if memmap is not None and not isinstance(memmap, str | Path):
            raise TypeError(f"memmap is {memmap!r}; it must be a directory, or None")
        if memmap is not None and known.type != "cpu":
            raise ValueError(f"memmap keeps rows on disk and needs device='cpu'; got device={device!r}")
        if memmap is not None:
            check_writable("memmap", memmap)  # not only when the first row comes
        self._there = None if known.type == "cpu" else known  # device to which slots are moved
        # "Compilable" counters are plain numbers. The others are shared with forked processes, and of 32 bits.
        super().__init__(max_size=self.capacity, device=device, compilable=True)
        self._memmap: str | None = None if memmap is None else str(memmap)
        self._forget_columns()
        self.row_check: TransitionCheck | None = None  # refuses new rows by raising, set by a Replay
        self._is_torchrls = False  # whether only buffers of TorchRL read it, whose rows have "index"
        self._last_cursor: int | None = None  # the slot written last
        # Source of the rows, or None until the first ones since this storage was built or loaded.
        self._given_device: torch.device | None = None
        self.occupancy_owner: Occupancy | None = None  # The slots that hold a row, if a writer into tables decides it.
        self._reached = 0  # one more than the highest slot ever written
        #: Columns of the rows that were just written, in the order of their slots, while the buffers are told of them.
        #:
        #: :meta private:
        self.given: Sequence[Column] | None = None
        self._has_views = False  # whether rows may be written without notice, through views handed out
        self._least_generation = 0  # of rows written from now on, less 1: above all that were handed out before a load
        self._begin_life()

    def _begin_life(self) -> None:
        self.snapshots: Snapshots = Snapshots()
        # Writes into a file that forked processes share, counted in memory that they share, and in what a fork copies.
        shared = None if self._memmap is None else mmap.mmap(-1, 8)
        self._shared_writes = None if shared is None else np.frombuffer(shared, dtype=np.int64)
        self._own_writes = 0
        self._guard = ForkGuard(self)

    def after_fork(self) -> None:
        """Replaces the lock in a forked process, which may not write into a file of its parent.

        :meta private:
        """
        self._guard.renew(self.snapshots.lock)
        if self._guard.refusal is None and self._shared_writes is not None and self.initialized:
            self._guard.refusal = (
                f"the rows of this {type(self).__name__} lie in a file that a forked process shares with its "
                "parent, so they cannot be written here; nothing was changed. Write in the parent, or build a "
                "storage in this process"
            )
        self.snapshots = Snapshots()  # the open ones are read in the parent

    def check_read(self) -> None:
        """Raises ``RuntimeError`` after a read in a forked process, if the parent has written into the file since.

        :meta private:
        """
        if self._shared_writes is not None and self._shared_writes[0] != self._own_writes:
            raise RuntimeError(
                f"the rows of this {type(self).__name__} lie in a file that a forked process shares with its parent, "
                "which has written into it since the fork: what is read here is of no one moment. Save the buffer in "
                "the parent and load it here, or fork when nothing is written any more"
            )

    def check_writable(self) -> None:
        """Raises ``RuntimeError`` before a write in a forked process into rows of the parent.

        :meta private:
        """
        self._guard.check()

    def attach(self, buffer: Any) -> None:
        """Attaches a buffer, to be informed of rows that are written. The buffer calls it.

        :meta private:
        """
        super().attach(buffer)
        self._is_torchrls = not any(isinstance(one, BufferHooks) for one in self._attached_entities)

    def __len__(self) -> int:
        return self._len  # TorchRL's disables torch.compile around it, which costs 5 us a call

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, 0 before the first rows fixed the columns."""
        return 0 if self._rows is None else self._rows.numel() * WORD_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, padding included, 0 before the first rows."""
        return 0 if self.layout is None else self.layout.row_bytes

    @property
    def all_rows(self) -> TensorDictBase:
        """Every slot, written or not, as views, a TensorDict ``[capacity]``. Writing into it changes the storage.

        From then on a save reads all rows to find the changed rows. See :attr:`readable_rows`.
        """
        rows, self._has_views = self.readable_rows, True
        return rows

    @property
    def readable_rows(self) -> TensorDictBase:
        """The same as :attr:`all_rows`, to be read and not written: saves take no notice of changes through it."""
        if self._storage is None:
            raise RuntimeError("the storage is empty; call extend first")
        return self._storage

    @property
    def all_packed(self) -> Tensor:
        """Every slot as it is packed, int64 ``[capacity, words]``. Only read it, see :attr:`readable_rows`.

        :meta private:
        """
        if self._rows is None:
            raise RuntimeError("the storage is empty; call extend first")
        return self._rows

    def observation_pairs(self, form: Callable[[Tensor], Any]) -> list[tuple[Any, Any]]:
        """Returns each column of observations and the next ones in the given form, both to be indexed by slots.

        :meta private:
        """
        return [(form(own), form(following)) for own, following in observation_pairs(self.readable_rows)]

    @property
    def occupancy(self) -> Occupancy:
        """The slots that hold a row, which are the slots not released, or the slots that a writer's tables refer to."""
        if self.occupancy_owner is not None:
            return self.occupancy_owner
        return FirstSlots(self._len) if self._live is None or self._live.count == self._len else self._live

    @property
    def num_stored(self) -> int:
        """Rows that are stored, fewer than the length if some below it were released.

        :meta private:
        """
        return self.occupancy.count

    def build_options(self) -> dict[str, Any]:
        """Returns the options that a saved state presumes beside class and capacity, names by option.

        :meta private:
        """
        return {}

    def stats(self) -> dict[str, Any]:
        """Returns the entries of this storage in ``Replay.stats``."""
        return {}

    @property
    def rows_in_memory(self) -> int:
        """Rows for which memory is taken.

        :meta private:
        """
        return self.capacity

    def column(self, key: NestedKey, index: Tensor) -> Tensor | None:
        """Returns one column ``[N, ...]`` of the rows ``index``, or ``None`` when it is not stored."""
        column = self._views.get(key)
        if column is None:
            column = self.readable_rows.get(key, None)  # a branch, or a name as a tuple
        if column is not None and self._there is not None:
            index = index.to(self._there, non_blocking=True)
        values = None if column is None else column[index]
        self.check_read()
        return values

    def generation_of(self, index: Tensor) -> Tensor:
        """Returns how often each slot has been written, int64 of the shape of ``index``.

        :meta private:
        """
        if self._generation is None:
            return torch.zeros_like(index)
        if self._keeps_there:
            index = index.to(self._generation.device)
        return self._generation.index_select(0, index.flatten()).view(index.shape)

    def get(self, index: Any, extra: dict[str, Tensor] | None = None) -> Any:
        """Returns rows, TensorDict of the shape of ``index``, as a copy for tensors and as views otherwise.

        They have ``index`` in a buffer of TorchRL, and ``generation`` otherwise.

        Args:
            index: int64 ``[B]`` or ``[B, 2]`` (one packed gather), or anything else that indexes a TensorDict.
            extra: further entries of the TensorDict, for int64 indices.
        """
        if self.layout is None or self._rows is None:
            raise RuntimeError("the storage is empty; call extend first")
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim == 0:
            self._has_views = True
            views = super().get(index)
            self.check_read()
            if not self._is_torchrls or is_key(index):
                return views
            return self._indexed(views, torch.arange(self._len, device="cpu")[index])
        rows = self.packed_rows(index if index.ndim == 1 else index.flatten())
        read = self.layout.unpack(rows, index.shape, extra)
        return self._indexed(read, index) if self._is_torchrls else read

    def _get_by(self, index: Any) -> Any:
        # Copies of rows by a key, or by anything else than int64 slots.
        if is_key(index):
            return self.get(slice(None))[index]
        slots = torch.arange(self._len, device="cpu")[index]
        return self.get(slots) if slots.ndim else self.get(slots.view(1))[0]

    @staticmethod
    def _indexed(rows: TensorDictBase, index: Tensor) -> TensorDictBase:
        return rows.exclude(GENERATION).set(INDEX, index.to(rows.device))

    def packed_rows(self, slots: Tensor) -> Tensor:
        """Returns a copy of the rows in these slots, int64 ``[N]``, as they are packed: int64 ``[N, words]``.

        :meta private:
        """
        stored = self.all_packed
        if self._there is not None:
            slots = slots.to(self._there, non_blocking=True)
        rows = stored.index_select(0, slots)
        if self._shared_writes is not None:
            self.check_read()
        return rows

    def read_in_place(self, slots: Tensor) -> tuple[RowLayout, Tensor, Tensor]:
        """Returns the layout of packed rows with all columns, the rows, and places of slots among them, ``[B, 2]``.

        Equal slots of a pair have the same place.

        :meta private:
        """
        rows = self.all_packed
        assert self.layout is not None
        return self.layout, rows, slots

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes transitions into slots and counts one more generation of each.

        Args:
            cursor: int, slice, range, or int64 ``[N]`` without duplicates.
            data: TensorDict ``[N]`` (``[]`` for an int cursor). Its columns of batches, as ``index``, are ignored.
            set_cursor: whether these rows are the newest, and the storage grows to hold them.

        Raises:
            IndexError: a slot below 0 or beyond the capacity. Nothing is written.
            TypeError: no TensorDict. Nothing is written.
            ValueError: no slots, or keys, shapes, dtypes or device differ from the first rows, or the check of the
                ``Replay`` refuses. Nothing is written.
            RuntimeError: see :meth:`check_writable`.
        """
        if isinstance(data, list):
            data = torch.stack(data)
        if isinstance(cursor, int):
            if not 0 <= cursor < self.capacity:
                raise IndexError(f"cursor is {cursor}; it must be a slot from 0 to {self.capacity - 1}")
            data, cursor = data.unsqueeze(0), slice(cursor, cursor + 1)
        slots = range(*cursor.indices(self.capacity)) if isinstance(cursor, slice) else cursor
        if isinstance(slots, range) and slots.step == 1:
            slots = slice(slots.start, slots.stop)
        else:
            slots = torch.as_tensor(slots, dtype=torch.int64, device="cpu")
            if not slots.numel():
                raise ValueError("cursor is empty; it must be at least one slot. Nothing was written")
            lowest, highest = (int(bound) for bound in slots.aminmax())
            if lowest < 0 or highest >= self.capacity:  # the compiled loop that writes rows checks no bounds
                raise IndexError(
                    f"cursor has slots from {lowest} to {highest}; they must be from 0 to {self.capacity - 1}. Nothing "
                    "was written"
                )
        values = self.checked_values(data)
        self.write(slots, values, grow=set_cursor)

    def checked_values(self, data: TensorDictBase) -> list[Column]:
        """Returns the values of rows ``[N]`` in the order of the columns, after all checks of :meth:`set`.

        :meta private:
        """
        if not isinstance(data, TensorDictBase):
            raise TypeError(
                f"a PackedStorage holds rows of a TensorDict; got {type(data).__name__}. Nothing was stored; wrap "
                "columns as TensorDict({'observation': ...}, batch_size=[N]), call to_tensordict() of a class, or "
                "use one of TorchRL's storages"
            )
        self.check_writable()
        has_columns = self.has_columns
        try:
            if self._columns is None:
                refuse_ragged(data)
                self._init(data)
            # Rows must all come from one device: a row from another would be copied without notice at every write.
            if self._given_device is None:
                self._given_device = next((leaf.device for leaf in data.values(True, True)), torch.device("cpu"))
            assert self._reader is not None
            values = self._reader.read(data, self._given_device)
            if values is None:
                refuse_ragged(data)
                raise other_columns(data, self.row_columns, self._given_device)
            self._check(values)
            return values
        except BaseException:
            # The first rows fix columns and memory. Rows that are refused fix nothing.
            if not has_columns:
                self.undo_entry()
            raise

    def read(self, rows: TensorDictBase | Mapping[Any, Any]) -> list[Column] | None:
        """Returns :meth:`checked_values` of rows that follow others, also of columns by key, and changes nothing.

        ``None`` if that must decide: no columns are fixed yet, or these rows have others, or padding.
        """
        if self._reader is None or self._given_device is None:
            return None
        values = self._reader.read(rows, self._given_device)
        if values is None or not len(values[0]):
            return None
        if self._masks and not all(bool(values[place].all()) for place in self._masks):
            return None
        self._check(values)
        return values

    def whole_rows(self, rows: Any, columns: Sequence[Column]) -> Any:
        """Returns rows that :meth:`read` has read as ``columns``, with ``("next", "done")`` if they lack it.

        :meta private:
        """
        is_whole = self._reader is None or not self._reader.derived_done
        return rows if is_whole else dict(zip(self.row_columns, columns, strict=True))

    def _check(self, values: Sequence[Column]) -> None:
        self._guard.check()
        if self.row_check is not None:
            if self._columns_check is None:
                self._columns_check = self.row_check.of(dict(zip(self.row_columns, values, strict=True)))
            self._columns_check(values)

    def check_rows_by(self, check: TransitionCheck | None) -> None:
        """Lets ``check`` refuse new rows.

        :meta private:
        """
        self.row_check = check
        self._columns_check = None

    def has_column(self, key: NestedKey) -> bool:
        """Returns whether rows must have this column.

        :meta private:
        """
        return ((key,) if isinstance(key, str) else key) in self.row_columns

    @property
    def has_columns(self) -> bool:
        """Whether rows have fixed the columns and the device that rows come from.

        :meta private:
        """
        return self._given_device is not None  # set after the columns

    def undo_entry(self) -> None:
        """Discards the device of refused rows, and their columns unless rows were ever written.

        :meta private:
        """
        self._given_device = None
        if not self._reached:
            self._forget_columns()

    def _forget_columns(self) -> None:
        self.__dict__.update(dict.fromkeys(self._of_columns), _views={}, row_columns={})
        self.initialized: bool = False

    def write(self, slots: slice | Tensor, values: Sequence[Column], *, grow: bool = True) -> None:
        """Writes the values of :meth:`checked_values` into a slice or int64 ``[N]`` of slots."""
        assert self._columns is not None
        places: Any = slots if type(slots) is slice else slots.numpy()
        snapshots = self.snapshots
        with snapshots.lock:
            snapshots.keep(places)  # as begin_write, without the call
            if self._shared_writes is not None:
                self._shared_writes[0] += 1
                self._own_writes += 1
            single = self._single
            if (
                # One row, as environments give it, is written by one copy.
                single is not None
                and isinstance(places, slice)
                and places.stop - places.start == 1
                and single.write(places.start, values, self._least_generation)
            ):
                highest = places.stop
            else:
                there = places if self._there is None else self._moved(slots)
                for column, value in zip(self._columns, values, strict=True):
                    column.write(there, value)
                self._next_generation(slots)
                highest = slots.stop if isinstance(slots, slice) else int(slots.max()) + 1
            # Generations of slots up to here are saved, also of released rows.
            if highest > self._reached:
                self._reached = highest
            if self._live is not None:
                self._live.add(np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots.numpy())
            if grow:
                self._last_cursor = slots.stop - 1 if isinstance(slots, slice) else int(slots[-1])
                if highest > self._len:
                    self._len = highest
        self._mutation_revision += 1

    def begin_write(self, slots: slice | Tensor | np.ndarray) -> None:
        """Prepares a change of rows in these slots. Call it with the lock of the snapshots held.

        :meta private:
        """
        # A save that runs now reads these rows as they were when it began.
        self.snapshots.keep(slots)
        if self._shared_writes is not None:
            # Before anything is changed, so that a fork refuses rows that are half-written.
            self._shared_writes[0] += 1
            self._own_writes += 1

    def slots(self, start: int, stop: int) -> Tensor:
        if self._keeps_there:
            return torch.arange(start, stop, device=self.slot_device)
        return torch.from_numpy(np.arange(start, stop))  # half the time

    def _bump_mutation_revision(self) -> None:
        self._mutation_revision += 1

    def _tell_released(self, slots: Tensor) -> None:
        self._bump_mutation_revision()
        for buffer in self._attached_entities:
            if isinstance(buffer, BufferHooks):
                buffer.on_evict(slots)

    @property
    def _last_cursor_index(self) -> int | None:
        return self._last_cursor  # at which TorchRL's slices and queries of a full ring end

    def _set_last_cursor(self, cursor: int) -> None:
        self._last_cursor = cursor

    def _next_generation(self, slots: slice | Tensor) -> None:
        if self.generations is None:
            assert self._generation is not None
            there = slots if isinstance(slots, slice) else slots.to(self._generation.device)
            self._generation[there] = self._generation[there].clamp_min(self._least_generation) + 1
            return
        places = slots if isinstance(slots, slice) else slots.numpy()
        self.generations[places] = now = np.maximum(self.generations[places], self._least_generation) + 1
        if self._there is not None:
            self._views["generation"][self._moved(slots)] = self._moved(torch.from_numpy(now))

    def _moved(self, slots: Any) -> Any:
        # Without a wait for the device.
        return slots if isinstance(slots, slice) else slots.to(self._there, non_blocking=True)

    def set_flags(self, keys: Sequence[NestedKey], slots: Tensor) -> None:
        """Sets columns of flags to true in stored rows, int64 ``[N]``. Their generations stay.

        :meta private:
        """
        self.check_writable()
        with self.snapshots.lock:
            self.begin_write(slots)
            for key in keys:
                self.readable_rows.get(key)[slots] = True
        self._bump_mutation_revision()

    def _init(self, data: TensorDictBase) -> None:
        leaves = [leaf for leaf in leaves_of(data[0]) if leaf[0] not in NOT_STORED]
        if not leaves:
            raise ValueError("the transitions have no columns; nothing was stored. Store at least one, [N, ...]")
        self._allocate(RowLayout([*leaves, (GENERATION, torch.int64, torch.Size([]))]))

    @torch.inference_mode(False)
    def _allocate(self, layout: RowLayout) -> None:
        breakdown = f"{self.capacity:,} rows of {layout.row_bytes:,} bytes"
        device = torch.device(self.device)
        self.snapshots.keep_no_result()
        self._rows = allocate_rows(self.capacity, layout.row_bytes // WORD_BYTES, device, self._memmap, breakdown)
        self.layout = layout
        self._storage = slots = layout.unpack(self._rows, torch.Size([self.capacity]))
        # Of a GPU's rows they are kept on the CPU as well, so that TD errors are compared without a wait.
        is_view = device.type == "cpu"
        self._views = {key if len(key) > 1 else key[0]: slots.get(key) for key in layout.columns}
        self._place_generations()
        self._columns = [StoredColumn(key, slots.get(key)) for key in layout.columns if key != GENERATION]
        self._single = None
        if is_view and layout.row_bytes <= MOST_SINGLE_BYTES:
            columns = [one.tensor for one in self._columns]
            self._single = SingleRow(layout, self._rows, columns, self._views["generation"])
        self._expect({key: kind for key, kind in layout.columns.items() if key != GENERATION})
        self.initialized = True

    def defer_reads(self, checks: DeferredChecks | None) -> None:
        """Has refusals, and what the storage needs, read later by ``checks``, or at once if ``None``.

        :meta private:
        """
        self.deferred = checks

    def keep_generations(self, *, there: bool) -> None:
        """Keeps generations only on the device of the rows, if slots are drawn there, otherwise also on the CPU.

        :meta private:
        """
        if self._keeps_there != there:
            self._keeps_there = there
            if self.initialized:
                self._place_generations()

    def _place_generations(self) -> None:
        column = self._views["generation"]
        self._generation = column if self._keeps_there else column.cpu()
        self.generations = None if self._keeps_there else self._generation.numpy()

    @property
    def slot_device(self) -> torch.device:
        """Device of the slots of new rows, which is the device on which slots are drawn.

        :meta private:
        """
        return self._there if self._keeps_there and self._there is not None else torch.device("cpu")

    def _expect(self, columns: dict[Key, tuple[torch.dtype, torch.Size]], arrays: Iterable[Key] = ()) -> None:
        # Columns in ``arrays`` are read as arrays, although they are not in the packed rows.
        assert self._columns is not None
        self.row_columns = columns
        as_arrays = {column.key for column in self._columns if column.array is not None}
        self._reader = RowReader(columns, as_arrays | {*arrays})
        self._columns_check = None
        self._masks = [place for place, key in enumerate(columns) if key in MASKS]

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows written so far (a view, not a copy, to be read alone) and the layout of their bytes."""
        state: dict[str, Any] = {
            "capacity": self.capacity,
            "length": self._len,
            "layout": None,
            "rows": None,
            "emptied": None,
        }
        if self.layout is not None and self._rows is not None and self._generation is not None:
            # Generations of slots that held rows once continue from there.
            emptied = self._generation[self._len : self._reached].clone().cpu()
            state |= {"layout": self.layout.description(), "rows": self._rows[: self._len], "emptied": emptied}
        return state | {"least_generation": self._least_generation, "last_cursor": self._last_cursor}

    @contextmanager
    def frozen_state(self) -> Iterator[dict[str, Any]]:
        """Gives the body the present :meth:`state_dict`, however rows are written meanwhile.

        Rows are a :class:`~lightning_replay.saving.snapshot.Snapshot`, to be read once in the body.

        :meta private:
        """
        with self.snapshots.lock:
            state = self.state_dict()
            if self._has_views:
                self.snapshots.keep_no_result()
            rows = None if state["rows"] is None else self.snapshots.take(state["rows"])
        try:
            yield state | {"rows": rows}
            self.check_read()
        finally:
            if rows is not None:
                self.snapshots.close(rows)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: another capacity was saved, or rows that do not fit their layout. Nothing is changed.
            MemoryError: the rows do not fit.
            RuntimeError: see :meth:`check_writable`.
        """
        self.check_writable()
        layout = self._saved_layout(state_dict)
        least = max(self._least_generation, checked_least_generation(state_dict["least_generation"]))
        # A TD error of a batch drawn before this load must find no row of it.
        if self._generation is not None and self._reached:  # above all that were handed out
            least = max(least, int(self._generation[: self._reached].max()))
        with self.snapshots.lock:
            if layout is not None and (self.layout is None or self.layout.description() != layout.description()):
                self._allocate(layout)
            if self._rows is not None and self._generation is not None:
                self.begin_write(slice(0, self._reached))
                self.snapshots.keep_no_result()  # of rows above these, too
                reached = 0
                if layout is not None:
                    reached = length = state_dict["length"]
                    self._rows[:length] = state_dict["rows"].to(self._rows.device)
                    reached += len(state_dict["emptied"])
                    if self._there is not None:
                        self._generation[:length] = self._views["generation"][:length]
                    self._generation[length:reached] = state_dict["emptied"]
                self._generation[reached : self._reached] += 1  # these rows leave, and none comes in their place
                if self._there is not None:
                    self._views["generation"].copy_(self._generation)
                self._reached = max(self._reached, reached)
            self._least_generation = least
            self._given_device = None
            self._len = state_dict["length"]
            self._last_cursor = state_dict["last_cursor"]
        self._bump_mutation_revision()

    def _saved_layout(self, state_dict: dict[str, Any]) -> RowLayout | None:
        if state_dict["capacity"] != self.capacity:
            raise ValueError(
                f"the saved storage has capacity {state_dict['capacity']} and this one {self.capacity}; "
                "build the buffer with the saved capacity"
            )
        if state_dict["layout"] is None:
            return None
        layout = RowLayout.from_description(state_dict["layout"])
        length, rows = state_dict["length"], state_dict["rows"]
        if not 0 <= length <= self.capacity or rows.shape != (length, layout.row_bytes // WORD_BYTES):
            raise ValueError(
                f"the saved rows {list(rows.shape)} are not {length} of {layout.row_bytes} bytes in a storage of "
                f"{self.capacity}; nothing was loaded"
            )
        emptied = state_dict["emptied"]
        if emptied.ndim != 1 or len(emptied) > self.capacity - length:
            raise ValueError(
                f"the saved generations {list(emptied.shape)} of emptied slots are not those of at most "
                f"{self.capacity - length} slots; nothing was loaded"
            )
        return layout

    def dumps(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` into ``path``, a directory or a URL of fsspec."""
        with self.frozen_state() as state:
            write_state(path, state, of=type(self).__name__)

    def loads(self, path: str | Path) -> None:
        load_state(path, self.load_state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "PackedStorage cannot be shared between processes; for several, as the ranks of a trainer, use "
                "lightning_replay.sharded.ShardedReplay or TorchRL's LazyMemmapStorage, or keep "
                "the buffer in one process"
            )
        state = super().__getstate__()
        state["packed"] = self.state_dict()
        self.check_read()
        del state["snapshots"], state["_shared_writes"], state["_guard"]
        return state | dict.fromkeys(self._of_columns) | {"_reached": 0, "_views": {}, "row_columns": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state.pop("packed")
        super().__setstate__(state)
        self._begin_life()
        self.load_state_dict(packed)

    def _empty(self) -> None:
        self.check_writable()
        with self.snapshots.lock:
            if self._generation is not None and self._len:
                self.begin_write(slice(0, self._len))
                self._next_generation(slice(0, self._len))  # updates on their way to rows forgotten now are stale
            self._len = 0
            self._last_cursor = None
        self._bump_mutation_revision()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(capacity={self.capacity}, length={len(self)}, row_bytes={self.row_bytes})"


def is_key(index: Any) -> bool:
    # TorchRL's sequences index a storage by columns too.
    return isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(part, str) for part in index))


def rows_of(storage: Storage) -> Any:
    """Returns what knows generations and occupancy: a :class:`PackedStorage`, or what a writer keeps of TorchRL's.

    ``None`` for a storage of TorchRL whose writer keeps neither.
    """
    if isinstance(storage, PackedStorage):
        return storage
    kept = (getattr(writer_of(buffer), "rows_beside", None) for buffer in attached_buffers(storage))
    return next((rows for rows in kept if rows is not None), None)


def occupancy_of(storage: Storage) -> Occupancy:
    """Returns which slots hold a row, or all below the length if neither storage nor writer knows."""
    known = storage if isinstance(storage, KnowsOccupancy) else rows_of(storage)
    return FirstSlots(len(storage)) if known is None else known.occupancy


def other_columns(
    data: TensorDictBase, columns: Mapping[Key, tuple[torch.dtype, torch.Size]], device: torch.device | None
) -> ValueError:
    """Returns the error for rows whose columns or device differ from the rows that were stored first."""
    given = {leaf[0]: (leaf[1], tuple(leaf[2])) for leaf in leaves_of(data[0])}
    stored = {key: (dtype, tuple(shape)) for key, (dtype, shape) in columns.items()}
    for key in NOT_STORED - stored.keys():
        given.pop(key, None)
    different = [
        f"{shown(name)}: stored {stored.get(name, 'no such column')}, given {given.get(name, 'no such column')}"
        for name in sorted(stored.keys() | given.keys())
        if stored.get(name) != given.get(name)
    ] or [
        f"device of {shown(name)}: first {device}, given {data.get(name).device}"
        for name in sorted(given)
        if data.get(name).device != device
    ]
    return ValueError(
        "transitions must have the columns of the first ones stored; nothing was written. "
        f"Different: {'; '.join(different)}. Convert them, leave columns out (exclude), or start a new buffer"
    )


def empty_storage() -> RuntimeError:
    return RuntimeError("cannot sample from an empty replay buffer; call extend first")


def device_of(storage: Storage) -> torch.device | None:
    """Returns the device of the rows, or ``None`` if a storage of TorchRL has none, or not yet."""
    device = getattr(storage, "device", None)  # a list of rows has none, and "auto" is no device
    return device if isinstance(device, torch.device) else None


def stored_before(storage: Storage, new: Tensor) -> Tensor:
    """Returns the slots stored before those in ``new``, int64 ``[N]``, ascending."""
    earlier = torch.zeros(storage.max_size, dtype=torch.bool, device="cpu")
    earlier[occupancy_of(storage).slots()] = True
    earlier[new] = False
    return earlier.nonzero().squeeze(1)


def readable_rows(storage: Storage) -> TensorDictBase:
    """Returns the rows below the length, to be read. Rows of a list are copied."""
    rows: Any = storage.readable_rows if isinstance(storage, PackedStorage) else storage.get(slice(0, len(storage)))
    return torch.stack(rows) if isinstance(rows, list) and rows and isinstance(rows[0], TensorDictBase) else rows


def read_columns(storage: Storage, index: Tensor, keys: Sequence[NestedKey]) -> list[Tensor]:
    """Returns single columns ``[N, ...]`` of the rows ``index`` of any TorchRL tensor storage.

    Raises:
        KeyError: a key is not stored. The message names the stored ones.
    """
    packed, everything = isinstance(storage, PackedStorage), readable_rows(storage)
    if not isinstance(everything, TensorDictBase) or isinstance(storage, ListStorage):
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
