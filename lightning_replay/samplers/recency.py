# SPDX-License-Identifier: Apache-2.0
"""Draws by the ages of rows, without priorities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.ages import Age, RowAges
from lightning_replay.parts import GroupTotals, ShardDraw, ShardRequest
from lightning_replay.priority_tree import aged_kernels
from lightning_replay.samplers.distinct import draw_repeats_again, has_repeats
from lightning_replay.samplers.prioritized import PrioritizedSampler
from lightning_replay.saving.spec import rebuildable


@rebuildable
class RecencySampler(PrioritizedSampler):
    """Draws rows in proportion to the weights of their ages, and ignores TD errors.

    With a half-life, this is truncated geometric replay (Korniak et al. 2026, https://arxiv.org/abs/2605.10236). If
    only ``max_age`` is given, it draws uniformly from a window. Batches have no importance weights.

    Ages in rows of a ring are found by their logarithm, in constant time. Other ages need the tree of
    :class:`~lightning_replay.samplers.PrioritizedSampler`.

    Args:
        capacity: Number of slots in the storage.
        age: Formula of the weights, or a mapping of its options.
        seed: Seed for the sampler's own generator. ``None`` seeds it from torch's global generator.
        replace: as :class:`~lightning_replay.samplers.PrioritizedSampler`.

    Sampled keys:
        index: int64 ``[B]``.

    Example:
        >>> import torch
        >>> from lightning_replay import Age, PackedStorage, Replay
        >>> from tensordict import TensorDict
        >>> sampler = RecencySampler(100, Age(max_age=1), seed=0)
        >>> replay = Replay(storage=PackedStorage(100), sampler=sampler, batch_size=8)
        >>> _ = replay.extend(TensorDict({"observation": torch.arange(50.0)}, [50]))
        >>> replay.sample()["observation"].unique()
        tensor([48., 49.])
    """

    uses_priorities = False
    sample_shard: Any = PrioritizedSampler.sample_shard

    def __init__(
        self, capacity: int, age: Age | Mapping[str, Any], seed: int | None = None, replace: bool = True
    ) -> None:
        super().__init__(capacity, 0.0, 0.0, seed=seed, age=age, replace=replace)
        if self.age is None:
            raise TypeError("age is None; give an Age, such as Age(half_life=10_000), or use UniformSampler")
        self._begin()

    def _begin(self) -> None:
        # The slot of the newest row, as long as ages follow from the slots, and otherwise None. Without the tree, a
        # draw of 256 of a million rows takes a third of the time, and an insertion of one row takes half.
        self._newest: int | None = self.max_size - 1 if self._row_ages.counts_rows else None

    @property
    def _row_ages(self) -> RowAges:
        assert self._ages is not None
        return self._ages

    @property
    def _stored(self) -> int:
        return min(self._row_ages.rows_written, self.max_size)

    def _fill(self, index: int | Tensor, storage: Storage | None) -> None:
        if self._newest is not None:
            if isinstance(index, int):
                count = 1
                newest = index
                follows = index == (self._newest + 1) % self.max_size
            else:
                count = len(index)
                newest = int(index[-1])
                following = (self._newest + 1 + np.arange(count)) % self.max_size
                follows = np.array_equal(following, index.numpy())
            if follows:
                self._row_ages.count(count)
                self._newest = newest
                self._has_rows = True
                return
            self._leave_ring()
        super()._fill(index, storage)

    def _leave_ring(self) -> None:
        # From here on the tree is needed, because rows come or go in another order than in a ring.
        if self._newest is None:
            return
        slots = (self._newest + 1 + np.arange(-self._stored, 0)) % self.max_size
        rows = self._row_ages.rows_written
        self._newest = None
        self._row_ages.insert(slots, np.arange(rows - len(slots), rows, dtype=np.float64))
        self._tree.set(torch.from_numpy(slots), 1.0)

    def on_evict(self, index: Tensor) -> None:
        """Removes evicted rows, so that they are never drawn."""
        if len(index):
            self._leave_ring()
        super().on_evict(index)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draws ``batch_size`` slots, int64 ``[B]``, or a tuple for several dimensions.

        Raises RuntimeError without any.
        """
        self._attach_storage(storage)
        if storage.ndim > 1:
            self._leave_ring()
        if self._newest is None or not len(storage):
            return super().sample(storage, batch_size)[0], {}
        points = torch.rand(batch_size, dtype=torch.float64, generator=self._generator, device="cpu")
        slots, _ = self._in_ring(points.numpy())
        if not self.replace and has_repeats(slots):
            draw_repeats_again(self, storage, np.zeros(batch_size, dtype=np.int64), slots, np.ones(batch_size))
        self._clocks["draws"] += 1
        return torch.from_numpy(slots), {}

    def _in_ring(self, points: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns the slots at points ``[n]`` in [0, 1) of the mass, int64 ``[n]``, and the mass."""
        ages = self._row_ages
        if not ages.is_steady:
            ages.follow(self._clocks)
        # The minima come first, because an age may be too large for an integer.
        stored = int(min(self._stored, ages.max_age + 1))
        decaying = int(min(stored - 1, ages.reach)) + 1
        slots = np.empty(len(points), np.int64)
        mass = aged_kernels.slots_at(
            points, slots, decaying, stored, ages.rate, float(ages.age.floor), self._newest, self.max_size
        )
        return slots, mass

    def group_totals(self, storage: Storage) -> GroupTotals:
        """Returns the sum and the smallest of the weights."""
        if self._newest is None:
            return super().group_totals(storage)
        self._attach_storage(storage)
        _, mass = self._in_ring(np.empty(0))
        oldest = self._weights(np.array([self._stored - 1]))
        return GroupTotals(["rows"], np.array([mass]), np.array([self._stored]), oldest)

    def masses(self, storage: Any, group: int = 0) -> Tensor:
        """Returns the weights of the stored rows, float64 ``[len(storage)]``. From then on the tree is kept.

        :meta private:
        """
        self._leave_ring()
        return super().masses(storage)

    def _weights(self, ages: np.ndarray) -> np.ndarray:
        return self._row_ages.age.weight(ages, self._row_ages.half_life)

    def _rows_at(self, storage: Any, groups: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._newest is None:
            return super()._rows_at(storage, groups, points)
        slots, mass = self._in_ring(points)
        return slots, self._weights((self._newest - slots) % self.max_size) / mass

    def weigh(self, part: ShardRequest, drawn: ShardDraw) -> dict[str, np.ndarray]:
        """Returns no columns, and counts a draw."""
        self._clocks["draws"] += 1
        return {}

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Storage | None) -> None:
        """Does nothing, because rows have no priorities."""

    def stats(self) -> dict[str, float]:
        """Returns ``effective_sample_size``, the number of equally likely rows that would repeat as often."""
        if self._newest is None:
            return super().stats()
        weights = self._weights(np.arange(self._stored))
        return {"effective_sample_size": float(weights.sum() ** 2 / np.square(weights).sum())} if len(weights) else {}

    def _empty(self) -> None:
        super()._empty()
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Returns the ages, options, clocks, and the generator's state."""
        return super().state_dict() | {"newest": self._newest}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises ``ValueError`` if the newest slot lies outside of the storage.
        """
        newest = state_dict.get("newest")
        if newest is not None and not 0 <= int(newest) < self.max_size:
            raise ValueError(f"the saved newest row is in slot {newest} of {self.max_size} slots; load another save")
        super().load_state_dict(state_dict)
        self._newest = newest
