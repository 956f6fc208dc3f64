# SPDX-License-Identifier: Apache-2.0
"""A replay buffer made of parts, each read once for what it offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.data.replay_buffers import Sampler, Storage, Writer

from lightning_replay.argument_names import with_named_arguments
from lightning_replay.checkpoint.replay import SavedReplay
from lightning_replay.parts import BufferHooks, Drawing, Insertion, ReplayTransform, declared_sampler, declared_writer
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.storage.transition_check import TransitionCheck
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import checked_count, checked_seed


class AssembledReplay(BufferHooks, SavedReplay):
    """A storage, a writer, a sampler and transforms, called through :mod:`lightning_replay.parts`."""

    _row_check: TransitionCheck

    def _begin_life(self) -> None:
        super()._begin_life()
        self._attach_parts()

    def _attach_parts(self) -> None:
        """Reads once what each part offers: TorchRL's get the defaults of :mod:`lightning_replay.parts`."""
        self._sampler_hooks, self._writer_hooks = declared_sampler(self._sampler), declared_writer(self._writer)
        self._packed = self._storage if isinstance(self._storage, PackedStorage) else None
        if self._packed is not None:
            self._packed.row_check = self._row_check
        self.last_insertion = Insertion(torch.zeros(0, dtype=torch.int64), slice(0, 0))

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the sampler; returns the one there was."""
        before = super().set_sampler(sampler)
        self._attach_parts()
        return before

    def set_writer(self, writer: Writer) -> Writer:
        """Replaces the writer; returns the one there was."""
        before = super().set_writer(writer)
        self._attach_parts()
        return before

    def set_storage(self, storage: Storage, collate_fn: Callable[..., Any] | None = None) -> Storage:
        """Replaces the storage; returns the one there was."""
        before = super().set_storage(storage, collate_fn)
        self._attach_parts()
        return before

    @property
    def _transforms(self) -> nn.ModuleList:
        """The transforms in order, not by ``Transform.__getattr__``, which takes a microsecond."""
        transforms: Any = self._transform._modules["transforms"]
        return transforms

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
        """Bytes of rows, links and of what sampler and writer keep."""
        own = self._sampler_hooks.nbytes + self._writer_hooks.nbytes
        own += 0 if self._episodes is None else self._episodes.nbytes
        return own + (0 if self._packed is None else self._packed.nbytes)

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
        formed = [] if self._episodes is None else [(self._episodes.n_steps, self._episodes.discount)]
        formed += [(one.n_steps, one.discount) for one in self._own_transforms()]
        return [(n_steps, discount) for n_steps, discount in formed if n_steps > 1]

    @property
    def is_prioritized(self) -> bool:
        """Whether the sampler learns from TD errors."""
        return self._sampler_hooks.uses_priorities

    @property
    def takes_feedback(self) -> bool:
        """Whether the sampler or the writer learns from :meth:`update_priority`."""
        return self._sampler_hooks.uses_priorities or self._writer_hooks.needs_feedback

    def mark_update(self, index: Tensor | int) -> None:
        """Called by the writer when slots were written: sampler and episodes learn of the new rows."""
        if not isinstance(index, Tensor) or index.ndim != 1:
            index = torch.as_tensor(index).reshape(-1)
        if self._episodes is not None:
            self._episodes.mark_update(index, self._storage)
        self._sampler.mark_update(index, storage=self._storage)

    def on_evict(self, index: Tensor) -> None:
        """Called by the storage when rows left without being overwritten: sampler and episodes forget them."""
        if self._episodes is not None:
            self._episodes.on_evict(index)
        self._sampler_hooks.on_evict(index)

    def cut(self, index: Tensor) -> None:
        """Ends the episodes at the rows in these slots: nothing follows them."""
        if self._episodes is not None:
            self._episodes.cut(index)
        self._sampler_hooks.cut(index)

    def break_episodes(self, trajectories: Iterable[int | None]) -> None:
        """Called by the writer with trajectories of which steps were left out: what comes next follows no row."""
        if self._episodes is not None:
            self._episodes.break_episodes(trajectories)
        self._sampler_hooks.break_episodes(trajectories)

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

    def seed(self, seed: int) -> None:
        """Starts the draws of sampler, transforms and writer anew from ``seed``."""
        if checked_seed(seed) is None:
            raise TypeError("seed is None; it must be a whole number that fits into 64 bits")
        with self._changing():
            for offset, part in enumerate([self._sampler_hooks, *self._transforms, self._writer_hooks]):
                if isinstance(part, Drawing):
                    part.reseed(seed + offset)
