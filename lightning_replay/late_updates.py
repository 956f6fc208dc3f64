# SPDX-License-Identifier: Apache-2.0
"""TD errors of rows that may have left since they were drawn: late ones are dropped and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.priority_updates import check_values, magnitudes
from lightning_replay.storage.access import occupancy_of
from lightning_replay.storage.packed import PackedStorage


@dataclass(frozen=True, slots=True)
class Checked:
    """Feedback that no part refuses.

    Attributes:
        index: int64 ``[B]`` or ``[B, 2]``, -1 where the row has left since.
        magnitude: float32 ``[B]``.
        num_late: rows of the batch that have left.
    """

    index: Tensor
    magnitude: Tensor
    num_late: int


class Feedback:
    """Checks TD errors on their way to the sampler, drops late ones, and counts them."""

    def __init__(self) -> None:
        self.draws_since_update: int = 0
        self.last_index: Tensor | None = None
        self.received: int = 0
        self._late = 0

    @staticmethod
    def check(
        index: Tensor, td_error: Tensor | None, generation: Tensor | None, storage: Storage, *, sampler_checks: bool
    ) -> Checked:
        """Returns rows that still hold what was drawn, and the magnitudes of their TD errors; changes nothing.

        Args:
            index: int64 ``[B]`` or ``[B, 2]``.
            td_error: signed, ``[B]`` or ``[B, 1]``, or ``None``.
            generation: int64 ``[B]`` or ``[B, 2]``, or ``None`` to trust the index.
            storage: of the rows.
            sampler_checks: whether the sampler refuses bad values itself, so that a batch is checked once.
        """
        index = index.to(storage.device)
        if index.dtype != torch.int64 or index.ndim not in (1, 2):
            raise ValueError(
                f"index must be int64 [B] or [B, 2], the batch's 'index'; got {index.dtype} {list(index.shape)}"
            )
        if td_error is None:
            magnitude = torch.zeros(index.shape[0], device=index.device)
        elif td_error.numel() == index.shape[0]:
            magnitude = magnitudes(td_error.to(storage.device))
        else:
            raise ValueError(
                f"td_error must hold one value for each of the {index.shape[0]} rows of the batch; "
                f"got shape {list(td_error.shape)}. Reduce it over everything but the batch dimension"
            )
        if generation is None or not isinstance(storage, PackedStorage):
            check_values(index, magnitude, len(storage))
            drawable = occupancy_of(storage).drawable(index)
            return Checked(index, magnitude, 0) if drawable is None else _without(index, magnitude, ~drawable)
        if not sampler_checks:
            check_values(index, magnitude, storage.capacity)
        generation = generation.to(storage.device)
        slots = index if index.ndim == 1 or index.shape == generation.shape else index[:, 0]
        if slots.shape != generation.shape:
            raise ValueError(
                f"generation must be the batch's own, of shape {list(slots.shape)}; got {list(generation.shape)}. "
                "No priority was changed"
            )
        try:
            late = storage.generation_of(slots) != generation
            drawable = storage.occupancy.drawable(slots)
        except IndexError:
            check_values(index, magnitude, len(storage))
            raise
        if drawable is not None:
            late |= ~drawable
        if not bool(late.any()):
            return Checked(index, magnitude, 0)
        # Not the length: slots emptied since are late like those written since.
        check_values(index, magnitude, storage.capacity)
        return _without(index, magnitude, late)

    def count(self, received: int, late: int) -> None:
        """Counts an update that every part has accepted: its rows, and those of them that had left."""
        self.draws_since_update = 0
        self.received += received
        self._late += late

    def forget(self) -> None:
        """Discards the last batch, whose rows are gone; the counts stay."""
        self.draws_since_update = 0
        self.last_index = None

    def stats(self, age_of: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
        """Returns counts, and ages of the rows of the last batch in transitions written since."""
        stats: dict[str, Any] = {"priorities_updated": self.received - self._late, "late_updates_dropped": self._late}
        ages = None if self.last_index is None else age_of(self.last_index)
        if ages is not None:
            stats["drawn_age_mean"] = float(ages.float().mean())
            stats["drawn_age_max"] = float(ages.max())
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters."""
        return {"received": self.received, "late": self._late, "draws_since_update": self.draws_since_update}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.received, self._late = state_dict["received"], state_dict["late"]
        self.draws_since_update = state_dict["draws_since_update"]
        self.last_index = None


def _without(index: Tensor, magnitude: Tensor, late: Tensor) -> Checked:
    """Returns ``index`` with -1, which samplers skip, in place of late rows."""
    if late.ndim < index.ndim:
        late = late.unsqueeze(1).expand_as(index)
    rows = late if late.ndim == 1 else late[:, 0]
    return Checked(torch.where(late, -1, index), magnitude, int(rows.sum()))
