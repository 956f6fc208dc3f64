# SPDX-License-Identifier: Apache-2.0
"""Episodes that reached a goal, replayed backwards from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes import kernels
from lightning_replay.episodes.running import FollowedEpisodes
from lightning_replay.episodes.running_rows import RunningRows
from lightning_replay.events.conditions import Condition, ConditionLike, holds, own, warn_of_unmet
from lightning_replay.jit import compiled
from lightning_replay.options import checked_share
from lightning_replay.samplers.pairs import FollowsEpisodes, check_capacities
from lightning_replay.samplers.prioritized import written_slots
from lightning_replay.samplers.uniform import UniformSampler
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.packed import empty_storage, occupancy_of, readable_rows

# An unreached goal is warned of after this many rows, or after the number of slots if that is more.
_ROWS_BEFORE_WARNING = 1_000
_NEVER = 2**62


class GoalEpisodes:
    """Episodes that reached a goal, and the slots of their last goals.

    Args:
        num_slots: Number of slots in the storage.
        pairs: Episodes and slots, from :meth:`state`, int64 ``[G, 2]``.
    """

    def __init__(self, num_slots: int, pairs: Tensor | None = None) -> None:
        self._count = 0
        self._goals = np.zeros((0, 3), dtype=np.int64)  # Episode, slot, and row in _running of each goal.
        self._running = RunningRows()
        self._place_of_row = np.zeros(0, dtype=np.int64)  # Place in _goals of each row in _running, or -1.
        self._place_at = np.full(num_slots, -1, dtype=np.int64)  # Place in _goals of the goal in each slot, or -1.
        if pairs is not None and len(pairs):
            self.put(pairs[:, 0], pairs[:, 1])

    def __len__(self) -> int:
        return self._count

    def slot(self, place: int) -> int:
        """Returns the slot of the last goal of an episode, by its place in :meth:`state`."""
        return int(self._goals[place, 1])

    def put(self, episodes: Tensor, slots: Tensor) -> None:
        """Adds goals, earlier ones first. A later goal of an episode replaces the earlier one."""
        names, number = np.unique(episodes.numpy(), return_inverse=True)
        rows = self._running.open(names)[number]
        further = self._running.capacity - len(self._goals)
        if further:
            self._goals = np.concatenate((self._goals, np.zeros((further, 3), dtype=np.int64)))
            self._place_of_row = np.concatenate((self._place_of_row, np.full(further, -1)))
        goals = np.stack((episodes.numpy(), slots.numpy(), rows), axis=1)
        self._count = _put(goals, self._goals, self._count, self._place_of_row, self._place_at)

    def drop(self, slots: Tensor) -> None:
        """Removes the goals in ``slots``, int64 ``[n]``, with their episodes."""
        if not self._count:
            return
        leaving = slots.numpy()
        leaving = leaving[self._place_at[leaving] >= 0]
        if len(leaving):
            arrays = self._goals, self._count, self._place_of_row, self._place_at
            self._running.close(_drop(np.unique(leaving), *arrays))
            self._count = len(self._running)

    def state(self) -> Tensor:
        """Returns episodes and slots of goals, int64 ``[G, 2]``."""
        return torch.from_numpy(self._goals[: self._count, :2].copy())


@compiled
def _put(new, goals, count, place_of_row, place_at):  # type: ignore[no-untyped-def]
    """Loop of :meth:`GoalEpisodes.put`. Returns returns how many goals there are."""
    for number in range(len(new)):
        row = new[number, 2]
        place = place_of_row[row]
        if place < 0:
            place = place_of_row[row] = count
            count += 1
        else:
            place_at[goals[place, 1]] = -1
        goals[place] = new[number]
        place_at[goals[place, 1]] = place
    return count


@compiled
def _drop(slots, goals, count, place_of_row, place_at):  # type: ignore[no-untyped-def]
    """Loop of :meth:`GoalEpisodes.drop`. The last goal takes the place of each. Returns the rows of their episodes."""
    rows = np.empty(slots.size, np.int64)
    for number in range(slots.size):
        place = place_at[slots[number]]
        rows[number] = goals[place, 2]
        place_at[slots[number]] = place_of_row[rows[number]] = -1
        count -= 1
        if place < count:
            goals[place] = goals[count]
            place_of_row[goals[place, 2]] = place_at[goals[place, 1]] = place
    return rows


@rebuildable
class ReverseSweepSampler(FollowsEpisodes, UniformSampler):
    """Draws batches that run backwards along episodes that reached a goal, mixed with uniform batches.

    A sweep starts at the last goal of an episode drawn uniformly among the episodes that reached one, and goes back one
    step at a time. Each sweep batch continues at the place at which the one before stopped. At the earliest stored step
    of the episode the next sweep starts, within the same batch if that is not full. Overwritten rows end a sweep. Until
    a goal is stored every batch is uniform. Needs no feedback. The reverse sweep baseline of the SSET paper, which
    gives no numbers.

    Args:
        goal: Condition on steps ``TensorDict[N] -> bool [N]``, true if the goal was reached, such as
            ``reward_at_least(1.0)``. It is evaluated once for each stored row, in insertion order. The sampler has its
            own copy of a condition with a state.
        sweep_share: Probability that a batch is a sweep.
        done_key: Flag of rows that ended their episode, terminated or truncated.
        check_continuity: Whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.
        seed: Seed for the sampler's own generator, whose state is part of :meth:`state_dict`.

    Sampled keys:
        index: int64 ``[B]``. In a sweep, later steps come first.

    Raises:
        ValueError: rows without ``done_key``, or a condition that does not return one bool for each row.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = ReverseSweepSampler(lambda steps: steps["next", "reward"] > 0, sweep_share=1.0, seed=0)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=3)
        >>> done = torch.tensor([[False], [False], [False], [True]])
        >>> _ = buffer.extend(TensorDict({"next": {"reward": done.float(), "done": done}}, [4]))
        >>> sampler.sample(buffer.storage, 3)[0], sampler.sample(buffer.storage, 3)[0]
        (tensor([3, 2, 1]), tensor([0, 3, 2]))
    """

    sample_shard: Any = UniformSampler._next_part
    stored_options: tuple[str, ...] = (*FollowsEpisodes.stored_options, "goal")
    _purpose = "sweeps along episodes"
    saved_attributes: tuple[str, ...] = ("_episode", "_next_episode", "_cursor")
    _cursor: int  # The slot to be drawn next, or -1 before a new sweep.

    def __init__(
        self,
        goal: ConditionLike,
        sweep_share: float = 0.5,
        done_key: NestedKey = ("next", "done"),
        check_continuity: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed=seed)
        self.goal: ConditionLike = own(goal, "goal")
        self.sweep_share: float = checked_share("sweep_share", sweep_share)
        self.followed: FollowedEpisodes = FollowedEpisodes(done_key, check_continuity)
        self._empty()

    @property
    def num_goal_episodes(self) -> int:
        """Episodes that reached a goal which is still stored."""
        return len(self._goals)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` slots, int64 ``[B]``: uniform, or the next of the sweep.

        Raises RuntimeError without rows.
        """
        if not len(storage):
            raise empty_storage()
        if self.followed.links is None:
            self._link(torch.empty(0, dtype=torch.int64, device="cpu"), storage)
        generator = self._generator
        point = torch.rand((), dtype=torch.float32, generator=generator, device=generator.device)
        if not (len(self._goals) and float(point) < self.sweep_share):
            return super().sample(storage, batch_size)
        parts: list[Tensor] = []
        while batch_size:
            if self._cursor < 0:
                drawn = torch.randint(len(self._goals), (), generator=generator, device=generator.device)
                self._cursor = self._goals.slot(int(drawn))
            predecessor = self.followed.links.predecessor.numpy()
            parts.append(torch.from_numpy(kernels.path_back(predecessor, self._cursor, batch_size)))
            self._cursor = int(predecessor[parts[-1][-1]])
            batch_size -= len(parts[-1])
        return torch.cat(parts), {}

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses rows ``[N]`` without episode ends or that the condition cannot read. ``Replay`` calls it."""
        super().check_rows(rows)
        # The condition may keep a state and sees each stored row later, so a copy is evaluated here.
        holds(copy.deepcopy(self.goal) if isinstance(self.goal, Condition) else self.goal, rows)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Links new rows to their episodes and evaluates ``goal`` on them. Raises ``ValueError`` without a storage."""
        slots = written_slots(index, storage, type(self).__name__).cpu()
        assert storage is not None
        self._link(slots, storage)
        self.followed.warn()

    @property
    def nbytes(self) -> int:
        """Size of the episode links and numbers in bytes."""
        return super().nbytes + self._episode.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the sweep, the goals, and the condition."""
        return {
            **super().state_dict(),
            "goals": self._goals.state(),
            "condition": self.goal.state_dict() if isinstance(self.goal, Condition) else None,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a saved state. Raises ``ValueError`` if it names slots outside of the storage."""
        self._empty()
        super().load_state_dict(state_dict)
        goals = state_dict["goals"]
        if self.followed.links is not None:
            check_capacities(len(self._episode), self.followed.links.capacity)
        slots = goals[:, 1].tolist()
        if max([self._cursor, *slots]) >= len(self._episode) or min(slots, default=0) < 0:
            raise ValueError("the state has sweeps from slots that there are not; load another save")
        self._goals = GoalEpisodes(len(self._episode), goals)
        # The goal was reached or warned of before the save.
        if len(self._goals) or self._next_episode >= len(self._episode):
            self._unmet_after = _NEVER
        if state_dict["condition"] is not None:
            self.goal.load_state_dict(state_dict["condition"])  # type: ignore[union-attr]

    def _empty(self) -> None:
        super()._empty()
        # The number of each slot's episode, in order of time.
        self._episode = torch.empty(0, dtype=torch.int64, device="cpu")
        # Rows are counted, because each may begin an episode.
        self._next_episode = 0
        self._unmet_after = _ROWS_BEFORE_WARNING
        self._goals = GoalEpisodes(0)
        self._cursor = -1
        # The new copy has no running episodes.
        self.goal = own(self.goal)

    def on_evict(self, index: Tensor) -> None:
        """Ends the sweep and drops the goals that evicted rows belong to."""
        super().on_evict(index)
        self._leave(index)

    def _leave(self, index: Tensor) -> None:
        self._goals.drop(index)
        if self._cursor >= 0 and bool((index == self._cursor).any()):
            self._cursor = -1

    def _link(self, index: Tensor, storage: Storage) -> None:
        self._leave(index)
        index = self.followed.mark_update(index, storage)
        if not len(self._episode):
            self._episode = torch.full((storage.max_size,), -1, dtype=torch.int64, device="cpu")
            self._goals = GoalEpisodes(storage.max_size)
        predecessor = self.followed.links.predecessor.numpy()
        kernels.name(predecessor, index.numpy(), self._next_episode, self._episode.numpy())
        self._next_episode += len(index)
        episode = self._episode[index]
        reached = holds(self.goal, storage.get(index)).cpu()
        if bool(reached.any()):
            self._goals.put(episode[reached], index[reached])
            self._unmet_after = _NEVER
        elif self._next_episode >= max(self._unmet_after, storage.max_size):
            rows = self._next_episode
            slots = occupancy_of(storage).slots()
            # The warning may be turned into an error, so the counter is set first.
            self._unmet_after = _NEVER
            if not warn_of_unmet("the goal", self.goal, rows, readable_rows(storage), slots, self.followed.done_key):
                self._unmet_after = 2 * rows
