# SPDX-License-Identifier: Apache-2.0
"""A replay buffer made of parts, each read once for what it offers, whose state is read and restored as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data.replay_buffers import Sampler, SliceSampler, Storage, TensorStorage, Writer
from torchrl.envs import Transform

from lightning_replay.argument_names import with_named_arguments
from lightning_replay.checkpoint.replay import read_replay, save_replay
from lightning_replay.checkpoint.state import read_state, restore_state
from lightning_replay.declared import declared_sampler, declared_writer
from lightning_replay.draw_parts import GroupTotals
from lightning_replay.episodes.running import slots_by_age
from lightning_replay.locking import LockedReplay
from lightning_replay.parts import BufferHooks, Drawing, Insertion, ReplaySampler, ReplayTransform
from lightning_replay.samplers.slices import SliceCheck, check_slice_writer
from lightning_replay.samplers.table_sampler import without_tables
from lightning_replay.saving.state import refusing_other_states
from lightning_replay.storage.access import readable_rows
from lightning_replay.storage.devices import as_tensor
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.storage.transition_check import TransitionCheck
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import checked_count, checked_number, checked_seed


def check_parts(storage: Storage, sampler: Sampler, writer: Writer, n_steps: int) -> None:
    """Refuses parts that do not work together; some would fail only once rows are stored or drawn."""
    hooks, name, capacity = declared_sampler(sampler), type(sampler).__name__, storage.max_size
    if hooks.num_slots is not None and hooks.num_slots < capacity:
        raise ValueError(
            f"capacity of {type(hooks.base_sampler).__name__} is {hooks.num_slots} and that of the storage {capacity}; "
            f"build the sampler with capacity={capacity}"
        )
    if hooks.draws_from_tables and not declared_writer(writer).keeps_tables:
        raise without_tables(type(hooks.base_sampler).__name__)
    if not isinstance(storage, TensorStorage) and (hooks.reads_columns or n_steps > 1):
        reader = name if hooks.reads_columns else f"a buffer with n_steps={n_steps}"
        raise TypeError(
            f"{reader} reads columns of rows, and a {type(storage).__name__} has none; use PackedStorage or "
            "LazyTensorStorage"
        )
    if isinstance(sampler, SliceSampler):
        check_slice_writer(sampler, declared_writer(writer), type(writer).__name__)


_ENDS = (("next", "truncated"), ("next", "done"))


class AssembledReplay(BufferHooks, LockedReplay):
    """A storage, a writer, a sampler and transforms, called through :mod:`lightning_replay.parts`."""

    _row_check: TransitionCheck
    _checks_continuity: bool

    def _begin_life(self) -> None:
        super()._begin_life()
        self._attach_parts()

    def _attach_parts(self) -> None:
        """Reads what each part offers; TorchRL's parts get the defaults of :mod:`lightning_replay.parts`."""
        self._sampler_hooks, self._writer_hooks = declared_sampler(self._sampler), declared_writer(self._writer)
        is_own = type(self._sampler).__module__.startswith("lightning_replay.")
        self._takes_batches = self._sampler_hooks.takes_batches and not self._writer_hooks.needs_feedback
        self._checks_draws = isinstance(self._sampler, ReplaySampler) and not is_own  # of a user
        self._packed = self._storage if isinstance(self._storage, PackedStorage) else None
        if self._packed is not None:
            self._packed.row_check = self._row_check
        self._check_slices = SliceCheck()
        self._cuts_slices = isinstance(self._sampler, SliceSampler) and self._checks_continuity
        self.last_insertion: Insertion = Insertion(torch.zeros(0, dtype=torch.int64, device="cpu"), slice(0, 0))

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the sampler; returns the previous one."""
        before = super().set_sampler(sampler)
        self._attach_parts()
        in_order = slots_by_age(self._storage, self._writer_hooks) if self._cuts_slices and len(self) else None
        if in_order is not None:
            self._mark_ends(self._check_slices.broken(in_order[1:], self._storage))
        return before

    def set_writer(self, writer: Writer) -> Writer:
        """Replaces the writer; returns the previous one."""
        before = super().set_writer(writer)
        self._attach_parts()
        return before

    def set_storage(self, storage: Storage, collate_fn: Callable[..., Any] | None = None) -> Storage:
        """Replaces the storage; returns the previous one."""
        before = super().set_storage(storage, collate_fn)
        self._attach_parts()
        return before

    @property
    def _transforms(self) -> nn.ModuleList:
        """The transforms in order, without ``Transform.__getattr__``, which takes a microsecond."""
        transforms: Any = self._transform._modules["transforms"]
        return transforms

    @property
    def _has_transforms(self) -> bool:
        return len(self._transform._modules["transforms"]._modules) > 0

    @property
    def _changes_rows(self) -> bool:
        """Whether a transform may change rows before they are stored; of this library those that define an inverse."""
        transforms = self._transform._modules["transforms"]._modules.values()
        return any(
            not isinstance(one, ReplayTransform) or type(one)._inv_call is not Transform._inv_call for one in transforms
        )

    def _own_transforms(self) -> list[ReplayTransform]:
        """Returns the transforms that define what a ``Replay`` calls."""
        return [transform for transform in self._transforms if isinstance(transform, ReplayTransform)]

    @property
    def capacity(self) -> int:
        """Most transitions kept."""
        return self._storage.max_size

    def __len__(self) -> int:
        return len(self._storage) if self._packed is None else self._packed.num_held

    @property
    def nbytes(self) -> int:
        """Bytes of rows and links, and of what sampler and writer keep."""
        return (
            self._sampler_hooks.nbytes
            + self._writer_hooks.nbytes
            + sum(0 if part is None else part.nbytes for part in (self._episodes, self._packed))
        )

    @property
    def tables(self) -> Tables | None:
        """The tables that the writer keeps; ``None`` for other writers."""
        held = None if self._packed is None else self._packed.occupancy
        return held if isinstance(held, Tables) else None

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks of a curriculum, in the order of the column ``task``; none for other buffers."""
        return []

    @property
    def returns(self) -> list[tuple[int, float]]:
        """Length above 1 and discount of the returns that are formed, at the draw or before rows are stored."""
        formed: list[Any] = [] if self._episodes is None else [self._episodes]
        return [(one.n_steps, one.discount) for one in (*formed, *self._own_transforms()) if one.n_steps > 1]

    @property
    def is_prioritized(self) -> bool:
        """Whether TD errors change what the sampler draws."""
        return self._sampler_hooks.uses_priorities

    @property
    def sampler_name(self) -> str:
        """Name of the class of the sampler."""
        return type(self._sampler).__name__

    @property
    def needs_consecutive_rows(self) -> bool:
        """Whether the sampler cuts slices out of rows that lie side by side."""
        return isinstance(self._sampler, SliceSampler)

    @property
    def needs_initial_surprise(self) -> bool:
        """Whether the writer lacks a function for the surprise of new rows."""
        return self._writer_hooks.needs_initial_surprise

    def set_initial_surprise(self, measure: Callable[[TensorDictBase], Tensor] | None) -> None:
        """Sets the writer's function for the surprise of new rows; ``None`` removes it."""
        self._writer_hooks.set_initial_surprise(measure)

    def draw_stamp(self) -> bytes:
        """Returns the state of the sampler's generator, which is equal while nothing is drawn."""
        state = self._sampler_hooks.generator_state()
        return b"" if state is None else state.numpy().tobytes()

    @property
    def takes_feedback(self) -> bool:
        """Whether :meth:`update_priority` changes what is drawn or kept."""
        return self._sampler_hooks.uses_priorities or self._writer_hooks.needs_feedback

    def mark_update(self, index: Tensor | int) -> None:
        """Informs sampler and episodes of rows just written to these slots; the writer calls it."""
        if not isinstance(index, Tensor) or index.ndim != 1:
            index = as_tensor(index).reshape(-1)
        if self._cuts_slices:
            self._mark_ends(self._check_slices.broken(index, self._storage))
        if self._episodes is not None:
            self._episodes.mark_update(index, self._storage)
        self._sampler.mark_update(index, storage=self._storage)

    def on_evict(self, index: Tensor) -> None:
        """Removes rows that left without being overwritten from sampler and episodes; the storage calls it."""
        if self._episodes is not None:
            self._episodes.on_evict(index)
        self._sampler_hooks.on_evict(index)

    def cut(self, index: Tensor) -> None:
        """Ends the episodes at the rows in these slots: nothing follows them."""
        if self._episodes is not None:
            self._episodes.cut(index)
        self._sampler_hooks.cut(index)

    def _mark_ends(self, index: Tensor) -> None:
        """Marks the rows in these slots, int64 ``[n]``, truncated and done: nothing follows them."""
        if not len(index):
            return
        rows = readable_rows(self._storage)
        flags = [key for key in _ENDS if rows.get(key, None) is not None]
        if self._packed is not None:
            self._packed.set_flags(flags, index)
        else:
            for key in flags:
                rows.get(key)[index] = True
        self.cut(index)

    def break_episodes(self, trajectories: Iterable[int | None]) -> None:
        """Ends the running episodes of these trajectories: their next rows follow no stored row."""
        if self._episodes is not None:
            self._episodes.break_episodes(trajectories)
        self._sampler_hooks.break_episodes(trajectories)

    def successors(self, index: Tensor) -> Tensor | None:
        """Returns the slot of the next step of each row's episode, int64 ``[n]``, -1 where none is stored.

        ``None`` where no returns over several steps are drawn, for which rows are linked.

        Args:
            index: slots, int64 ``[n]``.
        """
        links = None if self._episodes is None else self._episodes.links
        return None if links is None else links.successor[index]

    @with_named_arguments
    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules: environment steps collected and updates made, since the start of training.

        Raises:
            TypeError, ValueError: readings that are no whole numbers from 0 on; nothing is changed.
        """
        for name, reading in (("env_steps", env_steps), ("updates", updates)):
            if reading is not None and (type(reading) is not int or reading < 0):
                checked_count(name, reading, 0)
        if self._prefetch_queue:
            self._wait_for_draws()
        with self._replay_lock, self._write_lock:  # before every update of an agent, so without _changing
            if self._refusal is not None:
                self._check_usable()
            self._sampler_hooks.advance(env_steps=env_steps, updates=updates)
            self._writer_hooks.advance(env_steps=env_steps, updates=updates)

    def group_totals(self) -> GroupTotals:
        """Returns what the stored rows add up to, for a :class:`~lightning_replay.divided_draws.Divider`.

        Raises:
            TypeError: draws of the sampler cannot be divided over several replays.
        """
        with self._changing():  # a sampler may read rows that were stored before it was attached
            self._sampler_hooks.check_divisible()
            return self._sampler_hooks.group_totals(self._storage)

    def raise_largest_priority(self, priority: float) -> None:
        """Raises the largest priority so far, which new rows get, to that of other replays; ignored without priorities.

        Args:
            priority: before any exponent.

        Raises:
            TypeError, ValueError: no finite number from 0 on; nothing is changed.
        """
        priority = checked_number("priority", priority, 0.0)
        with self._changing():
            self._sampler_hooks.raise_largest_priority(priority)

    def seed(self, seed: int) -> None:
        """Restarts the draws of sampler, transforms and writer from ``seed``."""
        if checked_seed(seed) is None:
            raise TypeError("seed is None; it must be a whole number that fits into 64 bits")
        with self._changing():
            for offset, part in enumerate([self._sampler_hooks, *self._transforms, self._writer_hooks]):
                if isinstance(part, Drawing):
                    part.reseed(seed + offset)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of all that decides the next draws: rows, priorities, generators, batches drawn ahead."""
        return read_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, from a buffer of the same capacity, parts, tables and tasks.

        Other options stay those of this buffer; the log names exponents, offsets and schedules that differ.

        Raises:
            TypeError: no dictionary.
            ValueError: the state of another buffer, or of something else; nothing is changed.
        """
        restore_state(self, state_dict)
        self._check_slices = SliceCheck()

    def save(self, path: str | Path, *, previous: str | Path | None = None) -> None:
        """Saves the buffer into the directory ``path``, sharing what has not changed with the save in ``previous``.

        See :func:`lightning_replay.save_replay`.
        """
        save_replay(self, path, previous=previous)

    def load(self, path: str | Path) -> None:
        """Restores a saved buffer into this one, as :meth:`load_state_dict`; imports nothing.

        Raises:
            FileNotFoundError, DamagedFileError, ValueError: as :func:`lightning_replay.load_replay`; nothing is loaded.
        """
        _, state = read_replay(Path(path))
        with refusing_other_states(path):
            self.load_state_dict(state)

    def dumps(self, path: str | Path, *, previous: str | Path | None = None) -> None:
        """TorchRL's name of :meth:`save`."""
        self.save(path, previous=previous)

    def loads(self, path: str | Path) -> None:
        """TorchRL's name of :meth:`load`."""
        self.load(path)
