# SPDX-License-Identifier: Apache-2.0
"""Rows of a storage as vectors to be compared, standardized by the moments of what is stored."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_replay.state import Stateful

# A smaller share of the mean square about the shift is the rounding error of a constant feature.
_ROUNDING = 1e-10


class Standardization(Stateful):
    """Divides each of ``width`` features by its population standard deviation over the stored rows.

    Every write updates the sums (:meth:`replace`), in float64 and about a shift near the mean. ``mean`` and ``std``
    change at :meth:`refit` alone, so that distances in between can be compared. A feature with ``std`` 0 is ignored.
    """

    saved_attributes: tuple[str, ...] = ("count", "mean", "std", "_total", "_square")

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.count: int = 0
        self.mean: Tensor = torch.zeros(width, dtype=torch.float64, device=device)
        self.std: Tensor = torch.zeros_like(self.mean)
        self._total = torch.zeros_like(self.mean)
        self._square = torch.zeros_like(self.mean)

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Removes the rows ``old`` ``[n, d]`` from the sums and adds ``new`` ``[m, d]``."""
        entering = new.double() - self.mean
        leaving = old.double() - self.mean
        self.count += len(new) - len(old)
        self._total += entering.sum(0) - leaving.sum(0)
        self._square += entering.square().sum(0) - leaving.square().sum(0)

    def refit(self, rows: Tensor) -> None:
        """Computes all statistics again from the stored rows ``[N, d]``, in two passes for the last digit."""
        first = rows[0].double()
        # Relative to the first row, a constant feature has exactly the mean 0 and the variance 0.
        shifted = rows.double() - first
        mean = shifted.mean(0)
        shifted -= mean
        self.count = len(rows)
        self.mean = first + mean
        self._total = shifted.sum(0)
        self._square = shifted.square().sum(0)
        self.std = (self._square / self.count).sqrt()

    def drift(self) -> float:
        """Largest relative change of a standard deviation since the last :meth:`refit`."""
        offset = self._total / self.count
        mean_square = self._square / self.count
        variance = mean_square - offset.square()
        variance = torch.where(variance <= _ROUNDING * mean_square, 0.0, variance)
        change = (variance.sqrt() / self.std - 1).abs()
        change = torch.where((self.std == 0) & (variance == 0), 0.0, change)
        # Distances do not depend on the mean, but float32 products lose digits far from the origin.
        change = torch.where(offset.abs() > self.std, torch.inf, change)
        return float(change.max())

    def apply(self, rows: Tensor) -> Tensor:
        """Returns standardized rows, float32 ``[n, d]``. A feature with ``std`` 0 becomes 0."""
        scale = torch.where(self.std > 0, 1 / self.std, 0.0)
        return ((rows.double() - self.mean) * scale).float()


class FeatureRows:
    """Features of ``capacity`` slots, with their standardization. Width, dtype and device are set by the first rows."""

    features: Tensor
    stored: Tensor
    standardization: Standardization

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.width: int = 0
        self.count: int = 0
        self.limit: int = 0  #: One more than the highest slot ever written.

    @property
    def nbytes(self) -> int:
        """Size of features and flags in bytes, 0 before the first write."""
        return self.features.nbytes + self.stored.nbytes if self.width else 0

    def write(self, index: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Stores checked ``features`` ``[n, d]`` at ``index``. Returns the slots that held rows, and their features."""
        # Rows often come one by one: these calls take half the time of square brackets.
        held = index[self.stored.index_select(0, index)]
        old = self.features.index_select(0, held)
        self.stored.index_fill_(0, index, True)
        self.features.index_copy_(0, index, features.to(self.features))
        self.count += len(index) - len(held)
        self.limit = max(self.limit, int(index.max()) + 1)
        return held, old

    def slots(self) -> Tensor:
        """Returns the slots that hold rows, int64 ``[n]``, in ascending order."""
        return self.stored[: self.limit].nonzero().squeeze(1)

    def refit(self) -> Tensor:
        """Refits the standardization to all rows and returns their slots."""
        slots = self.slots()
        self.standardization.refit(self.features[slots])
        return slots

    def standardized(self, slots: Tensor) -> Tensor:
        """Returns the standardized features of stored rows, float32 ``[n, d]``."""
        return self.standardization.apply(self.features[slots])

    def allocate(self, features: Tensor) -> None:
        """Reserves memory for features of the width, dtype, and device of ``features``."""
        self.width = features.shape[1]
        device = features.device
        # Integer features are kept as float32.
        dtype = features.dtype if features.is_floating_point() else torch.float32
        self.features = torch.zeros(self.capacity, self.width, dtype=dtype, device=device)
        self.stored = torch.zeros(self.capacity, dtype=torch.bool, device=device)
        self.standardization = Standardization(self.width, device)

    def check_write(self, index: Tensor, features: Tensor) -> None:
        """Refuses a write of NaN, of another width, or of one slot twice. Nothing is changed."""
        if features.ndim != 2 or index.shape != features.shape[:1]:
            raise ValueError(
                f"index has shape {list(index.shape)} and features {list(features.shape)}; accepted are [n] and [n, d]"
            )
        if self.width and features.shape[1] != self.width:
            raise ValueError(
                f"features are {features.shape[1]} wide and the rows stored {self.width}; "
                "concatenate the same columns for every write, or call clear() first"
            )
        # A finite sum has finite terms, and takes half the time. Finite terms may still overflow.
        if not math.isfinite(float(features.sum())) and not bool(features.isfinite().all()):
            finite = features.isfinite().all(1)
            raise ValueError(
                f"features of slots {index[~finite.to(index.device)].tolist()} are NaN or infinite; "
                "they must be finite. Nothing was stored."
            )
        self.check_range(index)
        if len(index) > 1 and len(index.unique()) < len(index):
            raise ValueError("index names a slot twice in one write; give each slot once, with the row it holds now")

    def check_range(self, index: Tensor) -> None:
        """Refuses slots outside of the capacity. Raises ``IndexError``."""
        if not index.numel():
            return
        lowest, highest = index.aminmax()
        if int(lowest) < 0 or int(highest) >= self.capacity:
            wrong = index[(index < 0) | (index >= self.capacity)].tolist()
            raise IndexError(f"slots {wrong} do not exist; accepted are 0 to {self.capacity - 1}")

    def check_stored(self, index: Tensor) -> None:
        """Refuses slots without a row. Raises ``IndexError``."""
        self.check_range(index)
        known = self.stored[index] if self.width else torch.zeros_like(index, dtype=torch.bool)
        if not bool(known.all()):
            raise IndexError(f"slots {index[~known].tolist()} hold no row; write them before drawing their partners")

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the features and flags below the highest written slot."""
        if not self.count:
            return {"limit": 0}
        return {
            "limit": self.limit,
            "features": self.features[: self.limit].clone(),
            "stored": self.stored[: self.limit].clone(),
            "standardization": self.standardization.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores saved rows. Memory must be allocated."""
        self.limit = int(state["limit"])
        self.features[: self.limit] = state["features"]
        self.stored[: self.limit] = state["stored"]
        self.count = int(self.stored.sum())
        self.standardization.load_state_dict(state["standardization"])
