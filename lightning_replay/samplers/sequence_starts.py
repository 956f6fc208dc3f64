# SPDX-License-Identifier: Apache-2.0
"""First rows of sequences: drawn by their priorities, or on a device that nothing waits for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from lightning_replay.episodes.device_links import DeviceLinks
from lightning_replay.parts import ReplaySampler
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.samplers.prioritized import PrioritizedSampler
from lightning_replay.storage.columns import as_tensor


class SequenceStarts(PrioritizedSampler):
    """Draws the first rows of sequences by the priorities of the sequences. Other rows have no weight in the tree."""

    num_slots: int | None = None  # type: ignore[assignment]  # the tree gets the size of the storage with the first rows

    @property
    def uses_priorities(self) -> bool:  # type: ignore[override]
        """Whether TD errors change the draws."""
        return self.priority_exponent > 0

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Counts new rows for ages. A row gets its priority from :meth:`begin`, if a sequence begins with it."""
        if self._ages is not None:
            self._attach_storage(storage)
            self._ages.register(as_tensor(index).reshape(-1).numpy(), self._clocks, storage)

    def begin(self, slots: Tensor) -> None:
        """Gives the first rows of new sequences, int64 ``[n]``, the largest priority so far."""
        # A sequence that could be drawn before keeps its priority.
        super().mark_update(slots[self._tree.get(slots) == 0])

    def _insert_ages(self, slots: np.ndarray, storage: Storage | None) -> None:
        # A sequence is born at the end of the insertion that completes it.
        assert self._ages is not None
        self._ages.insert(slots, np.full(len(slots), self._ages.now))

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws first rows of sequences, int64 ``[B]``, with weights if priorities are used."""
        index, info = super().sample(storage, batch_size)
        return index, info if self.uses_priorities else {}

    def _attach_storage(self, storage: Storage | None, new: int | Tensor | None = None) -> None:
        if storage is not None and self._tree.capacity != storage.max_size:
            self._build_tree(storage.max_size)
        self._has_rows = True
        super()._attach_storage(storage)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a saved state, with a tree of the saved capacity."""
        self._build_tree(len(state_dict["tree"]["leaves"]))
        super().load_state_dict(state_dict)


class DeviceStarts(ReplaySampler, Sampler):
    """Draws the first rows of sequences, all equally likely, on a device.

    Args:
        length: Number of steps of a sequence.
        overlap: Number of steps that neighboring sequences of an episode share.
        min_steps: Fewest steps of a sequence.
        device: Device of the rows and the links.
        seed: Seed of the generator on the device.
    """

    has_state_of: str | None = "SequenceStarts"

    def __init__(self, length: int, overlap: int, min_steps: int, device: torch.device, seed: int) -> None:
        super().__init__()
        self._length = length
        self._overlap = overlap
        self._min_steps = min_steps
        self._device = device
        self._seed_generator(seed, device)
        # Sequences that begin at each slot or before it, int64 [capacity].
        self._counts = torch.zeros(1, dtype=torch.int64, device=device)
        # Whether a read of the device has found a sequence.
        self._has_sequences = False

    def number(self) -> Tensor:
        """Returns the number of sequences that can be drawn, int64 ``[1]`` on the device."""
        return self._counts[-1:]

    def receive(self, numbers: list[int]) -> None:
        """Receives the number that :meth:`number` returns now."""
        self._has_sequences = numbers[0] > 0

    def has_sequences(self) -> bool:
        """Returns whether there is a sequence, and waits for the device until there is the first one."""
        if not self._has_sequences:
            self.receive(self.number().tolist())
        return self._has_sequences

    def update(self, links: DeviceLinks) -> None:
        """Finds the first rows of all sequences. Call it after each change of the links."""
        assert links.position is not None
        position = links.position
        ahead, is_over = self._rest(links)
        # The last sequence of an episode has at least one step that the previous sequence lacks.
        is_last = is_over & (ahead >= self._min_steps - 1) & ((position == 0) | (ahead >= self._overlap))
        is_place = (position >= 0) & (position % (self._length - self._overlap) == 0)
        counts = (is_place & (is_last | (ahead == self._length - 1))).cumsum(0)
        if len(self._counts) != len(counts):
            self._counts = counts
        else:  # In place, so that a captured graph draws from the present rows.
            self._counts.copy_(counts)

    def longest_ended(self, links: DeviceLinks) -> int:
        """Returns the number of steps of the longest stored episode that ended, and waits for the device."""
        assert links.position is not None
        ahead, is_over = self._rest(links)
        return int(torch.where(is_over & (ahead == 0), links.position + 1, 0).max())

    def _rest(self, links: DeviceLinks) -> tuple[Tensor, Tensor]:
        # How many rows follow each row in a sequence, and whether the last of them ended its episode.
        slots = torch.arange(links.capacity, device=links.device)
        most = self._length - 1
        last, ahead = links.walk(slots, torch.full_like(slots, most), most=most)
        return ahead, ~links.is_newest[last] & (links.successor[last] < 0)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws first rows of sequences, int64 ``[B]``. If there is no sequence, these are slots that begin none."""
        point = torch.rand(batch_size, generator=self._generator, dtype=torch.float64, device=self._device)
        place = torch.minimum((point * self.number()).long(), self.number() - 1)
        return torch.searchsorted(self._counts, place, right=True).clamp(max=len(self._counts) - 1), {}

    def _empty(self) -> None:
        self._counts.fill_(0)
        self._has_sequences = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of :class:`SequenceStarts` with the same sequences."""
        counts = self._counts.cpu()
        host = SequenceStarts(1, 0.0, seed=0)
        host._tree = PriorityTree(len(counts))
        host.begin(counts.diff(prepend=counts.new_zeros(1)).nonzero().flatten())
        return host.state_dict() | self._generator_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the generator. The sequences are found by :meth:`update`."""
        self._empty()
        self._restore_generator(state_dict)
