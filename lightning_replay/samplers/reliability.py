# SPDX-License-Identifier: Apache-2.0
"""Prioritized draws by TD errors and by how far the later steps of the episode are learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.compiled import compiled
from lightning_replay.options import checked_count, checked_number
from lightning_replay.samplers.pairs import FollowedEpisodes
from lightning_replay.samplers.prioritized import PrioritizedSampler, written_slots
from lightning_replay.saving.spec import recorded
from lightning_replay.schedules import Schedule
from lightning_replay.storage.packed import read_columns, stored_before


@recorded
class ReliabilityAdjustedSampler(PrioritizedSampler):
    """Draws row t in proportion to ``R_t ** reliability_exponent * (|δ_t| + priority_offset) ** priority_exponent``.

    The reliability R_t is one less the share of the episode's TD errors that lies after t: of a row before steps that
    are not learned yet the target is not reliable. ``R_t = Σ_{i <= t} |δ_i| / Σ_i |δ_i|`` over the stored rows of the
    episode, ``priority_offset`` added to each; of a running one the divisor is the largest such sum of any episode,
    where that is more. New rows have the largest TD error so far, and reliability 1 until a row of their episode is
    updated.
    Reliability-adjusted prioritized replay (ReaPER), Pleiss et al. 2025, https://arxiv.org/abs/2506.18482; the defaults
    are those of the authors' code.

    A TD error changes the reliability of every row of its episode. With each update the episodes of the rows that were
    updated, or that ended, are renewed, those that wait longest first, until ``rows_per_update`` rows are: all at once
    where that is enough for them, as in the authors' code. Rows are joined to episodes as by
    :class:`~lightning_replay.samplers.ContinuousTransitionSampler`.

    Args:
        capacity, importance_exponent, priority_offset, normalize_over_batch, seed: as :class:`PrioritizedSampler`.
        priority_exponent: α.
        reliability_exponent: ω; 0 leaves prioritized replay.
        rows_per_update: rows whose reliability one update renews before the rest waits for the next; ``None`` for all.
            At 256 rows a batch 4,096 take about as long as the rest of the update five times.
        done_key: the flag of rows that ended their episode, terminated or truncated.
        check_continuity: whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.

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

    _reads_columns = True

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
        if rows_per_update is not None:
            checked_count("rows_per_update", rows_per_update, of="rows")
        self.rows_per_update = rows_per_update
        # Links are followed in loops on the CPU, wherever the rows are.
        self.followed: FollowedEpisodes = FollowedEpisodes(done_key, check_continuity, device="cpu")
        self._forget()

    def _forget(self) -> None:
        self.followed.links = None
        self._error, self._reliability = np.ones((2, self.max_size), dtype=np.float32)
        self._sum = np.zeros(self.max_size, dtype=np.float32)  # of each episode, at its last row
        # Slots whose episodes are to be renewed, in a ring from a place on, how many; and of each slot 2 if it waits in
        # it, 1 if it is in it and its episode was renewed since, 0 if it is not.
        self._queue, self._queued = np.zeros(self.max_size, dtype=np.int64), np.zeros(2, dtype=np.int64)
        self._waits = np.zeros(self.max_size, dtype=np.int8)

    def reliability_of(self, index: Tensor) -> Tensor:
        """Returns R of rows as last renewed, float32 ``[n]`` on the CPU."""
        return torch.from_numpy(self._reliability[index.cpu().numpy()])

    def priority_of(self, index: Tensor) -> Tensor:
        """Returns ``|δ|`` of rows, float32 ``[n]`` on the CPU."""
        return torch.from_numpy(self._error[index.cpu().numpy()])

    def check_rows(self, rows: TensorDictBase) -> None:
        self.followed.check_rows(rows, type(self).__name__, "reliabilities along episodes")

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        super().mark_update(index, storage=storage)
        if storage is not None:  # else rows that were stored before this sampler came, of the call below
            slots = written_slots(index, storage, type(self).__name__)
            if self.followed.links is None:
                self._link(stored_before(storage, slots), storage)
            self._link(slots, storage)
            self.followed.warn()

    def _link(self, index: Tensor, storage: Storage) -> None:
        if not len(index):
            return
        self.followed.write(index, storage)
        slots = index.cpu().numpy()
        self._error[slots], self._reliability[slots] = float(self.default_priority), 1.0
        self._forget_rows(slots)
        (done,) = read_columns(storage, index, [self.followed.done_key])
        self._enqueue(slots[done.reshape(len(slots), -1).any(1).cpu().numpy()])

    def _enqueue(self, slots: np.ndarray) -> None:
        _enqueue(slots, self._queue, self._queued, self._waits)

    def cut(self, index: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        self.followed.cut(index.cpu(), trajectories)
        self._enqueue(index.cpu().numpy())

    def on_evict(self, index: Tensor) -> None:
        super().on_evict(index)
        if self.followed.links is not None:
            self.followed.links.release(index.cpu())
            self._forget_rows(index.cpu().numpy())

    def _forget_rows(self, slots: np.ndarray) -> None:
        # None of them waits: a slot without a row would get a priority.
        self._sum[slots], self._waits[slots] = 0.0, np.minimum(self._waits[slots], 1)

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Storage | None) -> None:
        """Sets TD errors as :class:`PrioritizedSampler` does, and renews the reliabilities of their episodes."""
        if self.followed.links is None and storage is not None:
            self._link(stored_before(storage, slots[:0]), storage)
        super().set_priorities(slots, magnitudes, storage)  # which refuses before anything is changed
        index = slots.cpu().numpy()
        written = index[index >= 0]
        self._error[written] = magnitudes.cpu().numpy()[index >= 0]
        self._enqueue(written)
        self._set_leaves(np.concatenate((written, self._renew())))

    def _renew(self) -> np.ndarray:
        # Returns the slots of rows whose reliability changed.
        links = self.followed.links
        if links is None:
            return np.zeros(0, dtype=np.int64)
        most = self.max_size if self.rows_per_update is None else self.rows_per_update
        of_links = links.successor.numpy(), links.predecessors(slice(None)).numpy(), links.running_slots().numpy()
        own = self._error, self.priority_offset, self._reliability, self._sum, self._sum.max()
        renewed = np.empty(self.max_size, dtype=np.int64)
        return renewed[: _renew(most, self._queue, self._queued, self._waits, *of_links, *own, renewed)]

    def _set_leaves(self, slots: np.ndarray) -> None:
        if len(slots):
            self._tree.set(torch.from_numpy(slots), self._priorities(slots, self._priority_exponent))

    def _priorities(self, slots: np.ndarray | slice, exponent: float) -> Tensor:
        errors = (self._error[slots] + np.float32(self.priority_offset)) ** np.float32(exponent)
        return torch.from_numpy(errors * self._reliability[slots] ** np.float32(self.reliability_exponent))

    def _repowered(self, exponent: float) -> Tensor:
        return self._priorities(slice(None), exponent).to(self._tree.device)

    def _set_offset(self, offset: float) -> None:
        self.priority_offset = offset
        leaves, moved = self._tree.leaves(), self._repowered(self._priority_exponent)
        self._tree.load_state_dict({"leaves": torch.where(leaves > 0, moved, leaves)})

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.followed.nbytes + 3 * self._error.nbytes

    def _empty(self) -> None:
        super()._empty()
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        waiting = self._queue.take(np.arange(self._queued[0], self._queued.sum()), mode="wrap")
        own = {"error": self._error, "reliability": self._reliability, "sum": self._sum, "waits": self._waits}
        tensors = {name: torch.from_numpy(array.copy()) for name, array in (own | {"queue": waiting}).items()}
        return super().state_dict() | {"episodes": tensors | self.followed.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        kept = state_dict["episodes"]
        self._forget()
        own = (kept[name].cpu().numpy().copy() for name in ("error", "reliability", "sum", "waits"))
        self._error, self._reliability, self._sum, self._waits = own
        self._queued[1] = len(kept["queue"])
        self._queue[: self._queued[1]] = kept["queue"].cpu().numpy()
        self.followed.load_state_dict(kept)
        super().load_state_dict(state_dict)


@compiled
def _enqueue(slots, queue, queued, waits):  # type: ignore[no-untyped-def]
    for slot in slots:
        if waits[slot] == 0:
            queue[(queued[0] + queued[1]) % queue.size] = slot
            queued[1] += 1
        waits[slot] = 2


@compiled
def _renew(  # type: ignore[no-untyped-def]
    most, queue, queued, waits, successor, predecessor, running, error, offset, reliability, sums, largest, renewed
):
    """Renews the episodes of waiting rows until ``most`` rows are; returns how many, their slots in ``renewed``."""
    count = 0
    while queued[1] > 0 and count < most:
        first = queue[queued[0]]
        queued[0], queued[1] = (queued[0] + 1) % queue.size, queued[1] - 1
        is_waiting, waits[first] = waits[first] == 2, 0
        if not is_waiting:
            continue
        while predecessor[first] >= 0:
            first = predecessor[first]
        total, last, slot = 0.0, first, first
        while slot >= 0:
            total, last, slot = total + error[slot] + offset, slot, successor[slot]
        divisor = total
        for newest in running:
            if newest == last:
                divisor = max(total, largest)
        so_far, slot = 0.0, first
        while slot >= 0:
            so_far += error[slot] + offset
            reliability[slot] = so_far / divisor if divisor > 0 else 1.0
            sums[slot], waits[slot] = 0.0, min(waits[slot], 1)
            renewed[count] = slot
            count, slot = count + 1, successor[slot]
        sums[last] = total
    return count
