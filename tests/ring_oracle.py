# SPDX-License-Identifier: Apache-2.0
"""A prioritized ring buffer in plain lists, to compare the real one with."""

from __future__ import annotations

import numpy as np


class RingOracle:
    """What a first in, first out buffer of numbered transitions holds; new rows enter with the largest priority."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.number = [-1] * capacity
        self.generation = [0] * capacity
        self.priority = [0.0] * capacity
        self.done = [False] * capacity
        self.written = 0
        self.cursor = 0
        self.length = 0
        self.late = 0
        self.largest: float | None = None

    def extend(self, done: list[bool]) -> list[int]:
        """Stores the next ``len(done)`` numbers; returns the slots of those that stayed."""
        kept = min(len(done), self.capacity)
        start = (self.cursor + len(done) - kept) % self.capacity
        slots = [(start + offset) % self.capacity for offset in range(kept)]
        for offset, slot in enumerate(slots):
            self.number[slot] = self.written + len(done) - kept + offset
            self.done[slot] = done[len(done) - kept + offset]
            self.generation[slot] += 1
            self.priority[slot] = self.largest or 1.0  # 1 where none, or only zeros, were given
        self.written += len(done)
        self.cursor = (start + kept) % self.capacity
        self.length = min(self.capacity, self.length + kept)
        return slots

    def update(self, slots: list[int], generations: list[int], errors: list[float]) -> None:
        """The last of several errors for one slot counts; slots written since are late."""
        for slot, generation, error in zip(slots, generations, errors, strict=True):
            if self.generation[slot] != generation:
                self.late += 1
                continue
            self.priority[slot] = abs(error)
            self.largest = max(self.largest or 0.0, abs(error))

    def total(self) -> float:
        return sum(self.priority[: self.length])

    def weights(self, slots: list[int], exponent: float) -> np.ndarray:
        """Importance weights divided by the largest in memory: ``(p / p_min) ** -exponent``."""
        smallest = min(priority for priority in self.priority[: self.length] if priority > 0)
        return np.array([(self.priority[slot] / smallest) ** -exponent for slot in slots])

    def n_step(self, slot: int, n_steps: int, discount: float) -> tuple[float, int]:
        where = {number: position for position, number in enumerate(self.number) if number >= 0}
        number, total = self.number[slot], 0.0
        for step in range(n_steps):
            total += discount**step * (number + step)
            if self.done[where[number + step]] or number + step + 1 not in where:
                return total, step + 1
        return total, n_steps
