# SPDX-License-Identifier: Apache-2.0
"""TD errors on their way back: validated, matched with the rows that they belong to, stale ones dropped and counted.

:func:`parse_td_errors` reads what a user gives, and :func:`match_td_errors` finds the rows that still
hold what was drawn, and the magnitudes of their errors. A sampler only sets priorities. :func:`update_matching` does
all of it for a batch as it was drawn, and leaves whatever it would refuse to :func:`match_td_errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.options import did_you_mean
from lightning_replay.state import Stateful
from lightning_replay.storage.occupancy import FirstSlots
from lightning_replay.storage.packed import PackedStorage, occupancy_of, rows_of

#: Problem of TD errors that are checked on a device, with a place for the name of the method that brought them.
NOT_FINITE = (
    "call {{}} of {} brought TD errors that are NaN or infinite. Their rows keep the priorities that they had. "
    "Look for a diverging loss"
)
# Slots, int64 ``[B]`` or ``[B, 2]``, -1 if the row has left, magnitudes, float32 ``[B]``, and rows that have left.
Judged = tuple[Tensor, Tensor, int]


def parse_td_errors(index: Any, td_error: Any, generation: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns index, TD errors and generation as tensors, of a batch or of what was given beside it."""
    index, generation = of_batch(index, generation)
    index = row_numbers("index", index, "the batch that was drawn, or its 'index', int64 [B] or [B, 2]")
    if generation is not None:
        generation = row_numbers("generation", generation, "the batch's 'generation', of an integer dtype")
        dtype = generation.dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise TypeError(
                f"generation is {dtype}; it must be the batch's 'generation', of an integer dtype. No priority was "
                "changed"
            )
    if td_error is not None:
        td_error = real_numbers("td_error", td_error, "No priority was changed")
    return index, td_error, generation


def of_batch(index: Any, generation: Any) -> tuple[Any, Any]:
    """Returns the entries ``index`` and ``generation`` of a batch. Others are returned as they were given."""
    if not isinstance(index, TensorDictBase):
        return index, generation
    batch, index = index, index.get("index", None)
    if index is None:
        raise TypeError(
            f"update_priority got a batch without 'index'; it has {sorted(map(str, batch.keys()))}. Give the "
            "batch that sample() returned"
        )
    return index, batch.get("generation", None) if generation is None else generation


def update_matching(
    index: Any,
    td_error: Any,
    generation: Any,
    storage: Storage,
    set_held: Callable[[Any, Any, Any, Any, int], int | None],
) -> int | None:
    # Sets the priorities of a batch as it was drawn while generations are compared: a quarter of the time
    # of match_td_errors and set_priorities. Returns the number of stale rows. Returns None, with nothing changed, for
    # feedback in another form and for a value that match_td_errors refuses.
    index, generation = of_batch(index, generation)
    if not (
        isinstance(storage, PackedStorage) and isinstance(storage.occupancy, FirstSlots)
        and type(index) is type(generation) is type(td_error) is Tensor
        and index.dtype is generation.dtype is torch.int64 and td_error.dtype is torch.float32
        and not td_error.requires_grad
    ):  # fmt: skip
        return None
    slots, given, error = index.cpu().numpy(), generation.cpu().numpy(), td_error.cpu().numpy()
    stored = storage.generations
    if stored is None or not (slots.ndim == given.ndim == 1 and slots.size == given.size == error.size > 0):
        return None
    return set_held(slots, error.reshape(-1), given, stored, len(storage))


def match_td_errors(index: Any, td_error: Any, generation: Any, storage: Storage) -> Judged:
    """Returns which rows still hold what was drawn, the magnitudes of their TD errors, and the number of stale rows.

    Generations come from the batch by default. Without any, the index is trusted.
    """
    packed = rows_of(storage)
    index, td_error, generation = parse_td_errors(index, td_error, generation)
    index = index.cpu()
    if index.dtype != torch.int64 or index.ndim not in (1, 2):
        raise ValueError(
            f"index must be int64 [B] or [B, 2], the batch's 'index'; got {index.dtype} {list(index.shape)}"
        )
    if td_error is None:
        errors = torch.zeros(index.shape[0], dtype=torch.float32, device="cpu")
    else:  # all are checked, of stale rows too: a diverging loss shows at once
        errors = magnitudes(td_error, index.shape[0], "No priority was changed")
    # Without generations an index is trusted. Only slots without a row are dropped.
    if packed is None or generation is None:
        _check_slots(index, len(storage))
        held = occupancy_of(storage).drawable(index)
        return (index, errors, 0) if held is None else _without(index, errors, ~held)
    highest = _check_slots(index, packed.capacity)
    generation = generation.cpu()
    # Of pairs [B, 2] with one generation each, the TD error belongs to the first rows.
    slots = index if index.ndim == 1 or index.shape == generation.shape else index[:, 0]
    if slots.shape != generation.shape:
        raise ValueError(
            f"generation must be the batch's own, of shape {list(slots.shape)}; got {list(generation.shape)}. "
            "No priority was changed"
        )
    # Not by the length: slots emptied since are stale like those written since.
    # The slot may hold another row by now, to which this error does not belong.
    stale = packed.generation_of(slots) != generation
    is_stale = bool(stale.any())
    if highest >= len(packed):
        _check_slots(slots[~stale], len(packed))
    held = packed.occupancy.drawable(slots.masked_fill(stale, 0) if is_stale else slots)
    if held is None:
        return _without(index, errors, stale) if is_stale else (index, errors, 0)
    return _without(index, errors, stale | ~held)


def match_there(index: Any, td_error: Any, generation: Any, storage: PackedStorage) -> tuple[Tensor, Tensor, Tensor]:
    """Returns slots, TD errors, and whether each row still holds what was drawn, ``[n]`` each. Waits for nothing.

    All are on the device of the rows. A slot outside of the storage counts as one that holds another row.
    """
    device = storage.slot_device
    for name, value in (("index", index), ("td_error", td_error), ("generation", generation)):
        if value is not None and value.device.type != device.type:
            raise ValueError(
                f"{name} is on {value.device}, and slots are drawn on {device}; give it on that device. "
                "No priority was changed"
            )
    if index.dtype != torch.int64 or index.ndim != 1:
        raise ValueError(f"index must be int64 [B], the batch's 'index'; got {index.dtype} {list(index.shape)}")
    if generation is not None and generation.shape != index.shape:
        raise ValueError(
            f"generation must be the batch's own, of shape {list(index.shape)}; got {list(generation.shape)}. "
            "No priority was changed"
        )
    if td_error.numel() != len(index):
        raise one_each(td_error, len(index), "No priority was changed")
    slots = index.clamp(0, storage.capacity - 1)
    if generation is None:
        return slots, td_error.reshape(-1), (index >= 0) & (index < len(storage))
    return slots, td_error.reshape(-1), (storage.generation_of(slots) == generation) & (slots == index)


def _without(index: Tensor, magnitude: Tensor, stale: Tensor) -> Judged:
    # Samplers skip -1.
    rows = stale if stale.ndim == 1 else stale[:, 0]
    if stale.ndim < index.ndim:
        stale = stale.unsqueeze(1).expand_as(index)
    return torch.where(stale, -1, index), magnitude, int(rows.sum())


class Feedback(Stateful):
    """Counts of a buffer: draws since the last feedback, TD errors received, and TD errors that came stale."""

    saved_attributes: tuple[str, ...] = ("received", "_stale", "draws_since_update")

    def __init__(self) -> None:
        self.draws_since_update: int = 0
        self.last_index: Tensor | None = None
        self.received: int = 0
        self._stale = 0
        self._stale_there: Tensor | None = None  # Stale rows of draws on a device, since the last load.

    def count(self, received: int, stale: int) -> None:
        self.draws_since_update = 0
        self.received += received
        self._stale += stale

    def stale_on(self, device: torch.device) -> Tensor:
        """Returns the count of stale rows on a device, an int64 scalar. Add to it in place."""
        if self._stale_there is None:
            self._stale_there = torch.zeros((), dtype=torch.int64, device=device)
        return self._stale_there

    @property
    def stale(self) -> int:
        """Number of TD errors whose rows had left. Reads the device that counts them."""
        return self._stale + (0 if self._stale_there is None else int(self._stale_there))

    def forget(self) -> None:
        """Discards the last batch, whose rows are gone. The counts stay."""
        self.draws_since_update = 0
        self.last_index = None

    def stats(self, age_of: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
        """Returns counts, and ages of the rows of the last batch in transitions written since."""
        stale = self.stale
        stats: dict[str, Any] = {"priorities_updated": self.received - stale, "stale_updates_dropped": stale}
        ages = None if self.last_index is None else age_of(self.last_index.cpu())
        if ages is not None:
            stats |= {"drawn_age_mean": float(ages.float().mean()), "drawn_age_max": float(ages.max())}
        return stats

    def _read_attributes(self) -> dict[str, Any]:
        return super()._read_attributes() | {"stale": self.stale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.forget()
        super().load_state_dict(state_dict)
        if self._stale_there is not None:
            self._stale_there.zero_()


def magnitudes(td_error: Any, count: int, outcome: str) -> Tensor:
    """Returns ``|δ|``, float32 ``[B]`` on the CPU, of signed TD errors ``[B]`` or ``[B, 1]``, finite, one a row."""
    td_error = real_numbers("td_error", td_error, outcome)
    if td_error.numel() != count:
        raise one_each(td_error, count, outcome)
    errors = td_error.cpu().reshape(-1).abs().to(torch.float32)
    # A sum is NaN or infinite when any term is: one reduction instead of an elementwise test and a reduction.
    if not bool(errors.sum(dtype=torch.float64).isfinite()):
        rows = (~errors.isfinite()).nonzero().flatten().tolist()
        raise ValueError(
            f"td_error must be finite; rows {rows[:10]} are NaN or infinite. {outcome}. Look for a diverging loss"
        )
    return errors


def one_each(td_error: Tensor, count: int, outcome: str) -> ValueError:
    return ValueError(
        f"td_error must hold one value for each of the {count} rows; got shape {list(td_error.shape)}. {outcome}. "
        "Reduce it over everything but the batch dimension"
    )


def _check_slots(index: Tensor, length: int) -> int:
    """Returns the highest slot, -1 if there are none, and refuses slots outside of ``length``."""
    if index.numel() == 0:
        return -1
    lowest, highest = (int(bound) for bound in torch.aminmax(index))
    if lowest < 0 or highest >= length:
        raise IndexError(
            f"index must lie in 0..{length - 1}, the rows stored; got {lowest}..{highest}. "
            "No priority was changed. Pass the 'index' of a batch drawn from this buffer"
        )
    return highest


def row_numbers(name: str, value: Any, accepted: str, outcome: str = "No priority was changed") -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        given = f"a {type(value).__name__}" if isinstance(value, Mapping) else repr(value)
        raise TypeError(f"{name} is {given}; it must be {accepted}. {outcome}") from error


def td_error_of(td_error: Any, signals: dict[str, Any], known: Sequence[str]) -> Any:
    """Returns TD errors given as such or as ``priority``, TorchRL's name. Refuses signals that are not ``known``."""
    if "priority" in signals:
        if td_error is not None:
            raise TypeError(
                "update_priority got td_error and priority, TorchRL's name of the same; give one. No priority was "
                "changed"
            )
        td_error = signals.pop("priority")
    for name in signals:
        if name not in known:
            raise TypeError(
                f"update_priority got the signal {name!r}; the signals are {', '.join(dict.fromkeys(known))}"
                f"{did_you_mean(name, known)}"
            )
    return td_error


def own_td_error(index: Any, td_error: Any, signals: Mapping[str, Any], priority_key: Any) -> Any:
    """Returns TD errors as given, or the column ``priority_key`` of a batch that comes without any feedback."""
    is_alone = td_error is None and not signals and isinstance(index, TensorDictBase)
    return index.get(priority_key, None) if is_alone else td_error


def real_numbers(name: str, value: Any, outcome: str) -> Tensor:
    """Returns a value as a tensor without gradient, or raises ``TypeError`` for text, flags and complex numbers."""
    tensor = row_numbers(name, value, "a tensor of real numbers", outcome)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} is {tensor.dtype}; it must be of real numbers. {outcome}")
    return tensor


def flat_index(index: Any, storage: Storage | None) -> Tensor:
    """Returns slots, given as ``[n]``, ``[n, d]`` or d tensors, as contiguous int64 ``[n]`` on the CPU, -1 for none."""
    if type(index) is Tensor and index.dtype is torch.int64 and index.ndim == 1 and index.is_cpu:
        return index.contiguous()
    if isinstance(index, tuple):
        index = torch.stack([torch.as_tensor(axis, device="cpu") for axis in index], -1)
    index = torch.as_tensor(index, device="cpu")
    if index.dtype is not torch.int64:
        if index.numel() and (index.is_floating_point() or index.is_complex() or index.dtype is torch.bool):
            raise TypeError(f"index is {index.dtype}; slots must be integers, as in batch['index']")
        index = index.to(torch.int64)
    if index.ndim < 2:
        return index.contiguous() if index.ndim else index.reshape(1)
    shape = (1,) if storage is None or storage.ndim == 1 else tuple(storage.shape)
    if index.ndim != 2 or index.shape[1] != len(shape):
        raise ValueError(
            f"index has shape {list(index.shape)}; a storage of {len(shape)} dimension(s) is indexed by [n] slots"
            + (f" or [n, {len(shape)}] coordinates" if len(shape) > 1 else ", one per priority")
        )
    if len(shape) == 1:
        return index.reshape(-1)
    flat, is_outside = torch.zeros_like(index[:, 0]), (index < 0).any(-1)
    for axis, size in enumerate(shape):
        flat = flat * size + index[:, axis]
    return flat.masked_fill(is_outside, -1)


def matching_priority(priority: Any, index: Tensor) -> Tensor:
    """Returns priorities as contiguous float32 ``[n]``, one per slot. A single number is repeated."""
    priority = torch.as_tensor(priority, device=index.device).detach()
    if priority.is_complex():
        raise TypeError(f"priority is {priority.dtype}; it must be real, the magnitudes of TD errors")
    priority = priority.to(torch.float32)
    if priority.shape == index.shape:
        return priority.contiguous()
    if priority.numel() == index.numel() and priority.ndim <= 2:
        return priority.reshape(-1)
    if priority.numel() == 1:
        return priority.reshape(1).repeat(index.numel())
    raise ValueError(
        f"{priority.numel()} priorities of shape {list(priority.shape)} for {index.numel()} slots; give one number, "
        "or [n] or [n, 1] with one per slot"
    )


def refusal(index: Tensor, priority: Tensor | None, limit: int, stored: int | None) -> Exception:
    """Returns the error for the first entry that is refused."""
    if priority is not None:
        refused = (~(torch.isfinite(priority) & (priority >= 0))).nonzero()
        if refused.numel():
            first = int(refused[0])
            return ValueError(
                f"priority is {float(priority[first])} at position {first}; priorities must be finite and >= 0. "
                "Give magnitudes of TD errors; nothing was changed."
            )
    outside = ((index < -1) | (index >= limit)).reshape(-1).nonzero()
    if outside.numel():
        first = int(outside[0])
        slot = int(index.reshape(-1)[first])
        what = f"the sampler has {limit} slots" if stored is None or stored > limit else f"{stored} rows are stored"
        return IndexError(
            f"index is {slot} at position {first}, but {what}; accepted are 0 to {limit - 1}, and -1 to skip. "
            "Give batch['index'], and build the sampler with the capacity of its storage; nothing was changed."
        )
    return ValueError(
        "a priority raised to priority_exponent does not fit float32; give smaller priorities. Nothing was changed."
    )
