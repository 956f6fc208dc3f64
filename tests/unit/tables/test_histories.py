# SPDX-License-Identifier: Apache-2.0
"""Histories of running episodes by hand: which rows continue which, what is held, and what leads to events."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from lightning_replay.episodes.groups import EpisodeGroups, groups_of
from lightning_replay.tables.histories import Histories
from lightning_replay.tables.kernels import EventArrays
from lightning_replay.tables.tables import Tables

EMPTY: list[int] = []


class World:
    """A default table of 20 and one event table, whose events have the given history lengths."""

    def __init__(
        self, length: int, max_trajectories: int = 3, events: tuple[int, ...] = (1,), forget_stale: bool = False
    ) -> None:
        self.tables = Tables({"default": 20, "events": 20})
        self.histories = Histories(self.tables, length, max_trajectories, forget_stale)
        sent = np.zeros((self.tables.num_slots, 1), dtype=bool)
        self.events = EventArrays(np.zeros(len(events), dtype=np.int64), np.array(events), sent)

    def add(self, trajectory: list[int], done: list[int] | None = None, events: list[str] = EMPTY) -> list[int]:
        """Rows in new slots; returns those that went to the event table."""
        rows = grouped(trajectory, done or [0] * len(trajectory))
        slots = self.tables.append_new_to_each(np.zeros(len(trajectory), dtype=np.int64))
        none = ["." * len(trajectory)] * len(self.events.table)
        happened = np.array([[step == "e" for step in one] for one in events or none])
        return self.histories.follow(happened, self.events, rows, slots)[1].tolist()

    @property
    def references(self) -> list[int]:
        return self.tables.references[: self.tables.rows_written].tolist()


def grouped(trajectory: list[int], done: list[int]) -> EpisodeGroups:
    return groups_of(np.array(trajectory, dtype=np.int64), np.array(done, dtype=bool))


@pytest.mark.parametrize(
    ("trajectory", "done", "expected"),
    [
        ([5, 5, 5], [0, 0, 0], ([5], [0, 1, 2], [0, 3], [False])),
        ([5, 5, 5], [0, 1, 0], ([5], [0, 1, 2], [0, 3], [False])),
        ([-1], [1], ([-1], [0], [0, 1], [True])),
        # Interleaved: b a b a, where a ends at its first.
        ([8, 3, 8, 3], [0, 1, 0, 0], ([3, 8], [1, 3, 0, 2], [0, 2, 4], [False, False])),
        ([8, 3, 8, 3], [0, 0, 1, 0], ([3, 8], [1, 3, 0, 2], [0, 2, 4], [False, True])),
    ],
)
def test_rows_are_grouped_by_episode(trajectory, done, expected) -> None:
    groups = grouped(trajectory, done)
    found = groups.trajectory, groups.order, groups.start, groups.ended
    assert tuple(one.tolist() for one in found) == expected


def test_rows_without_a_trajectory_are_one_episode() -> None:
    groups = groups_of(None, np.array([False, True]))
    assert (groups.trajectory.tolist(), groups.start.tolist(), groups.ended.tolist()) == ([0], [0, 2], [True])


@pytest.mark.parametrize(
    ("events", "lengths", "before", "expected"),
    [
        # Slots: two remembered steps 0 1, then four new ones 2 3 4 5. One event on the third of these.
        (["..e."], (3,), 2, [2, 3, 4]),
        (["..e."], (9,), 2, [0, 1, 2, 3, 4]),
        (["..e."], (1,), 2, [4]),
        # Two events: what the first sent is not sent again.
        (["e..e"], (2,), 1, [0, 1, 3, 4]),
        (["ee.."], (3,), 0, [0, 1]),
        # Two kinds: a long history after a short one sends older steps after newer ones.
        (["e...", "..e."], (1, 3), 1, [1, 2, 3]),
        ([".e..", "...e"], (1, 5), 1, [2, 0, 1, 3, 4]),
        (["..e.", "..e."], (1, 3), 0, [0, 1, 2]),
    ],
)
def test_the_steps_that_led_to_events(events, lengths, before, expected) -> None:
    world = World(length=max(lengths) - 1, events=lengths)
    if before:
        world.add([7] * before)
    assert world.add([7] * 4, events=events) == expected
    assert world.tables.slots_of(1).tolist() == expected


def test_histories_end_with_their_episodes_and_go_by_the_order_of_events() -> None:
    """Episodes 1 and 2 side by side; 1 ends in between, and its number begins again::

    row          0  1  2  3  4  5
    episode      2  1  1  2  1  2
    done               x
    event                 e  e
    """
    world = World(length=4, events=(5,))
    assert world.add([2, 1, 1, 2, 1, 2], [0, 0, 1, 0, 0, 0], ["...ee."]) == [0, 3, 4]


def test_the_last_steps_are_held_and_earlier_ones_released() -> None:
    """Length 3; steps of one episode come as 2, 2 and 4::

    rows of          held        released
    0 1              0 1
    2 3              1 2 3       0
    4 5 6 7          5 6 7       1 2 3
    """
    world = World(length=3)
    for count, expected in ((2, [0, 1]), (2, [1, 2, 3]), (4, [5, 6, 7])):
        world.add([4] * count)
        assert world.histories.of(4).tolist() == expected
    assert world.references == [1, 1, 1, 1, 1, 2, 2, 2]
    assert world.histories.of(5).tolist() == []


def test_an_ended_episode_is_released() -> None:
    world = World(length=3)
    world.add([4, 4])
    world.add([4], [1])
    assert len(world.histories) == 0 and world.references == [1, 1, 1]
    world.add([4])
    assert world.histories.of(4).tolist() == [3]
    world.histories.end_episodes([4])
    world.histories.end_episodes([4])
    assert world.references == [1, 1, 1, 1]


def test_events_of_one_step_need_no_histories() -> None:
    world = World(length=0, max_trajectories=1)
    world.histories.check_room([grouped(list(range(9)), [0] * 9)])
    assert world.add([4, 4], events=[".e"]) == [1]
    assert len(world.histories) == 0 and world.references == [1, 2]


@pytest.mark.parametrize(
    ("trajectory", "done", "running"),
    [
        ([3], [0], 3),  # a third one
        ([1, 3, 3], [0, 1, 0], 3),  # ends and starts again
        ([3, 4], [0, 0], 4),
        ([1, 2], [0, 0], 2),
        ([3], [1], 2),  # it ends at once
        ([1, 3], [1, 0], 2),  # one ends, another begins
    ],
)
def test_as_many_episodes_run_as_there_is_room_for(trajectory, done, running: int) -> None:
    world = World(length=3, max_trajectories=2)
    world.add([1, 2])
    message = f"{running} episodes would run at once.*max_trajectories=2.*Nothing was"
    with pytest.raises(ValueError, match=message) if running > 2 else nullcontext():
        world.histories.check_room([grouped(trajectory, done)])
    assert len(world.histories) == 2 and world.histories.forgotten == 0


def test_stale_episodes_are_forgotten_those_continued_longest_ago_first() -> None:
    """1 and 2 run, and 1 is continued after 2: for episode 3 it is 2 that goes."""
    world = World(length=3, max_trajectories=2, forget_stale=True)
    for name in (1, 2, 1):
        world.add([name])
    histories, third = world.histories, grouped([3], [0])
    histories.check_room([third])
    assert histories.forgotten == 0, "a check changes nothing"
    assert histories.evict_stale(third).tolist() == [2]
    world.add([3])
    assert histories.forgotten == 1 and len(histories) == 2
    assert histories.of(1).tolist() == [0, 2] and histories.of(2).tolist() == []
    with pytest.raises(ValueError, match="5 episodes would run"):
        World(length=3, max_trajectories=2, forget_stale=True).histories.check_room([grouped(list(range(5)), [0] * 5)])
    assert histories.evict_oldest().tolist() == [1] and histories.forgotten == 2


def test_room_is_looked_for_at_the_end_of_every_part() -> None:
    """Two episodes run at the end of the first part, though none does at the end of the second."""
    parts = [grouped([1, 2], [0, 0]), grouped([1, 2], [1, 1])]
    World(length=3, max_trajectories=2).histories.check_room(parts)
    for forget_stale in (False, True):
        with pytest.raises(ValueError, match="2 episodes would run at once"):
            World(length=3, max_trajectories=1, forget_stale=forget_stale).histories.check_room(parts)


def test_histories_come_back_from_their_state() -> None:
    world = World(length=3)
    for name, count in ((7, 2), (1, 1), (7, 2)):
        world.add([name] * count)
    state = world.histories.state_dict()
    assert state["trajectory"].tolist() == [1, 7], "the one continued last is last"
    world.histories.load_state_dict(state)
    assert len(world.histories) == 2
    assert world.histories.of(7).tolist() == [1, 3, 4] and world.histories.of(1).tolist() == [2]
    world.add([1], [1])
    assert world.references == [1, 2, 1, 2, 2, 1]
