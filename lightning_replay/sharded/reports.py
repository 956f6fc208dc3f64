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
    """Contents of a shard in few numbers.

    Attributes:
        totals: of each module's replay, by which draws are divided.
        rows: stored by each module.
        env_steps_stored: steps of the environment.
        counts: sums over the life of the shard, under names of the actors' own, by module.
        fragments_lost: fragments of episodes that could not be fetched, as their EnvRunner was lost.
        signals: progress signals of a curriculum since the last report, by module; each with its task.
    """

    totals: dict[str, GroupTotals] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    env_steps_stored: int = 0
    counts: Counts = field(default_factory=Counter)
    fragments_lost: int = 0
    signals: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of all modules."""
        return sum(self.rows.values())


@dataclass
class Losses:
    """Rows, TD errors and counts that went with lost shards.

    Attributes:
        rows: that they held, and steps that they had been sent.
        td_errors: of their rows, those that they had been sent included.
        counts: of their last reports.
    """

    rows: int = 0
    td_errors: int = 0
    counts: Counts = field(default_factory=Counter)

    def state(self) -> dict[str, Any]:
        """Returns plain values for :meth:`load`."""
        counts = [[*key, amount] for key, amount in self.counts.items()]
        return {"counts": counts, "rows": self.rows, "td_errors": self.td_errors}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state`."""
        self.rows, self.td_errors = state["rows"], state["td_errors"]
        self.counts = Counter({(name, module_id): amount for name, module_id, amount in state["counts"]})


class Answer(NamedTuple):
    """The answer of a shard.

    Attributes:
        value: result of the method.
        report: of what the shard holds afterwards.
    """

    value: Any
    report: ShardReport


class RemotePart(NamedTuple):
    """Rows that a shard has drawn: their identities, and a reference to the rows themselves.

    Attributes:
        reference: of the rows, in a form of the actors' own.
        slot, generation: int64 ``[n]`` or ``[n, 2]``, where the rows are stored.
        reply: how likely they were.
        mean_n_step: steps per row.
        module_id: the module, where there are several agents.
        stats: of the module's replay in this shard, in some of the answers.
    """

    reference: ray.ObjectRef[Any]
    slot: np.ndarray
    generation: np.ndarray
    reply: PartDraw
    mean_n_step: float
    module_id: str | None
    stats: Mapping[str, Any] | None = None
