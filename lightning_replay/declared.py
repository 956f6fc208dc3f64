# SPDX-License-Identifier: Apache-2.0
"""Adapters that give TorchRL's samplers and writers the attributes of :mod:`lightning_replay.parts`."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, RoundRobinWriter, Sampler, Writer

from lightning_replay.draw_parts import indivisible
from lightning_replay.parts import Insertion, SamplerHooks, WriterHooks


class _TorchRLSampler(SamplerHooks):
    """A sampler, TorchRL's or another, that is no :class:`SamplerHooks`."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.uses_priorities = isinstance(sampler, PrioritizedSampler)
        self.num_slots = getattr(sampler, "_max_capacity", None)

    @property
    def base_sampler(self) -> Sampler:
        return self._sampler

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Any) -> None:
        self._sampler.update_priority(slots, magnitudes, storage=storage)

    def check_divisible(self) -> None:
        raise indivisible(type(self._sampler).__name__)


class _TorchRLWriter(WriterHooks):
    """A writer, TorchRL's or another, that is no :class:`WriterHooks`."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.keeps_order = isinstance(writer, RoundRobinWriter)

    def insert(self, data: TensorDictBase) -> Insertion:
        index, count = self._writer.extend(data), data.shape[0]
        return Insertion(index, slice(count - index.numel(), count))

    def age_of(self, index: Tensor) -> Tensor | None:
        if not isinstance(self._writer, RoundRobinWriter):
            return None
        return (self._writer._cursor - 1 - index) % self._writer._storage.max_size


def declared_sampler(sampler: Sampler) -> SamplerHooks:
    """Returns a :class:`~lightning_replay.parts.ReplaySampler` itself, and an adapter for another sampler."""
    return sampler if isinstance(sampler, SamplerHooks) else _TorchRLSampler(sampler)


def declared_writer(writer: Writer) -> WriterHooks:
    """Returns a :class:`~lightning_replay.parts.ReplayWriter` itself, and an adapter for another writer."""
    return writer if isinstance(writer, WriterHooks) else _TorchRLWriter(writer)
