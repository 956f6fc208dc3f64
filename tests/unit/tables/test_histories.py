# SPDX-License-Identifier: Apache-2.0
"""Histories of running episodes by hand: which rows continue which, and what is held."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_replay.tables.histories import EpisodeSlice, Histories, episode_slices, led_to_events
from lightning_replay.tables.slot_pool import Slots


def listed(trajectory: list[int], done: list[int]) -> list[tuple[int, list[int], bool, bool]]:
    found = episode_slices(np.array(trajectory, dtype=np.int64), np.array(done, dtype=bool))
    return [(one.trajectory, one.rows.tolist(), one.continues, one.ended) for one in found]


def stretch(trajectory: int, count: int, *, continues: bool = True, ended: bool = False) -> EpisodeSlice:
    return EpisodeSlice(trajectory, np.arange(count), continues, ended)


def taken(slots: Slots, count: int) -> np.ndarray:
    """Slots as a table would hold them: with one reference each."""
    one = slots.take(count)
    slots.hold(one)
    return one


@pytest.mark.parametrize(
    ("trajectory", "done", "expected"),
    [
        ([5, 5, 5], [0, 0, 0], [(5, [0, 1, 2], True, False)]),
        ([5, 5, 5], [0, 0, 1], [(5, [0, 1, 2], True, True)]),
        # The same number after an end is another episode, which continues nothing.
        ([5, 5, 5], [0, 1, 0], [(5, [0, 1], True, True), (5, [2], False, False)]),
        ([5, 5], [1, 1], [(5, [0], True, True), (5, [1], False, True)]),
        # Interleaved: b a b a, where a ends at its first.
        ([8, 3, 8, 3], [0, 1, 0, 0], [(3, [1], True, True), (3, [3], False, False), (8, [0, 2], True, False)]),
        ([-1], [1], [(-1, [0], True, True)]),
    ],
)
def test_rows_are_taken_apart_by_episode(trajectory, done, expected) -> None:
    assert listed(trajectory, done) == expected


@pytest.mark.parametrize(
    ("events", "lengths", "before", "already", "expected", "senders"),
    [
        # One event on the third of four new steps after two remembered ones; three steps go.
        (["..e."], [3], 2, [], [2, 3, 4], [2, 2, 2]),
        (["..e."], [9], 2, [], [0, 1, 2, 3, 4], [2] * 5),
        (["..e."], [3], 2, [3], [2, 4], [2, 2]),
        (["..e."], [1], 2, [], [4], [2]),
        # Two events: what the first sent is not sent again.
        (["e..e"], [2], 1, [], [0, 1, 3, 4], [0, 0, 3, 3]),
        (["ee"], [3], 0, [], [0, 1], [0, 1]),
        # Two kinds: a long history after a short one sends older steps after newer ones.
        (["e...", "..e."], [1, 3], 1, [], [1, 2, 3], [0, 2, 2]),
        ([".e..", "...e"], [1, 5], 1, [], [2, 0, 1, 3, 4], [1, 3, 3, 3, 3]),
        (["..e.", "..e."], [1, 3], 0, [], [0, 1, 2], [2, 2, 2]),
    ],
)
def test_the_steps_that_led_to_events(events, lengths, before, already, expected, senders) -> None:
    happened = np.array([[step == "e" for step in one] for one in events])
    is_sent = np.zeros(before + happened.shape[1], dtype=bool)
    is_sent[already] = True
    sent, sender = led_to_events(happened, np.array(lengths), before, is_sent)
    assert sent.tolist() == expected and sender.tolist() == senders
    assert is_sent.nonzero()[0].tolist() == already, "the caller says what was sent"


def test_the_last_steps_are_held_and_earlier_ones_released() -> None:
    """Length 3; steps of one episode come as 2, 2 and 4::

    rows of          held        released
    0 1              0 1
    2 3              1 2 3       0
    4 5 6 7          5 6 7       1 2 3
    """
    slots = Slots(9)
    histories = Histories(slots, length=3, max_trajectories=2)
    for count, expected in ((2, [0, 1]), (2, [1, 2, 3]), (4, [5, 6, 7])):
        histories.append(stretch(4, count), taken(slots, count))
        assert histories.before(stretch(4, 1)).tolist() == expected
    assert slots.references.tolist() == [1, 1, 1, 1, 1, 2, 2, 2, 0]
    assert histories.before(stretch(4, 1, continues=False)).tolist() == []
    assert histories.before(stretch(5, 1)).tolist() == []


def test_an_ended_episode_is_released() -> None:
    slots = Slots(4)
    histories = Histories(slots, length=3, max_trajectories=2)
    histories.append(stretch(4, 2), taken(slots, 2))
    histories.append(stretch(4, 1, ended=True), taken(slots, 1))
    assert len(histories) == 0 and slots.references.tolist() == [1, 1, 1, 0]
    histories.append(stretch(4, 1, continues=False), taken(slots, 1))
    assert histories.before(stretch(4, 1)).tolist() == [3]
    histories.forget(4)
    histories.forget(4)
    assert slots.references.tolist() == [1, 1, 1, 1]


def test_events_of_one_step_need_no_histories() -> None:
    slots = Slots(4)
    histories = Histories(slots, length=0, max_trajectories=1)
    histories.check_room([(np.arange(9), np.zeros(9, dtype=bool))], forget_stale=False)
    histories.append(stretch(4, 2), taken(slots, 2))
    assert len(histories) == 0 and slots.references.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("trajectory", "done", "running"),
    [
        ([3], [0], 3),  # a third one
        ([1, 3, 3], [0, 1, 0], 3),  # ends and starts again
        ([3, 4], [0, 0], 4),
    ],
)
def test_more_episodes_than_there_is_room_for_are_refused(trajectory, done, running: int) -> None:
    histories = Histories(Slots(4), length=3, max_trajectories=2)
    for name in (1, 2):
        histories.append(stretch(name, 1), taken(histories._slots, 1))
    with pytest.raises(ValueError, match=f"{running} episodes would run at once.*max_trajectories=2.*Nothing was"):
        histories.check_room([(np.array(trajectory), np.array(done, dtype=bool))], forget_stale=False)
    assert len(histories) == 2


@pytest.mark.parametrize(
    ("trajectory", "done"),
    [
        ([1, 2], [0, 0]),
        ([3], [1]),  # it ends at once
        ([1, 3], [1, 0]),  # one ends, another begins
    ],
)
def test_as_many_as_there_is_room_for_may_run(trajectory, done) -> None:
    histories = Histories(Slots(4), length=3, max_trajectories=2)
    for name in (1, 2):
        histories.append(stretch(name, 1), taken(histories._slots, 1))
    histories.check_room([(np.array(trajectory), np.array(done, dtype=bool))], forget_stale=False)
    assert len(histories) == 2 and histories.forgotten == 0


def test_stale_episodes_are_forgotten_those_continued_longest_ago_first() -> None:
    """1 and 2 run, and 1 is continued after 2: for episode 3 it is 2 that goes."""
    slots = Slots(6)
    histories = Histories(slots, length=3, max_trajectories=2)
    for name in (1, 2, 1):
        histories.append(stretch(name, 1), taken(slots, 1))
    histories.check_room([(np.array([3]), np.array([False]))], forget_stale=True)
    assert histories.forgotten == 0, "a check changes nothing"
    histories.make_room(np.array([3]), np.array([False]))
    histories.append(stretch(3, 1), taken(slots, 1))
    assert histories.forgotten == 1 and len(histories) == 2
    assert histories.before(stretch(1, 1)).tolist() == [0, 2] and histories.before(stretch(2, 1)).tolist() == []
    with pytest.raises(ValueError, match="5 episodes would run"):
        histories.check_room([(np.array([4, 5, 6]), np.zeros(3, dtype=bool))], forget_stale=True)
    assert histories.forgotten == 1, "what cannot be made room for costs nothing"


def test_room_is_looked_for_at_the_end_of_every_part() -> None:
    """Two episodes run at the end of the first part, though none does at the end of the second."""
    parts = [(np.array([1, 2]), np.array([False, False])), (np.array([1, 2]), np.array([True, True]))]
    Histories(Slots(4), length=3, max_trajectories=2).check_room(parts, forget_stale=False)
    for forget_stale in (False, True):
        with pytest.raises(ValueError, match="2 episodes would run at once"):
            Histories(Slots(4), length=3, max_trajectories=1).check_room(parts, forget_stale)


def test_histories_come_back_from_their_state() -> None:
    slots = Slots(8)
    histories = Histories(slots, length=3, max_trajectories=3)
    for name, count in ((7, 2), (1, 1), (7, 2)):
        histories.append(stretch(name, count), taken(slots, count))
    loaded = Histories(slots, length=3, max_trajectories=3)
    loaded.load_state_dict(histories.state_dict())
    assert len(loaded) == 2
    assert loaded.before(stretch(7, 1)).tolist() == [1, 3, 4] and loaded.before(stretch(1, 1)).tolist() == [2]
    loaded.append(stretch(1, 1, ended=True), taken(slots, 1))
    assert slots.references.tolist() == [1, 2, 1, 2, 2, 1, 0, 0]


def test_the_state_without_a_running_episode_is_empty() -> None:
    histories = Histories(Slots(3), length=3, max_trajectories=1)
    loaded = Histories(Slots(3), length=3, max_trajectories=1)
    loaded.append(stretch(1, 1), taken(loaded._slots, 1))
    loaded.load_state_dict(histories.state_dict())
    assert len(loaded) == 0
