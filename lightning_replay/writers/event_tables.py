# SPDX-License-Identifier: Apache-2.0
"""Every step goes to the default table, and what led to an event to the table of that event as well."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.episodes import trajectory_of
from lightning_replay.events import ConditionError, EventTable, holds
from lightning_replay.histories import Histories, Stretch, stretches
from lightning_replay.recorded import recorded
from lightning_replay.state_action_counts import StateActionCounts
from lightning_replay.tables import Tables
from lightning_replay.writers.table_writer import TableWriter

DEFAULT_TABLE = "default"
_ROWS_BEFORE_WARNING = 1_000
_SUSPICIOUS_SHARE = 0.95


@recorded
class EventTableWriter(TableWriter):
    """Stratified Sampling from Event Tables: an event's table gets the last ``history_length`` steps up to the event.

    An event is tested on the step that led to it: conditions see rows with their ``next`` state, never a reset state.
    The event's own step counts as one of the history. A step goes to a table once, however many events follow it, even
    if it has left that table since. Histories never cross episodes: ``trajectory`` (int64 ``[N]``) says which episode a
    row belongs to, without it the rows are one environment in order; ``("next", "done")`` ends an episode. All tables
    are first in, first out. Needs no feedback. Kompella et al. 2022, https://arxiv.org/abs/2211.00576, section 4.

    Args:
        capacity: most entries of the default table.
        event_tables: the others.
        max_trajectories: episodes whose histories are held at once.
        forget_stale: where more run, forget those continued longest ago; otherwise such rows are refused.
        count_state_actions: keep the counts that the corrections of Lemma 2 need; for discrete states and actions.

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
    ) -> None:
        check_tables(event_tables)
        if max_trajectories < 1:
            raise ValueError(f"max_trajectories is {max_trajectories}; at least 1 episode runs")
        longest = max(event.history_length for table in event_tables for event in table.events)
        capacities = {DEFAULT_TABLE: capacity} | {table.name: table.capacity for table in event_tables}
        super().__init__(Tables(capacities, extra_slots=max_trajectories * (longest - 1)))
        self.forget_stale = forget_stale
        self._given_tables = list(event_tables)
        self._max_trajectories = max_trajectories
        self._longest = longest
        self._counts_state_actions = count_state_actions
        self._start()

    def _start(self) -> None:
        # Conditions remember episodes, and each buffer has its own.
        self._event_tables = [table.fresh() for table in self._given_tables]
        self._histories = Histories(self.tables.pool, self._longest - 1, self._max_trajectories)
        self._sent = np.zeros((len(self._event_tables), self.num_slots), dtype=np.bool_)
        self._fired = [np.zeros(len(table.events), dtype=np.int64) for table in self._event_tables]
        self._rows_tested = 0
        self._has_warned = False
        if self._counts_state_actions:
            self.tables.state_action_counts = StateActionCounts(self.num_slots)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Writes transitions ``[N]``, in order of time within each trajectory.

        Returns:
            Slots of the rows that are in the default table afterwards, int64 ``[min(N, capacity)]``.

        Raises:
            ValueError: rows that do not fit the first ones or lack ``("next", "done")``, a condition that raises or
                does not answer one bool per row, or too many running episodes. Nothing is stored then.
        """
        trajectory, done = _episodes_of(data)
        remembered = [table.state_dict() for table in self._event_tables]
        try:
            values = self._storage.checked_values(data)
            fired = [_answers(table, data) for table in self._event_tables]
            self._histories.check_room(trajectory, done, forget_stale=self.forget_stale)
        except BaseException:
            self._remind_conditions(remembered)
            raise
        self._count(fired, len(done))
        written = []
        most = int(self.tables.capacity[0])
        for start in range(0, len(done), most):
            rows = slice(start, start + most)
            slots = self.write_new(0, [value[rows] for value in values])
            self._sent[:, slots] = False
            if self.tables.state_action_counts is not None:
                self.tables.state_action_counts.store(slots, data[rows])
            part = [[answers[rows] for answers in table] for table in fired]
            self._send(part, trajectory[rows], done[rows], slots)
            self._write_count += len(slots)
            written.append(self.announce(slots))
        return torch.cat(written)[-most:]

    def _send(self, fired: list[list[np.ndarray]], trajectory: np.ndarray, done: np.ndarray, slots: np.ndarray) -> None:
        """Appends what led to events in rows just written to their tables, in the order in which it was sent."""
        episodes = list(stretches(trajectory, done))
        for number, (table, answers) in enumerate(zip(self._event_tables, fired, strict=True)):
            if not any(answer.any() for answer in answers):
                continue
            parts = [self._led_to_events(number, table, answers, episode, slots) for episode in episodes]
            sent, sender = (np.concatenate(column) for column in zip(*parts, strict=True))
            # Within an episode they are in order already; episodes that run side by side are merged by their events.
            sent = sent[np.argsort(sender, kind="stable")]
            self._sent[number, sent] = True
            if self.tables.state_action_counts is not None:
                self.tables.state_action_counts.send(sent)
            self.tables.append(number + 1, sent)
        for episode in episodes:
            self._histories.follow(episode, slots[episode.rows])

    def _led_to_events(
        self, number: int, table: EventTable, answers: list[np.ndarray], episode: Stretch, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slots of one episode that events in its new rows send to a table, and the row of the event that sends each.

        Where one table has events of several history lengths, an early short one may send less than a later long one,
        which then sends older steps after newer ones.
        """
        before = self._histories.before(episode)
        steps = np.concatenate((before, slots[episode.rows]))
        is_sent = self._sent[number, steps]
        chosen: list[np.ndarray] = []
        senders: list[np.ndarray] = []
        by_event = np.stack([answer[episode.rows] for answer in answers])
        lengths = np.array([event.history_length for event in table.events])
        if (lengths == lengths[0]).all():
            events = np.flatnonzero(by_event.any(0)) + len(before)
            # The next event after each step, by number; past the last there is none.
            following = np.searchsorted(events, np.arange(len(steps)))
            has_one = following < len(events)
            distance = events[np.minimum(following, len(events) - 1)] - np.arange(len(steps)) if len(events) else 0
            led = np.flatnonzero(has_one & (distance < lengths[0]) & ~is_sent)
            return steps[led], episode.rows[events[following[led]] - len(before)]
        for event in np.flatnonzero(by_event.any(0)).tolist():
            longest = int(lengths[by_event[:, event]].max())
            last = event + len(before)
            window = np.arange(max(0, last - longest + 1), last + 1)
            new = window[~is_sent[window]]
            is_sent[new] = True
            chosen.append(steps[new])
            senders.append(np.full(len(new), episode.rows[event]))
        return np.concatenate([_NONE, *chosen]), np.concatenate([_NONE, *senders])

    def _count(self, fired: list[list[np.ndarray]], rows: int) -> None:
        self._rows_tested += rows
        for counts, answers in zip(self._fired, fired, strict=True):
            counts += [int(answer.sum()) for answer in answers]
        if self._has_warned or self._rows_tested < _ROWS_BEFORE_WARNING:
            return
        for table, counts in zip(self._event_tables, self._fired, strict=True):
            share = int(counts.max()) / self._rows_tested
            if share >= _SUSPICIOUS_SHARE:
                self._has_warned = True
                warnings.warn(
                    f"the condition of event table {table.name!r} is true on {share:.0%} of all steps, so that the "
                    "table is a copy of the default table; an event marks what is rare",
                    stacklevel=2,
                )

    def event_shares(self) -> dict[str, float]:
        """Share of the tested steps that were events, by table; of several events into one table, their sum."""
        return {
            table.name: float(counts.sum()) / max(self._rows_tested, 1)
            for table, counts in zip(self._event_tables, self._fired, strict=True)
        }

    @property
    def histories_forgotten(self) -> int:
        """Running episodes whose history was given up, see ``forget_stale``."""
        return self._histories.forgotten

    def cut(self, index: Tensor) -> None:
        """Forgets the episodes that were interrupted after the rows in these slots: histories and conditions."""
        trajectory = trajectory_of(self._storage.all_rows)
        names = [None] if trajectory is None else trajectory[index].flatten().tolist()
        for name in names:
            self._histories.forget(name or 0)
        for table in self._event_tables:
            table.end_episodes(names)

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count=empty_write_count)
        self._start()

    def state_dict(self) -> dict[str, Any]:
        """Tables, running episodes with what was sent of them, the states of conditions, and counters."""
        return super().state_dict() | {
            "histories": self._histories.state_dict(),
            "sent": torch.from_numpy(self._sent.copy()),
            "fired": [counts.tolist() for counts in self._fired],
            "rows_tested": self._rows_tested,
            "conditions": [table.state_dict() for table in self._event_tables],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        super().load_state_dict(dict(state_dict))
        self._histories.load_state_dict(state_dict["histories"])
        self._sent[:] = state_dict["sent"].numpy()
        self._fired = [np.array(counts) for counts in state_dict["fired"]]
        self._rows_tested = int(state_dict["rows_tested"])
        self._remind_conditions(state_dict["conditions"])

    def _remind_conditions(self, states: Sequence[Mapping[str, Any]]) -> None:
        for table, state in zip(self._event_tables, states, strict=True):
            table.load_state_dict(dict(state))


def check_tables(event_tables: Sequence[EventTable]) -> None:
    """Refuses event tables that cannot stand beside each other.

    Raises:
        ValueError: none, or a name that is taken twice.
        TypeError: something else than an :class:`~lightning_replay.events.EventTable`.
    """
    for table in event_tables:
        if not isinstance(table, EventTable):
            raise TypeError(f"tables holds a {type(table).__name__}; EventTable objects are accepted")
    names = [DEFAULT_TABLE, *(table.name for table in event_tables)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"the table names {twice} are taken twice; every table has a name of its own, and {DEFAULT_TABLE!r} is the "
            "one all steps go to. For several events into one table use EventTable(events=[...])"
        )
    if len(names) == 1:
        raise ValueError("tables is empty; give at least one EventTable, or use recipes.uniform")


def _answers(table: EventTable, rows: TensorDictBase) -> list[np.ndarray]:
    """What the conditions of a table say of the rows, bool ``[N]`` each."""
    try:
        return [holds(event.condition, rows).cpu().numpy() for event in table.events]
    except ConditionError as error:
        raise ConditionError(f"event table {table.name!r}: {error}. Nothing was stored") from error


def _episodes_of(data: TensorDictBase) -> tuple[np.ndarray, np.ndarray]:
    """Running episode, int64 ``[N]``, and whether it ended, bool ``[N]``, of each row."""
    done = data.get(("next", "done"), None)
    if done is None:
        raise ValueError(
            "the transitions have no ('next', 'done'), which histories of events need; nothing was stored. "
            "Store terminated, truncated and done with every transition"
        )
    trajectory = trajectory_of(data)
    rows = data.shape[0]
    named = np.zeros(rows, dtype=np.int64) if trajectory is None else trajectory.reshape(-1).cpu().numpy()
    return named, done.reshape(-1).cpu().numpy()


_NONE = np.zeros(0, dtype=np.int64)
