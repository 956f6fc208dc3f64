# SPDX-License-Identifier: Apache-2.0
"""Draws from all tables at once, rows of events more often than others, with the weights that correct for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.samplers.table_draws import tables_of
from lightning_replay.samplers.uniform import UniformSampler
from lightning_replay.saving.spec import recorded
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import BELOW_ONE, checked_count, checked_flag, checked_number


@recorded
class ContinuousCorrectionSampler(UniformSampler):
    """Draws each row that a table holds in proportion to ``1 + η`` if an event table holds it, to ``1 - η`` otherwise.

    The correction for continuous states of Kompella et al. 2022, https://arxiv.org/abs/2211.00576, which needs no
    counts of states; the paper's experiments do without. η is the share of all event tables together: single tables
    have no shares, and a row counts once however many hold it. ``priority_weight`` is the sum of priorities over
    the row's own, divided by the largest of all rows: 1 outside and ``(1 - η) / (1 + η)`` in an event table. With it
    the mean over draws is the mean over the rows of all tables. Needs no feedback.

    Args:
        event_share: η, in [0, 1).
        min_size: rows that the default table must hold.
        normalize_over_batch: divide the weights by the largest of the batch.
        seed: of the sampler's own generator.
        return_probabilities: add ``table_probability`` and ``raw_weight`` to each batch; counts all rows at each draw.

    Sampled keys:
        index: int64 ``[B]``.
        table: int64 ``[B]``, the first event table that holds the row, 0 where none does.
        priority_weight: float32 ``[B]``, at most 1.
        table_probability: float32 ``[B]``, with ``return_probabilities``: how likely a draw has the ``table`` of the
            row, the sum of the priorities of such rows over that of all rows.
        raw_weight: float32 ``[B]``, with ``return_probabilities``: the sum of all priorities over the row's own.

    Raises:
        ValueError: ``event_share`` is outside [0, 1), or ``min_size`` is not positive.
    """

    draws_from_tables = True

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
        self.event_share = checked_number("event_share", event_share, 0.0, BELOW_ONE, accepted=accepted)
        self.min_size = checked_count("min_size", min_size, of="rows")
        self.normalize_over_batch = checked_flag("normalize_over_batch", normalize_over_batch)
        self.return_probabilities = checked_flag("return_probabilities", return_probabilities)
        self._empty()

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` slots with replacement, int64 ``[B]`` on the storage's device.

        Raises:
            RuntimeError: the default table holds fewer than ``min_size`` rows.
        """
        tables = tables_of(storage, self)
        if tables.length[0] < self.min_size:
            raise RuntimeError(
                f"table {tables.names[0]!r} holds {tables.length[0]} rows and {self.min_size} are needed; collect more "
                "steps before the first draw, or lower min_size"
            )
        slots = self._draw(tables, len(storage), batch_size)
        table = _first_event_table(tables.position[1:, slots] >= 0)
        weight = np.where(table > 0, (1.0 - self.event_share) / (1.0 + self.event_share), 1.0)
        if self.normalize_over_batch:
            weight /= weight.max()
        drawn = np.bincount(table, minlength=len(tables))
        self.rows_drawn = drawn + (self.rows_drawn if len(self.rows_drawn) else 0)
        info = {"table": torch.from_numpy(table), "priority_weight": torch.from_numpy(weight).float()}
        if self.return_probabilities:
            holds = tables.position[:, (tables.position >= 0).any(0)] >= 0
            priority = np.where(np.arange(len(tables)) > 0, 1.0 + self.event_share, 1.0 - self.event_share)
            mass = priority * np.bincount(_first_event_table(holds[1:]), minlength=len(tables))
            info["table_probability"] = torch.from_numpy((mass / mass.sum())[table]).float()
            info["raw_weight"] = torch.from_numpy((mass.sum() / priority)[table]).float()
        device = storage.device
        return torch.from_numpy(slots).to(device), {key: value.to(device) for key, value in info.items()}

    def _draw(self, tables: Tables, limit: int, count: int) -> np.ndarray:
        """Draws ``count`` slots below ``limit`` by rejection, which needs no index of priorities."""
        generator, kept, missing, candidates = self._generator, [], count, 2 * count
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

    def draw_state(self) -> Any:
        """Returns what a draw changes: the generator's state and the rows drawn."""
        return super().draw_state(), self.rows_drawn

    def undo_draw(self, state: Any) -> None:
        """Undoes the draws since :meth:`draw_state`."""
        generator, self.rows_drawn = state
        super().undo_draw(generator)

    def _empty(self) -> None:
        self.rows_drawn = np.zeros(0, dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the generator, and the rows drawn."""
        return super().state_dict() | {"rows_drawn": self.rows_drawn.tolist()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        super().load_state_dict(dict(state_dict))
        self.rows_drawn = np.array(state_dict["rows_drawn"], dtype=np.int64)

    def __repr__(self) -> str:
        return f"ContinuousCorrectionSampler(event_share={self.event_share})"


def _first_event_table(in_events: np.ndarray) -> np.ndarray:
    """Returns the first event table that holds each row, bool ``[L - 1, N]`` to int64 ``[N]``; 0 for none."""
    return np.where(in_events.any(0), in_events.argmax(0) + 1, 0)
