# SPDX-License-Identifier: Apache-2.0
"""Columns of the steps of many environments, as arrays or as tensors of one device: copied, chosen and numbered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class ArrayColumns:
    """Columns of arrays. ``everywhere`` is a flag for each environment, bool ``[num_envs]``, all of which are true."""

    where: Any = staticmethod(np.where)
    is_finite: Any = staticmethod(np.isfinite)

    def __init__(self, everywhere: Any) -> None:
        self.everywhere: Any = everywhere
        self.nowhere: Any = ~everywhere

    def given(self, name: str, value: Any) -> Any:
        """Returns a value as a column."""
        return value if type(value) is np.ndarray else np.asarray(value)

    def owned(self, name: str, value: Any) -> Any:
        """Returns a copy as it is stored: floats as float32."""
        if type(value) is not np.ndarray:
            value = np.asarray(value)
        return value.astype(np.float32) if value.dtype.kind == "f" else value.copy()

    def numbers(self, name: str, value: Any) -> Any:
        """Returns a copy, float32."""
        return np.asarray(value).astype(np.float32)

    def flags(self, name: str, value: Any) -> Any:
        """Returns a copy, bool."""
        if type(value) is np.ndarray and value.dtype.char == "?":
            return value.copy()  # a third of the time of a cast
        return np.asarray(value).astype(np.bool_)

    def may_be_any(self, flags: Any) -> bool:
        """Returns whether a flag is true."""
        return bool(np.count_nonzero(flags))

    def chosen(self, mask: Any, one: Any, other: Any) -> Any:
        """Returns the rows of one column if the mask is true, and of the other column elsewhere."""
        return self.where(mask.reshape(-1, *[1] * (other.ndim - 1)), one, other)

    def finite_rows(self, column: Any) -> Any:
        """Returns which rows have neither NaN nor infinity, bool ``[N]``."""
        return self.is_finite(column).reshape(len(column), -1).all(1)

    def numbered(self, began: Any, first: Any, trajectory: Any) -> tuple[Any, Any]:
        """Numbers the episodes that began from ``first`` on. Returns the numbers of all, and the next number."""
        numbers = first + began.cumsum(0)
        return self.where(began, numbers - 1, trajectory), numbers[-1]


class TensorColumns(ArrayColumns):
    """Columns of tensors on the device of a simulator, which no method reads."""

    where: Any = staticmethod(torch.where)
    is_finite: Any = staticmethod(torch.isfinite)

    def given(self, name: str, value: Any) -> Any:
        """Returns a value as a column, and refuses a tensor of another device, and what is no number."""
        try:
            tensor: Tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name} is {value!r:.60}; it must be a tensor with one row for each environment, as the first "
                "observations were. Nothing was stored"
            ) from error
        if tensor.device != self.everywhere.device:
            raise ValueError(
                f"{name} is on {tensor.device}, and the first observations were on {self.everywhere.device}; all "
                f"tensors of a simulator must be on one device. Move {name} there. Nothing was stored"
            )
        return tensor

    def owned(self, name: str, value: Any) -> Any:
        """Returns a copy as it is stored: floats as float32."""
        given = self.given(name, value)
        return given.to(torch.float32, copy=True) if given.is_floating_point() else given.clone()

    def numbers(self, name: str, value: Any) -> Any:
        """Returns a copy, float32."""
        return self.given(name, value).to(torch.float32, copy=True)

    def flags(self, name: str, value: Any) -> Any:
        """Returns a copy, bool."""
        return self.given(name, value).to(torch.bool, copy=True)

    def may_be_any(self, flags: Any) -> bool:
        """Returns whether a flag may be true. Flags on another device than the CPU are not read."""
        return not flags.is_cpu or bool(flags.any())
