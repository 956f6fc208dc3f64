# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from rllib_ext.episodes import FragmentTracker


def test_an_overlap_leaves_only_its_new_rows() -> None:
    #  known   0 1 2 3 4
    #  sent          3 4 5 6     new: rows 2 and 3 of the fragment
    fragments = FragmentTracker()
    fragments.place("a", 0, 5)
    assert fragments.place("a", 3, 4) == (0, 2)
    assert fragments.place("a", 7, 1) == (0, 0)


def test_a_lost_fragment_is_a_gap_and_a_new_trajectory() -> None:
    fragments = FragmentTracker()
    fragments.place("a", 0, 3)
    assert fragments.place("a", 6, 2) == (1, 0)
    assert fragments.place("a", 8, 2) == (1, 0)
    assert fragments.gaps == 1


def test_an_episode_that_is_first_seen_in_its_middle_is_kept() -> None:
    fragments = FragmentTracker()
    assert fragments.place("a", 50, 3) == (0, 0)
    assert fragments.gaps == 0


def test_the_episode_continued_longest_ago_is_forgotten_first() -> None:
    fragments = FragmentTracker(remembered=2)
    fragments.place("a", 0, 1)
    fragments.place("b", 0, 1)
    fragments.place("a", 1, 1)
    fragments.place("c", 0, 1)  # forgets b
    assert fragments.place("a", 2, 1) == (0, 0)
    assert fragments.place("b", 1, 1) == (3, 0)
