# SPDX-License-Identifier: Apache-2.0
"""Draws from all tables at once, rows of events more often than others, with the weights that correct for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.options import BELOW_ONE, checked_count, checked_flag, checked_number
from lightning_replay.parts import GroupTotals, ShardDraw, ShardRequest
from lightning_replay.samplers.tables import as_tensors, tables_of
from lightning_replay.samplers.uniform import UniformSampler
from lightning_replay.saving.spec import rebuildable
from lightning_replay.tables.tables import Tables


class _RowsByTable(NamedTuple):
    slots: np.ndarray  #: int64 ``[N]``, in the order of the first event tables of the rows, first rows of none.
    start: np.ndarray  #: int64 ``[L]``, at which the rows of each begin.
    counts: np.ndarray  #: int64 ``[L]``, how many there are of each.


@rebuildable
class ContinuousCorrectionSampler(UniformSampler):
    """Draws each row that a table holds in proportion to ``1 + η`` if an event table holds it, to ``1 - η`` otherwise.

    The correction for continuous states of Kompella et al. 2022, https://arxiv.org/abs/2211.00576, which needs no
    counts of states. The paper's experiments do without it. η is the share of all event tables together: single tables
    have no shares, and a row counts once however many hold it. ``priority_weight`` is the sum of priorities over the
    row's own, divided by the largest of all rows. It is 1 outside and ``(1 - η) / (1 + η)`` in an event table. With it,
    the mean over draws is the mean over the rows of all tables. Needs no feedback.

    Args:
        event_share: Share η, in [0, 1).
        min_size: Number of rows that the default table must hold.
        normalize_over_batch: Whether weights are divided by the largest of the batch.
        seed: Seed for the sampler's own generator.
        return_probabilities: Whether ``table_probability`` and ``raw_weight`` are added. This counts all rows at each
            draw.

    Sampled keys:
        index: int64 ``[B]``.
        table: int64 ``[B]``, the first event table that holds the row, or 0 if none does.
        priority_weight: float32 ``[B]``, at most 1.
        table_probability: float32 ``[B]``, with ``return_probabilities``: how likely a draw has the ``table`` of the
            row, the sum of the priorities of such rows over that of all rows.
        raw_weight: float32 ``[B]``, with ``return_probabilities``: the sum of all priorities over the row's own.

    Raises:
        ValueError: ``event_share`` outside of [0, 1).
        TypeError: at the draw, a writer that keeps no tables.
        RuntimeError: at the draw, while the default table holds fewer than ``min_size`` rows.
    """

    _draws_from_tables = True
    # The state of the tables at the last count, and the counted rows.
    _counted: tuple[bytes, _RowsByTable] | None

    def __init__(
        self,
        event_share: float,
        min_size: int = 1,
        normalize_over_batch: bool = False,
        seed: int | None = None,
        return_probabilities: bool = False,
    ) -> None:
        super().__init__(seed=seed)
        accepted = "a number in [0, 1), because with 1 rows outside are never drawn"
        self.event_share: float = checked_number("event_share", event_share, 0.0, BELOW_ONE, accepted=accepted)
        self.min_size: int = checked_count("min_size", min_size, of="rows")
        self.normalize_over_batch: bool = checked_flag("normalize_over_batch", normalize_over_batch)
        self.return_probabilities: bool = checked_flag("return_probabilities", return_probabilities)
        self._empty()

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` slots, int64 ``[B]``.

        Raises RuntimeError if the default table holds below ``min_size``.
        """
        tables = tables_of(storage, self)
        self._check_held(tables.names[0], int(tables.length[0]))
        slots = self._draw(tables, len(storage), batch_size)
        table = _first_event_table(tables.position[1:, slots] >= 0)
        weight = np.where(table > 0, (1.0 - self.event_share) / (1.0 + self.event_share), 1.0)
        drawn = np.bincount(table, minlength=len(tables))
        self.rows_drawn: np.ndarray = drawn + (self.rows_drawn if len(self.rows_drawn) else 0)
        share = raw = weight
        if self.return_probabilities:
            priority = self._priorities(len(tables))
            mass = priority * self._by_table(tables).counts
            share = (mass / mass.sum())[table]
            raw = (mass.sum() / priority)[table]
        return as_tensors(slots, {"table": table} | self._columns(weight, share, raw))

    def _columns(self, weight: np.ndarray, share: np.ndarray, raw: np.ndarray) -> dict[str, np.ndarray]:
        largest = weight.max() if self.normalize_over_batch else 1.0
        columns = {"priority_weight": weight / largest}
        if self.return_probabilities:
            columns |= {"table_probability": share, "raw_weight": raw}
        return {name: column.astype(np.float32) for name, column in columns.items()}

    def _draw(self, tables: Tables, limit: int, count: int) -> np.ndarray:
        # Rejection needs no index of priorities. A divided draw counts all rows if the tables changed.
        generator = self._generator
        kept = []
        missing = count
        candidates = 2 * count
        while missing > 0:
            uniform = torch.rand(2, candidates, dtype=torch.float64, generator=generator, device=generator.device)
            where, chance = uniform.cpu().numpy()
            slots = np.minimum((where * limit).astype(np.int64), limit - 1)
            holds = tables.position[:, slots] >= 0
            outside = np.where(holds.any(0), 1.0 - self.event_share, 0.0)
            priority = np.where(holds[1:].any(0), 1.0 + self.event_share, outside)
            kept.append(slots[chance * (1.0 + self.event_share) < priority])
            missing -= len(kept[-1])
            candidates = min(2 * candidates, 1 << 20)
        return np.concatenate(kept)[:count]

    def _check_held(self, name: str, held: int) -> None:
        if held < self.min_size:
            raise RuntimeError(f"table {name!r} holds {held} of {self.min_size} rows; collect more, or lower min_size")

    def _priorities(self, num_tables: int) -> np.ndarray:
        """Returns the priority of rows by their first event table, float64 ``[L]``.

        The first is that of rows in none.
        """
        return np.where(np.arange(num_tables) > 0, 1.0 + self.event_share, 1.0 - self.event_share)

    def group_totals(self, storage: Storage) -> GroupTotals:
        """Returns the priority mass of the rows by their first event table."""
        tables = tables_of(storage, self)
        mass = self._priorities(len(tables)) * self._by_table(tables).counts
        smallest = np.where(mass > 0, self._priorities(len(tables)), np.inf)
        return GroupTotals([*tables.names], mass, tables.length, smallest)

    def rows_of_groups(self, batch_size: int, totals: GroupTotals) -> tuple[np.ndarray, np.ndarray]:
        """Draws the first event table of each row, from the sums over all replays."""
        self._check_held(totals.names[0], int(totals.rows[0]))
        ends = np.cumsum(totals.mass)
        device = self._generator.device
        uniform = torch.rand(batch_size, dtype=torch.float64, generator=self._generator, device=device)
        chosen = np.searchsorted(ends, uniform.cpu().numpy() * ends[-1], side="right")
        # A product may be rounded to the sum itself.
        last = int(np.flatnonzero(totals.mass)[-1])
        return np.bincount(np.minimum(chosen, last), minlength=len(ends)), totals.mass / ends[-1]

    def sample_shard(self, storage: Storage, part: ShardRequest) -> tuple[Tensor, dict[str, Any], ShardDraw]:
        """Draws rows of the requested event tables, each equally likely.

        Raises ``RuntimeError`` if one holds no rows.
        """
        tables = tables_of(storage, self)
        rows = self._by_table(tables)
        count = rows.counts[part.groups]
        if not count.all():
            empty = tables.names[part.groups[int(count.argmin())]]
            raise RuntimeError(f"table {empty!r} holds no rows to draw from; call extend first")
        slots = rows.slots[rows.start[part.groups] + np.minimum((part.points * count).astype(np.int64), count - 1)]
        drawn = np.bincount(part.groups, minlength=len(tables))
        self.rows_drawn = drawn + (self.rows_drawn if len(self.rows_drawn) else 0)
        drawn_of = as_tensors(slots, {"table": part.groups.copy()})
        return *drawn_of, ShardDraw(1.0 / count, self.group_totals(storage))

    def weigh(self, part: ShardRequest, drawn: ShardDraw) -> dict[str, np.ndarray]:
        """Returns ``priority_weight`` and the columns of ``return_probabilities``, float32 ``[B]``."""
        share = part.shares[part.groups]
        probability = share * drawn.probability
        priority = self._priorities(len(part.shares))
        # The probability of a row in no event table, at the lowest ratio of probability to priority.
        with np.errstate(invalid="ignore"):
            outside = np.nanmin(part.shares * drawn.totals.smallest / priority) * priority[0]
        return self._columns(outside / probability, share, 1.0 / probability)

    def _by_table(self, tables: Tables) -> _RowsByTable:
        # Rows are counted again only if the tables have changed.
        state = tables.appended.tobytes() + tables.first.tobytes()
        if self._counted is None or self._counted[0] != state:
            held = np.flatnonzero((tables.position >= 0).any(0))
            first = _first_event_table(tables.position[1:, held] >= 0)
            count = np.bincount(first, minlength=len(tables))
            slots = held[np.argsort(first, kind="stable")]
            self._counted = state, _RowsByTable(slots, np.cumsum(count) - count, count)
        return self._counted[1]

    @property
    def nbytes(self) -> int:
        """Size of the cached rows by table in bytes. The tables belong to the storage."""
        return 0 if self._counted is None else sum(array.nbytes for array in self._counted[1])

    def _empty(self) -> None:
        self.rows_drawn = np.zeros(0, dtype=np.int64)
        self._counted = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the generator's state and the number of rows drawn from each table."""
        return super().state_dict() | {"rows_drawn": self.rows_drawn.tolist()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a saved state. Rows are counted again at the next draw."""
        super().load_state_dict(dict(state_dict))
        self.rows_drawn = np.array(state_dict["rows_drawn"], dtype=np.int64)
        self._counted = None

    def __repr__(self) -> str:
        return f"ContinuousCorrectionSampler(event_share={self.event_share})"


def _first_event_table(in_events: np.ndarray) -> np.ndarray:
    """Returns the first event table that holds each row, bool ``[L - 1, N]`` to int64 ``[N]``, or 0 for none."""
    return np.where(in_events.any(0), in_events.argmax(0) + 1, 0)
