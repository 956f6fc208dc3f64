# SPDX-License-Identifier: Apache-2.0
"""TD errors checked before any part takes them, and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.storage.packed import PackedStorage, occupancy_of


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
        self.draws_since_update = 0
        self.last_index: Tensor | None = None
        self.received = 0
        self._late = 0

    def check(
        self,
        index: Tensor,
        td_error: Tensor | None,
        generation: Tensor | None,
        storage: Storage,
        *,
        sampler_checks: bool,
    ) -> Checked:
        """Returns rows that still hold what was drawn, and the magnitudes of their TD errors; changes nothing.

        Args:
            index: int64 ``[B]`` or ``[B, 2]``.
            td_error: signed, ``[B]`` or ``[B, 1]``, or ``None``.
            generation: int64 ``[B]`` or ``[B, 2]``, or ``None`` to trust the index.
            storage: where the rows are.
            sampler_checks: whether the sampler refuses bad values itself, so that a sound batch is checked once.
        """
        index = torch.as_tensor(index, device=storage.device)
        magnitude = self._magnitude(index, td_error, storage)
        if generation is None or not isinstance(storage, PackedStorage):
            self.check_values(index, magnitude, len(storage))
            return _without(index, magnitude, _released(storage, index))
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
            released = _released(storage, slots)
        except IndexError:
            self.check_values(index, magnitude, len(storage))
            raise
        late = late if released is None else late | released
        if not bool(late.any()):
            return Checked(index, magnitude, 0)
        # Not the length: slots emptied since hold nothing and are late like those written since.
        self.check_values(index, magnitude, storage.capacity)
        return _without(index, magnitude, late)

    def count(self, checked: Checked) -> None:
        """Counts an update that every part has taken."""
        self.draws_since_update = 0
        self.received += checked.index.shape[0]
        self._late += checked.num_late

    @staticmethod
    def _magnitude(index: Tensor, td_error: Tensor | None, storage: Storage) -> Tensor:
        if index.dtype != torch.int64 or index.ndim not in (1, 2):
            raise ValueError(
                f"index must be int64 [B] or [B, 2], the batch's 'index'; got {index.dtype} {list(index.shape)}"
            )
        if td_error is None:
            return torch.zeros(index.shape[0], device=index.device)
        td_error = td_error.to(storage.device)
        if td_error.numel() != index.shape[0]:
            raise ValueError(
                f"td_error must hold one value for each of the {index.shape[0]} rows of the batch; "
                f"got shape {list(td_error.shape)}. Reduce it over everything but the batch dimension"
            )
        return _magnitude(td_error)

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
        magnitude = _magnitude(real_numbers("td_error", td_error, "Nothing was stored"))
        if not bool(magnitude.isfinite().all()):
            rows = (~magnitude.isfinite()).nonzero().flatten().tolist()
            raise ValueError(
                f"the TD errors given with rows {rows[:10]} are NaN or infinite. Nothing was stored; leave the column "
                "out, or pass update_priority=False"
            )
        return magnitude

    def forget(self) -> None:
        """Drops what refers to drawn rows, which are gone; the counts stay."""
        self.draws_since_update = 0
        self.last_index = None

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

    def stats(self, age_of: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
        """Counts, and ages of the rows of the last batch in transitions written since."""
        stats: dict[str, Any] = {"priorities_updated": self.received - self._late, "late_updates_dropped": self._late}
        ages = None if self.last_index is None else age_of(self.last_index)
        if ages is not None:
            stats["drawn_age_mean"] = float(ages.float().mean())
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


def row_numbers(name: str, value: Any, accepted: str) -> Tensor:
    """Returns slots or generations that were fed back as a tensor, of any shape and of any dtype of numbers.

    Raises:
        TypeError: a dictionary, text or something else that is no tensor; the message completes "it must be ...".
    """
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        given = f"a {type(value).__name__}" if isinstance(value, Mapping) else repr(value)
        raise TypeError(f"{name} is {given}; it must be {accepted}. No priority was changed") from error


def row_generations(value: Any) -> Tensor:
    """Returns the generations that were fed back as a tensor.

    Raises:
        TypeError: no tensor, or not of an integer dtype.
    """
    generation = row_numbers("generation", value, "the batch's 'generation', of an integer dtype")
    dtype = generation.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(
            f"generation is {dtype}; it must be the batch's 'generation', of an integer dtype. No priority was changed"
        )
    return generation


def real_numbers(name: str, value: Any, outcome: str) -> Tensor:
    """Returns what was fed back as a tensor without gradient.

    Raises:
        TypeError: text, flags, complex numbers.
    """
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is {value!r}; it must be a tensor of real numbers. {outcome}") from error
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} is {tensor.dtype}; it must be of real numbers. {outcome}")
    return tensor


def _magnitude(td_error: Tensor) -> Tensor:
    return td_error.reshape(-1).abs().to(torch.float32)


def _released(storage: Storage, slots: Tensor) -> Tensor | None:
    """Whether slots hold no row that can be drawn, bool of their shape; ``None`` where every stored row can."""
    drawable = occupancy_of(storage).drawable(slots)
    return None if drawable is None else ~drawable


def _without(index: Tensor, magnitude: Tensor, late: Tensor | None) -> Checked:
    """Returns ``index`` with -1, which samplers skip, in place of late rows."""
    if late is None:
        return Checked(index, magnitude, 0)
    if late.ndim < index.ndim:
        late = late.unsqueeze(1).expand_as(index)
    rows = late if late.ndim == 1 else late[:, 0]
    return Checked(torch.where(late, -1, index), magnitude, int(rows.sum()))
