# SPDX-License-Identifier: Apache-2.0
"""Mean and standard deviation of the stored rows, updated at every write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# A variance below this share of the mean square about the shift is the rounding error of a constant feature.
_ROUNDING = 1e-10


class Standardization:
    """Divides each of ``width`` features by its population standard deviation over the stored rows.

    Every write updates the sums (:meth:`replace`), in float64 and about a shift near the mean. ``mean`` and ``std``
    change at :meth:`refit` alone, so that distances in between can be compared; :meth:`drift` is how far the rows have
    moved since then. A feature with ``std`` 0 is ignored.

    Example:
        >>> rows = torch.tensor([[0.0, 5.0], [2.0, 5.0]])
        >>> standardization = Standardization(width=2)
        >>> standardization.refit(rows)
        >>> standardization.apply(rows)
        tensor([[-1.,  0.],
                [ 1.,  0.]])
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.count: int = 0
        self.mean: Tensor = torch.zeros(width, dtype=torch.float64, device=device)
        self.std: Tensor = torch.zeros_like(self.mean)
        self._total = torch.zeros_like(self.mean)
        self._square = torch.zeros_like(self.mean)

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Removes the rows ``old`` ``[n, d]`` from the sums and adds ``new`` ``[m, d]``."""
        entering, leaving = new.double() - self.mean, old.double() - self.mean
        self.count += len(new) - len(old)
        self._total += entering.sum(0) - leaving.sum(0)
        self._square += entering.square().sum(0) - leaving.square().sum(0)

    def refit(self, rows: Tensor) -> None:
        """Computes all statistics again from the stored rows ``[N, d]``, in two passes for the last digit."""
        first = rows[0].double()
        # About the first row, a constant feature has exactly the mean 0 and the variance 0.
        shifted = rows.double() - first
        mean = shifted.mean(0)
        shifted -= mean
        self.count = len(rows)
        self.mean = first + mean
        self._total = shifted.sum(0)
        self._square = shifted.square().sum(0)
        self.std = (self._square / self.count).sqrt()

    def drift(self) -> float:
        """Largest relative change of a standard deviation since the last :meth:`refit`.

        Distances do not depend on the mean; it counts as infinite drift where it has moved by more than one standard
        deviation, because float32 products lose digits far from the origin.
        """
        offset = self._total / self.count
        mean_square = self._square / self.count
        variance = mean_square - offset.square()
        variance = torch.where(variance <= _ROUNDING * mean_square, 0.0, variance)
        change = (variance.sqrt() / self.std - 1).abs()
        change = torch.where((self.std == 0) & (variance == 0), 0.0, change)
        change = torch.where(offset.abs() > self.std, torch.inf, change)
        return float(change.max())

    def apply(self, rows: Tensor) -> Tensor:
        """Returns standardised ``rows`` ``[n, d]``, float32."""
        scale = torch.where(self.std > 0, 1 / self.std, 0.0)
        return ((rows.double() - self.mean) * scale).float()

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums, and mean and standard deviation of the last :meth:`refit`."""
        tensors = {"mean": self.mean, "std": self.std, "total": self._total, "square": self._square}
        return {"count": self.count, **{name: tensor.clone() for name, tensor in tensors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])
        self.mean, self.std = state["mean"].to(self.mean, copy=True), state["std"].to(self.mean, copy=True)
        self._total, self._square = state["total"].to(self.mean, copy=True), state["square"].to(self.mean, copy=True)
