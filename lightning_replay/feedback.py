# SPDX-License-Identifier: Apache-2.0
"""TD errors checked at the door, and what became of them counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.storage import PackedStorage


class Feedback:
    """Checks TD errors on their way to the sampler, drops late ones, and keeps count."""

    def __init__(self) -> None:
        self.draws_since_update = 0
        self.last_index: Tensor | None = None
        self.received = 0
        self._late = 0

    def check(
        self, index: Tensor, td_error: Tensor, generation: Tensor | None, storage: Storage, *, sampler_checks: bool
    ) -> tuple[Tensor, Tensor]:
        """Rows that still hold what was drawn, and the magnitudes of their TD errors.

        Args:
            index: int64 ``[B]`` or ``[B, 2]``.
            td_error: signed, ``[B]`` or ``[B, 1]``.
            generation: int64 ``[B]`` or ``[B, 2]``, or ``None`` to trust the index.
            storage: where the rows are.
            sampler_checks: whether the sampler refuses bad values itself, so that a sound batch is checked once.

        Returns:
            index: int64 ``[B]`` or ``[B, 2]``, -1 where the slot was written or emptied since.
            magnitude: float32 ``[B]``.
        """
        index = torch.as_tensor(index, device=storage.device)
        td_error = torch.as_tensor(td_error, device=storage.device).detach()
        self._check_shapes(index, td_error)
        magnitude = td_error.reshape(-1).abs().to(torch.float32)
        if generation is None or not isinstance(storage, PackedStorage):
            self.check_values(index, magnitude, len(storage))
            live = getattr(storage, "live_slots", None)
            if live is not None:
                index, dropped = _without(index, torch.from_numpy(~live.contains(index.cpu().numpy())).to(index.device))
                self._late += dropped
            return index, magnitude
        if not sampler_checks:
            self.check_values(index, magnitude, storage.capacity)
        generation = torch.as_tensor(generation, device=storage.device)
        slots = index if index.ndim == 1 or index.shape == generation.shape else index[:, 0]
        if slots.shape != generation.shape:
            raise ValueError(
                f"generation must be the batch's own, of shape {list(slots.shape)}; got {list(generation.shape)}. "
                "No priority was changed"
            )
        try:
            late = storage.generation_of(slots) != generation
        except IndexError:
            self.check_values(index, magnitude, len(storage))
            raise
        if bool(late.any()):
            # Not the length: slots emptied since hold nothing and are late like those written since.
            self.check_values(index, magnitude, storage.capacity)
            index, dropped = _without(index, late)
            self._late += dropped
        return index, magnitude

    @staticmethod
    def given_priority(td_error: Tensor, count: int) -> Tensor:
        """Magnitudes, float32 ``[N]``, of the TD errors that came with ``count`` new rows.

        Raises:
            ValueError: NaN or infinite ones, or another number of them than of rows.
        """
        if td_error.numel() != count:
            raise ValueError(
                f"the TD errors given with {count} rows have shape {list(td_error.shape)}; one per row is accepted. "
                "Nothing was stored"
            )
        magnitude = td_error.detach().reshape(-1).abs().to(torch.float32)
        if not bool(magnitude.isfinite().all()):
            rows = (~magnitude.isfinite()).nonzero().flatten().tolist()
            raise ValueError(
                f"the TD errors given with rows {rows[:10]} are NaN or infinite. Nothing was stored; leave the column "
                "out, or pass update_priority=False"
            )
        return magnitude

    def forget(self) -> None:
        """Nothing is drawn any more that an update could come for; the counts stay."""
        self.draws_since_update = 0
        self.last_index = None

    @staticmethod
    def _check_shapes(index: Tensor, td_error: Tensor) -> None:
        if index.dtype != torch.int64 or index.ndim not in (1, 2):
            raise ValueError(
                f"index must be int64 [B] or [B, 2], the batch's 'index'; got {index.dtype} {list(index.shape)}"
            )
        if td_error.numel() != index.shape[0]:
            raise ValueError(
                f"td_error must hold one value for each of the {index.shape[0]} rows of the batch; "
                f"got shape {list(td_error.shape)}. Reduce it over everything but the batch dimension"
            )

    @staticmethod
    def check_values(index: Tensor, magnitude: Tensor, length: int) -> None:
        """Refuses TD errors that are not finite and slots that hold nothing.

        Raises:
            ValueError, IndexError: with what was given; nothing has been changed.
        """
        if index.numel() == 0:
            return
        # A sum is NaN or infinite when any term is: one reduction instead of an elementwise test and a reduction.
        if not bool(magnitude.sum(dtype=torch.float64).isfinite()):
            rows = (~magnitude.isfinite()).nonzero().flatten().tolist()
            raise ValueError(
                f"td_error must be finite; rows {rows[:10]} of the batch are NaN or infinite. No priority was changed. "
                "Look for a diverging loss before this update"
            )
        lowest, highest = torch.aminmax(index)
        if int(lowest) < 0 or int(highest) >= length:
            raise IndexError(
                f"index must lie in 0..{length - 1}, the rows stored; got {int(lowest)}..{int(highest)}. "
                "No priority was changed. Pass the 'index' of a batch drawn from this buffer"
            )

    def stats(self, age_of: Callable[[Tensor], Tensor] | None) -> dict[str, Any]:
        """Counts, and ages of the rows of the last batch in transitions written since."""
        stats: dict[str, Any] = {"priorities_updated": self.received - self._late, "late_updates_dropped": self._late}
        if age_of is not None and self.last_index is not None:
            ages = age_of(self.last_index).float()
            stats["drawn_age_mean"] = float(ages.mean())
            stats["drawn_age_max"] = float(ages.max())
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Counters."""
        return {"received": self.received, "late": self._late, "draws_since_update": self.draws_since_update}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        self.received, self._late = state_dict["received"], state_dict["late"]
        self.draws_since_update = state_dict["draws_since_update"]
        self.last_index = None


def _without(index: Tensor, late: Tensor) -> tuple[Tensor, int]:
    """``index`` with -1, which samplers skip, in place of late rows; and how many of the batch these are."""
    if late.ndim < index.ndim:
        late = late.unsqueeze(1).expand_as(index)
    rows = late if late.ndim == 1 else late[:, 0]
    return torch.where(late, -1, index), int(rows.sum())
