# SPDX-License-Identifier: Apache-2.0
"""The tables of a buffer, from its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_replay.report.facts import table_shares_of
from lightning_replay.report.reading import array_of


@dataclass(frozen=True)
class Table:
    """A table: its slots, int64 ``[n]`` oldest first; ``share`` of a batch by the options, ``None`` if none is fixed.

    ``appended`` entries ever came; ``drawn`` rows were drawn from it so far. ``events``: the share of all steps that
    were its events, ``None`` of other tables.
    """

    name: str
    slots: np.ndarray
    capacity: int
    appended: int
    share: float | None
    drawn: int
    events: float | None = None

    @property
    def fill(self) -> float:
        """Entries over the capacity."""
        return len(self.slots) / self.capacity


def tables_of(state: Mapping[str, Any], built_by: Any) -> list[Table]:
    """Returns the tables of a buffer in the order of their numbers; none of a buffer without.

    Args:
        state: of the buffer.
        built_by: class and options, from which the shares of a batch are read.
    """
    writer = state["writer"]
    if "tables" not in writer:
        return []
    saved = writer["tables"]
    named: list[tuple[str, int]] = [(str(name), int(capacity)) for name, capacity in state["built_from"]["tables"]]
    entries, appended = array_of(saved["entries"]), array_of(saved["appended"])
    first = array_of(saved["first"]) if "first" in saved else np.zeros(len(named), np.int64)
    drawn = state["sampler"].get("rows_drawn", [])
    shares, events = table_shares_of(built_by), _event_shares(writer, named, built_by)
    tables, offset = [], 0
    for number, (name, capacity) in enumerate(named):
        oldest = max(int(first[number]), int(appended[number]) - capacity)
        places = np.arange(oldest, int(appended[number])) % capacity
        tables.append(
            Table(
                name=name,
                slots=entries[offset + places],
                capacity=capacity,
                appended=int(appended[number]),
                share=shares.get(name),
                drawn=int(drawn[number]) if len(drawn) == len(named) else 0,
                events=events.get(name),
            )
        )
        offset += capacity
    return tables


def _event_shares(writer: Mapping[str, Any], named: list[tuple[str, int]], built_by: Any) -> dict[str, float]:
    """Returns the share of tested steps that were events by table, where each table has the events of one option."""
    fired, tested = writer.get("fired", []), int(writer.get("rows_tested", 0))
    if len(fired) != len(named) - 1 or not tested:  # several events into one table
        return {}
    return {name: count / tested for (name, _), count in zip(named[1:], fired, strict=True)}
