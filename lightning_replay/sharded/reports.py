# SPDX-License-Identifier: Apache-2.0
"""Answers of shards: the result of a method, and a report of what the shard holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import ray

    from lightning_replay.draw_parts import GroupTotals, PartDraw

Counts = Counter[tuple[str, str]]


@dataclass
class ShardReport:
    """Contents of a shard in few numbers."""

    totals: dict[str, GroupTotals] = field(default_factory=dict)  # of each module, by which draws are divided
    rows: dict[str, int] = field(default_factory=dict)  # stored by each module
    env_steps_stored: int = 0
    counts: Counts = field(default_factory=Counter)  # sums over the life of the shard, by module
    fragments_lost: int = 0  # rows or fragments of episodes whose sender was lost before they could be fetched
    #: Progress signals of a curriculum since the last report, by module; each with its task.
    signals: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())


@dataclass
class Losses:
    """Rows, TD errors and counts that went with lost shards."""

    rows: int = 0  # that they held, and steps that they had been sent
    td_errors: int = 0  # of their rows, also those that they had been sent
    counts: Counts = field(default_factory=Counter)  # of their last reports

    def state(self) -> dict[str, Any]:
        counts = [[*key, amount] for key, amount in self.counts.items()]
        return {"counts": counts, "rows": self.rows, "td_errors": self.td_errors}

    def load(self, state: Mapping[str, Any]) -> None:
        self.rows, self.td_errors = state["rows"], state["td_errors"]
        self.counts = Counter({(name, module_id): amount for name, module_id, amount in state["counts"]})


class Answer(NamedTuple):
    """The answer of a shard: the result of a method, and what the shard holds afterwards."""

    value: Any
    report: ShardReport


class RemotePart(NamedTuple):
    """Rows that a shard has drawn: their identities, and a reference to the rows themselves."""

    reference: ray.ObjectRef[Any]  # of the rows, in a form of the actors' own
    slot: np.ndarray  # int64 [n] or [n, 2], where the rows are stored
    generation: np.ndarray
    reply: PartDraw  # how likely they were
    mean_n_step: float = 1.0  # steps per row
    module_id: str | None = None  # where there are several agents
    stats: Mapping[str, Any] | None = None  # of the module's replay in this shard, in some of the answers
