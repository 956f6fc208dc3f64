# SPDX-License-Identifier: Apache-2.0
"""The sampler, the writer, and the transforms of a replay: their hooks, and whether they fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data.replay_buffers import RoundRobinWriter, Sampler, SliceSampler, Storage, TensorStorage, Writer
from torchrl.envs import MultiStepTransform, Transform

from lightning_replay.episodes.returns import EpisodeTracker, NStepTransitions, refuse_formed
from lightning_replay.fast_path import has_fast_path, overrides
from lightning_replay.parts import (
    ReplaySampler,
    ReplayTransform,
    ReplayWriter,
    WriterHooks,
    as_replay_sampler,
    as_replay_writer,
    check_home,
    check_slots,
    unwrap,
    without_columns,
    without_tables,
)
from lightning_replay.samplers.slice_check import check_slice_writer
from lightning_replay.state import SeededStateful, seeded_generator
from lightning_replay.storage.packed import PackedStorage, device_of
from lightning_replay.writers.first_in_first_out import FirstInFirstOutWriter


class ReplayParts:
    """The parts of a replay and what they can do. Built again when the replay gets another part.

    Args:
        storage: Storage of the replay.
        sampler: Sampler, of this library or TorchRL's.
        writer: Writer, of this library or TorchRL's.
        transform: Composition of the transforms, which may get more of them.
    """

    def __init__(self, storage: Storage, sampler: Sampler, writer: Writer, transform: Transform) -> None:
        self.storage: Storage = storage
        self.sampler: ReplaySampler = as_replay_sampler(sampler)
        self.writer: WriterHooks = as_replay_writer(writer)
        self.packed: PackedStorage | None = storage if isinstance(storage, PackedStorage) else None
        #: The storage, if it keeps rows of different lengths.
        self.ragged: Any = self.packed if self.packed is not None and self.packed.ragged_keys else None
        device = device_of(storage)
        #: Device on which batches are put together, or ``None`` for the CPU.
        self.device: torch.device | None = None if device is None or device.type == "cpu" else device
        #: Whether slots are drawn on the device of the rows, and nothing waits for it.
        self.draws_there: bool = self.sampler.draw_device is not None
        hooks: Any = self.writer
        #: Fast paths for rows that a packed storage has read, and for TD errors of a batch as it was drawn.
        self.insert_columns: Any = hooks._insert_columns if has_fast_path(hooks) else None
        matches = has_fast_path(sampler) and not self.draws_there
        self.update_matching: Any = self.sampler._update_matching if matches else None
        self.checks_rows: bool = self.sampler.reads_versions or overrides(self.sampler, ReplaySampler, "check_rows")
        #: Whether the sampler cuts slices out of rows that lie side by side.
        self.cuts_slices: bool = isinstance(sampler, SliceSampler)
        self.cuts_ring: bool = self.cuts_slices and isinstance(writer, RoundRobinWriter)
        self.own_transforms: list[ReplayTransform] = []
        self._given: tuple[Sampler, Writer] = (sampler, writer)
        self._transform = transform

    @property
    def transforms(self) -> nn.ModuleList:
        """Transforms in the order in which they are applied to a batch."""
        # Not as an attribute: Transform.__getattr__ takes a microsecond.
        transforms: Any = self._transform._modules["transforms"]
        return transforms

    @property
    def has_transforms(self) -> bool:
        """Whether there is a transform."""
        return len(self.transforms._modules) > 0

    @property
    def changes_rows(self) -> bool:
        """Whether a transform changes rows before they are stored: one of this library does if it has an inverse."""
        return any(
            not isinstance(transform, ReplayTransform) or overrides(transform, Transform, "_inv_call")
            for transform in self.transforms
        )

    @property
    def delaying(self) -> list[NStepTransitions]:
        """Transforms whose rows wait for others before they are stored."""
        return [transform for transform in self.transforms if isinstance(transform, NStepTransitions)]

    @property
    def nbytes(self) -> int:
        """Bytes of the sampler and the writer, and of the rows in a packed storage."""
        return self.sampler.nbytes + self.writer.nbytes + (0 if self.packed is None else self.packed.nbytes)

    def returns(self, episodes: EpisodeTracker | None) -> list[tuple[int, float]]:
        """Returns length and discount of the returns that ``episodes`` and transforms form, and of potentials."""
        forming: list[Any] = [*self.delaying] if episodes is None else [episodes, *self.delaying]
        own = [transform for transform in self.transforms if isinstance(transform, ReplayTransform)]
        shaped = [(1, transform.shaping_discount) for transform in own if transform.shaping_discount is not None]
        return [(former.n_steps, former.discount) for former in forming if former.n_steps > 1] + shaped

    def seed(self, seed: int) -> None:
        """Restarts the draws of sampler, transforms, and writer."""
        for offset, part in enumerate([self.sampler, *self.transforms, self.writer]):
            if isinstance(part, SeededStateful):
                part.reseed(seed + offset)

    def advance(self, env_steps: int | None, updates: int | None) -> None:
        """Sets the clocks of schedules in sampler, writer, and transforms."""
        self.sampler.advance(env_steps=env_steps, updates=updates)
        self.writer.advance(env_steps=env_steps, updates=updates)
        for transform in self.own_transforms:
            transform.advance(env_steps=env_steps, updates=updates)

    def refuse_returns(self, rows: TensorDictBase) -> None:
        """Refuses first rows ``[N]`` that hold returns if a transform would form returns of these."""
        for transform in self.transforms:
            refuse_formed(rows, transform.n_steps if isinstance(transform, MultiStepTransform) else 1)

    @contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        """Context manager that restores transforms and columns if anything refuses rows.

        Transforms change their pending rows while they work, and the first rows fix the columns of a storage. Both
        happen before a part, or a function that was given to one, can refuse the rows.
        """
        pending = [(transform, transform.pending) for transform in self.delaying]
        is_first = self.packed is not None and not self.packed.has_columns
        try:
            yield
        except BaseException:
            for transform, kept in pending:
                transform.pending = kept
            if is_first and self.packed is not None:
                self.packed.undo_entry()
            raise

    def checked_transforms(self, replay: Any) -> list[ReplayTransform]:
        """Returns the transforms of this library, if they fit the other parts of ``replay``."""
        own = [transform for transform in self.transforms if isinstance(transform, ReplayTransform)]
        waiting = [type(transform).__name__ for transform in own if self.draws_there and not transform.draws_there]
        if waiting:
            raise ValueError(
                f"{', '.join(waiting)} works on the CPU, and slots are drawn on a device; leave it out, or draw on the "
                "CPU (draws_on='cpu')"
            )
        if self.sampler.sequence_length is not None:
            self._check_sequences(own, replay.returns)
        for transform in own:
            transform.check_buffer(replay)
        following = [type(transform).__name__ for transform in own if transform.follows_episodes]
        if following and self.delaying:
            raise ValueError(
                f"{following[0]} follows the episodes of stored rows, and NStepTransitions stores returns over several "
                "steps, of which none follows another; leave NStepTransitions out and give n_steps= to the buffer, "
                "which forms returns when they are drawn"
            )
        if following and not isinstance(self.storage, TensorStorage):
            raise without_columns(following[0], self.storage)
        return own

    def _check_sequences(self, transforms: list[ReplayTransform], returns: list[tuple[int, float]]) -> None:
        # Parts that change or keep single rows leave no sequences to follow.
        sampler, writer = self._given
        unfit = [
            *(f"n_steps={steps}" for steps, _ in returns if steps > 1),
            *(type(transform).__name__ for transform in transforms if not transform.takes_sequences),
        ]
        if self.writer.may_refuse:
            unfit.append(type(writer).__name__)
        if unfit:
            raise ValueError(
                f"{', '.join(unfit)} works with single rows, and {type(sampler).__name__} draws sequences of "
                f"{self.sampler.sequence_length} steps as they were played. Leave it out, or use a sampler of rows"
            )

    def check_draw(self, index: Any, batch_size: int) -> None:
        """Refuses slots that a sampler of this library returned in another form than the batch needs."""
        sampler = self._given[0]
        if not isinstance(sampler, ReplaySampler):
            return
        steps = self.sampler.sequence_length
        shapes = ((batch_size,), (batch_size, 2)) if steps is None else ((batch_size, steps),)
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.shape not in shapes:
            got = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
            raise ValueError(
                f"sample of {type(sampler).__name__} returned {got}, and a batch needs slots, int64 "
                f"[{batch_size}], or pairs of slots, [{batch_size}, 2]{'' if steps is None else f'; here {shapes}'}"
            )


def generator_of_torchrl(sampler: Sampler, storage: Storage, former: torch.Generator | None) -> torch.Generator | None:
    """Returns the generator of TorchRL's samplers and gives it to them, or ``None`` if there is no such sampler.

    Otherwise they would draw from torch's global generator. Some of them draw by the storage's.
    """
    of_torchrl = [each for each in (sampler, unwrap(sampler)) if not isinstance(each, ReplaySampler)]
    if not of_torchrl:
        return None
    device = device_of(storage) or torch.device("cpu")
    generator: torch.Generator | None = of_torchrl[0]._rng or former  # set_rng gave the former, which a copy loses
    if generator is None:
        generator = seeded_generator(None, device)
    elif generator.device.type != device.type:  # the first rows chose the device of the storage
        generator = seeded_generator(generator.initial_seed(), device)
    for part in (*of_torchrl, storage):
        part._rng = generator
    return generator


def _check_there(sampler: str, device: torch.device, storage: Storage, writer: Writer) -> None:
    """Refuses a storage or a writer for a sampler that draws slots on a device."""
    draws = f"{sampler} draws on {device}"
    if not isinstance(storage, PackedStorage) or not storage.draws_there:
        raise TypeError(
            f"{draws}, and a {type(storage).__name__} is read by slots on the CPU; use a PackedStorage on that device, "
            "or leave out device= of the sampler"
        )
    there = torch.device(storage.device)
    if (there.type, there.index or 0) != (device.type, device.index or 0):
        raise ValueError(f"{draws}, and the rows are on {there}; give sampler and storage the same device")
    if not isinstance(writer, FirstInFirstOutWriter):
        raise TypeError(
            f"{draws}, and {type(writer).__name__} chooses slots on the CPU; use FirstInFirstOutWriter, or leave out "
            "device= of the sampler"
        )


def check_parts(storage: Storage, sampler: Sampler, writer: Writer, n_steps: int) -> None:
    """Refuses parts that do not work together. Some of them would fail only once rows are stored or drawn."""
    hooks, name = as_replay_sampler(sampler), type(unwrap(sampler)).__name__
    for part in (sampler, unwrap(sampler), writer):
        if isinstance(part, ReplaySampler | ReplayWriter):
            part._check_state()
    check_home(storage, writer, sampler, unwrap(sampler))
    check_slots(storage, sampler)
    hooks.check_storage(storage, writer)
    if hooks.draw_device is not None:
        _check_there(name, hooks.draw_device, storage, writer)
    if hooks._draws_from_tables and as_replay_writer(writer).tables is None:
        raise without_tables(name)
    is_ragged = isinstance(storage, PackedStorage) and storage.ragged_keys
    if is_ragged and (n_steps > 1 or not isinstance(writer, RoundRobinWriter)):
        raise ValueError(
            f"{f'n_steps={n_steps}' if n_steps > 1 else type(writer).__name__} does not fit the option ragged, with "
            "which each row is a whole sequence and rows leave first in, first out; leave one of the two out"
        )
    if not isinstance(storage, TensorStorage) and (hooks._reads_columns or n_steps > 1):
        reader = type(sampler).__name__ if hooks._reads_columns else f"a buffer with n_steps={n_steps}"
        raise without_columns(reader, storage)
    setting = next(one for one in type(sampler).__mro__ if {"set_priorities", "update_priority"} & vars(one).keys())
    if isinstance(sampler, ReplaySampler) and setting is not ReplaySampler and "set_priorities" not in vars(setting):
        raise TypeError(
            f"{setting.__name__} defines update_priority, which Replay does not call; define "
            "set_priorities(slots, magnitudes, storage), with the slots and the magnitudes of checked TD errors"
        )
    if isinstance(sampler, SliceSampler):
        check_slice_writer(sampler, writer)
