# SPDX-License-Identifier: Apache-2.0
"""Writing every step to the default table, and the steps that led to an event to the event's table as well."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.episodes.links import MOST_NUMBERS, comparable, trajectory_name, trajectory_of
from lightning_replay.episodes.running import Breaks, ObservationPair, RunningObservations
from lightning_replay.events.conditions.comparisons import ConditionBlock
from lightning_replay.events.conditions.condition import (
    Condition,
    ConditionError,
    holds,
    load_state_of,
    state_of,
    warn_of_unmet,
)
from lightning_replay.events.event_table import EventTable
from lightning_replay.parts import Insertion
from lightning_replay.saving.spec import recorded
from lightning_replay.storage.row_layout import Key, observation_keys
from lightning_replay.storage.rows_of_columns import as_rows
from lightning_replay.storage.stored_column import as_array
from lightning_replay.storage.transition_check import TRAJECTORIES, Column, check_trajectory
from lightning_replay.tables.arrays import EpisodeGroups, EventArrays, groups_of
from lightning_replay.tables.counts import StateActionCounts, state_action_keys
from lightning_replay.tables.histories import Histories
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import check_kind, checked_count, checked_flag
from lightning_replay.writers.table_writer import TableWriter

DEFAULT_TABLE = "default"
_ROWS_BEFORE_WARNING = 1_000
_NEVER = 2**62
_SUSPICIOUS_SHARE = 0.95


@recorded
class EventTableWriter(TableWriter):
    """Stratified Sampling from Event Tables: an event's table gets the last ``history_length`` steps up to the event.

    An event is tested on the step that led to it, a row with its ``next`` state, never a reset state. This step counts
    as one of the history. A step goes to a table once, however many events follow it, even if it has left that table
    since. Histories never cross episodes: ``trajectory`` (int64 ``[N]``) is the episode of a row, without it the rows
    are one environment in order; ``("next", "done")`` ends an episode, and so does a row that starts with another
    observation than the row before ended with. All tables are first in, first out. Needs no
    feedback. Kompella et al. 2022, https://arxiv.org/abs/2211.00576, section 4.

    Args:
        capacity: most entries of the default table.
        event_tables: the others.
        max_trajectories: episodes whose histories are held at once.
        forget_stale: where more run, forget those continued longest ago; otherwise such rows are refused.
        check_continuity: whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.
        count_state_actions: keep the counts that the corrections of Lemma 2 need; for discrete states and actions.
            Tables with a share of 0 are not counted as events.

    Raises:
        ValueError: names that are taken twice, or no event table.
    """

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
        max_trajectories = checked_count("max_trajectories", max_trajectories, of="running episodes")
        longest = max(event.history_length for table in event_tables for event in table.events)
        capacities = {DEFAULT_TABLE: capacity} | {table.name: table.capacity for table in event_tables}
        super().__init__(Tables(capacities, extra_slots=max_trajectories * (longest - 1)))
        self.forget_stale: bool = checked_flag("forget_stale", forget_stale)
        self._given_tables = list(event_tables)
        self._max_trajectories = max_trajectories
        self._longest = longest
        self._counts_state_actions = checked_flag("count_state_actions", count_state_actions)
        self._check_continuity = checked_flag("check_continuity", check_continuity)
        self._start()

    def _start(self) -> None:
        # Conditions remember episodes, and each buffer has its own.
        self._event_tables = [table.fresh() for table in self._given_tables]
        self._events = [event for table in self._event_tables for event in table.events]
        self._event_arrays = EventArrays(
            np.repeat(np.arange(len(self._event_tables)), [len(table.events) for table in self._event_tables]),
            np.array([event.history_length for event in self._events]),
            np.zeros((self.num_slots, len(self._event_tables)), dtype=np.bool_),
        )
        self._fired = np.zeros(len(self._events), dtype=np.int64)
        self._most_fired = 0  # the largest of them
        self._histories = Histories(self.tables, self._longest - 1, self._max_trajectories, self.forget_stale)
        self._columns: Mapping[Key, tuple[torch.dtype, torch.Size]] | None = None  # see _read_columns
        self._running = RunningObservations()
        self._rows_tested = 0
        self._has_warned = False
        # Rows after which a condition that was never true is warned of, by event: a table's worth, and the least.
        capacities = [table.capacity for table in self._event_tables for _ in table.events]
        self._unmet_after = np.maximum(np.array(capacities, dtype=np.int64), _ROWS_BEFORE_WARNING)
        self._unmet_at = int(self._unmet_after.min())
        if self._counts_state_actions:
            self.tables.state_action_counts = StateActionCounts(self.num_slots)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Writes transitions ``[N]``, in order of time within each trajectory.

        Returns:
            Slots of the rows that are in the default table afterwards, int64 ``[min(N, capacity)]``; fewer where the
            frames of so many do not fit.

        Raises:
            TypeError: a ``trajectory`` that is not of an integer dtype.
            ValueError: rows that do not fit the first ones or lack ``("next", "done")``, a condition that raises or
                does not return one bool per row, or too many running episodes. Nothing is stored then.
        """
        return self.insert_columns(self._storage.checked_values(data), data).slots

    def insert_columns(self, columns: Sequence[Column], rows: Any) -> Insertion:
        if self._columns is not self._storage.row_columns:
            self._read_columns(self._storage.row_columns)
        trajectory, done = self._episodes_of(columns)
        observations = self._observations(columns)
        whole = groups_of(trajectory, done)
        breaks = self._running.breaks(observations, whole)
        if breaks is not None:
            done, whole = breaks.done, groups_of(trajectory, breaks.done)
        count, most = len(done), min(self._most_at_once, self._storage.rows_at_once)
        parts = [slice(start, start + most) for start in range(0, count, most)] if count > most else []
        episodes = [groups_of(None if trajectory is None else trajectory[part], done[part]) for part in parts] or [
            whole
        ]
        called = self._block.others
        states = [state_of(self._events[number].condition) for number in called] if called else ()
        try:  # all that may refuse the rows, before any is stored
            self._histories.check_room(episodes, self.forget_stale)
            fired = self._test(columns, rows, breaks)
            keys = None if self.tables.state_action_counts is None else state_action_keys(as_rows(rows))
        except BaseException:
            for number, state in zip(called, states, strict=True):
                load_state_of(self._events[number].condition, state)
            raise
        if breaks is not None:  # nothing can refuse the rows any more
            for name in breaks.starts:
                self._histories.forget(name)
        if not parts:
            index = self._write(columns, fired, whole, keys)
            kept = slice(0, count)
        else:
            for part, groups in zip(parts, episodes, strict=True):
                now = np.ascontiguousarray(fired[:, part])
                self._write([column[part] for column in columns], now, groups, keys and keys[part])
            index = torch.from_numpy(self.tables.slots_of(0)[-count:]).to(self._storage.device)
            kept = slice(count - len(index), count)
        self._running.follow(observations, whole, 0 if breaks is None else len(breaks.begins))
        self._count(fired)  # may warn, and a warning may be made an error
        return Insertion(index, kept)

    def _episodes_of(self, columns: Sequence[Column]) -> tuple[np.ndarray | None, np.ndarray]:
        """Returns running episode, int64 ``[N]`` or ``None``, and whether it ended, bool ``[N]``, of each row."""
        done = np.ascontiguousarray(as_array(columns[self._done_at]).reshape(-1))
        if self._trajectory_at is None:
            return None, done
        trajectory = as_array(columns[self._trajectory_at]).reshape(-1)
        return np.ascontiguousarray(trajectory, dtype=np.int64), done

    def _observations(self, columns: Sequence[Column]) -> list[ObservationPair]:
        """Returns the observations before and after the step of each row, ``[N, numbers]`` on the CPU."""
        pairs = [(columns[own], columns[following]) for own, following in self._observed_at]
        if self._are_vectors and type(pairs[0][0]) is np.ndarray:
            return pairs
        return [(comparable(own, "cpu"), comparable(following, "cpu")) for own, following in pairs]

    def _read_columns(self, columns: Mapping[Key, tuple[torch.dtype, torch.Size]]) -> None:
        """Finds the columns that histories need; raises where they are missing or no flags and numbers of episodes."""
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
        observed = observation_keys(columns) if self._check_continuity else []
        self._observed_at = [(places[key], places["next", *key]) for key in observed]
        shapes = [columns[key][1] for key in observed]
        self._are_vectors = bool(shapes) and all(len(one) == 1 and one[0] <= MOST_NUMBERS for one in shapes)
        self._block = ConditionBlock([event.condition for event in self._events], columns)
        self._columns = columns

    def _test(self, columns: Sequence[Column], given: Any, breaks: Breaks | None) -> np.ndarray:
        """Returns which events happened in each row, bool ``[V, N]``.

        Args:
            columns: of the rows ``[N]``, for compiled conditions.
            given: the rows, with which other conditions are called.
            breaks: where episodes begin that conditions would take for the one before.
        """
        happened = self._block(columns)
        for number in self._block.others:
            rows, condition = as_rows(given), self._events[number].condition
            try:
                if breaks is None or not isinstance(condition, Condition):
                    happened[number] = holds(condition, rows).cpu().numpy()
                    continue
                for part, name in breaks.parts():
                    if name is not None:
                        condition.end_episodes([name if self._trajectory_at is not None else None])
                    happened[number, part] = holds(condition, rows[part]).cpu().numpy()
            except ConditionError as error:
                name_of_table = self._event_tables[self._event_arrays.table[number]].name
                raise ConditionError(f"event table {name_of_table!r}: {error}. Nothing was stored") from error
        return happened

    def _write(
        self, values: Sequence[Column], fired: np.ndarray, episodes: EpisodeGroups, keys: list[bytes] | None
    ) -> Tensor:
        """Stores rows, at most the capacity of the default table; returns their slots."""
        if self.forget_stale:
            stale = self._histories.make_room(episodes)
            self._end_conditions(stale)
            for name in stale:
                self._running.forget(name)
        slots = self.tables.append_new_to_each(np.zeros(len(episodes.done), dtype=np.int64))
        index = self.write(slots, values)
        counts = self.tables.state_action_counts
        if counts is not None and keys is not None:
            counts.store(slots, keys)
        table, steps = self._histories.follow(fired, self._event_arrays, episodes, slots)
        if counts is not None:
            for number, event_table in enumerate(self._event_tables, 1):
                # Lemma 2 is about tables that are drawn from; a share of 0 is an ablation.
                if event_table.share != 0:
                    counts.send(np.unique(steps[table == number]))
        self._write_count += len(slots)
        for buffer in self._storage._attached_entities:
            buffer.mark_update(index)
        return index

    def _count(self, fired: np.ndarray) -> None:
        if self._running.tally.is_suspicious:
            self._running.tally.warn(trajectory_name(self._storage.readable_rows))
        self._rows_tested += fired.shape[1]
        if np.count_nonzero(fired):
            self._fired += fired.sum(1)
            self._most_fired = int(self._fired.max())
        if self._rows_tested >= self._unmet_at:
            self._check_unmet()
        if self._has_warned or self._rows_tested < _ROWS_BEFORE_WARNING:
            return
        share = self._most_fired / self._rows_tested
        if share >= _SUSPICIOUS_SHARE:
            self._has_warned = True
            name = self._event_tables[self._event_arrays.table[self._fired.argmax()]].name
            warnings.warn(
                f"the condition of event table {name!r} is true on {share:.0%} of all steps, so that the table is a "
                "copy of the default table; an event marks what is rare",
                stacklevel=2,
            )

    def _check_unmet(self) -> None:
        """Warns once of each event that no row was, after a table's worth of rows among which episodes end."""
        due = self._unmet_after <= self._rows_tested
        unmet = np.flatnonzero(due & (self._fired == 0)).tolist()
        self._unmet_after[due] = _NEVER  # before a warning that may be made an error
        self._unmet_at = int(self._unmet_after.min())
        slots = torch.from_numpy(self.tables.slots_of(0))
        for number in unmet:
            name = self._event_tables[self._event_arrays.table[number]].name
            what = f"the condition of event table {name!r},"
            condition, stored = self._events[number].condition, self._storage.readable_rows
            if not warn_of_unmet(what, condition, self._rows_tested, stored, slots):
                self._unmet_after[number] = 2 * self._rows_tested
                self._unmet_at = min(self._unmet_at, 2 * self._rows_tested)

    def stats(self) -> dict[str, Any]:
        """Returns ``histories_forgotten``, and ``event_shares``: the share of tested steps that were events, by table.

        Of several events into one table it is their sum.
        """
        counts = np.bincount(self._event_arrays.table, weights=self._fired) / max(self._rows_tested, 1)
        shares = {table.name: float(count) for table, count in zip(self._event_tables, counts, strict=True)}
        return {"histories_forgotten": self.histories_forgotten, "event_shares": shares}

    @property
    def histories_forgotten(self) -> int:
        """Running episodes whose history was dropped, see ``forget_stale``."""
        return self._histories.forgotten

    def forget_oldest(self) -> bool:
        name = self._histories.forget_oldest()
        if name is not None:
            self._running.forget(name)
        return name is not None

    def cut(self, index: Tensor) -> None:
        """Discards the episodes interrupted after the rows in these slots, in histories and conditions."""
        if not len(index):
            return
        trajectory = trajectory_of(self._storage.readable_rows)
        names = [None] if trajectory is None else trajectory[index].flatten().tolist()
        for name in names:
            self._histories.forget(name or 0)
            self._running.forget(name or 0)
        self._end_conditions(names)

    def _end_conditions(self, names: Sequence[int | None]) -> None:
        """Ends episodes that do not continue, such as those of lost workers, in the conditions."""
        if names:
            for table in self._event_tables:
                table.end_episodes(names)

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count=empty_write_count)
        self._start()

    def state_dict(self) -> dict[str, Any]:
        """Returns tables, running episodes, the slots sent to event tables, states of conditions, and counters."""
        return super().state_dict() | {
            "histories": self._histories.state_dict(),
            "running": self._running.state_dict(),
            "sent": torch.from_numpy(self._event_arrays.sent.T.copy()),
            "fired": self._fired.tolist(),
            "rows_tested": self._rows_tested,
            "conditions": [state_of(event.condition) for event in self._events],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; tables of other events are refused, and nothing is changed."""
        if len(state_dict["conditions"]) != len(self._events):
            raise ValueError(
                f"the saved tables have {len(state_dict['conditions'])} events and these {len(self._events)}; build "
                "them with the saved events"
            )
        super().load_state_dict(dict(state_dict))
        self._histories.load_state_dict(state_dict["histories"])
        if "running" in state_dict:
            self._running.load_state_dict(state_dict["running"])
        else:  # format 3 began without it: what its episodes ended with is not known, so that nothing continues them
            self._running.abandon(state_dict["histories"]["trajectory"].tolist())
        self._event_arrays.sent[:] = state_dict["sent"].numpy().T
        self._fired = np.array(state_dict["fired"], dtype=np.int64)
        self._most_fired = int(self._fired.max())
        self._rows_tested = int(state_dict["rows_tested"])
        self._unmet_after[self._unmet_after <= self._rows_tested] = _NEVER  # warned of before the save, or met
        self._unmet_at = int(self._unmet_after.min())
        for event, state in zip(self._events, state_dict["conditions"], strict=True):
            load_state_of(event.condition, dict(state))


def check_tables(event_tables: Sequence[EventTable], name: str = "tables") -> None:
    """Refuses no event tables, a name that is taken twice, and other objects; ``name`` is that of the option."""
    if isinstance(event_tables, EventTable):
        raise TypeError(f"{name} is one EventTable; a list of them is accepted, as {name}=[EventTable(...)]")
    check_kind(name, event_tables, Sequence, f"a list of EventTable objects, as {name}=[EventTable(...)]")
    for table in event_tables:
        if not isinstance(table, EventTable):
            raise TypeError(f"{name} holds a {type(table).__name__}; EventTable objects are accepted")
    names = [DEFAULT_TABLE, *(table.name for table in event_tables)]
    twice = sorted({taken for taken in names if names.count(taken) > 1})
    if twice:
        raise ValueError(
            f"the table names {twice} are taken twice; every table has a name of its own, and {DEFAULT_TABLE!r} is the "
            "one all steps go to. For several events into one table use EventTable(events=[...])"
        )
    if len(names) == 1:
        raise ValueError(f"{name} is empty; give at least one EventTable, or use recipes.uniform")
