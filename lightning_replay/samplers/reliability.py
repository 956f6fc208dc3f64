# SPDX-License-Identifier: Apache-2.0
"""Prioritized draws by TD errors and by how far the later steps of the episode are learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.running import FollowedEpisodes
from lightning_replay.jit import compiled
from lightning_replay.options import checked_count, checked_number
from lightning_replay.samplers.pairs import FollowsEpisodes, check_capacities
from lightning_replay.samplers.prioritized import PrioritizedSampler, written_slots
from lightning_replay.saving.spec import rebuildable
from lightning_replay.schedules import Schedule


@rebuildable
class ReliabilityAdjustedSampler(FollowsEpisodes, PrioritizedSampler):
    """Draws row t in proportion to ``R_t ** reliability_exponent * (|δ_t| + priority_offset) ** priority_exponent``.

    The target of a row before steps that are not learned yet is not reliable: its reliability is one less the share of
    the episode's TD errors after it, ``R_t = Σ_{i <= t} |δ_i| / Σ_i |δ_i|`` over the stored rows of the episode,
    ``priority_offset`` added to each; of a running one over the largest such sum of any episode, where that is more.
    New rows have the largest TD error so far and reliability 1. Reliability-adjusted prioritized replay (ReaPER),
    Pleiss et al. 2025, https://arxiv.org/abs/2506.18482; the default exponents are those of the authors' code.

    A TD error changes the reliability of all rows of its episode. With each update the episodes of its rows are
    renewed, in the order of the batch, until ``rows_per_update`` rows are; the authors' code renews all. Rows are
    joined to episodes as by :class:`~lightning_replay.samplers.ContinuousTransitionSampler`.

    Args:
        capacity, priority_exponent, importance_exponent, priority_offset, normalize_over_batch, seed: as
            :class:`PrioritizedSampler`.
        reliability_exponent: Exponent ω; 0 leaves prioritized replay.
        rows_per_update: Number of rows after which the other episodes keep their reliabilities; ``None`` for no limit.
        done_key, check_continuity: as :class:`~lightning_replay.samplers.ContinuousTransitionSampler`.

    Sampled keys:
        index: int64 ``[B]``.
        priority_weight: float32 ``[B]``, at most 1.

    Raises:
        ValueError: rows without ``done_key``; before anything is stored by ``Replay``.

    Example:
        >>> from lightning_replay import PackedStorage, Replay
        >>> from tensordict import TensorDict
        >>> sampler = ReliabilityAdjustedSampler(capacity=4, priority_offset=0.0)
        >>> replay = Replay(storage=PackedStorage(4), sampler=sampler, batch_size=2)
        >>> done = torch.tensor([[False], [False], [True]])
        >>> slots = replay.extend(TensorDict({"observation": torch.zeros(3, 1), "next": {"done": done}}, [3]))
        >>> replay.update_priority(slots, torch.tensor([1.0, 1.0, 2.0]))
        >>> sampler.reliability_of(slots)
        tensor([0.2500, 0.5000, 1.0000])
    """

    _purpose = "reliabilities along episodes"

    def __init__(
        self,
        capacity: int,
        priority_exponent: float = 0.3,
        reliability_exponent: float = 0.3,
        importance_exponent: float | Schedule = 0.5,
        priority_offset: float = 1e-6,
        normalize_over_batch: bool = False,
        rows_per_update: int | None = 4_096,
        done_key: NestedKey = ("next", "done"),
        check_continuity: bool = True,
        seed: int | None = None,
    ) -> None:
        of_priorities = (priority_exponent, importance_exponent, priority_offset, normalize_over_batch)
        super().__init__(capacity, *of_priorities, seed=seed)
        self.reliability_exponent: float = checked_number("reliability_exponent", reliability_exponent, 0.0)
        self._built_with["reliability_exponent"] = self.reliability_exponent
        if rows_per_update is not None:
            checked_count("rows_per_update", rows_per_update, of="rows")
        self.rows_per_update = rows_per_update
        self.followed: FollowedEpisodes = FollowedEpisodes(done_key, check_continuity)
        self._forget()

    def _forget(self) -> None:
        # The rows are the errors, the reliabilities, and the sum of each episode in the slot of its last row.
        self._of_rows = np.ones((3, self.max_size), dtype=np.float32)
        self._of_rows[2] = 0.0
        # The slot of the largest sum, and its value at the last update.
        self._largest_sum = np.zeros(2)

    def reliability_of(self, index: Tensor) -> Tensor:
        """Returns R of rows as last renewed, float32 ``[n]`` on the CPU."""
        return torch.from_numpy(self._of_rows[1, index.cpu().numpy()])

    def priority_of(self, index: Tensor) -> Tensor:
        """Returns ``|δ|`` of rows, float32 ``[n]`` on the CPU."""
        return torch.from_numpy(self._of_rows[0, index.cpu().numpy()])

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Gives new rows the largest TD error so far and reliability 1, and links them to their episodes."""
        super().mark_update(index, storage=storage)
        # Without a storage, the call above came here with rows that were stored earlier.
        if storage is not None:
            self._link(written_slots(index, storage, type(self).__name__).cpu(), storage)
            self.followed.warn()

    def _link(self, index: Tensor, storage: Storage) -> None:
        linked = self.followed.mark_update(index, storage).numpy()
        self._of_rows[:, linked] = np.array([[float(self.default_priority)], [1.0], [0.0]])

    def on_evict(self, index: Tensor) -> None:
        """Sets the priorities of evicted rows to 0 and removes the sums of their episodes."""
        super().on_evict(index)
        self._of_rows[2, index.numpy()] = 0.0

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Storage | None) -> None:
        """Sets TD errors as :class:`PrioritizedSampler` does, and renews the reliabilities of their episodes."""
        if storage is not None and self.followed.links is None:
            self._link(slots[:0], storage)
        # A refused batch raises before anything is changed.
        super().set_priorities(slots, magnitudes, storage)
        index = slots.numpy()
        written = index[index >= 0]
        if self.followed.links is None or not len(written):
            return
        self._of_rows[0, written] = magnitudes.numpy()[index >= 0]
        changed = np.concatenate((written, self._renewed(written, self.rows_per_update or self.max_size)))
        self._tree.set(torch.from_numpy(changed), self._priorities(changed, self._priority_exponent))

    def _renewed(self, slots: np.ndarray, most: int) -> np.ndarray:
        # Renews the reliabilities of the episodes of these rows, and returns the rows of these episodes.
        links: Any = self.followed.links
        of_links = links.successor.numpy(), links.predecessor.numpy(), links.running
        renewed = np.empty(self.max_size, dtype=np.int64)
        count = _renew(slots, most, *of_links, *self._of_rows, self._largest_sum, self.priority_offset, renewed)
        return renewed[:count]

    def _priorities(self, slots: np.ndarray | slice, exponent: float) -> Tensor:
        error, reliability, _ = self._of_rows[:, slots]
        powered = (error + np.float32(self.priority_offset)) ** np.float32(exponent)
        return torch.from_numpy(powered * reliability ** np.float32(self.reliability_exponent))

    def _repowered(self, exponent: float) -> Tensor:
        return self._priorities(slice(None), exponent)

    def _set_offset(self, offset: float) -> None:
        self.priority_offset = offset
        self._replace_leaves(self._repowered(self._priority_exponent))

    @property
    def nbytes(self) -> int:
        """Size of the tree, the episode links, and the reliabilities in bytes."""
        return super().nbytes + self._of_rows.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the prioritized sampler's state with errors and reliabilities by slot."""
        return super().state_dict() | {"of_rows": torch.from_numpy(self._of_rows.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a saved state; another offset or exponent of the constructor is applied to the stored rows."""
        of_rows = state_dict["of_rows"].cpu().numpy()
        links = state_dict["links"] or {"successor": self._of_rows[0]}
        check_capacities(self.max_size, of_rows.shape[1], len(state_dict["tree"]["leaves"]), len(links["successor"]))
        # The next update finds the largest sum again.
        self._of_rows = of_rows.copy()
        self._largest_sum = np.array([0.0, np.inf])
        super().load_state_dict(state_dict)
        differs = self._differs("priority_offset", state_dict)
        if differs and self.followed.links is not None:  # All sums contain the offset.
            self._renewed(np.flatnonzero(self._tree.leaves().numpy()), self.max_size)
        if differs or self._differs("reliability_exponent", state_dict):
            self._replace_leaves(self._repowered(self._priority_exponent))


@compiled
def _renew(  # type: ignore[no-untyped-def]
    slots, most, successor, predecessor, running, error, reliability, sums, largest_sum, offset, renewed
):
    """Renews the episodes of these rows until ``most`` rows are; returns how many, their slots in ``renewed``."""
    count, seen, episodes = 0, set(), []
    for first in slots:
        if count >= most:
            break
        while predecessor[first] >= 0:
            first = predecessor[first]
        if first in seen:
            continue
        seen.add(first)
        # A plain 0.0 would make float32 sums if this is not compiled.
        total, last, slot = np.float64(0.0), first, first
        while slot >= 0:
            total, last = total + error[slot] + offset, slot
            sums[slot], renewed[count] = 0.0, slot
            count, slot = count + 1, successor[slot]
        sums[last] = total
        episodes.append((first, last, total))
    # With the present sums of these episodes, not with those that they had before. All sums are read only where the
    # largest one became less: its rows were renewed, or its last row left.
    holder, largest = int(largest_sum[0]), largest_sum[1]
    for _, last, _ in episodes:
        if sums[last] >= largest:
            holder, largest = last, sums[last]
    if sums[holder] < largest:
        holder = sums.argmax()
        largest = sums[holder]
    largest_sum[0], largest_sum[1] = holder, largest
    for first, last, total in episodes:
        divisor = total
        for newest in running:
            if newest == last:
                divisor = max(total, largest)
        so_far, slot = np.float64(0.0), first
        while slot >= 0:
            so_far += error[slot] + offset
            reliability[slot] = so_far / divisor if divisor > 0 else 1.0
            slot = successor[slot]
    return count
