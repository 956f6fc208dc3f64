# SPDX-License-Identifier: Apache-2.0
"""Links from stored rows to the next rows of their episodes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
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
from lightning_replay.storage.rows import observation_keys, observation_pairs

MOST_NUMBERS = 4_096  # If more numbers of a row were compared, the insert of an image would take an eighth longer.
_WORD_BYTES = 4
_LEAST_GIVEN = 1_024  # Digests of as many rows are formed of the given columns, in a third of the time.
_LEAST_COMPARED = 16  # Rows that do not continue others are reported after so many comparisons.

_UNNAMED = np.iinfo(np.int64).min  # The trajectory of rows without trajectories.
_NO_SLOTS = np.zeros(0, dtype=np.int64)
_NO_DIGESTS = np.zeros((2, 0), dtype=np.int64)

TRAJECTORY_KEYS = ("trajectory", ("collector", "traj_ids"))  # the second is written by TorchRL's collectors


def trajectory_of(rows: TensorDictBase) -> Tensor | None:
    """Returns the running episode of each row, int64 of any shape, or ``None`` when the rows name none."""
    found = (rows.get(key, None) for key in TRAJECTORY_KEYS)
    return next((trajectory for trajectory in found if trajectory is not None), None)


def trajectory_name(rows: TensorDictBase) -> str:
    """Returns the key of the column that names the episodes, for a message."""
    return repr(next((key for key in TRAJECTORY_KEYS if rows.get(key, None) is not None), TRAJECTORY_KEYS[0]))


def comparable(column: Any, device: str | None = None) -> Any:
    """Returns a tensor or array ``[N, ...]`` as ``[N, numbers]``, of large ones every k-th number: 4,096 at most.

    It lies on ``device``, by default on that of the column. On the CPU it is an array, whose rows are read faster.
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


class _DigestedPair(NamedTuple):
    """Columns ``[N, numbers]`` of an observation, before and after each step, of which digests are formed."""

    own: Any
    following: Any
    factors: np.ndarray  #: uint64, one for each word.
    is_in_place: bool  #: Whether the columns are words, whose rows are read in place.


def _digested(pairs: Sequence[tuple[Any, Any]]) -> list[_DigestedPair]:
    digested = []
    numbers = np.random.default_rng(0)
    for own, following in pairs:
        factors = numbers.integers(2**64, size=own.shape[1] * max(own.itemsize // _WORD_BYTES, 1), dtype=np.uint64)
        if _is_read_in_place(own) and _is_read_in_place(following):
            digested.append(_DigestedPair(own.view(np.uint32), following.view(np.uint32), factors, True))
        else:
            digested.append(_DigestedPair(own, following, factors, False))
    return digested


def _is_read_in_place(column: Any) -> bool:
    # Each compiled loop has a single signature. Of several signatures, two processes that compile at once would mix up
    # the files in the cache of numba.
    is_strided = type(column) is np.ndarray and not column.flags.c_contiguous
    return is_strided and column.itemsize >= _WORD_BYTES and column.strides[1] == column.itemsize


def _words_of(column: Any) -> np.ndarray:
    """Returns a copy of a column ``[N, numbers]`` as words of 32 bits, or the column."""
    # A product of 32 and 64 bits hides no difference between two words.
    column = np.ascontiguousarray(comparable(column, "cpu"))
    return column.view(f"u{min(column.itemsize, _WORD_BYTES)}").astype(np.uint32, copy=False)


def _digests(pairs: Iterable[_DigestedPair], slots: np.ndarray) -> np.ndarray:
    digests = np.zeros((2, len(slots)), dtype=np.uint64)
    for own, following, factors, is_in_place in pairs:
        if is_in_place:
            kernels.add_digests_at(own, following, slots, factors, digests)
        else:
            kernels.add_digests(_words_of(own[slots]), factors, digests[0])
            kernels.add_digests(_words_of(following[slots]), factors, digests[1])
    return digests.view(np.int64)


def row_digests(pairs: Sequence[tuple[Any, Any]]) -> np.ndarray:
    """Returns digests of the observations before and after the step of each row, int64 ``[2, N]``.

    Observations that differ have the same digest with a probability of 1 in 4 billion.

    Args:
        pairs: Columns ``[N, ...]`` of each observation before and after the step.
    """
    digests = np.zeros((2, len(pairs[0][0])), dtype=np.uint64)
    numbers = np.random.default_rng(0)
    for columns in pairs:
        own, following = map(_words_of, columns)
        factors = numbers.integers(2**64, size=own.shape[1], dtype=np.uint64)
        kernels.add_digests(own, factors, digests[0])
        kernels.add_digests(following, factors, digests[1])
    return digests.view(np.int64)


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

    The compared columns are ``observation`` and the columns below it. Without such a name, every column is compared
    that is stored at the root and, with the same dtype and shape, under ``"next"``, except flags and rewards. NaN
    equals NaN. Frames that are stored once are compared by their numbers. Of other columns with more than 4,096 numbers
    a row, every k-th is compared. Rows without such a column all continue. Links of new rows compare :meth:`digests`,
    of 64 bits each. If ``source`` is a TensorDict ``[N]``, the slots are its places.
    """

    def __init__(self, source: Storage | TensorDictBase) -> None:
        self._source = source
        self._packed: Tensor | None = None  # the rows of a packed storage that the pairs are views of
        self._pairs: list[tuple[Any, Any]] = []
        self._digested: list[_DigestedPair] = []
        self._tally = DiscontinuityCount()

    def of_slots(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Returns whether the rows in the slots ``after`` continue those in ``before``, int64 ``[n]`` each, as bool."""
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

    def digests(self, slots: np.ndarray) -> np.ndarray:
        """Returns digests of the observations before and after the step of each row, int64 ``[2, n]``.

        Of rows that do not continue others, one in 4 billion has the digest of a row that does.
        """
        self._read()
        return _digests(self._digested, slots)

    def digests_of_new(self, slots: np.ndarray) -> np.ndarray:
        """Returns :meth:`digests` of the rows that were written last."""
        # The rows before them are no longer in the processor's cache. To read 4,096 takes as long as to store as many.
        storage: Any = self._source
        given = storage.given if isinstance(storage, PackedStorage) else None
        # With the first rows, rows that were stored before are linked.
        if given is None or len(slots) < _LEAST_GIVEN or len(given[0]) != len(slots):
            return self.digests(slots)
        columns = dict(zip(storage.row_columns, given, strict=True))
        return row_digests([(columns[key], columns["next", *key]) for key in observation_keys(storage.row_columns)])

    def count(self, compared: int, broken: int) -> None:
        """Counts rows whose digests were compared, and rows that do not continue the row before."""
        self._tally.add(compared, broken)

    def warn(self) -> None:
        """Warns once if most rows do not continue the row before. Call it when all parts have the new rows."""
        if self._tally.is_suspicious:
            self._tally.warn(trajectory_name(self._rows()))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "_packed": None,
            "_pairs": [],
            "_digested": [],
        }  # views of all rows, which would be copied whole

    def _rows(self) -> TensorDictBase:
        return self._source if isinstance(self._source, TensorDictBase) else readable_rows(self._source)

    def _read(self) -> None:
        if isinstance(self._source, PackedStorage):
            if self._packed is self._source.all_packed:
                return
            self._packed = self._source.all_packed  # A load replaces this tensor.
            self._pairs = self._source.observation_pairs(comparable)
        else:
            pairs = observation_pairs(self._rows())
            self._pairs = [(comparable(own), comparable(following)) for own, following in pairs]
        self._digested = _digested(self._pairs)


def consecutive(episodes: EpisodeGroups) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a batch that another row of their episode follows, int64 ``[n]``, and these."""
    is_followed = ~episodes.done[episodes.order[:-1]]
    is_followed[episodes.start[1:-1] - 1] = False
    return episodes.order[:-1][is_followed], episodes.order[1:][is_followed]


def with_real_ends(rows: TensorDictBase) -> TensorDictBase | None:
    """Returns rows ``[N]`` that are all truncated, some of them not done, with the ends of their episodes alone.

    TorchRL's trainers mark all rows of a batch so before they store it. A row that is not done ends its episode only
    if the next row does not continue it. ``None`` for other rows that are not done.
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
    previous row of its trajectory if it starts with the observation that the previous row ended with. It is not linked
    if the previous row ended its episode (terminated or truncated) or was overwritten. So links never cross an episode
    end, the write head, environments or runs. Overwriting a slot cuts the link of its predecessor.

    Args:
        capacity: slots in the storage.
        continuity: compares the observations of two rows. ``None`` links rows by their trajectory alone.
    """

    compares: type[Continuity] = Continuity  #: Comparison of observations that these links take.

    @torch.inference_mode(False)
    def __init__(self, capacity: int, continuity: Continuity | None = None) -> None:
        self.continuity: Continuity | None = continuity
        self.capacity: int = checked_count("capacity", capacity, of="slots")
        self._after = np.full(capacity, -1, dtype=np.int64)
        self._before = np.full(capacity, -1, dtype=np.int64)
        # Place in the table of episodes for each slot that holds the newest row of a running episode, or -1.
        self._places = np.full(capacity, -1, dtype=np.int32)
        self._num_written = 0
        self._has_digests = False
        self._stopped = _NO_SLOTS
        self._one_row = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.bool_))
        self._allocate(0)

    def _allocate(self, num_running: int) -> None:
        # A hash table of the running episodes, of which a quarter is in use. Its columns are described beside NAME.
        self._table = np.full((2 ** max(4 * num_running, 16).bit_length(), 4), kernels.EMPTY, dtype=np.int64)
        self._num_names = 0

    @property
    def successor(self) -> Tensor:
        """Slot of the next step of every slot, int64 ``[capacity]``, -1 for none."""
        return torch.from_numpy(self._after)

    @property
    def predecessor(self) -> Tensor:
        """Slot of the previous step of every slot, int64 ``[capacity]``, -1 for none."""
        return torch.from_numpy(self._before)

    def write(self, index: Tensor, trajectory: Tensor | None, done: Tensor) -> None:
        """Links rows that were just written into the slots ``index``, int64 ``[n]`` in insertion order.

        Each has the number of its running episode, if any have, and whether it ended that, terminated or truncated.
        """
        self._stopped = _NO_SLOTS
        if index.numel() == 1:
            # A separate buffer for one row takes half the time.
            slots, names, ended = self._one_row
            slots[0] = int(index)
            names[0] = _UNNAMED if trajectory is None else int(trajectory)
            ended[0] = bool(done)
            self._write(slots, names, ended)
            return
        slots = index.reshape(-1).cpu().numpy()
        ended = np.ascontiguousarray(done.reshape(-1).cpu().numpy())
        if trajectory is None:
            names = np.full(len(slots), _UNNAMED)
        else:
            names = np.ascontiguousarray(trajectory.reshape(-1).cpu().numpy(), dtype=np.int64)
        for start in range(0, len(slots), self.capacity):
            # A batch longer than the ring names slots twice: the later rows must overwrite the earlier ones.
            rows = slice(start, start + self.capacity)
            self._write(slots[rows], names[rows], ended[rows])

    def chain(self, index: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
        """Returns the slots of up to ``n_steps`` rows from each on, ``[B, n_steps]``, and how many differ, ``[B]``."""
        first = np.ascontiguousarray(index.reshape(-1).cpu().numpy())
        slots, used = kernels.chain(self._after, first, n_steps)
        return torch.from_numpy(slots), torch.from_numpy(used)

    def walk(self, index: Tensor, steps: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
        """Follows the episode of each slot, ahead or back, for up to ``steps`` rows, int64 ``[B]`` as the slots are.

        Returns:
            int64 ``[B]`` each: the slots, and how many steps away they are. There are fewer if no more are stored.
        """
        table = self._before if back else self._after
        arrays = kernels.walk(table, *(np.ascontiguousarray(part) for part in (index, steps)))
        return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])

    def before(self, index: Tensor) -> np.ndarray:
        """Returns the previous step of each slot, int64 ``[n]``, -1 for none."""
        return self._before[index.numpy()]

    def ended(self, slots: np.ndarray) -> np.ndarray:
        """Returns the slots, int64 ``[n]``, that nothing follows, now or later, each once in their order."""
        over = slots[(self._places[slots] < 0) & (self._after[slots] < 0)]
        return over if len(over) < 2 else over[np.sort(np.unique(over, return_index=True)[1])]

    @property
    def stopped(self) -> np.ndarray:
        """Slots that held the newest rows of running episodes until the last :meth:`write`, which nothing followed.

        They are int64 ``[n]`` in the order in which these rows were written. New rows may lie in the slots.
        """
        return self._stopped

    @property
    def running(self) -> np.ndarray:
        """The newest slot of each running episode, int64 in the order in which these rows were written."""
        return self._running()[:, kernels.NEWEST]

    def end_episodes(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        """Ends episodes at these slots, int64 ``[n]``, and the running episodes of these trajectories.

        No row follows their rows, now or later.
        """
        ending = slots.reshape(-1).numpy()
        following = self._after[ending]
        self._before[following[following >= 0]] = -1
        self._after[ending] = -1
        named = [_UNNAMED if trajectory is None else trajectory for trajectory in trajectories]
        kernels.stop(self._places, self._table, ending, np.array(named, dtype=np.int64))

    def release(self, index: Tensor) -> None:
        """Cuts the links to and from slots whose rows left without being overwritten."""
        # The return of the row before must not go on to a slot that is free.
        index = index.reshape(-1)
        before = self.predecessor[index]
        self.end_episodes(torch.cat((before[before >= 0], index)))

    def clear(self) -> None:
        """Removes all links and running episodes."""
        for links in (self._after, self._before, self._places):
            links.fill(-1)
        self._allocate(0)
        self._has_digests = False

    @property
    def nbytes(self) -> int:
        """Bytes of the links."""
        return self._after.nbytes + self._before.nbytes + self._places.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the links ahead, and the newest slot of each running episode."""
        running = self._running()
        names = running[:, kernels.NAME]
        newest = running[:, kernels.NEWEST]
        unnamed = newest[names == _UNNAMED].tolist()
        return {
            "successor": self.successor.clone(),
            "running_trajectory": torch.from_numpy(names[names != _UNNAMED]),
            "running_slot": torch.from_numpy(newest[names != _UNNAMED]),
            "newest_slot": unnamed[0] if unnamed else -1,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned. Raises ``ValueError`` for links of other slots or in circles."""
        successor = state["successor"]
        if successor.numel() != self.capacity:
            raise ValueError(
                f"{successor.numel()} slots are saved, these links have {self.capacity}; build them with as many"
            )
        after = successor.cpu().numpy()
        names = [*state["running_trajectory"].tolist(), _UNNAMED]
        running = [*state["running_slot"].tolist(), int(state["newest_slot"])]
        before = np.full_like(after, -1)
        is_sound = max(int(after.max()), *running) < self.capacity and len(names) == len(running)
        if is_sound:
            before[after[after >= 0]] = np.flatnonzero(after >= 0)
        if not (is_sound and kernels.are_paths(after, before)):  # compiled loops follow the links unchecked
            raise ValueError("the state holds links that lead to no slot or in circles; load another save")
        self.clear()
        self._after[:] = after
        self._before[:] = before
        self._allocate(len(names))
        entries = np.zeros((len(names), 4), dtype=np.int64)
        entries[:, kernels.NAME] = names
        entries[:, kernels.NEWEST] = running
        self._remember(entries[entries[:, kernels.NEWEST] >= 0])

    def _write(self, slots: np.ndarray, names: np.ndarray, done: np.ndarray) -> None:
        if 2 * (self._num_names + len(slots)) > len(self._table):
            running = self._running()
            self._allocate(len(running) + len(slots))
            self._remember(running)
        digests = _NO_DIGESTS
        if self.continuity is not None:
            if not self._has_digests:
                runs = self._table[:, kernels.NEWEST] >= 0
                newest = np.ascontiguousarray(self._table[runs, kernels.NEWEST])
                self._table[runs, kernels.LAST] = self.continuity.digests(newest)[1]
                self._has_digests = True
            digests = self.continuity.digests_of_new(slots)
        stopped = np.empty((2 * len(slots), 2), dtype=np.int64)
        num_new, num_stopped, num_compared, num_broken = kernels.follow(
            self._after,
            self._before,
            self._places,
            self._table,
            self._num_written,
            slots,
            names,
            done,
            digests,
            stopped,
        )
        self._num_names += num_new
        self._num_written += len(slots)
        if self.continuity is not None:
            self.continuity.count(num_compared, num_broken)
        if num_stopped:
            in_order = stopped[:num_stopped, 1].argsort()
            self._stopped = np.concatenate((self._stopped, stopped[in_order, 0]))

    def _running(self) -> np.ndarray:
        """Returns the entries of running episodes in the order in which their newest rows were written."""
        running = self._table[self._table[:, kernels.NEWEST] >= 0]
        return running[running[:, kernels.SINCE].argsort()]

    def _remember(self, running: np.ndarray) -> None:
        kernels.remember(self._places, self._table, running)
        self._num_names = len(running)
        self._num_written = 0


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
