# SPDX-License-Identifier: Apache-2.0
"""Packed rows whose stacks of frames are kept frame by frame, each once, however many rows refer to it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.options import checked_count, checked_key, checked_keys
from lightning_replay.saving.snapshot import Snapshots
from lightning_replay.saving.spec import DTYPES, rebuildable
from lightning_replay.storage.columns import GENERATION, NOT_STORED, Column
from lightning_replay.storage.frame_pool import Found, FramePool
from lightning_replay.storage.occupancy import SlotSet, are_within
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.storage.rows import FRAMES, Key, Leaf, RowLayout, frames_by_column, leaves_of, shown

__all__ = ["FrameStorage"]

logger: logging.Logger = logging.getLogger(__name__)


class _Stacks(NamedTuple):
    """Both stacks ``[N, k, ...]`` of new rows, and which of their frames are held."""

    first: Tensor
    second: Tensor
    found: Found


class _Images(NamedTuple):
    """One column of stacks: the pool of its frames and, int32 ``[capacity, 2 k]``, the numbers of them in all rows."""

    pool: FramePool
    numbers: Tensor
    is_stacked: bool  # whether the column has an axis of frames, which single images may lack


@rebuildable
class FrameStorage(PackedStorage):
    """Keeps every frame of the stacks under ``image_key`` and ``("next", image_key)`` once, by counted references.

    Several columns of images, such as images of several cameras, may differ in shape. Each column has a separate pool.

    Rows are written and drawn as with :class:`~lightning_replay.storage.PackedStorage`. Stacks are uint8
    ``[N, k, H, W]`` (or ``[N, k, H, W, C]``) of k frames, oldest first. For k = 1 they may be images without that axis.
    Inside, a row holds 2 k numbers of frames for each column of images, the column ``frames_of_stacks`` of
    ``all_rows``. Equal frames are found by their bytes, not by ``trajectory`` or the order of rows. This works with any
    writer, any order of eviction, environments side by side and n-step successors. A frame leaves with the last row
    that refers to it: when rows are overwritten, or by :meth:`release`. Drawn stacks are built by one gather and are
    contiguous copies.

    Args:
        capacity: rows.
        frame_stack: k, frames of a stack.
        image_key: the stacks' key, a tuple if it is nested. Their successors are ``("next", image_key)``. A list
            has the keys of several columns.
        frame_capacity: most frames kept of each column, each for its bytes and about 25 more. A CPU's memory is taken
            as they come. When a column is full, writers release rows until new ones fit.
        device: device of rows and frames. The CPU keeps the counts.
        memmap: a directory for scratch files that hold rows and frames.

    Raises:
        MemoryError: at the first rows, when rows and frames do not fit.
        ValueError: sizes that are not positive whole numbers, a ``frame_capacity`` below the 2 k frames of a single
            row, a key given twice. At the first rows, no such column, or one that holds no stacks of uint8 images.

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

    stores_frames: bool = True
    draws_there: bool = False  # A row that leaves is found on the CPU.
    _of_columns = (
        *PackedStorage._of_columns,
        *("_images", "_frames_of", "_outer_layout", "_looked_up"),
    )
    _images: list[_Images] | None  # in the order of image_keys
    _frames_of: Tensor | None  # int32 [capacity, 2 k], or [capacity, columns, 2 k] of several, a column of the rows
    _outer_layout: RowLayout | None  # of rows with stacks in place of the numbers of their frames
    _looked_up: tuple[Tensor, list[_Stacks]] | None

    def __init__(
        self,
        capacity: int,
        frame_stack: int,
        image_key: NestedKey | list[NestedKey] = "pixels",
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
        several = isinstance(image_key, list)
        self.image_keys: list[Key] = (
            checked_keys("image_key", image_key) if several else [checked_key("image_key", image_key)]
        )
        if len(set(self.image_keys)) < max(len(self.image_keys), 1):
            raise ValueError(f"image_key is {image_key!r}; it must have at least one key, and each once")
        self._given_images = [given for key in self.image_keys for given in (key, ("next", *key))]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, references and index and, on the CPU, of the most frames held so far, or 0 before any."""
        pools = [images.pool.nbytes for images in self._images or ()]
        return super().nbytes + sum(pools) + (0 if self._live is None else self._live.nbytes)

    @property
    def frames_held(self) -> int:
        """Frames that stored rows refer to, all different. Of several columns, the one that has the most counts."""
        return max((images.pool.num_stored for images in self._images or ()), default=0)

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame, with several columns of one of each, 0 before the first rows."""
        return sum(images.pool.frame_bytes for images in self._images or ())

    def build_options(self) -> dict[str, Any]:
        """Returns the options that saved rows presume: frames in a stack, their key, and ``frame_capacity``.

        :meta private:
        """
        keys, capacity = [list(key) for key in self.image_keys], self.frame_capacity
        image_key = keys if len(keys) > 1 else keys[0]
        return {"frames": {"frame_stack": self.frame_stack, "image_key": image_key, "frame_capacity": capacity}}

    @property
    def rows_in_memory(self) -> int:
        """Rows held, at least 1. Memory for frames is taken when they are stored.

        :meta private:
        """
        return max(self.num_stored, 1)

    def stats(self) -> dict[str, Any]:
        """Returns frames held, their capacity, bytes of one, frames held per transition held, and bytes by column."""
        columns = zip(self.image_keys, self._images or (), strict=False)
        return {
            "frames_held": self.frames_held,
            "frame_capacity": self.frame_capacity,
            "frame_bytes": self.frame_bytes,
            "frames_per_transition": self.frames_held / max(self.num_stored, 1),
            "image_bytes": {".".join(key): images.pool.bytes_of_frames for key, images in columns},
        }

    def _forget_columns(self) -> None:
        super()._forget_columns()
        self._was_full = False
        self._order: list[Key] = []  # columns in the order in which rows were given

    def _check(self, values: Sequence[Column]) -> None:
        self._looked_up = None  # tensors that are given again may have other content
        super()._check(values)

    def frames_missing(self, values: Sequence[Column], slots: slice | Tensor | np.ndarray | None = None) -> int:
        """Returns how many frames lack, of the worst column, to write :meth:`checked_values`, or 0 if they fit.

        :meta private:
        """
        assert self._images is not None
        most = len(values[0]) * 2 * self.frame_stack
        if all(most <= images.pool.num_free for images in self._images):
            return 0
        missing = max(
            images.pool.missing(stacks.found, self._numbers_at(images, slots))
            for images, stacks in zip(self._images, self._find(values), strict=True)
        )
        if missing and not self._was_full:
            self._was_full = True
            held, room = f"{self.num_stored:,}", f"{self.frame_capacity:,}"
            logger.info("the room for %s frames is full with %s of %d transitions", room, held, self.capacity)
        return missing

    def release(self, slots: Tensor | np.ndarray) -> None:
        """Evicts rows without overwriting them: their frames become free unless others refer to them.

        Calls :meth:`~lightning_replay.parts.BufferHooks.on_evict` of the buffers. Their pending updates are stale.

        Args:
            slots: int64 ``[n]``, all different. Empty ones are skipped.
        """
        if self._images is None or self._frames_of is None:
            return
        self.check_writable()
        index = torch.as_tensor(slots, dtype=torch.int64, device="cpu").reshape(-1)
        index = index[(self._images[0].numbers[index, 0] != 0).cpu()]
        if not len(index):
            return
        with self.snapshots.lock:
            self.begin_write(index)
            if self.occupancy_owner is None:  # tables count their rows themselves
                self._next_generation(index)
                if self._live is None:
                    held = self._images[0].numbers[: self._len, 0].nonzero().flatten()
                    self._live = SlotSet.from_state(self.capacity, held.cpu())
                self._live.remove(index.numpy())
            for images in self._images:
                images.pool.release(self._numbers_at(images, index))
            self._looked_up = None
            self._frames_of[index] = 0
        self._tell_released(index)

    def write(self, slots: slice | Tensor, values: Sequence[Column], *, grow: bool = True) -> None:
        """Writes :meth:`checked_values` into a slice or int64 ``[N]``. Lacking frames are a ``RuntimeError``."""
        assert self._images is not None
        if not len(values[0]):
            return
        with self.snapshots.lock:
            self.begin_write(slice(0, 0))  # the frames are changed first
            stacks, left = self._find(values), [self._numbers_at(images, slots) for images in self._images]
            if len(self._images) > 1:  # all have room, or none is changed
                for images, (_, _, found), given_up in zip(self._images, stacks, left, strict=True):
                    images.pool.check_room(found, given_up)
            numbers = [
                images.pool.replace(found, first, second, given_up)
                for images, (first, second, found), given_up in zip(self._images, stacks, left, strict=True)
            ]
            self._looked_up = None
            frames = numbers[0] if len(numbers) == 1 else np.stack(numbers, 1)
            super().write(slots, [*values[: -2 * len(numbers)], frames], grow=grow)

    def _find(self, values: Sequence[Column]) -> list[_Stacks]:
        """Returns the stacks of new rows by column, and which of their frames are held."""
        assert self._images is not None
        given: Any = values[-2 * len(self._images) :]
        # The check for room and the write that follows it look up the same stacks once.
        if self._looked_up is None or self._looked_up[0] is not given[0]:
            looked_up = []
            for place, (pool, _, is_stacked) in enumerate(self._images):
                first, second = given[2 * place : 2 * place + 2]
                if not is_stacked:
                    first, second = first.unsqueeze(1), second.unsqueeze(1)
                looked_up.append(_Stacks(first, second, pool.find(first, second)))
            self._looked_up = given[0], looked_up
        return self._looked_up[1]

    @staticmethod
    def _numbers_at(images: _Images, slots: slice | Tensor | np.ndarray | None) -> np.ndarray:
        if slots is None:
            return np.zeros(0, dtype=np.int32)
        if isinstance(slots, np.ndarray):
            slots = torch.from_numpy(slots)
        if isinstance(slots, Tensor):
            slots = slots.to(images.numbers.device)
        return np.ascontiguousarray(images.numbers[slots].cpu().numpy())

    @staticmethod
    def _gather(images: _Images, slots: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
        """Returns both stacks ``[*shape, ...]`` of the rows in ``slots``, int64 ``[N]``."""
        stacks = images.pool.gather_stacks(images.numbers, slots)
        if not images.is_stacked:
            stacks = tuple(stack.squeeze(1) for stack in stacks)
        return stacks if len(shape) == 1 else tuple(stack.view(*shape, *stack.shape[1:]) for stack in stacks)

    def get(self, index: Any, extra: dict[str, Tensor] | None = None) -> Any:
        """Returns rows as a copy, their stacks rebuilt.

        Raises ``RuntimeError`` if it is empty, or a row was released.
        """
        if self._outer_layout is None or self._images is None:
            raise RuntimeError("the storage is empty; call extend first")
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.ndim == 0:
            return self._get_by(index)
        slots = index if index.ndim == 1 else index.flatten()
        rows = self.packed_rows(slots)
        # Not on a GPU, for which every draw would wait. Nothing but a release leaves rows without frames.
        numbers = self._images[0].numbers
        if self._live is not None and rows.device.type == "cpu" and not bool(numbers[slots, 0].all()):
            raise RuntimeError(
                "a slot was drawn whose row was released to make room for frames; use a sampler of "
                "lightning_replay.samplers, which draws rows that are held"
            )
        stacks = [stack for images in self._images for stack in self._gather(images, slots, index.shape)]
        self.check_read()
        read = self._outer_layout.unpack(rows, index.shape, extra, stacks)
        return self._indexed(read, index) if self._is_torchrls else read

    def column(self, key: NestedKey, index: Tensor) -> Tensor | None:
        """Returns one column ``[N, ...]`` of the rows ``index``, stacks rebuilt, or ``None`` when it is not stored."""
        name: Key = (key,) if isinstance(key, str) else tuple(key)
        if name not in self._given_images or self._images is None:
            return super().column(key, index)
        place, is_next = divmod(self._given_images.index(name), 2)
        images = self._images[place]
        return self._gather(images, index.to(images.numbers.device), index.shape)[is_next]

    def _init(self, data: TensorDictBase) -> None:
        for key in self.image_keys:
            if data.get(("next", *key), None) is None or data.get(key, None) is None:
                there_are = ", ".join(shown(key) for key, _, _ in leaves_of(data[0]))
                raise self._wrong_stacks(key, f"there are {there_are}")
        leaves = {key: (dtype, shape) for key, dtype, shape in leaves_of(data[0]) if key not in NOT_STORED}
        if FRAMES in leaves:
            raise ValueError(f"the column {FRAMES[0]!r} is the storage's own; rename it. Nothing was stored")
        for key in self.image_keys:
            shapes = []
            for given in (key, ("next", *key)):
                dtype, shape = leaves.get(given, (None, torch.Size()))
                if dtype != torch.uint8 or not self.takes_shape(shape):
                    value = data.get(given)
                    is_dense = isinstance(value, Tensor) and not value.is_nested
                    described = f"{value.dtype} {list(value.shape)}" if is_dense else type(value).__name__
                    raise self._wrong_stacks(key, f"{shown(given)} is {described}")
                shapes.append(list(shape))
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"the stacks under {shown(key)} have shape {shapes[0]} and those under {shown(('next', *key))} "
                    f"{shapes[1]}; both need one shape. Nothing was stored"
                )
        self._allocate_all([(key, *leaf) for key, leaf in leaves.items()])

    def takes_shape(self, shape: Sequence[int]) -> bool:
        """Returns whether a row of this shape is a stack of frames, or, for stacks of one, an image alone.

        :meta private:
        """
        is_stack = len(shape) in (3, 4) and shape[0] == self.frame_stack
        return (is_stack or self._is_image(shape)) and 0 not in shape

    def _is_image(self, shape: Sequence[int]) -> bool:
        # [H, W] or [H, W, C]. [1, H, W] is a stack of one.
        return self.frame_stack == 1 and len(shape) in (2, 3) and shape[0] != 1

    def _wrong_stacks(self, key: Key, given: str) -> ValueError:
        stacks = f"stacks of {self.frame_stack} frames, uint8 [N, {self.frame_stack}, H, W]"
        needed = stacks if self.frame_stack > 1 else "images, uint8 [N, H, W] or [N, H, W, C]"
        return ValueError(
            f"rows need {needed}, under {shown(key)} and {shown(('next', *key))}; {given}. Nothing was stored; give "
            "their key as image_key (a tuple where it is nested, a list of keys for several columns) and their number "
            "of frames as frame_stack (1 for images without an axis of frames), and convert them to uint8 images"
        )

    def _allocate_all(self, leaves: list[Leaf]) -> None:
        # Frames and rows get memory, or neither does.
        kinds = {key: (dtype, shape) for key, dtype, shape in leaves}
        stacks = {key: kinds[key] for key in self._given_images}
        several = [len(self.image_keys)] if len(self.image_keys) > 1 else []
        numbers_of_row = (FRAMES, torch.int32, torch.Size([*several, 2 * self.frame_stack]))
        packed = [leaf for leaf in leaves if leaf[0] not in stacks]
        layout = RowLayout([*packed, numbers_of_row, (GENERATION, torch.int64, torch.Size([]))])
        pools: list[FramePool] = []
        for key in self.image_keys:
            _, shape = kinds[key]
            frame = shape if self._is_image(shape) else shape[1:]
            # A CPU's memory still counts as free until a frame is written there.
            taken = sum(pool.frames.nbytes for pool in pools) if torch.device(self.device).type == "cpu" else 0
            beside = self.capacity * layout.row_bytes + taken
            pools.append(FramePool(self.frame_capacity, frame, self.device, self._memmap, beside))
        self._allocate(layout)
        assert self._storage is not None and self.layout is not None
        self._live = self._looked_up = None
        self._frames_of = numbers = self._storage.get(FRAMES)
        of_each = numbers.unbind(1) if several else [numbers]
        stacked = [not self._is_image(kinds[key][1]) for key in self.image_keys]
        self._images = [_Images(*one) for one in zip(pools, of_each, stacked, strict=True)]
        self._expect({key: (dtype, size) for key, dtype, size in packed} | stacks)
        self._order = [*(leaf[0] for leaf in leaves), GENERATION]
        self._outer_layout = self.layout.replacing(FRAMES, self._given_images, self._order)
        sizes = f"{self.frame_capacity:,}", f"{self.frame_bytes:,}"
        logger.info("room for %s frames of %s bytes is taken as frames come, with about 25 bytes more for each", *sizes)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of packed rows and a view of the used frames of each image column."""
        state = super().state_dict()
        if self._images is None:
            return state | {"frames": None, "frame_shape": None, "live": None}
        pools = [images.pool for images in self._images]
        return state | {
            "frames": [pool.frames[: pool.num_used] for pool in pools],
            "frame_shape": [list(pool.shape) for pool in pools],
            "unstacked": [not images.is_stacked for images in self._images],
            "image_keys": [list(key) for key in self.image_keys],
            "order": [list(key) for key in self._order],
            "live": None if self._live is None else self._live.state(),
        }

    @contextmanager
    def frozen_state(self) -> Iterator[dict[str, Any]]:
        """Gives the body the present :meth:`state_dict`. Rows and frames are snapshots.

        :meta private:
        """
        with ExitStack() as taken:
            with self.snapshots.lock:
                state = taken.enter_context(super().frozen_state())
                if self._images is not None:
                    frames = []
                    for images, (_, used, _) in zip(self._images, frames_by_column(state), strict=True):
                        frames.append(images.pool.snapshots.take(used))
                        taken.callback(images.pool.snapshots.close, frames[-1])
                    state["frames"] = frames
            yield state

    def after_fork(self) -> None:
        """Replaces the locks of rows and frames in a forked process.

        :meta private:
        """
        super().after_fork()
        for images in self._images or ():
            images.pool.snapshots = Snapshots()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_writable()
        self._saved_layout(state_dict)
        frames = state_dict["frames"]
        if frames is None and state_dict["layout"] is not None:
            raise ValueError("the saved storage has rows and no frames; load another save")
        if frames is not None:
            leaves = self._saved_columns(state_dict)
            self._check_frames(state_dict)
            if self._images is None or self.row_columns != {key: (dtype, shape) for key, dtype, shape in leaves}:
                self._allocate_all(leaves)
        before = self._len
        super().load_state_dict(state_dict)
        self._looked_up = None
        if self._images is None or self._frames_of is None:
            return
        # Rows above the loaded rows refer to nothing any more.
        self._frames_of[self._len : max(before, self._len)] = 0
        if frames is None:
            for images in self._images:
                images.pool.clear()
            self._live = None
            return
        for images, (_, saved, _) in zip(self._images, frames_by_column(state_dict), strict=True):
            images.pool.restore(saved, images.numbers[: self._len].cpu().numpy().ravel())
        live = state_dict["live"]
        self._live = None if live is None else SlotSet.from_state(self.capacity, live)

    def _check_frames(self, state: Mapping[str, Any]) -> None:
        """Refuses frames of another size than their shape, and rows that refer to none of them."""
        saved, live, rows = frames_by_column(state), state["live"], state["rows"]
        numbers = RowLayout.from_description(state["layout"]).leaves(rows, rows.shape[:1])[FRAMES]
        of_each = numbers.unbind(1) if len(saved) > 1 else [numbers]
        for (key, frames, shape), referred in zip(saved, of_each, strict=True):
            # Compiled loops check no bounds, and the count of references would be as long as the largest number.
            is_whole = frames.shape[1:] == (math.prod(shape),) and min(shape) > 0
            if not is_whole or not bool(((referred >= 0) & (referred < len(frames))).all()):
                raise ValueError(f"the saved rows and frames under {shown(key)} do not fit; load another save")
        if live is not None and not are_within(live.cpu().numpy(), int(state["length"])):
            raise ValueError("the saved storage names slots that hold no row; load another save")

    def _saved_columns(self, state: Mapping[str, Any]) -> list[Leaf]:
        """Returns the columns of a saved storage, in the order in which rows were given, and refuses other stacks."""
        layout = {tuple(leaf["key"]): leaf for leaf in state["layout"]}
        stacked = layout[FRAMES]["shape"][-1] // 2 if FRAMES in layout else 0
        saved = frames_by_column(state)
        if stacked != self.frame_stack or [key for key, _, _ in saved] != self.image_keys:
            raise ValueError(
                f"the saved storage has stacks of {stacked} frames in rows of {state['order']}, this one stacks of "
                f"{self.frame_stack} under {', '.join(map(shown, self.image_keys))}; build it with the saved options"
            )
        most = max(len(frames) for _, frames, _ in saved)
        if most > self.frame_capacity + 1:
            raise ValueError(
                f"the saved storage has {most - 1:,} frames and this one room for "
                f"{self.frame_capacity:,}; build it with the saved frame_capacity"
            )
        stacks: dict[Key, torch.Size] = {}
        for is_alone, (key, _, shape) in zip(state["unstacked"], saved, strict=True):
            stacks[key] = stacks["next", *key] = torch.Size(shape if is_alone else [stacked, *shape])
        columns: list[Leaf] = []
        for key in map(tuple, state["order"]):
            if key in stacks:
                columns.append((key, torch.uint8, stacks[key]))
            elif key != GENERATION:
                columns.append((key, DTYPES[layout[key]["dtype"]], torch.Size(layout[key]["shape"])))
        return columns

    def _empty(self) -> None:
        super()._empty()
        self._live = self._looked_up = None
        if self._images is not None and self._frames_of is not None:
            self._frames_of.zero_()
            for images in self._images:
                images.pool.clear()

    def __repr__(self) -> str:
        return (
            f"FrameStorage(capacity={self.capacity}, length={len(self)}, row_bytes={self.row_bytes}, "
            f"frames={self.frames_held} of {self.frame_capacity})"
        )
