# SPDX-License-Identifier: Apache-2.0
"""Devices that can keep rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["MissingDeviceError", "as_tensor", "check_present", "checked_device"]


def as_tensor(value: Any) -> Tensor:
    """Returns a tensor itself, and anything else as one on the CPU, whatever torch's default device is."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


class MissingDeviceError(ValueError):
    """A device that this machine, or torch as it is installed, does not have."""


def checked_device(device: Any) -> torch.device:
    """Returns a device of torch that keeps data; raises ``TypeError`` or ``ValueError`` for anything else."""
    try:
        known = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; it must be a device of torch, such as 'cpu' or 'cuda'") from error
    if known is None:
        raise TypeError(f"device is {device!r}; it must be a device of torch, such as 'cpu' or 'cuda'")
    if known.type == "meta":
        raise ValueError(f"device is {device!r}, which keeps no data; it must be a device such as 'cpu' or 'cuda'")
    return known


def check_present(device: torch.device) -> None:
    """Refuses a missing CUDA device, for which torch would raise an ``AssertionError`` or fail at the first rows."""
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise MissingDeviceError(
                f"device is {str(device)!r}, and torch finds {count} CUDA devices here; use device='cpu', or install a "
                "torch that supports the GPU of this machine"
            )
