# SPDX-License-Identifier: Apache-2.0
"""The features of every stored row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_replay.neighbors.standardization import Standardization


class FeatureRows:
    """Features of ``capacity`` slots, with their standardisation.

    Width, dtype and device are those of the first rows written; integers become float32.
    """

    features: Tensor
    stored: Tensor
    standardization: Standardization

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.width: int = 0
        self.count: int = 0
        self.limit: int = 0  # one more than the highest slot ever written

    @property
    def nbytes(self) -> int:
        return self.features.nbytes + self.stored.nbytes if self.width else 0

    def write(self, index: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Stores checked ``features`` ``[n, d]`` at the slots ``index`` ``[n]``; the standardisation stays as it is.

        Returns:
            The slots that held other rows, and the features of these.
        """
        # Rows often come one by one: these calls take half the time of square brackets.
        held = index[self.stored.index_select(0, index)]
        old = self.features.index_select(0, held)
        self.stored.index_fill_(0, index, True)
        self.features.index_copy_(0, index, features.to(self.features))
        self.count += len(index) - len(held)
        self.limit = max(self.limit, int(index.max()) + 1)
        return held, old

    def slots(self) -> Tensor:
        return self.stored[: self.limit].nonzero().squeeze(1)

    def refit(self) -> Tensor:
        """Refits the standardisation to all rows and returns their slots."""
        slots = self.slots()
        self.standardization.refit(self.features[slots])
        return slots

    def standardized(self, slots: Tensor) -> Tensor:
        return self.standardization.apply(self.features[slots])

    def allocate(self, features: Tensor) -> None:
        self.width, device = features.shape[1], features.device
        dtype = features.dtype if features.is_floating_point() else torch.float32
        self.features = torch.zeros(self.capacity, self.width, dtype=dtype, device=device)
        self.stored = torch.zeros(self.capacity, dtype=torch.bool, device=device)
        self.standardization = Standardization(self.width, device)

    def check_write(self, index: Tensor, features: Tensor) -> None:
        if features.ndim != 2 or index.shape != features.shape[:1]:
            raise ValueError(
                f"index has shape {list(index.shape)} and features {list(features.shape)}; accepted are [n] and [n, d]"
            )
        if self.width and features.shape[1] != self.width:
            raise ValueError(
                f"features are {features.shape[1]} wide and the rows stored {self.width}; "
                "concatenate the same columns for every write, or call clear() first"
            )
        # A finite sum has finite terms, and takes half the time; finite terms may still overflow.
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
        if not index.numel():
            return
        lowest, highest = index.aminmax()
        if int(lowest) < 0 or int(highest) >= self.capacity:
            wrong = index[(index < 0) | (index >= self.capacity)].tolist()
            raise IndexError(f"slots {wrong} do not exist; accepted are 0 to {self.capacity - 1}")

    def check_stored(self, index: Tensor) -> None:
        self.check_range(index)
        known = self.stored[index] if self.width else torch.zeros_like(index, dtype=torch.bool)
        if not bool(known.all()):
            raise IndexError(f"slots {index[~known].tolist()} hold no row; write them before drawing their partners")

    def state_dict(self) -> dict[str, Any]:
        """Returns rows up to the highest slot written, and the standardisation."""
        if not self.count:
            return {"limit": 0}
        return {
            "limit": self.limit,
            "features": self.features[: self.limit].clone(),
            "stored": self.stored[: self.limit].clone(),
            "standardization": self.standardization.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, after :meth:`allocate` and before any write."""
        self.limit = int(state["limit"])
        self.features[: self.limit] = state["features"]
        self.stored[: self.limit] = state["stored"]
        self.count = int(self.stored.sum())
        self.standardization.load_state_dict(state["standardization"])
