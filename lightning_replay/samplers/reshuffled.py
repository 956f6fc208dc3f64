# SPDX-License-Identifier: Apache-2.0
"""Uniform draws without replacement: every row once before any again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.jit import compiled
from lightning_replay.samplers.pairs import check_capacities
from lightning_replay.samplers.uniform import UniformSampler
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.columns import as_tensor
from lightning_replay.storage.packed import empty_storage, occupancy_of


@rebuildable
class ReshuffledSampler(UniformSampler):
    """Draws each stored row once per epoch, in random order, before the next epoch begins.

    Random reshuffling, RR-C of Fujita 2025, https://arxiv.org/abs/2503.02269. As there, slots are shuffled: a row that
    overwrites another takes its place, drawn or not. So the draws of two slots differ by one at most. A row in a slot
    that was empty is drawn in the present epoch, and one that leaves is drawn no more. A batch takes the same time
    whatever is stored. A batch that ends an epoch may have a row twice. Needs no feedback. In a draw that is divided
    over several replays, each of them has separate epochs.

    Args:
        seed: Seed for the sampler's own generator. ``None`` seeds it from torch's global generator.

    Sampled keys:
        index: int64 ``[B]``.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(6), sampler=ReshuffledSampler(seed=0), batch_size=3)
        >>> _ = buffer.extend(TensorDict({"observation": torch.arange(6)}, [6]))
        >>> sorted([*buffer.sample()["observation"].tolist(), *buffer.sample()["observation"].tolist()])
        [0, 1, 2, 3, 4, 5]
    """

    sample_shard: Any = UniformSampler._next_part
    saved_attributes: tuple[str, ...] = ("_order", "_ends")

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        self._empty()

    def _empty(self) -> None:
        # The order lists the drawn slots of this epoch, then the others, and the ends are the ends of both parts. Each
        # slot has its place in the order, or -1.
        self._order = self._place = np.zeros(0, dtype=np.int64)
        self._ends = np.zeros(2, dtype=np.int64)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Adds new slots, an int or int64 ``[n]``, to the present epoch."""
        if storage is not None:
            self._add(as_tensor(index).reshape(-1).cpu().numpy(), storage)

    def _add(self, slots: np.ndarray, storage: Storage) -> None:
        if not len(self._order):
            self._order = np.zeros(storage.max_size, dtype=np.int64)
            self._place = np.full(storage.max_size, -1)
        # A loaded state may be of another capacity.
        check_capacities(len(self._order), storage.max_size)
        new = np.unique(slots[self._place[slots] < 0])
        places = np.arange(self._ends[1], self._ends[1] + len(new))
        self._order[places] = new
        self._place[new] = places
        self._ends[1] += len(new)

    def on_evict(self, index: Tensor) -> None:
        """Removes evicted slots from the present epoch."""
        place = self._place
        for slot in index.tolist() if len(place) else ():
            hole = place[slot]
            # The last slot of each part that contains or follows the hole moves up.
            for part in (0, 1) if 0 <= hole < self._ends[0] else (1,) if hole >= 0 else ():
                self._ends[part] -= 1
                last = self._order[self._ends[part]]
                self._order[hole] = last
                place[last] = hole
                hole = self._ends[part]
            place[slot] = -1

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` slots, int64 ``[B]``. Raises RuntimeError if the storage is empty."""
        occupancy = occupancy_of(storage)
        if not occupancy.count:
            raise empty_storage()
        # Rows may have been stored before this sampler was added.
        if self._ends[1] != occupancy.count or len(self._order) != storage.max_size:
            self._add(occupancy.slots().numpy(), storage)
            if self._ends[1] != occupancy.count:
                raise ValueError("the state names slots without a row; load another save")
        uniform = torch.rand(batch_size, dtype=torch.float64, generator=self._generator, device=self._generator.device)
        index = torch.empty(batch_size, dtype=torch.int64, device="cpu")
        _draw(uniform.cpu().numpy(), index.numpy(), self._order, self._place, self._ends)
        return index, {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a saved epoch. Raises ``ValueError`` if its order names a slot twice."""
        order, ends = (state_dict[name].cpu().numpy() for name in ("order", "ends"))
        place = np.full(len(order), -1)
        listed = order[: ends[1]]
        is_sound = 0 <= ends[0] <= ends[1] == len(listed) and ((listed >= 0) & (listed < len(order))).all()
        if is_sound:
            place[listed] = np.arange(len(listed))
        # A compiled loop indexes both arrays without checks.
        if not is_sound or (place >= 0).sum() != len(listed):
            raise ValueError("the state names slots twice or slots that there are not; load another save")
        super().load_state_dict(state_dict)
        self._place = place

    @property
    def nbytes(self) -> int:
        """Size of the order and of the places in bytes."""
        return self._order.nbytes + self._place.nbytes


@compiled
def _draw(uniform, index, order, place, ends):  # type: ignore[no-untyped-def]
    """Moves slots that were not drawn, each equally likely, to the end of the slots that were."""
    for number in range(uniform.size):
        if ends[0] == ends[1]:
            ends[0] = 0
        here = ends[0]
        there = min(here + int(uniform[number] * (ends[1] - here)), ends[1] - 1)
        slot, other = order[there], order[here]
        order[here], order[there] = slot, other
        place[slot], place[other] = here, there
        index[number] = slot
        ends[0] = here + 1
