# SPDX-License-Identifier: Apache-2.0
"""Episodes that reached a goal, replayed backwards from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes import kernels
from lightning_replay.episodes.running import FollowedEpisodes
from lightning_replay.events.conditions import Condition, ConditionLike, holds, own, warn_of_unmet
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
    """Episodes that reached a goal, and the slots of their last goals, from :meth:`state`, int64 ``[G, 2]``."""

    def __init__(self, pairs: Tensor) -> None:
        self._pairs: list[tuple[int, int]] = [(episode, slot) for episode, slot in pairs.tolist()]
        self._place_of_episode = {episode: place for place, (episode, _) in enumerate(self._pairs)}
        self._episode_at = {slot: episode for episode, slot in self._pairs}

    def __len__(self) -> int:
        return len(self._pairs)

    def slot(self, place: int) -> int:
        """Returns the slot of the last goal of an episode, by its place in :meth:`state`."""
        return self._pairs[place][1]

    def put(self, episodes: Tensor, slots: Tensor) -> None:
        """Adds goals, earlier ones first; a later goal of an episode replaces the earlier one."""
        for episode, slot in zip(episodes.tolist(), slots.tolist(), strict=True):
            place = self._place_of_episode.setdefault(episode, len(self._pairs))
            if place == len(self._pairs):
                self._pairs.append((episode, slot))
            else:
                del self._episode_at[self._pairs[place][1]]
                self._pairs[place] = (episode, slot)
            self._episode_at[slot] = episode

    def drop(self, slots: Tensor) -> None:
        """Removes the goals in ``slots``, int64 ``[n]``, with their episodes."""
        if not self._episode_at:
            return
        for slot in sorted(self._episode_at.keys() & set(slots.tolist())):
            place = self._place_of_episode.pop(self._episode_at.pop(slot))
            last = self._pairs.pop()
            if place < len(self._pairs):
                self._pairs[place] = last
                self._place_of_episode[last[0]] = place

    def state(self) -> Tensor:
        """Returns episodes and slots of goals, int64 ``[G, 2]``."""
        return torch.tensor(self._pairs, dtype=torch.int64, device="cpu").reshape(-1, 2)


@rebuildable
class ReverseSweepSampler(FollowsEpisodes, UniformSampler):
    """Draws batches that run backwards along episodes that reached a goal, mixed with uniform batches.

    A sweep starts at the last goal of an episode drawn uniformly among those that reached one, and goes back one step
    at a time: each sweep batch continues where the one before stopped. At the earliest stored step of the episode the
    next sweep starts, within the same batch if that is not full. Overwritten rows end a sweep. Until a goal is stored
    every batch is uniform. Needs no feedback. The reverse sweep baseline of the SSET paper, which gives no numbers.

    Args:
        goal: Condition on steps ``TensorDict[N] -> bool [N]``, true where the goal was reached, such as
            ``reward_at_least(1.0)``; evaluated once for each stored row, in insertion order. The sampler has its own
            copy of a condition with a state.
        sweep_share: Probability that a batch is a sweep.
        done_key: Flag of rows that ended their episode, terminated or truncated.
        check_continuity: Whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.
        seed: Seed for the sampler's own generator, whose state is part of :meth:`state_dict`.

    Sampled keys:
        index: int64 ``[B]``; of a sweep, later steps first.

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
        """Draws ``batch_size`` slots, int64 ``[B]``: uniform, or the next of the sweep; RuntimeError without rows."""
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
        """Refuses rows ``[N]`` without episode ends or that the condition cannot read; ``Replay`` calls it."""
        super().check_rows(rows)
        # The condition may keep a state and sees each stored row later, so a copy is evaluated here.
        holds(copy.deepcopy(self.goal) if isinstance(self.goal, Condition) else self.goal, rows)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Links new rows to their episodes and evaluates ``goal`` on them; ``ValueError`` without a storage."""
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
        """Restores a saved state; ``ValueError`` if it names slots outside of the storage."""
        self._empty()
        super().load_state_dict(state_dict)
        self._goals = GoalEpisodes(state_dict["goals"])
        if self.followed.links is not None:
            check_capacities(len(self._episode), self.followed.links.capacity)
        if max([self._cursor, *state_dict["goals"][:, 1].tolist()]) >= len(self._episode):
            raise ValueError("the state has sweeps from slots that there are not; load another save")
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
        self._goals = GoalEpisodes(torch.empty(0, 2, dtype=torch.int64, device="cpu"))
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
