# SPDX-License-Identifier: Apache-2.0
"""Event tables in plain lists of step numbers, one step after the other, to compare the real ones with."""

from __future__ import annotations

from collections import Counter


class TableOracle:
    """Stratified Sampling from Event Tables, section 4; of tables the capacity and events (name, history length)."""

    def __init__(self, capacity: int, tables: dict[str, tuple[int, list[tuple[str, int]]]]) -> None:
        self.default: list[int] = []
        self.contents: dict[str, list[int]] = {name: [] for name in tables}
        self._capacity, self._tables = capacity, tables
        self._episodes: dict[int, list[int]] = {}
        self._sent: dict[int, dict[str, set[int]]] = {}

    def add(self, number: int, trajectory: int, true: set[str], done: bool) -> None:
        self.default = [*self.default, number][-self._capacity :]
        self.make_room()
        episode = self._episodes[trajectory] = self._episodes.pop(trajectory, [])  # the one continued last is last
        sent = self._sent.setdefault(trajectory, {name: set() for name in self._tables})
        episode.append(number)
        for name, (capacity, events) in self._tables.items():
            lengths = [length for event, length in events if event in true]
            if lengths:
                new = [step for step in episode[-max(lengths) :] if step not in sent[name]]
                sent[name].update(new)
                self.contents[name] = [*self.contents[name], *new][-capacity:]
        if done:
            del self._episodes[trajectory], self._sent[trajectory]

    def make_room(self) -> None:
        """Called once a new step is in the default table."""

    def references(self) -> Counter[int]:
        """How many tables and running episodes refer to each step."""
        longest = max(length for _, events in self._tables.values() for _, length in events)
        held = [step for episode in self._episodes.values() for step in (episode[1 - longest :] if longest > 1 else [])]
        return Counter([*self.default, *held, *(step for content in self.contents.values() for step in content)])
