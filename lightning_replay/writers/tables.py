# SPDX-License-Identifier: Apache-2.0
"""Writers of tables: a step goes into the table of its task, or into the default table and the tables of its events."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.groups import EpisodeGroups, groups_of
from lightning_replay.episodes.links import MOST_NUMBERS, comparable, trajectory_name, trajectory_of
from lightning_replay.events.compiled import ConditionBlock
from lightning_replay.events.conditions import Condition, ConditionError, holds, load_state_of, state_of, warn_of_unmet
from lightning_replay.events.event_table import EventTable
from lightning_replay.options import check_kind, checked_count, checked_flag, checked_names
from lightning_replay.parts import Insertion, ReplayWriter, as_replay_sampler
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.columns import TRAJECTORIES, Column, as_array, as_rows, check_trajectory
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.storage.rows import Key, observation_keys
from lightning_replay.tables.counts import StateActionCounts, state_action_keys
from lightning_replay.tables.histories import Histories
from lightning_replay.tables.kernels import EventArrays
from lightning_replay.tables.last_observations import Discontinuities, LastObservations, ObservationPair
from lightning_replay.tables.tables import Tables
from lightning_replay.torchrl_compat import attached_buffers
from lightning_replay.writers.rows import announce, chosen, rows_in, write_slots

DEFAULT_TABLE = "default"
SHARED_TABLE = "all tasks"
_ROWS_BEFORE_WARNING = 1_000
_SUSPICIOUS_SHARE = 0.95


class TableWriter(ReplayWriter):
    """Writes rows into the slots of ``tables``, which are the ``occupancy`` of its storage."""

    saved_attributes: tuple[str, ...] = ("_write_count",)
    saved_parts: tuple[str, ...] = ("tables",)

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.tables: Tables = tables
        self._write_count = 0
        self._frames: FrameStorage | None = None

    @property
    def num_slots(self) -> int:
        """Slots of the tables and of running episodes, which the storage must have."""
        return self.tables.num_slots

    def register_storage(self, storage: Storage) -> None:
        """Attaches a storage with ``num_slots`` rows or more, in a buffer that draws from tables.

        Of TorchRL's storages, :attr:`rows_beside` keeps the generations.
        """
        given = type(storage).__name__
        storage = rows_in(storage, self, self.num_slots)
        if storage.capacity < self.num_slots:
            raise ValueError(
                f"the storage has {storage.capacity} rows and {type(self).__name__} needs {self.num_slots}: the "
                f"capacities of its tables, and the histories of running episodes. Use {given}({self.num_slots})"
            )
        super().register_storage(storage)
        storage.occupancy_owner = self.tables
        self._frames = storage if isinstance(storage, FrameStorage) else None
        if self._frames is not None:
            # The compiled loops over tables free slots, and the storage frees their frames.
            self.tables.on_free = self._frames.release

    def check_buffer(self, buffer: Any) -> None:
        """Refuses a buffer whose sampler does not draw from tables.

        :meta private:
        """
        if not as_replay_sampler(buffer.sampler)._draws_from_tables:
            raise TypeError(
                f"the sampler is a {type(buffer.sampler).__name__}, which would draw slots that no table of "
                f"{type(self).__name__} holds any more; use TableShares or ScheduledSampler, alone or as "
                "base_sampler= of a sampler of pairs or sequences, in a Replay or a TensorDictReplayBuffer"
            )
        super().check_buffer(buffer)

    def write(self, slots: np.ndarray, values: Sequence[Column]) -> Tensor:
        """Stores columns ``[N, ...]`` in the slots, int64 ``[N]``, that were just appended, and returns these."""
        if self._frames is not None:
            self._free_frames(self._frames, slots, values)
        return write_slots(self._storage, slots, values)

    def _free_frames(self, storage: FrameStorage, slots: np.ndarray, values: Sequence[Column]) -> None:
        # The oldest entries leave the table that is fullest, and at last the histories of running episodes.
        new = (self.tables.position[:, slots] >= 0).sum(1)
        while lacking := storage.frames_missing(values, slots):
            old = self.tables.length - new
            if old.any():
                fullest = int(np.where(old > 0, self.tables.length / self.tables.capacity, -1.0).argmax())
                # A row has at most this many frames, so that fewer entries would never do.
                leaving = -(-lacking // (2 * storage.frame_stack)) if len(new) == 1 else 1
                places = self.tables.leave_early(fullest, min(leaving, int(old[fullest])))
                for buffer in attached_buffers(self._storage):
                    as_replay_sampler(buffer.sampler).on_leave(fullest, places)
            elif not self.evict_oldest_history():
                raise RuntimeError(
                    f"{lacking} frames are lacking although nothing else is stored; raise frame_capacity"
                )

    def _mark_update(self, index: Tensor) -> None:
        for buffer in attached_buffers(self._storage):
            buffer.mark_update(index)

    def _push(self, numbers: Collection[int], slots: np.ndarray, are_new: bool) -> None:
        """Informs the samplers of rows that were appended to the tables of these numbers."""
        for buffer in attached_buffers(self._storage):
            as_replay_sampler(buffer.sampler).on_append(self.tables, numbers, slots, are_new)

    def evict_oldest_history(self) -> bool:
        """Evicts the oldest history of a running episode, and returns ``False``, because this writer keeps none."""
        return False

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned. Refuses a state whose slots disagree, and changes nothing then."""
        self.tables.check_state(state_dict["tables"], self._held_by(state_dict))
        super().load_state_dict(dict(state_dict))

    def _held_by(self, state_dict: Mapping[str, Any]) -> np.ndarray:
        return np.zeros(0, dtype=np.int64)

    def age_of(self, index: Tensor) -> Tensor:
        """Returns how many rows were written after the rows in the slots, int64."""
        return torch.from_numpy(self.tables.age_of(index.cpu().numpy()))

    def _empty(self, empty_write_count: bool = True) -> None:
        if empty_write_count:
            self._write_count = 0
        self.tables.clear()
        if self.rows_beside is not None:
            self.rows_beside.clear()


class _NewRows(NamedTuple):
    """New rows ``[N]`` by episode."""

    trajectory: np.ndarray | None  #: Running episode of each row, int64 ``[N]``, or ``None`` if rows name none.
    observations: Sequence[ObservationPair]  #: Columns that must continue the row before.
    episodes: EpisodeGroups
    breaks: Discontinuities | None  #: Rows that do not continue the row before, or ``None`` if all do.


@rebuildable
class EventTableWriter(TableWriter):
    """Stratified Sampling from Event Tables: an event's table gets the last ``history_length`` steps up to the event.

    An event is tested on the step that led to it, a row with its ``next`` state, never on a reset state. This step is
    part of the history. A step goes to a table once, however many events follow, even if it has left the table since.
    Histories never cross episodes. ``trajectory`` (int64 ``[N]``) is the episode of a row. Without it, the rows belong
    to one environment, in order. ``("next", "done")`` ends an episode. So does a row that does not start with the
    observation with which the row before ended. All tables are first in, first out. The writer needs no feedback.
    Kompella et al. 2022, https://arxiv.org/abs/2211.00576, section 4.

    Args:
        capacity: Most entries of the default table.
        event_tables: Tables of events.
        max_trajectories: Most episodes whose histories are kept at once.
        forget_stale: Whether the episodes continued longest ago lose their histories if more episodes run. Otherwise,
            such rows are refused.
        check_continuity: Whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.
        count_state_actions: Whether states and actions are counted for the correction of Lemma 2. They must be
            discrete. Tables with a share of 0 do not count as events.

    Raises:
        ValueError: Names that are taken twice, or no event table. In ``extend``, rows that do not fit the first rows or
            lack ``("next", "done")``, a condition that raises or does not return one bool per row, or too many running
            episodes. Nothing is stored then.
    """

    exact: bool = True
    saved_attributes: tuple[str, ...] = ("_write_count", "_fired", "_rows_tested")
    saved_parts: tuple[str, ...] = ("tables", "_histories", "_running")
    stored_options: tuple[str, ...] = ("_given_events", "check_continuity")

    def __init__(
        self,
        capacity: int,
        event_tables: Sequence[EventTable],
        max_trajectories: int = 64,
        forget_stale: bool = False,
        count_state_actions: bool = False,
        check_continuity: bool = True,
    ) -> None:
        check_tables(event_tables, "event_tables")
        self._most_at_once = checked_count("capacity", capacity, of="transitions")
        self._max_trajectories = checked_count("max_trajectories", max_trajectories, of="running episodes")
        self._longest = max(event.history_length for table in event_tables for event in table.events)
        capacities = {DEFAULT_TABLE: capacity} | {table.name: table.capacity for table in event_tables}
        super().__init__(Tables(capacities, extra_slots=max_trajectories * (self._longest - 1)))
        self.forget_stale: bool = checked_flag("forget_stale", forget_stale)
        self._given_tables = list(event_tables)
        self._given_events = [table.events for table in event_tables]
        self._counts_state_actions = checked_flag("count_state_actions", count_state_actions)
        self.check_continuity: bool = checked_flag("check_continuity", check_continuity)
        self._start()
        # Rows are compared only if a history has two steps or a condition has a memory. Others are fresh themselves.
        conditions = [event.condition for event in self._events]
        self.compares_rows: bool = self.check_continuity and (
            self._longest > 1 or any(isinstance(one, Condition) and one.fresh() is not one for one in conditions)
        )

    def _start(self) -> None:
        # Conditions remember episodes, so that each buffer needs fresh ones.
        self._event_tables = [table.fresh() for table in self._given_tables]
        self._events = [event for table in self._event_tables for event in table.events]
        self._event_arrays = EventArrays(
            np.repeat(np.arange(len(self._event_tables)), [len(table.events) for table in self._event_tables]),
            np.array([event.history_length for event in self._events]),
            np.zeros((self.num_slots, len(self._event_tables)), dtype=np.bool_),
        )
        self._fired = np.zeros(len(self._events), dtype=np.int64)
        self._histories = Histories(self.tables, self._longest - 1, self._max_trajectories, self.forget_stale)
        self._columns: Mapping[Key, tuple[torch.dtype, torch.Size]] | None = None
        self._running = LastObservations()
        self._rows_tested = 0
        self._judged_at = _ROWS_BEFORE_WARNING  # When so many rows are tested, _judge_conditions is called.
        self._warned_of: set[int] = set()  # Numbers of events.
        if self._counts_state_actions:
            self.tables.state_action_counts = StateActionCounts(self.num_slots)

    def _insert_columns(self, columns: Sequence[Column], rows: Any) -> Insertion:
        # The first rows fixed the columns. They are read again if a load fixed others.
        if self._columns is not self._storage.row_columns:
            self._read_columns(self._storage.row_columns)
        new = self._group(columns)
        parts = self._in_turn(new)
        fired, keys = self._check_and_test(columns, rows, new.breaks, [episodes for _, episodes in parts])
        if new.breaks is not None:  # Nothing can refuse the rows any more.
            self._histories.end_episodes(new.breaks.starts)
        count = len(new.episodes.done)
        if len(parts) == 1:
            index = self._write(columns, fired, new.episodes, keys)
        else:
            for part, episodes in parts:
                happened = np.ascontiguousarray(fired[:, part])
                self._write([column[part] for column in columns], happened, episodes, keys and keys[part])
            index = torch.from_numpy(self.tables.slots_of(0)[-count:])
        self._running.follow(new.observations, new.episodes, 0 if new.breaks is None else new.breaks.num_broken)
        self._count(fired)  # It may warn, and a warning may be made an error.
        return Insertion(index, slice(count - len(index), count))

    def _group(self, columns: Sequence[Column]) -> _NewRows:
        """Groups new rows by episode. A row that does not continue the row before it begins another episode."""
        done = np.ascontiguousarray(as_array(columns[self._done_at]).reshape(-1))
        trajectory = None
        if self._trajectory_at is not None:
            trajectory = np.ascontiguousarray(as_array(columns[self._trajectory_at]).reshape(-1), dtype=np.int64)
        observations = [(columns[own], columns[following]) for own, following in self._observed_at]
        if not self._are_vectors or type(observations[0][0]) is not np.ndarray:
            observations = [(comparable(own, "cpu"), comparable(following, "cpu")) for own, following in observations]
        episodes = groups_of(trajectory, done)
        # No step of the episode before may count as leading to an event of the new one.
        breaks = self._running.breaks(observations, episodes)
        if breaks is not None:
            episodes = groups_of(trajectory, breaks.done)
        return _NewRows(trajectory, observations, episodes, breaks)

    def _in_turn(self, new: _NewRows) -> list[tuple[slice, EpisodeGroups]]:
        """Divides the rows into parts to be written in turn. Each part fits the default table.

        The histories of events need the rows of a part although the next part makes them leave.
        """
        done = new.episodes.done
        most = min(self._most_at_once, self._storage.rows_at_once)
        if len(done) <= most:
            return [(slice(0, len(done)), new.episodes)]
        parts = [slice(start, start + most) for start in range(0, len(done), most)]
        names = [None if new.trajectory is None else new.trajectory[part] for part in parts]
        return [(part, groups_of(named, done[part])) for part, named in zip(parts, names, strict=True)]

    def _check_and_test(
        self, columns: Sequence[Column], rows: Any, breaks: Discontinuities | None, parts: Sequence[EpisodeGroups]
    ) -> tuple[np.ndarray, list[bytes] | None]:
        """Returns the events, bool ``[V, N]``, and the keys of states and actions, if they are counted.

        Whatever may refuse the rows comes here, before any row is stored. If the rows are refused, conditions that have
        followed some of them get their states back. Compiled conditions have no memory.
        """
        called = [self._events[number].condition for number in self._block.others]
        states = [state_of(condition) for condition in called]
        try:
            self._histories.check_room(parts)
            fired = self._test(columns, rows, breaks)
            return fired, None if self.tables.state_action_counts is None else state_action_keys(as_rows(rows))
        except BaseException:
            for condition, state in zip(called, states, strict=True):
                load_state_of(condition, state)
            raise

    def _read_columns(self, columns: Mapping[Key, tuple[torch.dtype, torch.Size]]) -> None:
        places = {key: place for place, key in enumerate(columns)}
        dtype, shape = columns.get(("next", "done"), (None, torch.Size()))
        if dtype != torch.bool or shape.numel() != 1:
            given = "no such column" if dtype is None else f"{dtype} {list(shape)} for each row"
            raise ValueError(
                f"histories of events need ('next', 'done'), bool [N] or [N, 1]; got {given}. Nothing was stored. "
                "Store terminated, truncated and done with every transition"
            )
        trajectory = next((key for key in TRAJECTORIES if key in places), None)
        if trajectory is not None:
            check_trajectory(trajectory, *columns[trajectory])
        self._done_at = places["next", "done"]
        self._trajectory_at = None if trajectory is None else places[trajectory]
        observed = observation_keys(columns) if self.compares_rows else []
        self._observed_at = [(places[key], places["next", *key]) for key in observed]
        shapes = [columns[key][1] for key in observed]
        self._are_vectors = bool(shapes) and all(len(one) == 1 and one[0] <= MOST_NUMBERS for one in shapes)
        self._block = ConditionBlock([event.condition for event in self._events], columns)
        self._columns = columns

    def _test(self, columns: Sequence[Column], given: Any, breaks: Discontinuities | None) -> np.ndarray:
        """Returns which events happened in each row, bool ``[V, N]``. Called conditions get ``given``."""
        happened = self._block(columns)
        for number in self._block.others:
            rows = as_rows(given)
            condition = self._events[number].condition
            try:
                if breaks is None or not isinstance(condition, Condition):
                    happened[number] = holds(condition, rows).cpu().numpy()
                    continue
                for part, ending in breaks.parts():
                    if len(ending):
                        condition.end_episodes([None] if self._trajectory_at is None else ending.tolist())
                    happened[number, part] = holds(condition, rows[part]).cpu().numpy()
            except ConditionError as error:
                table = self._table_of(number).name
                raise ConditionError(f"event table {table!r}: {error}. Nothing was stored") from error
        return happened

    def _write(
        self, values: Sequence[Column], fired: np.ndarray, episodes: EpisodeGroups, keys: list[bytes] | None
    ) -> Tensor:
        if self.forget_stale:
            stale = self._histories.evict_stale(episodes)
            self._end_conditions(stale.tolist())
            self._running.end_episodes(stale)
        # Order: slots are taken from the default table, and rows are written there. Only then does the table of an
        # event refer to the steps before it, which may free slots of others.
        slots = self.tables.append_new_to_each(np.zeros(len(episodes.done), dtype=np.int64))
        index = self.write(slots, values)
        counts = self.tables.state_action_counts
        if counts is not None and keys is not None:
            counts.store(slots, keys)
        # Event tables hold no separate rows: a step keeps its slot as long as a table or a history refers to it.
        table, steps = self._histories.follow(fired, self._event_arrays, episodes, slots)
        if counts is not None:
            for number, event_table in enumerate(self._event_tables, 1):
                # Lemma 2 is about tables that are drawn from. A share of 0 is an ablation.
                if event_table.share != 0:
                    counts.send(np.unique(steps[table == number]))
        self._write_count += len(slots)
        self._mark_update(index)
        self._push((0,), slots, are_new=True)
        if len(steps):
            self._push(np.flatnonzero(np.bincount(table)).tolist(), steps, are_new=False)
        return index

    def _count(self, fired: np.ndarray) -> None:
        if self._running.tally.is_suspicious:
            self._running.tally.warn(trajectory_name(self._storage.readable_rows))
        self._rows_tested += fired.shape[1]
        if np.count_nonzero(fired):
            self._fired += fired.sum(1)
        if self._rows_tested >= self._judged_at:
            self._judge_later()  # A warning after it may be made an error.
            self._judge_conditions()

    def _judge_later(self) -> None:
        # Conditions are judged at as many rows as a table holds, and whenever there are twice as many.
        later = [table.capacity for table in self._event_tables if table.capacity > self._rows_tested]
        self._judged_at = min([2 * self._rows_tested, *later])

    def _table_of(self, event: int) -> EventTable:
        return self._event_tables[self._event_arrays.table[event]]

    def _judge_conditions(self) -> None:
        # There is one warning for each event: its condition is nearly always true, or was never true.
        stored = self._storage.readable_rows
        slots = torch.from_numpy(self.tables.slots_of(0))
        for number, fired in enumerate(self._fired.tolist()):
            table = self._table_of(number)
            share = fired / self._rows_tested
            what = f"the condition of event table {table.name!r}"
            if number not in self._warned_of and share >= _SUSPICIOUS_SHARE:
                self._warned_of.add(number)
                warnings.warn(
                    f"{what} is true on {share:.0%} of all steps, so that the table is a copy of the default table; an "
                    "event marks what is rare",
                    stacklevel=2,
                )
            elif number not in self._warned_of and fired == 0 and self._rows_tested >= table.capacity:
                self._warned_of.add(number)
                if not warn_of_unmet(f"{what},", self._events[number].condition, self._rows_tested, stored, slots):
                    self._warned_of.remove(number)  # No episode has ended yet.

    def stats(self) -> dict[str, Any]:
        """Returns ``histories_forgotten``, and ``event_shares``: the share of tested steps that were events, by table.

        The shares of several events of one table are summed.
        """
        counts = np.bincount(self._event_arrays.table, weights=self._fired) / max(self._rows_tested, 1)
        shares = {table.name: float(count) for table, count in zip(self._event_tables, counts, strict=True)}
        return {"histories_forgotten": self._histories.forgotten, "event_shares": shares}

    def evict_oldest_history(self) -> bool:
        """Evicts the history of the episode continued longest ago, and returns whether there was one.

        :meta private:
        """
        evicted = self._histories.evict_oldest()
        self._running.end_episodes(evicted)
        return len(evicted) > 0

    def _held_by(self, state_dict: Mapping[str, Any]) -> np.ndarray:
        return self._histories.slots_in(state_dict["histories"])

    def end_episodes(self, slots: Tensor) -> None:
        """Forgets the histories of the episodes whose newest rows are in the slots ``[n]``."""
        if not len(slots):
            return
        trajectory = trajectory_of(self._storage.readable_rows)
        # The rows of unnamed episodes have the number 0.
        numbers = np.zeros(1, dtype=np.int64) if trajectory is None else trajectory[slots].flatten().cpu().numpy()
        self._histories.end_episodes(numbers)
        self._running.end_episodes(numbers)
        self._end_conditions([None] if trajectory is None else numbers.tolist())

    def _end_conditions(self, trajectories: Sequence[int | None]) -> None:
        # Conditions also remember the episodes of lost workers, which nothing continues.
        if trajectories:
            for event in self._events:
                if isinstance(event.condition, Condition):
                    event.condition.end_episodes(trajectories)

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count=empty_write_count)
        self._start()

    def state_dict(self) -> dict[str, Any]:
        """Returns tables, histories, last observations, counts of events, and the states of the conditions."""
        return super().state_dict() | {
            "sent": torch.from_numpy(self._event_arrays.sent.T.copy()),
            "conditions": [state_of(event.condition) for event in self._events],
            "warned_of": sorted(self._warned_of),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned. Tables of other events are refused, and nothing is changed."""
        if len(state_dict["conditions"]) != len(self._events):
            raise ValueError(
                f"the saved tables have {len(state_dict['conditions'])} events and these {len(self._events)}; build "
                "them with the saved events"
            )
        super().load_state_dict(state_dict)
        self._event_arrays.sent[:] = state_dict["sent"].numpy().T
        self._warned_of = set(state_dict["warned_of"])
        if self._rows_tested >= _ROWS_BEFORE_WARNING:
            self._judge_later()
        for event, state in zip(self._events, state_dict["conditions"], strict=True):
            load_state_of(event.condition, dict(state))


def check_tables(event_tables: Sequence[EventTable], name: str = "tables") -> None:
    """Raises for anything but a list of event tables with different names."""
    check_kind(name, event_tables, Sequence, f"a list of EventTable objects, as {name}=[EventTable(...)]")
    for place, table in enumerate(event_tables):
        check_kind(f"{name}[{place}]", table, EventTable, "an EventTable")
    names = [DEFAULT_TABLE, *(table.name for table in event_tables)]
    twice = sorted({taken for taken in names if names.count(taken) > 1})
    if twice:
        raise ValueError(
            f"the table names {twice} are taken twice; every table has a name of its own, and {DEFAULT_TABLE!r} is the "
            "one all steps go to. For several events into one table use EventTable(events=[...])"
        )
    if len(names) == 1:
        raise ValueError(f"{name} is empty; give at least one EventTable, or use recipes.uniform")


@rebuildable
class TaskTableWriter(TableWriter):
    """Writes each row into the table of its task, from which the oldest rows leave. The writer needs no feedback.

    Rows have a column ``task``, int64 ``[N]``, an index into ``tasks``. Distributed Parallel Curriculum Experience
    Replay keeps one replay buffer for each task (DPCER, Li and Ji 2021, https://openreview.net/forum?id=EiW3FLYBiP).

    Args:
        tasks: Names of the tasks.
        capacity_per_task: Most rows kept of each task.
        shares_one_table: Whether one table of ``len(tasks) * capacity_per_task`` rows keeps all tasks, as in the
            baselines.

    Raises:
        ValueError: No tasks, or a name that is taken twice. In ``extend``, rows without ``task``, or rows of a task
            that does not exist. Nothing is stored then.
    """

    exact: bool = True

    def __init__(self, tasks: Sequence[str], capacity_per_task: int, shares_one_table: bool = False) -> None:
        self.tasks: list[str] = checked_names("tasks", tasks, "task")
        capacity_per_task = checked_count("capacity_per_task", capacity_per_task, of="transitions")
        self._shares_one_table = checked_flag("shares_one_table", shares_one_table)
        self._columns: Mapping[Any, Any] | None = None  # The task is at the place _task_at in these columns.
        self._task_at = -1
        everything = {SHARED_TABLE: capacity_per_task * len(tasks)}
        super().__init__(Tables(everything if shares_one_table else dict.fromkeys(tasks, capacity_per_task)))

    def _insert_columns(self, columns: Sequence[Column], rows: Any) -> Insertion:
        task, storage = self._tasks_of(columns), self._storage
        count, at_once = len(task), storage.rows_at_once
        table = np.zeros_like(task) if self._shares_one_table else task
        # The usual way: each table takes its rows at once.
        slots = self.tables.try_append_new(table) if count <= at_once else None
        if slots is not None:
            index = self.write(slots, columns)
            inserted = Insertion(index, slice(0, count))
            self._mark_update(index)
        else:  # more rows than fit a table, or more frames than are free
            lasts = [np.flatnonzero(table == one)[-int(most) :] for one, most in enumerate(self.tables.capacity)]
            kept = np.sort(np.concatenate(lasts))
            table, columns = table[kept], chosen(columns, kept)
            slots, written = np.empty(len(table), dtype=np.int64), self.tables.rows_written
            for start in range(0, len(table), at_once):
                part = slice(start, start + at_once)
                slots[part] = self.tables.append_new_to_each(table[part])
                self.write(slots[part], [column[part] for column in columns])
            # Of rows written part by part, the rows that did not leave to make room for later ones.
            is_newest = self.tables.arrays.written_at[slots] == written + np.arange(len(slots))
            stayed = is_newest & (self.tables.references[slots] > 0)
            kept = kept[stayed]
            index = torch.from_numpy(slots[stayed])
            inserted = Insertion(index, torch.from_numpy(kept))
            announce(storage, index, kept, rows, count)
        numbers = table if count == 1 else np.flatnonzero(np.bincount(table))
        self._push(numbers.tolist(), slots, are_new=True)
        self._write_count += count
        return inserted

    def _tasks_of(self, columns: Sequence[Column]) -> np.ndarray:
        stored = self._storage.row_columns
        if self._columns is not stored:
            dtype, shape = stored.get(("task",), (None, torch.Size()))
            if dtype != torch.int64 or shape.numel() != 1:
                given = "no such column" if dtype is None else f"{dtype} {list(shape)} for each row"
                raise ValueError(
                    f"the transitions need a column 'task', int64 [N], an index into {self.tasks}; got {given}. "
                    "Nothing was stored"
                )
            self._columns = stored
            self._task_at = list(stored).index(("task",))
        task = np.ascontiguousarray(as_array(columns[self._task_at]).reshape(-1))
        if task.min() < 0 or task.max() >= len(self.tasks):
            unknown = np.unique(task[(task < 0) | (task >= len(self.tasks))])
            raise ValueError(
                f"the column 'task' holds {unknown.tolist()}; tasks are numbered 0..{len(self.tasks) - 1}, "
                f"{self.tasks}. Nothing was stored"
            )
        return task
