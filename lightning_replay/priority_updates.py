# SPDX-License-Identifier: Apache-2.0
"""Validation of TD errors, priorities and the rows they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage


def magnitudes(td_error: Tensor) -> Tensor:
    """Returns ``|δ|``, float32 ``[B]``, of signed TD errors ``[B]`` or ``[B, 1]``."""
    return td_error.reshape(-1).abs().to(torch.float32)


def given_priority(td_error: Tensor, count: int) -> Tensor:
    """Returns the magnitudes, float32 ``[N]``, of the TD errors given with ``count`` new rows; NaN is refused."""
    if td_error.numel() != count:
        raise ValueError(
            f"the TD errors given with {count} rows have shape {list(td_error.shape)}; one per row is accepted. "
            "Nothing was stored"
        )
    magnitude = magnitudes(real_numbers("td_error", td_error, "Nothing was stored"))
    if not bool(magnitude.isfinite().all()):
        rows = (~magnitude.isfinite()).nonzero().flatten().tolist()
        raise ValueError(
            f"the TD errors given with rows {rows[:10]} are NaN or infinite. Nothing was stored; leave the column "
            "out, or pass update_priority=False"
        )
    return magnitude


def check_values(index: Tensor, magnitude: Tensor, length: int) -> None:
    """Raises ``ValueError`` for TD errors that are not finite, ``IndexError`` for slots outside of ``length``."""
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


def row_numbers(name: str, value: Any, accepted: str, outcome: str = "No priority was changed") -> Tensor:
    """Returns a value as a tensor; raises ``TypeError`` for anything that is none."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        given = f"a {type(value).__name__}" if isinstance(value, Mapping) else repr(value)
        raise TypeError(f"{name} is {given}; it must be {accepted}. {outcome}") from error


def td_error_of(td_error: Any, signals: dict[str, Any]) -> Any:
    """Returns TD errors given as such or as ``priority``, TorchRL's name, which is removed from ``signals``."""
    if "priority" not in signals:
        return td_error
    if td_error is not None:
        raise TypeError(
            "update_priority got td_error and priority, TorchRL's name of the same; give one. No priority was changed"
        )
    return signals.pop("priority")


def row_generations(value: Any) -> Tensor:
    """Returns generations as a tensor; raises ``TypeError`` for anything else or another than an integer dtype."""
    generation = row_numbers("generation", value, "the batch's 'generation', of an integer dtype")
    dtype = generation.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(
            f"generation is {dtype}; it must be the batch's 'generation', of an integer dtype. No priority was changed"
        )
    return generation


def real_numbers(name: str, value: Any, outcome: str) -> Tensor:
    """Returns a value as a tensor without gradient; raises ``TypeError`` for text, flags and complex numbers."""
    tensor = row_numbers(name, value, "a tensor of real numbers", outcome).detach()
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} is {tensor.dtype}; it must be of real numbers. {outcome}")
    return tensor


def flat_index(index: Any, device: torch.device, storage: Storage | None) -> Tensor:
    """Returns slots as contiguous int64 ``[n]`` on ``device``.

    Args:
        index: int, ``[n]``, or for a storage of d dimensions ``[n, d]`` or a tuple of d tensors ``[n]``.
        device: of the result.
        storage: whose shape flattens an index of several dimensions; a row with a negative entry becomes -1.
    """
    if type(index) is Tensor and index.dtype is torch.int64 and index.ndim == 1 and index.device == device:
        return index.contiguous()
    if isinstance(index, tuple):
        index = torch.stack([torch.as_tensor(axis, device=device) for axis in index], -1)
    index = torch.as_tensor(index, device=device)
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
    """Returns priorities as contiguous float32 ``[n]``, one per slot; a single number is repeated."""
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
