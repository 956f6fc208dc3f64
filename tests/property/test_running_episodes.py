# SPDX-License-Identifier: Apache-2.0
"""Running episodes in arrays hold what dictionaries held: rows by name, histories of steps, and last observations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.episodes.groups import EpisodeGroups, groups_of
from lightning_replay.episodes.running_rows import RunningRows
from lightning_replay.events import first_in_episode, reestablished, reward_at_least, sustained
from lightning_replay.events.conditions import EpisodeCondition
from lightning_replay.tables.histories import Histories
from lightning_replay.tables.kernels import EventArrays
from lightning_replay.tables.last_observations import LastObservations
from lightning_replay.tables.tables import Tables

NAMES = st.integers(-3, 8)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sets(NAMES, max_size=6), st.lists(NAMES, max_size=4)), max_size=12))
def test_every_running_episode_has_a_row_of_its_own(calls: list[tuple[set[int], list[int]]]) -> None:
    running, rows = RunningRows(), dict[int, int]()
    for opened, closed in calls:
        names = np.array(sorted(opened), dtype=np.int64)
        given = running.open(names).tolist()
        assert all(rows.setdefault(name, row) == row for name, row in zip(names.tolist(), given, strict=True))
        assert len(set(rows.values())) == len(rows) == len(running) <= running.capacity
        ending = np.array(closed, dtype=np.int64)
        assert running.find(ending).tolist() == [rows.get(name, -1) for name in closed]
        running.close(running.find(ending))
        for name in closed:
            rows.pop(name, None)
        assert dict(zip(running.names.tolist(), running.rows.tolist(), strict=True)) == rows
        assert running.names.tolist() == sorted(rows)


class HistoriesOfDictionaries:
    """The oracle: the histories as they were, one list of slots for each name; the one continued last is last."""

    def __init__(self, tables: Tables, length: int) -> None:
        self.tables, self.length = tables, length
        self.held: dict[int, list[int]] = {}

    def follow(self, episodes: EpisodeGroups, slots: np.ndarray) -> None:
        for group, name in enumerate(episodes.trajectory.tolist()):
            held = self.held.pop(name, [])
            rows = episodes.order[episodes.start[group] : episodes.start[group + 1]]
            ends = np.flatnonzero(episodes.done[rows]) + 1
            if len(ends):
                self.tables.release(np.array(held, dtype=np.int64))
                held, rows = [], rows[ends[-1] :]
            new = slots[rows[max(len(rows) - self.length, 0) :]]
            self.tables.references[new] += 1
            leaving = max(len(held) + len(new) - self.length, 0)
            self.tables.release(np.array(held[:leaving], dtype=np.int64))
            if not episodes.ended[group]:
                self.held[name] = [*held[leaving:], *new.tolist()]

    def end_episodes(self, names: list[int]) -> None:
        for name in names:
            self.tables.release(np.array(self.held.pop(name, []), dtype=np.int64))


BATCH = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([False, False, False, True])), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(BATCH, BATCH, st.permutations(range(4))), max_size=20), st.integers(1, 3))
def test_histories_are_those_of_dictionaries(calls: list[list], length: int) -> None:
    worlds = [Tables({"default": 4, "events": 1}, extra_slots=5 * length) for _ in range(2)]
    histories = Histories(worlds[0], length, max_trajectories=5)
    oracle = HistoriesOfDictionaries(worlds[1], length)
    events = EventArrays(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), np.zeros((99, 1), dtype=bool))
    for call in calls:
        if call and isinstance(call[0], tuple):
            names, done = (np.array(column) for column in zip(*call, strict=True))
            episodes = groups_of(names, done)
            slots = [tables.append_new_to_each(np.zeros(len(done), dtype=np.int64)) for tables in worlds]
            assert slots[0].tolist() == slots[1].tolist()
            histories.follow(np.zeros((1, len(done)), dtype=bool), events, episodes, slots[0])
            oracle.follow(episodes, slots[1])
        else:
            histories.end_episodes(call)
            oracle.end_episodes(call)
        state = histories.state_dict()
        assert state["trajectory"].tolist() == list(oracle.held)
        assert state["slots"].tolist() == [slot for held in oracle.held.values() for slot in held]
        free = [tables.state_dict()["slots"]["free"].tolist() for tables in worlds]
        assert free[0] == free[1]
        if len(call) == 2:  # A load changes nothing.
            histories.load_state_dict(state)


ROW = st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2), st.integers(0, 2))


@settings(max_examples=50)
@given(st.lists(st.lists(ROW, min_size=1, max_size=6), max_size=8), st.sampled_from([(1,), (2,), (3, 1)]))
def test_rows_continue_the_last_observation_of_their_episode(batches: list, widths: tuple[int, ...]) -> None:
    """The oracle: rows one after the other, with a dictionary of bytes."""
    observations, last = LastObservations(), dict[int, bytes]()
    for number, batch in enumerate(batches):
        names, done, seen, following = (np.array(column) for column in zip(*batch, strict=True))
        dtypes = np.float32, np.uint8
        pairs = [
            tuple(np.repeat(one[:, None], width, 1).astype(dtype) for one in (seen, following))
            for width, dtype in zip(widths, dtypes, strict=False)
        ]
        starts, inner, ends, met = set(), [], done.copy(), dict[int, int]()
        for row, name in enumerate(names.tolist()):
            own, after = (b"".join(pair[side][row].tobytes() for pair in pairs) for side in range(2))
            if last.get(name, own) != own:
                if name in met:
                    inner.append(row)
                    ends[met[name]] = True
                else:
                    starts.add(name)
            met[name] = row
            last[name] = after
            if done[row]:
                del last[name]
        breaks = observations.breaks(pairs, groups_of(names, done))
        assert (breaks is None) == (not starts and not inner)
        if breaks is not None:
            assert breaks.starts.tolist() == sorted(starts) and breaks.inner.tolist() == inner
            assert breaks.names.tolist() == names[inner].tolist() and breaks.done.tolist() == ends.tolist()
            parts = [(list(range(len(done)))[part], ending.tolist()) for part, ending in breaks.parts()]
            assert [row for rows, _ in parts for row in rows] == list(range(len(done)))
            assert parts[0][1] == sorted(starts) and [rows[0] for rows, _ in parts[1:]] == inner
        observations.follow(pairs, groups_of(names, ends), 0 if breaks is None else breaks.num_broken)
        state = observations.state_dict()
        saved = zip(state["trajectory"].tolist(), state["last"].numpy(), strict=False)
        assert {name: row.tobytes() for name, row in saved} == last
        if number % 2:
            observations.load_state_dict(state)


STEP = st.tuples(st.integers(0, 1), st.sampled_from([True, True, True, False]), st.integers(0, 8))
STEPS = st.lists(st.lists(STEP, min_size=1, max_size=8), max_size=8)
CONDITIONS = st.sampled_from(
    [
        first_in_episode,
        *[lambda one, n=n: sustained(one, n) for n in (1, 2, 3)],
        lambda one: reestablished(one, 1),
        lambda one: reestablished(one, 2),
    ]
)


@pytest.mark.parametrize("is_compiled", [True, False])
@settings(max_examples=50)
@given(STEPS, CONDITIONS, st.booleans(), st.integers(0, 1))
def test_conditions_remember_episodes_as_dictionaries_did(
    is_compiled: bool, batches: list, build, named: bool, ending: int
) -> None:
    """The oracle: ``follow`` for one step after the other. A subclass that overrides it is not compiled."""
    condition: EpisodeCondition = build(reward_at_least(1))
    follow, start, running = condition.follow, condition.start, dict[int | None, int]()
    if not is_compiled:
        kind = type("Own", (type(condition),), {"follow": lambda _, *step: follow(*step)})
        condition.__class__ = kind
    for batch in batches:
        names, holding, number = (list(column) for column in zip(*batch, strict=True))
        done = [one == 0 for one in number]
        expected = []
        for name, holds, ends in zip(names if named else [None] * len(done), holding, done, strict=True):
            happens, remembered = follow(running.pop(name, start), holds)
            expected.append(happens)
            if not ends and remembered != start:
                running[name] = remembered
        columns = {"reward": torch.tensor(holding).float(), "done": torch.tensor(done)}
        steps = TensorDict({"next": columns}, [len(done)])
        if named:
            steps["trajectory"] = torch.tensor(names)
        assert condition(steps).tolist() == expected
        if len(done) == 2:
            condition.end_episodes([ending if named else None])
            running.pop(ending if named else None, None)
        state = condition.state_dict()
        found = dict(zip(state["trajectory"].tolist(), state["remembered"].tolist(), strict=True))
        assert found == {name: one for name, one in running.items() if name is not None}
        assert state["unnamed"] == running.get(None)
        if len(done) == 3:
            condition.load_state_dict(state)
