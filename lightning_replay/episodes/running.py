# SPDX-License-Identifier: Apache-2.0
"""Running episodes of a storage, the links between its rows, and returns over several steps along them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.links import (
    TRAJECTORY_KEYS,
    Continuity,
    EpisodeLinks,
    Tally,
    consecutive,
    equal_rows,
    trajectory_name,
    trajectory_of,
)
from lightning_replay.options import checked_count, checked_flag, checked_share
from lightning_replay.parts import WriterHooks
from lightning_replay.storage.packed import PackedStorage, device_of, occupancy_of, read_columns, stored_before
from lightning_replay.tables.kernels import EpisodeGroups

# Columns of rows whose rewards are returns, as this library, TorchRL's transform and its collectors' MultiStep have.
_FORMED = ("steps_to_next_obs", ("next", "original_reward"))


ObservationPair = tuple[Any, Any]  # columns [N, numbers] of one observation before and after the step of each row


def refuse_formed(rows: TensorDictBase, n_steps: int) -> None:
    """Raises ``ValueError`` for rows whose rewards are returns already, where ``n_steps`` is above 1."""
    found = next((key for key in _FORMED if rows.get(key, None) is not None), None)
    if n_steps > 1 and found is not None:
        raise ValueError(
            f"the rewards of the transitions are returns over several steps already, as their column {found!r} shows, "
            f"and returns over n_steps={n_steps} would sum them again; nothing was stored. Form returns once: store "
            "single steps, without MultiStep or another n-step transform, or build the buffer with n_steps=1"
        )


def n_step_returns(reward: Tensor, steps_used: Tensor, discount: float) -> Tensor:
    """Computes ``sum(discount**t * reward[:, t] for t < steps_used)`` of rewards ``[B, n]`` along a chain of links.

    Rewards after ``steps_used``, int64 ``[B]`` from 1 to n, are ignored. The result ``[B]`` has the dtype of the
    rewards; float32 for integers and for floats of fewer bits, in which a sum may be infinite.

    Example:
        >>> n_step_returns(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([2]), discount=0.5)
        tensor([2.])
    """
    if not reward.is_floating_point() or reward.itemsize < torch.float32.itemsize:
        reward = reward.to(torch.float32)  # powers of a discount below 1 are no integers
    step = torch.arange(reward.shape[1], device=reward.device)
    powers = [discount**power for power in range(reward.shape[1])]
    factors = torch.tensor(powers, dtype=reward.dtype, device=reward.device)
    # where, not a product: the ignored rewards may be anything, NaN included.
    return torch.where(step < steps_used.unsqueeze(1), reward * factors, 0).sum(1)


def bootstrap_discounts(steps_used: Tensor, terminated: Tensor, discount: float) -> Tensor:
    """Computes the factor of the bootstrap value: ``discount**steps_used``, and 0 where the last step terminated.

    ``steps_used`` is int64 ``[B]``, ``terminated`` bool ``[B]``, of the last step used; truncation does not count.
    Returns float64 ``[B]``.

    Example:
        >>> bootstrap_discounts(torch.tensor([2, 1]), torch.tensor([False, True]), discount=0.5)
        tensor([0.2500, 0.0000], dtype=torch.float64)
    """
    factors = torch.pow(torch.tensor(discount, dtype=torch.float64, device=steps_used.device), steps_used)
    return factors.masked_fill(terminated, 0.0)


def read_trajectory(storage: Storage, index: Tensor) -> Tensor | None:
    """Returns the running episode of each stored row, int64 ``[N]``; ``None`` when the rows name none."""
    if isinstance(storage, PackedStorage):
        key = next((key for key in TRAJECTORY_KEYS if storage.has_column(key)), None)
        trajectory = None if key is None else storage.column(key, index)
        return None if trajectory is None else trajectory.flatten()
    trajectory = trajectory_of(storage.get(slice(0, len(storage))))
    return None if trajectory is None else trajectory[index].flatten()


def require_columns(rows: TensorDictBase, purpose: str) -> None:
    """Raises ``ValueError`` for rows ``[N]`` without one reward, terminated and done each; ``purpose`` needs them."""
    for name in ("reward", "terminated", "done"):
        require_one_each(rows, ("next", name), purpose, is_flag=name != "reward")
    trajectory = trajectory_of(rows)
    if trajectory is not None and trajectory.numel() != rows.shape[0]:
        raise ValueError(
            f"the column {trajectory_name(rows)} has the shape {list(trajectory.shape)} for {rows.shape[0]} rows, and "
            f"{purpose} need the episode of each row, int64 [{rows.shape[0]}]. Nothing was stored"
        )


def require_one_each(rows: TensorDictBase, key: NestedKey, purpose: str, *, is_flag: bool) -> None:
    """Raises ``ValueError`` for rows ``[N]`` without one number, or one flag, for each row under ``key``."""
    column, count = rows.get(key, None), rows.shape[0]
    if column is None:
        raise ValueError(
            f"the transitions have no {key!r}, which {purpose} need; nothing was stored. "
            "Store reward, terminated, truncated and done under 'next' of every transition"
        )
    wrong_dtype = (column.dtype == torch.bool) != is_flag or column.is_complex()
    if column.numel() != count or wrong_dtype:
        kind = "bool" if is_flag else "a number"
        raise ValueError(
            f"{key!r} is {column.dtype} {list(column.shape)}, and {purpose} need {kind} for each row, [{count}] or "
            f"[{count}, 1]; nothing was stored"
        )


class EpisodeTracker:
    """Follows the episodes in a storage and turns drawn rows into n-step rows.

    Call :meth:`mark_update` after every write. A return never crosses an episode end, the newest row, another
    trajectory or a row that was overwritten, nor a row that starts with another observation than the row before ended
    with; it is shortened there. Sutton and Barto, section 7.1.

    Args:
        n_steps: rewards summed into one return.
        discount: γ per environment step.
        check_continuity: whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.
    """

    def __init__(self, n_steps: int, discount: float, check_continuity: bool = True) -> None:
        self.n_steps: int = checked_count("n_steps", n_steps, of="rewards in a return")
        self.discount: float = checked_share("discount", discount)
        self.check_continuity: bool = checked_flag("check_continuity", check_continuity)
        self.links: EpisodeLinks | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.links is None else self.links.nbytes

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses first rows ``[N]`` without the columns of a return, or whose rewards are returns already."""
        if self.links is None:  # later rows have the columns of the first
            refuse_formed(rows, self.n_steps)
            require_columns(rows, f"returns over {self.n_steps} steps")

    def mark_update(self, index: Tensor, storage: Storage) -> None:
        """Links the rows just written into the slots ``index``, int64 ``[N]`` in insertion order."""
        if self.links is None:
            self.links = self._new_links(storage)
            # A buffer that was filled before its episodes were followed: its rows are linked in the order of slots.
            index = torch.cat((stored_before(storage, index), index))
        (done,) = read_columns(storage, index, [("next", "done")])
        self.links.write(index, read_trajectory(storage, index), done.flatten())

    def _new_links(self, storage: Storage) -> EpisodeLinks:
        continuity = Continuity(storage) if self.check_continuity else None
        return EpisodeLinks(storage.max_size, device=device_of(storage) or "cpu", continuity=continuity)

    def warn(self) -> None:
        if self.links is not None and self.links.continuity is not None:
            self.links.continuity.warn()

    def draw(self, data: TensorDictBase, index: Tensor, storage: Storage) -> TensorDictBase:
        """Turns the rows drawn at ``index`` into n-step rows.

        Args:
            data: TensorDict of the shape of ``index``, ``[B]`` or ``[B, 2]``.

        Returns:
            ``data`` with ``next`` taken from the last step, the summed ``("next", "reward")``, ``discount``
            float32 ``[..., 1]`` (``discount**steps``, 0 where terminated) and ``steps_to_next_obs`` int64 ``[..., 1]``.
        """
        # The rows of a return are found when it is drawn, not when they are stored: until its episode ends or has n
        # more rows, a return grows with every step.
        slots, last, steps_used = self._chain(index, storage)
        shape = (*index.shape, 1)
        # The state to bootstrap from is that after the last reward of the sum.
        following = storage.get(last.view(index.shape)).get("next")
        if following.is_locked:  # TorchRL's memory-mapped rows
            following = following.copy()
        following.set("reward", self._summed(slots, steps_used, storage).view(shape))
        data.set("next", following)
        # Truncation does not count: there the value of the last state is still part of the return.
        remaining = bootstrap_discounts(steps_used, following.get("terminated").flatten(), self.discount)
        data.set("discount", remaining.to(torch.float32).view(shape))
        data.set("steps_to_next_obs", steps_used.view(shape))
        return data

    def returns(self, index: Tensor, storage: Storage) -> Tensor:
        """Returns the sums ``[N]`` over up to :attr:`n_steps` rewards from the rows ``index`` on, int64 ``[N]``."""
        slots, _, steps_used = EpisodeTracker._chain(self, index, storage)  # a subclass may draw the lengths
        return self._summed(slots, steps_used, storage)

    def _chain(self, index: Tensor, storage: Storage) -> tuple[Tensor, Tensor, Tensor]:
        """Slots along each return, int64 ``[N, n_steps]``, the last one used and how many are, int64 ``[N]``."""
        if self.links is None:  # rows were stored before the tracker came
            self.mark_update(_held(storage).to(index.device), storage)
        assert self.links is not None
        slots, steps_used = self.links.chain(index.flatten(), self.n_steps)
        return slots, slots[:, -1], steps_used

    def _summed(self, slots: Tensor, steps_used: Tensor, storage: Storage) -> Tensor:
        (reward,) = read_columns(storage, slots.flatten(), [("next", "reward")])
        return n_step_returns(reward.reshape(slots.shape), steps_used, self.discount)

    def cut(self, index: Tensor) -> None:
        if self.links is not None:
            self.links.cut(index)

    def break_episodes(self, trajectories: Iterable[int | None]) -> None:
        if self.links is not None:
            self.links.break_episodes(trajectories)

    def on_evict(self, index: Tensor) -> None:
        if self.links is not None:
            self.links.release(index)

    def clear(self) -> None:
        self.links = None

    def state_dict(self) -> dict[str, Any]:
        return {"links": None if self.links is None else self.links.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], storage: Storage) -> None:
        self.links = None
        if state_dict["links"] is not None:
            self.links = self._new_links(storage)
            self.links.load_state_dict(state_dict["links"])


class Breaks(NamedTuple):
    """Where new rows ``[N]`` start with another observation than the row before ended with."""

    done: np.ndarray  #: bool ``[N]``, whether an episode ends with each row; also where it breaks off.
    starts: list[int]  #: The running episodes that the rows given before them do not continue.
    begins: list[tuple[int, int]]  #: Rows with which another episode of the same trajectory begins, and these.

    def parts(self) -> Iterator[tuple[slice, int | None]]:
        """Yields the rows in parts, each with the trajectory whose episode begins anew with it, if one does."""
        bounds = [(0, None), *self.begins] if not self.begins or self.begins[0][0] else self.begins
        for place, (first, name) in enumerate(bounds):
            yield slice(first, bounds[place + 1][0] if place + 1 < len(bounds) else len(self.done)), name


class RunningObservations:
    """The observations that running episodes ended with so far, with which their next rows must start, bit for bit."""

    def __init__(self) -> None:
        self._last: dict[int, bytes] = {}
        self.tally: Tally = Tally()  #: Of rows that do not continue the row before.

    def breaks(self, pairs: Sequence[ObservationPair], episodes: EpisodeGroups) -> Breaks | None:
        """Returns where new rows do not continue the rows before them; ``None`` where all do, as without ``pairs``."""
        if not pairs:
            return None
        if len(episodes.done) == 1:  # in half the time
            name, observation = int(episodes.trajectory[0]), b"".join([own.tobytes() for own, _ in pairs])
            continues = self._last.get(name, observation) == observation
            return None if continues else Breaks(episodes.done, [name], [(0, name)])
        begins: list[tuple[int, int]] = []
        # Across batches: the first row of each episode against what the episode ended with.
        named, heads = episodes.trajectory.tolist(), episodes.order[episodes.start[:-1]]
        given = _bytes_at([own for own, _ in pairs], heads)
        if list(map(self._last.get, named)) != given:
            rows = zip(heads.tolist(), named, given, strict=True)
            begins = [(first, name) for first, name, seen in rows if self._last.get(name, seen) != seen]
        starts, done = [name for _, name in begins], episodes.done
        # Within the batch: each row against the one before it in its episode.
        if len(done) > len(episodes.trajectory):
            before, after = consecutive(episodes)
            broken = np.zeros(len(before), dtype=np.bool_)
            for own, following in pairs:
                broken |= ~equal_rows(own[after], following[before])
            if broken.any():
                done = done.copy()
                done[before[broken]] = True
                names = np.empty(len(done), dtype=np.int64)
                names[episodes.order] = np.repeat(episodes.trajectory, np.diff(episodes.start))
                begins += [(row, int(names[row])) for row in after[broken].tolist()]
        return Breaks(done, starts, sorted(begins)) if begins else None

    def follow(self, pairs: Sequence[ObservationPair], episodes: EpisodeGroups, num_broken: int) -> None:
        """Keeps the observations that rows ended with, once they are stored; ``num_broken`` do not continue others."""
        if not pairs:
            return
        self.tally.add(len(episodes.done), num_broken)
        if len(episodes.trajectory) == 1 and not episodes.done[-1]:  # in half the time
            self._last[int(episodes.trajectory[0])] = b"".join([following[-1].tobytes() for _, following in pairs])
            return
        lasts = _bytes_at([following for _, following in pairs], episodes.order[episodes.start[1:] - 1])
        self._last.update(zip(episodes.trajectory.tolist(), lasts, strict=True))
        if episodes.ended.any():
            for name in episodes.trajectory[episodes.ended].tolist():
                del self._last[name]

    def forget(self, trajectory: int) -> None:
        self._last.pop(trajectory, None)

    def abandon(self, trajectories: Iterable[int]) -> None:
        # No observation is empty, so that no row continues these episodes.
        self._last = dict.fromkeys(trajectories, b"")

    def state_dict(self) -> dict[str, Any]:
        known = {name: last for name, last in self._last.items() if last}
        abandoned = [name for name, last in self._last.items() if not last]
        last = np.frombuffer(b"".join(known.values()), dtype=np.uint8).reshape(len(known) or 1, -1)
        names, others = (torch.tensor(part, dtype=torch.int64, device="cpu") for part in (list(known), abandoned))
        return {"trajectory": names, "last": torch.from_numpy(last.copy()), "abandoned": others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names, last = state["trajectory"].tolist(), state["last"].numpy()
        self.abandon(state["abandoned"].tolist())
        self._last |= {name: row.tobytes() for name, row in zip(names, last, strict=False)}


def _bytes_at(columns: Sequence[np.ndarray], places: np.ndarray) -> list[bytes]:
    """Returns the bytes of all columns ``[N, numbers]`` in each of the rows at ``places``."""
    parts = [np.ascontiguousarray(column[places]) for column in columns]
    rows = parts[0] if len(parts) == 1 else np.concatenate([part.view(np.uint8) for part in parts], 1)
    return rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0].tolist()


def _held(storage: Storage) -> Tensor:
    return occupancy_of(storage).slots().to(device_of(storage) or "cpu")


def slots_by_age(storage: Storage, writer: WriterHooks) -> Tensor | None:
    """Returns the slots of the stored rows, int64 ``[N]``, oldest first; ``None`` where the writer keeps no order."""
    slots = _held(storage)
    age = writer.age_of(slots)
    return None if age is None else slots[age.to(slots.device).argsort(descending=True)]


def stored_trajectories(storage: Storage) -> list[int | None]:
    slots = _held(storage)
    ids = read_trajectory(storage, slots) if len(slots) else None
    return [None] if ids is None else ids.unique().tolist()


def newest_running(
    storage: PackedStorage, oldest_first: Tensor, trajectories: Iterable[int] | None = None
) -> tuple[Tensor, list[int | None]]:
    """Returns the newest slot of each running episode, int64 ``[E]``, and their ids, ``[None]`` where rows name none.

    Args:
        storage: without a column ``("next", "done")`` no episode is known to run.
        oldest_first: int64 ``[N]``, the stored slots in the order in which they were written.
        trajectories: ids of the episodes to return; ``None`` for all.
    """
    done = storage.column(("next", "done"), oldest_first) if len(oldest_first) else None
    if done is None:
        return oldest_first[:0], []
    ids = read_trajectory(storage, oldest_first)
    count = len(oldest_first)
    if ids is None:
        names = torch.zeros(1, dtype=torch.int64, device="cpu")
        last = torch.tensor([count - 1], device=oldest_first.device)
    else:
        names, of = ids.unique(return_inverse=True)
        place = torch.arange(count, device=of.device)
        last = torch.zeros_like(names).scatter_reduce_(0, of, place, "amax", include_self=False)
    is_running = ~done.reshape(count, -1)[last].any(1)
    if trajectories is not None and ids is not None:
        is_running &= torch.isin(names, torch.tensor(list(trajectories), dtype=torch.int64, device=names.device))
    index = oldest_first[last][is_running]
    return index, [None] * len(index) if ids is None else names[is_running].tolist()
