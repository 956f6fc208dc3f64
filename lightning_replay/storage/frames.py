# SPDX-License-Identifier: Apache-2.0
"""Packed rows whose stacks of frames are kept frame by frame, each once, however many rows refer to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.options import checked_count, checked_key
from lightning_replay.parts import BufferHooks
from lightning_replay.saving.snapshot import Snapshots
from lightning_replay.saving.spec import recorded
from lightning_replay.storage.columns import GENERATION, NOT_STORED, Column
from lightning_replay.storage.frame_pool import Found, FramePool
from lightning_replay.storage.occupancy import FirstSlots, Occupancy, SlotSet
from lightning_replay.storage.packed import PackedStorage, is_key
from lightning_replay.storage.rows import FRAMES, Key, Leaf, RowLayout, leaves_of, shown

__all__ = ["FrameStorage"]


logger: logging.Logger = logging.getLogger(__name__)


@recorded
class FrameStorage(PackedStorage):
    """Keeps every frame of the stacks under ``image_key`` and ``("next", image_key)`` once, by counted references.

    Rows are written and drawn as with :class:`~lightning_replay.storage.PackedStorage`, with stacks uint8
    ``[N, k, H, W]`` (or ``[N, k, H, W, C]``) of k frames, oldest first. Inside, a row holds 2 k numbers of frames, the
    column ``frames_of_stacks`` of ``all_rows``. Equal frames are found by their bytes, not by ``trajectory`` or the
    order of rows: this works with any writer, any order of eviction, environments side by side and n-step successors.
    A frame leaves with the last row that refers to it: when rows are overwritten, or by :meth:`release`. Drawn stacks
    are built by one gather and are contiguous copies.

    Args:
        capacity: rows.
        frame_stack: k, frames of a stack.
        image_key: the stacks' key; their successors are ``("next", image_key)``.
        frame_capacity: most frames kept, each for its bytes and about 25 more; a CPU's memory is taken as they come.
            When they are full, writers release rows until new ones fit.
        device: where rows and frames are kept; the counts are kept by the CPU.
        memmap: a directory for scratch files that hold rows and frames.

    Raises:
        MemoryError: at the first rows, when rows and frames do not fit.
        ValueError: sizes that are not positive whole numbers, a ``frame_capacity`` below the 2 k frames of a single
            row; at the first rows: no such column, or one that holds no stacks of uint8 images.

    Example:
        >>> from tensordict import TensorDict
        >>> storage = FrameStorage(10, frame_stack=2, frame_capacity=30)
        >>> frames = torch.arange(5, dtype=torch.uint8).view(5, 1, 1).expand(5, 8, 8)
        >>> stacks = torch.stack((frames[:-1], frames[1:]), 1)                      # 01 12 23 34
        >>> rows = TensorDict({"pixels": stacks[:3], "next": {"pixels": stacks[1:]}}, [3])
        >>> storage.set(slice(0, 3), rows)
        >>> storage.frames_held, storage.get(torch.tensor([1]))["next", "pixels"][0, :, 0, 0]
        (5, tensor([2, 3], dtype=torch.uint8))
    """

    _of_columns = (
        *PackedStorage._of_columns,
        *("_pool", "_live", "_frames_of", "_outer_layout", "_looked_up"),
    )
    _pool: FramePool | None
    _live: SlotSet | None  # from the first release on, unless tables hold the rows
    _frames_of: Tensor | None  # int32 [capacity, 2 k], a column of the rows
    _outer_layout: RowLayout | None  # of rows with stacks in place of the numbers of their frames
    _looked_up: tuple[Tensor, Tensor, Found] | None

    def __init__(
        self,
        capacity: int,
        frame_stack: int,
        image_key: NestedKey = "pixels",
        *,
        frame_capacity: int,
        device: str | torch.device = "cpu",
        memmap: str | None = None,
    ) -> None:
        super().__init__(capacity, device=device, memmap=memmap)
        self.frame_stack: int = checked_count("frame_stack", frame_stack, of="frames")
        self.frame_capacity: int = checked_count("frame_capacity", frame_capacity, of="frames")
        if frame_capacity < 2 * frame_stack:
            raise ValueError(
                f"frame_capacity is {frame_capacity}, and a single transition has up to {2 * frame_stack} different "
                f"frames, {frame_stack} in each of its two stacks. Raise frame_capacity to {2 * frame_stack} or more"
            )
        self.rows_at_once: int = min(self.capacity, frame_capacity // (2 * frame_stack))  # if all frames are different
        self.image_key: Key = checked_key("image_key", image_key)
        self.next_key: Key = ("next", *self.image_key)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, references and index and, on the CPU, of the most frames held so far; 0 before any."""
        return super().nbytes + sum(0 if part is None else part.nbytes for part in (self._pool, self._live))

    @property
    def frames_held(self) -> int:
        """Frames that stored rows refer to, all different."""
        return 0 if self._pool is None else self._pool.num_held

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame, 0 before the first rows."""
        return 0 if self._pool is None else self._pool.frame_bytes

    @property
    def occupancy(self) -> Occupancy:
        """The slots that hold a row, which are those not released, or those that a writer's tables refer to."""
        if self.held_by is not None:
            return self.held_by
        return FirstSlots(self._len) if self._live is None or self._live.count == self._len else self._live

    def held_slots(self) -> np.ndarray:
        """Slots that hold a row, int64 ``[num_held]``, ascending."""
        if self._frames_of is None:
            return np.zeros(0, dtype=np.int64)
        return self._frames_of[: self._len, 0].nonzero().flatten().cpu().numpy()

    def build_options(self) -> dict[str, Any]:
        """Returns the options that saved rows presume: frames in a stack, their key, and ``frame_capacity``."""
        image_key, capacity = list(self.image_key), self.frame_capacity
        return {"frames": {"frame_stack": self.frame_stack, "image_key": image_key, "frame_capacity": capacity}}

    @property
    def rows_in_memory(self) -> int:
        """Rows held, at least 1; memory for frames is taken when they are stored."""
        return max(self.num_held, 1)

    def stats(self) -> dict[str, Any]:
        """Returns frames held, their capacity, bytes of one, and frames held per transition held."""
        return {
            "frames_held": self.frames_held,
            "frame_capacity": self.frame_capacity,
            "frame_bytes": self.frame_bytes,
            "frames_per_transition": self.frames_held / max(self.num_held, 1),
        }

    def _forget_columns(self) -> None:
        super()._forget_columns()
        self._was_full = False
        self._order: list[Key] = []  # columns in the order in which rows were given

    def _check(self, values: Sequence[Column]) -> None:
        self._looked_up = None  # tensors that are given again may have other content
        super()._check(values)

    def room_for(self, values: Sequence[Column], slots: Tensor | np.ndarray | None = None) -> bool:
        """Returns whether the frames of values fit; see :meth:`frames_missing`."""
        return self.frames_missing(values, slots) == 0

    def frames_missing(self, values: Sequence[Column], slots: slice | Tensor | np.ndarray | None = None) -> int:
        """Returns how many frames lack to write the values of :meth:`checked_values`; 0 if they fit.

        ``slots``, int64 ``[N]``, are where they are to be written, whose frames become free; ``None`` for empty ones.
        """
        assert self._pool is not None
        if len(values[0]) * 2 * self.frame_stack <= self._pool.num_free:
            return 0
        missing = self._pool.missing(self._find(values)[2], self._frames_at(slots))
        if missing and not self._was_full:
            self._was_full = True
            held, room = f"{self.num_held:,}", f"{self.frame_capacity:,}"
            logger.info("the room for %s frames is full with %s of %d transitions", room, held, self.capacity)
        return missing

    def release(self, slots: Tensor | np.ndarray) -> None:
        """Evicts rows without overwriting them: their frames become free unless others refer to them.

        Calls :meth:`~lightning_replay.parts.BufferHooks.on_evict` of the buffers; pending updates of the rows are late.

        Args:
            slots: int64 ``[n]``, all different; empty ones are skipped.
        """
        if self._pool is None or self._frames_of is None:
            return
        self.check_writable()
        index = torch.as_tensor(slots, dtype=torch.int64, device=self._frames_of.device).reshape(-1)
        holds = self._frames_of[index, 0] != 0
        index = index[holds]
        if not len(index):
            return
        with self.snapshots.lock:
            self.begin_write(index)
            if self.held_by is None:  # tables count their rows themselves
                self._next_generation(index)
                if self._live is None:
                    self._live = SlotSet.from_state(self.capacity, torch.from_numpy(self.held_slots()))
                self._live.remove(index.cpu().numpy())
            self._pool.release(self._frames_at(index))
            self._looked_up = None
            self._frames_of[index] = 0
        self._bump_mutation_revision()
        for buffer in self._attached_entities:
            if isinstance(buffer, BufferHooks):
                buffer.on_evict(index)

    def write(self, slots: slice | Tensor, values: Sequence[Column], *, grow: bool = True) -> None:
        """Writes the values of :meth:`checked_values` into a slice or int64 ``[N]`` of slots, all different.

        Raises:
            RuntimeError: too few frames are free; nothing is written.
        """
        assert self._pool is not None and self._frames_of is not None
        if not len(values[0]):
            return
        with self.snapshots.lock:
            self.begin_write(slice(0, 0))  # the frames are changed first
            first, second, found = self._find(values)
            frames = self._pool.replace(found, first, second, self._frames_at(slots))
            self._looked_up = None
            super().write(slots, [*values[:-2], frames], grow=grow)
            if self._live is not None:
                self._live.add(np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots.cpu().numpy())

    def _find(self, values: Sequence[Column]) -> tuple[Tensor, Tensor, Found]:
        """Returns the stacks of new rows and which of their frames are held."""
        first, second = values[-2:]
        assert self._pool is not None and isinstance(first, Tensor) and isinstance(second, Tensor)
        # The check for room and the write that follows it look up the same stacks once.
        if self._looked_up is None or self._looked_up[0] is not first or self._looked_up[1] is not second:
            self._looked_up = (first, second, self._pool.find(first, second))
        return self._looked_up

    def _frames_at(self, slots: slice | Tensor | np.ndarray | None) -> np.ndarray:
        assert self._frames_of is not None
        if slots is None:
            return np.zeros(0, dtype=np.int32)
        if isinstance(slots, np.ndarray):
            slots = torch.from_numpy(slots)
        if isinstance(slots, Tensor):
            slots = slots.to(self._frames_of.device)
        return np.ascontiguousarray(self._frames_of[slots].cpu().numpy())

    def get(self, index: Any, extra: dict[str, Tensor] | None = None) -> Any:
        """Returns rows, their stacks rebuilt, as a copy; see :class:`~lightning_replay.storage.PackedStorage`.

        Raises:
            RuntimeError: the storage is empty, or a row was released.
        """
        if self._outer_layout is None or self._frames_of is None or self._pool is None:
            raise RuntimeError("the storage is empty; call extend first")
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim == 0:
            if is_key(index):
                return self.get(slice(None))[index]
            slots = torch.arange(self._len, device="cpu")[index]
            return self.get(slots) if slots.ndim else self.get(slots.view(1))[0]
        slots = index if index.ndim == 1 else index.flatten()
        rows = self.packed_rows(slots)
        # Not on a GPU, for which every draw would wait; nothing but a release leaves rows without frames.
        if self._live is not None and rows.device.type == "cpu" and not bool(self._frames_of[slots, 0].all()):
            raise RuntimeError(
                "a slot was drawn whose row was released to make room for frames; use a sampler of "
                "lightning_replay.samplers, which draws rows that are held"
            )
        first, second = self._pool.gather_stacks(self._frames_of, slots)
        if self._shared_writes is not None:
            self.check_read()
        if index.ndim != 1:
            first, second = (stack.view(*index.shape, *stack.shape[1:]) for stack in (first, second))
        read = self._outer_layout.unpack(rows, index.shape, extra, (first, second))
        return self._indexed(read, index) if self._is_torchrls else read

    def column(self, key: NestedKey, index: Tensor) -> Tensor | None:
        """Returns one column ``[N, ...]`` of the rows ``index``, stacks rebuilt; ``None`` when it is not stored."""
        name: Key = (key,) if isinstance(key, str) else tuple(key)
        if name not in (self.image_key, self.next_key) or self._frames_of is None or self._pool is None:
            return super().column(key, index)
        return self._pool.gather_stacks(self._frames_of, index.to(self._frames_of.device))[name == self.next_key]

    def _init(self, data: TensorDictBase) -> None:
        if data.get(self.next_key, None) is None or data.get(self.image_key, None) is None:
            raise self._wrong_stacks("there are " + ", ".join(shown(key) for key, _, _ in leaves_of(data[0])))
        leaves = {key: (dtype, shape) for key, dtype, shape in leaves_of(data[0]) if key not in NOT_STORED}
        if FRAMES in leaves:
            raise ValueError(f"the column {FRAMES[0]!r} is the storage's own; rename it. Nothing was stored")
        images = (self.image_key, self.next_key)
        for key in images:
            dtype, shape = leaves.get(key, (None, torch.Size()))
            if dtype != torch.uint8 or len(shape) not in (3, 4) or shape[0] != self.frame_stack or not shape.numel():
                given = data.get(key)
                is_dense = isinstance(given, Tensor) and not given.is_nested
                described = f"{given.dtype} {list(given.shape)}" if is_dense else type(given).__name__
                raise self._wrong_stacks(f"{shown(key)} is {described}")
        one, other = (list(leaves[key][1][1:]) for key in images)
        if one != other:
            raise ValueError(
                f"the frames under {shown(self.image_key)} have shape {one} and those under {shown(self.next_key)} "
                f"{other}; all frames need one shape. Nothing was stored"
            )
        self._allocate_all([(key, *leaf) for key, leaf in leaves.items()])

    def _wrong_stacks(self, given: str) -> ValueError:
        return ValueError(
            f"rows need stacks of {self.frame_stack} frames, uint8 [N, {self.frame_stack}, H, W], under "
            f"{shown(self.image_key)} and {shown(self.next_key)}; {given}. Nothing was stored; give their key as "
            "image_key and their number of frames as frame_stack, and convert them to uint8 images"
        )

    def _allocate_all(self, leaves: list[Leaf]) -> None:
        # Frames and rows get memory, or neither does.
        images = (self.image_key, self.next_key)
        shape = next(shape for key, _, shape in leaves if key == self.image_key)[1:]
        pool = FramePool(self.frame_capacity, shape, self.device, self._memmap)
        frames = (FRAMES, torch.int32, torch.Size([2 * self.frame_stack]))
        packed = [leaf for leaf in leaves if leaf[0] not in images]
        self._allocate(RowLayout([*packed, frames, (GENERATION, torch.int64, torch.Size([]))]))
        assert self._storage is not None and self.layout is not None
        self._pool = pool
        self._live = self._looked_up = None
        self._frames_of = self._storage.get(FRAMES)
        stack = (torch.uint8, torch.Size([self.frame_stack, *shape]))
        self._expect({key: (dtype, size) for key, dtype, size in packed} | dict.fromkeys(images, stack))
        self._order = [*(leaf[0] for leaf in leaves), GENERATION]
        self._outer_layout = self.layout.replacing(FRAMES, images, self._order)
        sizes = f"{self.frame_capacity:,}", f"{pool.frame_bytes:,}"
        logger.info("room for %s frames of %s bytes is taken as frames come, with about 25 bytes more for each", *sizes)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of packed rows and the frames that are used, uint8 ``[F, bytes]`` (a view, not a copy)."""
        state = super().state_dict()
        if self._pool is None:
            return state | {"frames": None, "frame_shape": None, "live": None}
        return state | {
            "frames": self._pool.frames[: self._pool.num_used],
            "frame_shape": list(self._pool.shape),
            "order": [list(key) for key in self._order],
            "live": None if self._live is None else self._live.state(),
        }

    @contextmanager
    def frozen_state(self) -> Iterator[dict[str, Any]]:
        """Gives the body the present :meth:`state_dict`; rows and frames are snapshots."""
        with ExitStack() as taken:
            with self.snapshots.lock:
                state = taken.enter_context(super().frozen_state())
                if self._pool is not None:
                    frames = self._pool.snapshots.take(state["frames"])
                    taken.callback(self._pool.snapshots.close, frames)
                    state["frames"] = frames
            yield state

    def after_fork(self) -> None:
        """Replaces the locks of rows and frames in a forked process."""
        super().after_fork()
        if self._pool is not None:
            self._pool.snapshots = Snapshots()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_writable()
        self._saved_layout(state_dict)
        frames = state_dict["frames"]
        if frames is not None:
            leaves = self._saved_columns(state_dict)
            if self._pool is None or self.row_columns != {key: (dtype, shape) for key, dtype, shape in leaves}:
                self._allocate_all(leaves)
        before = self._len
        super().load_state_dict(state_dict)
        self._looked_up = None
        if self._pool is None or self._frames_of is None:
            return
        # Rows above those that were loaded refer to nothing any more.
        self._frames_of[self._len : max(before, self._len)] = 0
        if frames is None:
            self._pool.clear()
            self._live = None
            return
        self._pool.restore(frames, self._frames_of[: self._len].cpu().numpy().ravel())
        live = state_dict["live"]
        self._live = None if live is None else SlotSet.from_state(self.capacity, live)

    def _saved_columns(self, state: Mapping[str, Any]) -> list[Leaf]:
        """Returns the columns of a saved storage, in the order in which rows were given; refuses other stacks."""
        layout = {tuple(leaf["key"]): leaf for leaf in state["layout"]}
        stacked = layout[FRAMES]["shape"][0] // 2 if FRAMES in layout else 0
        if stacked != self.frame_stack or list(self.image_key) not in state["order"]:
            raise ValueError(
                f"the saved storage has stacks of {stacked} frames in rows of {state['order']}, this one stacks of "
                f"{self.frame_stack} under {shown(self.image_key)}; build it with the saved options"
            )
        if len(state["frames"]) > self.frame_capacity + 1:
            raise ValueError(
                f"the saved storage has {len(state['frames']) - 1:,} frames and this one room for "
                f"{self.frame_capacity:,}; build it with the saved frame_capacity"
            )
        stack = torch.Size([self.frame_stack, *state["frame_shape"]])
        columns: list[Leaf] = []
        for key in map(tuple, state["order"]):
            if key in (self.image_key, self.next_key):
                columns.append((key, torch.uint8, stack))
            elif key != GENERATION:
                columns.append((key, getattr(torch, layout[key]["dtype"]), torch.Size(layout[key]["shape"])))
        return columns

    def _empty(self) -> None:
        super()._empty()
        self._live = self._looked_up = None
        if self._pool is not None and self._frames_of is not None:
            self._frames_of.zero_()
            self._pool.clear()

    def __repr__(self) -> str:
        return (
            f"FrameStorage(capacity={self.capacity}, length={len(self)}, row_bytes={self.row_bytes}, "
            f"frames={self.frames_held} of {self.frame_capacity})"
        )
