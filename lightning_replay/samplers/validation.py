# SPDX-License-Identifier: Apache-2.0
"""What a prioritized sampler is handed, brought into one form or refused in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage


def flat_index(index: Any, device: torch.device, storage: Storage | None) -> Tensor:
    """Slots as contiguous int64 ``[n]`` on ``device``.

    Args:
        index: int, ``[n]``, or for a storage of d dimensions ``[n, d]`` or a tuple of d tensors ``[n]``.
        device: of the result.
        storage: whose shape flattens an index of several dimensions; a row with a negative entry becomes -1.
    """
    if isinstance(index, tuple):
        index = torch.stack([torch.as_tensor(axis) for axis in index], -1)
    index = torch.as_tensor(index, device=device)
    if index.dtype is not torch.int64:
        if index.numel() and (index.is_floating_point() or index.is_complex() or index.dtype is torch.bool):
            raise TypeError(f"index is {index.dtype}; slots must be integers, as in batch['index']")
        index = index.to(torch.int64)
    if index.ndim == 1:
        return index.contiguous()
    if index.ndim == 0:
        return index.reshape(1)
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
    """Priorities as contiguous float32 ``[n]`` beside ``index``; one number stands for all."""
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
    """The error for the first entry that is not sound; says what it is, what is accepted and what to do."""
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
