# SPDX-License-Identifier: Apache-2.0
"""A buffer in a plain list from which the least worth keeping leaves, one row at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Row:
    """A transition: its number (its age among all that were offered), slot and priority."""

    number: int
    slot: int
    priority: float


@dataclass
class RetentionOracle:
    """Decides by scans of the list; ``rows`` are in the order in which they entered."""

    capacity: int
    always_admit: bool = False
    ties_enter: bool = False
    rows: list[Row] = field(default_factory=list)
    offered: int = 0
    admitted: int = 0
    refused: int = 0
    evicted: int = 0
    largest: float = -math.inf

    def offer(self, priority: float | None) -> None:
        """One candidate; ``None`` is the largest priority seen."""
        if priority is None:
            priority = self.largest if self.largest > 0 else 1.0
        self.largest = max(self.largest, priority)
        number, slot = self.offered, len(self.rows)
        self.offered += 1
        if len(self.rows) == self.capacity:
            victim = min(self.rows, key=lambda row: (row.priority, row.number))
            higher = priority > victim.priority or (self.ties_enter and priority == victim.priority)
            if not (higher or self.always_admit):
                self.refused += 1
                return
            self.rows.remove(victim)
            self.evicted += 1
            slot = victim.slot
        self.rows.append(Row(number, slot, priority))
        self.admitted += 1

    def update(self, slot: int, priority: float) -> None:
        (row,) = (row for row in self.rows if row.slot == slot)
        row.priority = priority
        self.largest = max(self.largest, priority)

    def by_slot(self) -> list[tuple[int, float]]:
        return [(row.number, row.priority) for row in sorted(self.rows, key=lambda row: row.slot)]

    def leaving(self) -> list[int]:
        """Slots in the order in which their rows leave."""
        return [row.slot for row in sorted(self.rows, key=lambda row: (row.priority, row.number))]


def softmax_weight(values: list[float], action: int, inverse_temperature: float) -> float:
    """On-policyness in float64."""
    logits = np.array(values) * inverse_temperature
    powers = np.exp(logits - logits.max())
    return float(powers[action] / powers.sum())


def float32(value: Any) -> float:
    """As it is stored."""
    return float(np.float32(value))
