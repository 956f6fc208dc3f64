# SPDX-License-Identifier: Apache-2.0
"""Links from stored rows to the next rows of their episodes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes import kernels
from lightning_replay.episodes.groups import EpisodeGroups, groups_of
from lightning_replay.options import checked_count
from lightning_replay.storage.columns import contradicts
from lightning_replay.storage.packed import PackedStorage, readable_rows
from lightning_replay.storage.rows import observation_pairs

MOST_NUMBERS = 4_096  # If more numbers of a row were compared, the insert of an image would take an eighth longer.
_LEAST_COMPARED = 16  # Rows that do not continue others are reported after so many comparisons.

TRAJECTORY_KEYS = ("trajectory", ("collector", "traj_ids"))  # the second is written by TorchRL's collectors


def trajectory_of(rows: TensorDictBase) -> Tensor | None:
    """Returns the running episode of each row, int64 of any shape; ``None`` when the rows name none."""
    found = (rows.get(key, None) for key in TRAJECTORY_KEYS)
    return next((trajectory for trajectory in found if trajectory is not None), None)


def trajectory_name(rows: TensorDictBase) -> str:
    """Returns the key of the column that names the episodes, for a message."""
    return repr(next((key for key in TRAJECTORY_KEYS if rows.get(key, None) is not None), TRAJECTORY_KEYS[0]))


def comparable(column: Any, device: str | None = None) -> Any:
    """Returns a tensor or array ``[N, ...]`` as ``[N, numbers]``, of large ones every k-th number: 4,096 at most.

    It lies on ``device``, or where the column lies; on the CPU it is an array, of which rows are read faster.
    """
    if type(column) is not np.ndarray:
        column = column.detach() if device is None else column.detach().to(device)
        if column.dtype == torch.bfloat16:  # NumPy has no bfloat16.
            column = column.view(torch.int16)
        if column.device.type == "cpu":
            column = column.numpy()
    flat = column if column.ndim == 2 else column.reshape(len(column), -1)
    return flat[:, :: max(-(-flat.shape[1] // MOST_NUMBERS), 1)]


def equal_rows(rows: Any, others: Any) -> Any:
    """Returns whether rows ``[N, numbers]`` of two columns of one dtype are equal bit for bit, bool ``[N]``."""
    if isinstance(rows, Tensor):
        return (rows.contiguous().view(torch.uint8) == others.contiguous().view(torch.uint8)).all(1)
    if rows.tobytes() == others.tobytes():  # The usual case takes a tenth of the time.
        return np.ones(len(rows), dtype=np.bool_)
    return (np.ascontiguousarray(rows).view(np.uint8) == np.ascontiguousarray(others).view(np.uint8)).all(1)


class DiscontinuityCount:
    """Counts rows that do not continue the row before, for one warning if they are the majority."""

    def __init__(self) -> None:
        self._compared = self._broken = 0
        self._has_warned = False

    def add(self, compared: int, broken: int) -> None:
        """Adds the number of compared rows, and of rows among them that do not continue the row before."""
        self._compared += compared
        self._broken += broken

    @property
    def is_suspicious(self) -> bool:
        """Whether most rows do not continue the row before, and no warning has been given."""
        return not self._has_warned and 2 * self._broken > self._compared >= _LEAST_COMPARED

    def warn(self, column: str) -> None:
        """Warns, and names the column in which each row should have the number of its episode."""
        self._has_warned = True
        warnings.warn(
            f"{self._broken} of {self._compared} rows do not start with the observation that the row before ended "
            "with, and were not joined to it: rows of several environments or runs are mixed, were shuffled, or are "
            f"returns over several steps. Give each row the number of its running episode in the column {column}, "
            "int64 [N], another one for each environment. Only where observations change between two steps (by noise, "
            "or by statistics that move on) build the buffer with check_continuity=False, which goes by the numbers",
            stacklevel=2,
        )


class Continuity:
    """Whether rows continue others: they start with the observations that those ended with, bit for bit.

    Compared are the columns named ``observation`` or below it; without such a name every column that is stored at the
    root and, of the same dtype and shape, under ``"next"``, flags and rewards left out. NaN equals NaN. Frames that are
    stored once are compared by their numbers; of other columns with more than 4,096 numbers a row every k-th is
    compared. Rows without such a column all continue. Of a TensorDict ``[N]`` as ``source`` the slots are the places.
    """

    def __init__(self, source: Storage | TensorDictBase) -> None:
        self._source = source
        self._packed: Tensor | None = None  # the rows of a packed storage that the pairs are views of
        self._pairs: list[tuple[Any, Any]] = []
        self._tally = DiscontinuityCount()

    def of_slots(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Returns whether the rows in the slots ``after`` continue those in ``before``, int64 ``[n]`` each; bool."""
        self._read()
        equal = np.ones(len(before), dtype=np.bool_)
        for own, following in self._pairs:
            if type(own) is np.ndarray:
                equal &= equal_rows(own[after], following[before])
            else:
                first, second = (torch.from_numpy(slots).to(own.device) for slots in (before, after))
                equal &= equal_rows(own[second], following[first]).cpu().numpy()
        self._tally.add(len(before), len(before) - int(np.count_nonzero(equal)))
        return equal

    def of_one(self, before: int, after: int) -> bool:
        """Returns whether the row in the slot ``after`` continues the row in ``before``."""
        self._read()
        is_equal = all(
            own[after].tobytes() == following[before].tobytes()
            if type(own) is np.ndarray
            else bool(equal_rows(own[after : after + 1], following[before : before + 1]))
            for own, following in self._pairs
        )
        self._tally.add(1, not is_equal)
        return is_equal

    def warn(self) -> None:
        """Warns once if most rows do not continue the row before; call it when all parts have the new rows."""
        if self._tally.is_suspicious:
            self._tally.warn(trajectory_name(self._rows()))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_packed": None, "_pairs": []}  # views of all rows, which would be copied whole

    def _rows(self) -> TensorDictBase:
        return self._source if isinstance(self._source, TensorDictBase) else readable_rows(self._source)

    def _read(self) -> None:
        if isinstance(self._source, PackedStorage):
            if self._packed is self._source.all_packed:
                return
            self._packed = self._source.all_packed  # A load replaces this tensor.
        pairs = observation_pairs(self._rows())
        self._pairs = [(comparable(own), comparable(following)) for own, following in pairs]


def consecutive(episodes: EpisodeGroups) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a batch that another row of their episode follows, int64 ``[n]``, and these."""
    is_followed = ~episodes.done[episodes.order[:-1]]
    is_followed[episodes.start[1:-1] - 1] = False
    return episodes.order[:-1][is_followed], episodes.order[1:][is_followed]


def with_real_ends(rows: TensorDictBase) -> TensorDictBase | None:
    """Returns rows ``[N]`` that are all truncated, some of them not done, with the ends of their episodes alone.

    TorchRL's trainers mark all rows of a batch so before they store it. A row that is not done ends its episode only
    where the next row does not continue it. ``None`` for other rows that are not done.
    """
    following = rows.get("next")
    done = following.get("done")
    truncated = following.get("truncated", None)
    terminated = following.get("terminated", torch.zeros_like(done))
    if rows.ndim != 1 or truncated is None or not bool(truncated.all()) or contradicts(done, terminated):
        return None
    place = np.arange(len(rows))
    continued = torch.zeros_like(done)
    continued[:-1] = torch.from_numpy(Continuity(rows).of_slots(place[:-1], place[1:])).view(done[:-1].shape)
    ended = done | ~continued
    return rows.copy().update({"next": following.copy().update({"done": ended, "truncated": ended & ~terminated})})


class EpisodeLinks:
    """Slots of the next and the previous step of every slot: ``successor[slot]``, ``predecessor[slot]``, -1 for none.

    Call :meth:`write` with every batch of rows that enters the storage, in insertion order. A row is linked to the
    previous row of its trajectory, unless that one ended its episode (terminated or truncated) or was overwritten, or
    the row does not start with the observation that the other ended with. So links never cross an episode end, the
    write head, environments or runs. Overwriting a slot cuts the link of its predecessor.

    Args:
        capacity: slots in the storage.
        continuity: compares the observations of two rows; ``None`` links rows by their trajectory alone.
    """

    compares: type[Continuity] = Continuity  #: Comparison of observations that these links take.

    @torch.inference_mode(False)
    def __init__(self, capacity: int, continuity: Continuity | None = None) -> None:
        self.continuity: Continuity | None = continuity
        self.capacity: int = checked_count("capacity", capacity, of="slots")
        self.successor: Tensor = torch.full((capacity,), -1, dtype=torch.int64, device="cpu")
        self.predecessor: Tensor = torch.full((capacity,), -1, dtype=torch.int64, device="cpu")
        # The newest slot of each running episode, both ways; the key None is the one stream without trajectory ids.
        self._newest_slot: dict[int | None, int] = {}
        self._trajectory_at: dict[int, int | None] = {}

    def write(self, index: Tensor, trajectory: Tensor | None, done: Tensor) -> None:
        """Links rows that were just written into the slots ``index``, int64 ``[n]`` in insertion order.

        Each has the number of its running episode, if any have, and whether it ended that, terminated or truncated.
        """
        if index.numel() == 1:
            self._write_one(int(index), None if trajectory is None else int(trajectory), bool(done))
            return
        index = index.reshape(-1)
        done = done.reshape(-1)
        for start in range(0, index.numel(), self.capacity):
            # A batch longer than the ring names slots twice: the later rows must overwrite the earlier ones.
            rows = slice(start, start + self.capacity)
            names = None if trajectory is None else trajectory.reshape(-1)[rows].cpu().numpy()
            self._write_many(index[rows].cpu().numpy(), names, done[rows].cpu().numpy())

    def chain(self, index: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
        """Returns the slots of up to ``n_steps`` rows from each on, ``[B, n_steps]``, and how many differ, ``[B]``."""
        first = np.ascontiguousarray(index.reshape(-1).cpu().numpy())
        slots, used = kernels.chain(self.successor.numpy(), first, n_steps)
        return torch.from_numpy(slots), torch.from_numpy(used)

    def walk(self, index: Tensor, steps: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
        """Follows the episode of each slot, ahead or back, for up to ``steps`` rows, int64 ``[B]`` as the slots are.

        Returns:
            int64 ``[B]`` each: the slots, and how many steps away they are; fewer where no more are stored.
        """
        table = self.predecessor if back else self.successor
        arrays = kernels.walk(table.numpy(), *(np.ascontiguousarray(part) for part in (index, steps)))
        return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])

    def before(self, index: Tensor) -> np.ndarray:
        """Returns the previous step of each slot, int64 ``[n]``, -1 for none."""
        return self.predecessor.numpy()[index.numpy()]  # NumPy takes a third of the time.

    def ended(self, slots: Iterable[int]) -> list[int]:
        """Returns those of the slots that nothing follows, now or later, each once."""
        over = [slot for slot in dict.fromkeys(slots) if slot not in self._trajectory_at]
        following = self.successor.numpy()[over].tolist()
        return [slot for slot, after in zip(over, following, strict=True) if after < 0]

    @property
    def running(self) -> list[int]:
        """The newest slot of each running episode."""
        return list(self._trajectory_at)

    def end_episodes(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        """Ends episodes at these slots, int64 ``[n]``, and the running episodes of these trajectories.

        No row follows their rows, now or later.
        """
        slots = slots.reshape(-1)
        following = self.successor[slots]
        self.predecessor[following[following >= 0]] = -1
        self.successor[slots] = -1
        self._remove_running(slots.tolist())
        for trajectory in trajectories:
            self._pop_newest(trajectory)

    def release(self, index: Tensor) -> None:
        """Cuts the links to and from slots whose rows left without being overwritten."""
        # The return of the row before must not go on to a slot that is free.
        before = self.predecessor[index.reshape(-1)]
        self.end_episodes(torch.cat((before[before >= 0], index.reshape(-1))))

    def clear(self) -> None:
        """Removes all links and running episodes."""
        self.successor.fill_(-1)
        self.predecessor.fill_(-1)
        self._newest_slot.clear()
        self._trajectory_at.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of both directions."""
        return self.successor.nbytes + self.predecessor.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the links ahead, and the newest slot of each running episode."""
        named = [trajectory for trajectory in self._newest_slot if trajectory is not None]
        return {
            "successor": self.successor.clone(),
            "running_trajectory": torch.tensor(named, dtype=torch.int64, device="cpu"),
            "running_slot": torch.tensor([self._newest_slot[name] for name in named], dtype=torch.int64, device="cpu"),
            "newest_slot": self._newest_slot.get(None, -1),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; raises ``ValueError`` for links of other slots or in circles."""
        successor = state["successor"]
        if successor.shape != self.successor.shape:
            raise ValueError(
                f"{successor.numel()} slots are saved, these links have {self.capacity}; build them with as many"
            )
        after = successor.cpu().numpy()
        running = [*state["running_slot"].tolist(), int(state["newest_slot"])]
        before = np.full_like(after, -1)
        is_sound = max(int(after.max()), *running) < self.capacity
        if is_sound:
            before[after[after >= 0]] = np.flatnonzero(after >= 0)
        if not (is_sound and kernels.are_paths(after, before)):  # compiled loops follow the links unchecked
            raise ValueError("the state holds links that lead to no slot or in circles; load another save")
        self.clear()
        self.successor.copy_(successor)
        self.predecessor.copy_(torch.from_numpy(before))
        for name, slot in zip([*state["running_trajectory"].tolist(), None], running, strict=True):
            if slot >= 0:
                self._remember(name, slot)

    def _write_one(self, slot: int, trajectory: int | None, done: bool) -> None:
        # With plain numbers, an extend of one row takes 59 us. With _write_many, it takes 124.
        successor = self.successor.numpy()
        predecessor = self.predecessor.numpy()
        before = predecessor[slot]
        after = successor[slot]
        # The row that was in this slot leaves. No episode may go through it.
        if before >= 0:
            successor[before] = -1
        if after >= 0:
            predecessor[after] = -1
        successor[slot] = -1
        # If it was the newest row of its episode, no row can continue the episode.
        if slot in self._trajectory_at:
            del self._newest_slot[self._trajectory_at.pop(slot)]
        # If rows have no ids, they all belong to one episode.
        previous = self._pop_newest(trajectory)
        if previous >= 0 and self.continuity is not None and not self.continuity.of_one(previous, slot):
            previous = -1
        predecessor[slot] = previous
        if previous >= 0:
            successor[previous] = slot
        if not done:
            self._remember(trajectory, slot)

    def _write_many(self, slots: np.ndarray, names: np.ndarray | None, done: np.ndarray) -> None:
        episodes = groups_of(names, done)
        successor = self.successor.numpy()
        predecessor = self.predecessor.numpy()
        before = predecessor[slots]
        after = successor[slots]
        successor[before[before >= 0]] = -1
        predecessor[after[after >= 0]] = -1
        successor[slots] = -1
        predecessor[slots] = -1
        self._remove_running(slots.tolist())
        first, second = (slots[rows] for rows in consecutive(episodes))
        # The first row of each trajectory follows its newest stored row, and the last one becomes the newest.
        lasts = slots[episodes.order[episodes.start[1:] - 1]].tolist()
        streams = [None] if names is None else episodes.trajectory.tolist()
        newest = np.array([self._pop_newest(stream) for stream in streams], dtype=np.int64)
        for stream, slot, is_over in zip(streams, lasts, episodes.ended.tolist(), strict=True):
            if not is_over:
                self._remember(stream, slot)
        heads = slots[episodes.order[episodes.start[:-1]]]
        first = np.concatenate((newest[newest >= 0], first))
        second = np.concatenate((heads[newest >= 0], second))
        if self.continuity is not None and len(first):
            continued = self.continuity.of_slots(first, second)
            first = first[continued]
            second = second[continued]
        successor[first] = second
        predecessor[second] = first

    def _remove_running(self, slots: list[int]) -> None:
        for slot in self._trajectory_at.keys() & slots:
            del self._newest_slot[self._trajectory_at.pop(slot)]

    def _remember(self, trajectory: int | None, slot: int) -> None:
        self._newest_slot[trajectory] = slot
        self._trajectory_at[slot] = trajectory

    def _pop_newest(self, trajectory: int | None) -> int:
        slot = self._newest_slot.pop(trajectory, -1)
        self._trajectory_at.pop(slot, None)
        return slot


class MissingSteps(NamedTuple):
    """Missing steps among new rows of which not all were stored."""

    trajectories: list[int | None]  #: Those that begin with a missing row.
    last_before: Tensor  #: Places, among the stored rows, of those whose next row is missing, int64 ``[n]``.


def missing_steps(trajectory: Tensor | None, stored: np.ndarray, count: int) -> MissingSteps:
    """Compares the rows ``stored``, int64 ``[n]`` ascending, with ``count`` rows that were given, in order of time."""
    if not len(stored):  # This case takes a third of the time.
        nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
        return MissingSteps([None] if trajectory is None else sorted(set(trajectory.flatten().tolist())), nothing)
    is_stored = np.zeros(count, dtype=np.bool_)
    is_stored[stored] = True
    names = None if trajectory is None else trajectory.flatten().cpu().numpy()
    episodes = groups_of(names, np.zeros(count, dtype=np.bool_))
    begins_missing = ~is_stored[episodes.order[episodes.start[:-1]]]
    named = [None] * int(begins_missing.sum()) if names is None else episodes.trajectory[begins_missing].tolist()
    before, after = consecutive(episodes)
    last = before[is_stored[before] & ~is_stored[after]]
    return MissingSteps(named, torch.from_numpy(np.searchsorted(stored, last)))
