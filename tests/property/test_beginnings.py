# SPDX-License-Identifier: Apache-2.0
"""Beginnings of episodes compared in arrays are judged as by dictionaries and sets of whole observations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_replay.episodes import beginnings
from lightning_replay.episodes.beginnings import Beginnings

ENDS, COMPARED, CALLS, STATES, RUNNING = 4, 5, 2, 12, 3


class BeginningsOfSets:
    """The oracle: beginnings as they were, with the observations themselves, for limits that short histories reach."""

    def __init__(self, compares: bool) -> None:
        self.compares, self.num_compared, self.last = compares, 0, dict[int, int]()
        self.num_ends, self.calls_left = 0, 0
        self.waiting, self.repeated, self.states, self.running = set[int](), set[int](), set[int](), set[int]()

    def read(self, rows: list[Any], is_collector: bool) -> None:
        """Reads rows of a name, an observation, the next one, and whether the episode terminated or was truncated."""
        is_judged = self.num_ends == ENDS and not self.waiting
        has_cut = any(row[4] and not row[3] for row in rows)
        if (is_judged and not self.compares) or not (self.compares or self.waiting or has_cut):
            return
        if self.compares:
            self.compare(rows)
        going_on = self.running if is_collector else set()
        self.running = {row[0] for row in rows}
        begun = {own for name, own, *_ in rows if name not in going_on}
        states = {own if terminated or truncated else last for _, own, last, terminated, truncated in rows}
        found = [last for _, _, last, terminated, truncated in rows if truncated and not terminated]
        ends = [*dict.fromkeys(found)][: ENDS - self.num_ends]
        self.states = states | (self.states if len(self.states) < STATES else set())
        self.num_ends += len(ends)
        self.calls_left = CALLS if ends else self.calls_left - 1
        waiting = self.waiting.union(ends) - self.states
        self.repeated |= waiting & begun
        self.waiting = waiting - begun if self.calls_left else set()

    def compare(self, rows: list[Any]) -> None:
        for name, own, last, terminated, truncated in rows:
            before = self.last.pop(name, None)
            self.num_compared += before is not None
            if before == own:
                self.compares = False
                return
            if self.num_compared == COMPARED:
                raise ValueError
            if not (terminated or truncated):
                self.last[name] = last
        self.compares = len(self.last) <= max(RUNNING, 2 * len(rows))


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in zip(
        ("ENDS", "COMPARED", "CALLS", "STATES", "RUNNING"), (ENDS, COMPARED, CALLS, STATES, RUNNING), strict=True
    ):
        monkeypatch.setattr(beginnings, f"_MOST_{name}", limit)


# Few rows continue others, and few ends are observations with which another episode begins.
ROW = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(5, 7), st.booleans(), st.booleans())
OTHER = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(5, 20), st.just(False), st.integers(0, 2).map(bool))
OPEN = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(5, 7), st.just(False), st.just(False))


@settings(max_examples=50, deadline=None)
@given(
    st.booleans(),
    st.booleans(),
    st.lists(st.lists(st.one_of(ROW, OTHER, OPEN), min_size=1, max_size=6), min_size=2, max_size=12),
)
# The last comparison before the refusal is of a row that continues the one before.
@example(True, False, [[(0, 0, 20, False, False), *[(0, 1, 20, False, False)] * 4, (0, 20, 9, False, False)]])
# A collector goes on with the number of an episode that it marked as truncated.
@example(False, True, [[(0, 1, 7, False, True)], [(0, 7, 8, False, False)]])
def test_beginnings_are_judged_as_by_sets(compares: bool, is_collector: bool, calls: list[list[Any]]) -> None:
    found, oracle = Beginnings(compares, is_silent=False), BeginningsOfSets(compares)
    name = ("collector", "traj_ids") if is_collector else ("trajectory",)
    for rows in calls:
        names, owns, lasts, terminated, truncated = (np.array(column) for column in zip(*rows, strict=True))
        columns = {
            name: names,
            ("observation",): owns.astype(np.float32)[:, None],
            ("next", "observation"): lasts.astype(np.float32)[:, None],
            ("next", "terminated"): terminated[:, None],
            ("next", "done"): (terminated | truncated)[:, None],
        }
        results = []
        for read in (lambda: oracle.read(rows, is_collector), lambda: found.after([*columns.values()], [*columns])):  # noqa: B023
            try:
                results.append(read())
            except ValueError:
                results.append(ValueError)
        assert (results[0] is ValueError) == (results[1] is ValueError)
        if results[0] is ValueError:
            return
        found = results[1]
        assert (found._compares, found._num_ends) == (oracle.compares, oracle.num_ends)
        assert (len(found._waiting), len(found._repeated)) == (len(oracle.waiting), len(oracle.repeated))
        assert len(found._states) == len(oracle.states)
        if oracle.compares:
            assert (found._num_compared, sorted(found._names)) == (oracle.num_compared, sorted(oracle.last))
