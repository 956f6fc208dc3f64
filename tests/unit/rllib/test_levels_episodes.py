# SPDX-License-Identifier: Apache-2.0
"""Fragments of episodes that come in any order, twice, late or never."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rllib_ext.levels.server import Fragment, PendingEpisode, PendingEpisodes


def fragment(name: str, start: int, length: int, done: bool = False) -> Fragment:
    return Fragment(name, start, np.ones(length, np.float32), np.zeros(length + 1, np.float32), done, False)


def begun(*names: str, max_lag: int = 2, player: tuple[int, int] = (1, 0)) -> PendingEpisodes:
    episodes = PendingEpisodes(max_lag)
    for number, name in enumerate(names):
        episodes.begin(name, PendingEpisode(name, number, player))
    return episodes


def taken(episodes: PendingEpisodes, *fragments: Fragment) -> tuple[list[tuple[str, int]], list[str]]:
    """Actor and first step of what is learned, and actors given up."""
    learned, lost = episodes.take(fragments)
    return [(episode.actor, one.t_started) for episode, one in learned], [episode.actor for episode in lost]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_end_waits_for_all_steps_before_it(order: tuple[int, ...]) -> None:
    #   steps  0 1 2 | 3 4 | 5 6 7 end
    pieces = [fragment("a", 0, 3), fragment("a", 3, 2), fragment("a", 5, 3, done=True)]
    episodes = begun("a")
    learned = [start for place in order for _, start in taken(episodes, pieces[place])[0]]
    assert sorted(learned) == [0, 3, 5] and learned[-1] == 5
    assert not episodes.active and not any(episodes.counts.values())


def test_fragments_that_came_before_or_of_unknown_episodes_are_dropped() -> None:
    episodes = begun("a")
    assert taken(episodes, fragment("a", 0, 3), fragment("a", 0, 3), fragment("b", 0, 3)) == ([("a", 0)], [])
    assert episodes.counts["fragments_dropped"] == 2
    assert taken(episodes, fragment("a", 3, 1, done=True), fragment("a", 3, 1, done=True)) == ([("a", 3)], [])
    assert episodes.counts["fragments_dropped"] == 3


def test_what_is_missing_is_given_up_when_later_episodes_went_by() -> None:
    # a lacks its end, b a piece in the middle, c is complete, d goes on; e of another environment has all the time
    episodes = begun("a", "b", "c", "d", max_lag=2)
    episodes.begin("e", PendingEpisode("e", 9, (1, 1)))
    assert taken(episodes, fragment("a", 0, 2), fragment("b", 0, 2), fragment("b", 4, 1, done=True))[0] == [
        ("a", 0),
        ("b", 0),
    ]  # a is overtaken for the first time
    assert taken(episodes, fragment("c", 0, 1, done=True)) == ([("c", 0)], [])
    assert taken(episodes, fragment("d", 0, 1)) == ([("d", 0)], ["a"])
    assert taken(episodes, fragment("d", 1, 1)) == ([("d", 1), ("b", 4)], [])
    assert dict(episodes.counts) == {"fragments_dropped": 0, "gaps": 1, "episodes_lost": 1}
    assert episodes.active.keys() == {"d", "e"}


def test_steps_are_in_torchrls_layout() -> None:
    values = np.arange(4, dtype=np.float32)
    logits = np.ones((3, 2), np.float32)
    steps = Fragment("a", 0, np.full(3, 0.5, np.float32), values, False, True, logits).steps()
    assert steps["state_value"].tolist() == [0, 1, 2] and steps["next", "state_value"].tolist() == [1, 2, 3]
    assert steps["next", "done"].tolist() == steps["next", "truncated"].tolist() == [False, False, True]
    assert not steps["next", "terminated"].any() and steps["logits"].shape == (3, 2)
    assert not fragment("a", 0, 2).steps()["next", "done"].any() and "logits" not in fragment("a", 0, 2).steps()
