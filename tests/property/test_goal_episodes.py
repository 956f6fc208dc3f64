# SPDX-License-Identifier: Apache-2.0
"""Goals of episodes in arrays stand in the order in which a list and dictionaries kept them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.samplers.reverse_sweep import GoalEpisodes

SLOTS = 12


class GoalsOfDictionaries:
    """The oracle: goals as they were, a list of episodes and slots; the last one takes the place of one that leaves."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def put(self, episode: int, slot: int) -> None:
        place = next((place for place, pair in enumerate(self.pairs) if pair[0] == episode), len(self.pairs))
        self.pairs[place : place + 1] = [(episode, slot)]

    def drop(self, slots: list[int]) -> None:
        for slot in sorted(slots):
            places = [place for place, pair in enumerate(self.pairs) if pair[1] == slot]
            if places:
                last = self.pairs.pop()
                self.pairs[places[0] : places[0] + 1] = [last][: len(self.pairs) - places[0]]


SLOTS_GIVEN = st.lists(st.integers(0, SLOTS - 1), max_size=5, unique=True)
CALLS = st.lists(
    st.tuples(SLOTS_GIVEN, st.lists(st.integers(0, 9), min_size=5, max_size=5), st.booleans()), max_size=12
)


@settings(max_examples=50)
@given(CALLS)
def test_goals_stand_in_the_order_of_a_list(calls: list[tuple[list[int], list[int], bool]]) -> None:
    goals, oracle = GoalEpisodes(SLOTS), GoalsOfDictionaries()
    for slots, episodes, reloads in calls:
        goals.drop(torch.tensor([*slots, *slots], dtype=torch.int64))
        oracle.drop(slots)
        chosen = slots[: len(slots) // 2 + 1]
        of = episodes[: len(chosen)]
        if chosen:
            goals.put(torch.tensor(of), torch.tensor(chosen))
        for episode, slot in zip(of, chosen, strict=True):
            oracle.put(episode, slot)
        if reloads:
            goals = GoalEpisodes(SLOTS, goals.state())
        assert goals.state().tolist() == [list(pair) for pair in oracle.pairs]
        assert len(goals) == len(oracle.pairs)
        assert [goals.slot(place) for place in range(len(goals))] == [slot for _, slot in oracle.pairs]
