# SPDX-License-Identifier: Apache-2.0
"""Links found in arrays are those that dictionaries of newest slots found, whatever is written, ended, and saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.episodes.links import Continuity, EpisodeLinks

CAPACITY = 9
STREAMS = 4


class LinksOfDictionaries:
    """The oracle: links as they were, with a dictionary of the newest slot of each running episode."""

    def __init__(self, continuity: Continuity | None) -> None:
        self.continuity = continuity
        self.successor = np.full(CAPACITY, -1)
        self.predecessor = np.full(CAPACITY, -1)
        self.newest: dict[int | None, int] = {}
        self.at: dict[int, int | None] = {}

    def write(self, slots: np.ndarray, names: list[int | None], done: list[bool]) -> None:
        for start in range(0, len(slots), CAPACITY):
            part = slice(start, start + CAPACITY)
            self.cut(slots[part])
            pairs = []
            for slot, name, is_over in zip(slots[part].tolist(), names[part], done[part], strict=True):
                before = self.pop(name)
                if before >= 0:
                    pairs.append((before, slot))
                if not is_over:
                    self.newest[name], self.at[slot] = slot, name
            first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
            if self.continuity is not None and pairs:
                continued = self.continuity.of_slots(first, second)
                first, second = first[continued], second[continued]
            self.successor[first], self.predecessor[second] = second, first

    def cut(self, slots: np.ndarray) -> None:
        before, after = self.predecessor[slots], self.successor[slots]
        self.successor[before[before >= 0]] = -1
        self.predecessor[after[after >= 0]] = -1
        self.successor[slots] = self.predecessor[slots] = -1
        for slot in self.at.keys() & set(slots.tolist()):
            del self.newest[self.at.pop(slot)]

    def pop(self, name: int | None) -> int:
        slot = self.newest.pop(name, -1)
        self.at.pop(slot, None)
        return slot

    def end_episodes(self, slots: np.ndarray, names: Iterable[int | None]) -> None:
        following = self.successor[slots]
        self.predecessor[following[following >= 0]] = -1
        self.successor[slots] = -1
        for slot in self.at.keys() & set(slots.tolist()):
            del self.newest[self.at.pop(slot)]
        for name in names:
            self.pop(name)

    def release(self, slots: np.ndarray) -> None:
        before = self.predecessor[slots]
        self.end_episodes(np.concatenate((before[before >= 0], slots)), [])

    def ended(self, slots: list[int]) -> list[int]:
        return [slot for slot in dict.fromkeys(slots) if slot not in self.at and self.successor[slot] < 0]


class Histories:
    """The same history for both: environments that step together, and rows in any order, named or not."""

    def __init__(self, compares: bool, random: Any) -> None:
        self.observed = torch.zeros(CAPACITY, 2)
        self.rows = TensorDict({"observation": self.observed, "next": {"observation": torch.zeros(CAPACITY, 2)}})
        self.rows.batch_size = [CAPACITY]
        self.random = random
        self.at = [0] * STREAMS  # The number of the observation of each environment.
        self.names = list(range(STREAMS))  # The running episode of each environment.
        self.head = 0
        self.comparisons = [Continuity(self.rows) if compares else None for _ in range(2)]
        self.links = EpisodeLinks(CAPACITY, self.comparisons[0])
        self.oracle = LinksOfDictionaries(self.comparisons[1])

    def step(self, environments: list[int], ended: list[bool], restarts: list[bool], is_named: bool) -> None:
        """One row of each of these environments, which may stand there twice; new episodes have new names."""
        names, owns, followings = [], [], []
        for environment, is_over, is_restarted in zip(environments, ended, restarts, strict=True):
            if is_restarted:
                self.at[environment] += 7
            names.append(self.names[environment])
            owns.append(self.at[environment])
            self.at[environment] += 1
            followings.append(self.at[environment])
            if is_over:
                self.at[environment] += 7
                self.names[environment] += self.random.choice([0, STREAMS])
        slots = [(self.head + row) % CAPACITY for row in range(len(names))]
        self.head = (self.head + len(names)) % CAPACITY
        self.write(slots, names if is_named else None, owns, followings, ended)

    def write(
        self, slots: list[int], names: list[int] | None, owns: list[int], followings: list[int], ended: list[bool]
    ) -> None:
        for slot, own, following in zip(slots, owns, followings, strict=True):
            self.rows["observation"][slot] = own
            self.rows["next", "observation"][slot] = following
        running = [*self.oracle.at]
        self.oracle.write(np.array(slots), [None] * len(slots) if names is None else names, ended)
        self.links.write(torch.tensor(slots), None if names is None else torch.tensor(names), torch.tensor(ended))
        expected = self.oracle.ended([*running, *slots])
        found = self.links.ended(np.concatenate((self.links.stopped, np.array(slots))))
        # Episodes without a next row that ended before this call are known since then.
        assert sorted(found.tolist()) == sorted(expected)

    def end(self, slots: list[int], names: list[int | None]) -> None:
        self.oracle.end_episodes(np.array(slots, dtype=np.int64), names)
        self.links.end_episodes(torch.tensor(slots, dtype=torch.int64), names)

    def release(self, slots: list[int]) -> None:
        self.oracle.release(np.array(slots, dtype=np.int64))
        self.links.release(torch.tensor(slots, dtype=torch.int64))

    def reload(self) -> None:
        state = self.links.state_dict()
        self.links = EpisodeLinks(CAPACITY, self.comparisons[0])
        self.links.load_state_dict(state)

    def compare(self) -> None:
        assert self.links.successor.tolist() == self.oracle.successor.tolist()
        assert self.links.predecessor.tolist() == self.oracle.predecessor.tolist()
        assert sorted(self.links.running.tolist()) == sorted(self.oracle.at)
        state = self.links.state_dict()
        running = zip(state["running_trajectory"].tolist(), state["running_slot"].tolist(), strict=True)
        named = dict(running) | ({None: state["newest_slot"]} if state["newest_slot"] >= 0 else {})
        assert named == self.oracle.newest
        counts = [(one._tally._compared, one._tally._broken) for one in self.comparisons if one is not None]
        assert len(set(counts)) <= 1
        assert {name: state[name].dtype for name in ("successor", "running_trajectory", "running_slot")} == {
            "successor": torch.int64,
            "running_trajectory": torch.int64,
            "running_slot": torch.int64,
        }


ENVIRONMENTS = st.one_of(
    st.just([*range(STREAMS)]),  # one row of each, in the same order
    st.permutations(range(STREAMS)),
    st.lists(st.integers(0, STREAMS - 1), min_size=1, max_size=2 * CAPACITY + 3),
)
SLOTS = st.lists(st.integers(0, CAPACITY - 1), max_size=3, unique=True)
NAMES = st.lists(st.one_of(st.integers(0, 2 * STREAMS), st.none()), max_size=2)
CALLS = st.one_of(
    *(st.tuples(st.just("step"), ENVIRONMENTS, st.integers(0, 2)) for _ in range(5)),
    st.tuples(st.just("end"), SLOTS, NAMES),
    st.tuples(st.just("release"), SLOTS, st.none()),
    st.tuples(st.just("reload"), st.none(), st.none()),
)


@settings(max_examples=50, deadline=None)
@given(st.booleans(), st.sampled_from([0.0, 0.3]), st.lists(CALLS, max_size=14), st.randoms(use_true_random=False))
def test_links_equal_those_of_dictionaries(compares: bool, unnamed: float, calls: list[Any], random: Any) -> None:
    histories = Histories(compares, random)
    for kind, first, second in calls:
        if kind == "step":
            ended, restarts = ([random.random() < 0.2 * second for _ in first] for _ in range(2))
            histories.step(first, ended, restarts, is_named=random.random() >= unnamed)
        elif kind == "end":
            histories.end(first, second)
        elif kind == "release":
            histories.release(first)
        else:
            histories.reload()
        histories.compare()
