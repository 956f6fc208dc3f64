# SPDX-License-Identifier: Apache-2.0
"""Sums and minima over slots in plain torch, on any device; on CUDA without host synchronisation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import threshold

# Leaves of a block and nodes of a block, as powers of 2. Of 16, 32, 64, and 128 the fastest on the CPU.
LEAF_SHIFT = 5
SHIFT = 6
# The highest level is searched as one row, however wide up to this. Measured on the CPU with 256 draws and updates of
# 1,000,000 slots: as one row its 31,250 nodes take 50 us less than as blocks under one more level.
WIDEST_TOP = 40_000
WIDEST_TOP_ELSEWHERE = 8192
# Up to so many nodes for each slot written, recomputing a whole level takes less than picking its blocks.
DENSE = 4


def _rounded_up(count: int, shift: int) -> int:
    return -(-count // (1 << shift)) << shift


class TorchTree:
    """Back end of :class:`lightning_replay.priority_tree.PriorityTree` for any device; validates only where stated."""

    # Node n of sums[0] is the sum of leaves 32 n to 32 n + 31, and of the levels above of 64 nodes below. Shapes never
    # depend on values and nothing is read back, so that every method but bounds can be captured in a CUDA graph;
    # set_checked and fill_checked then skip what they would refuse.

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.device = device
        self._capacity = capacity
        self._on_cpu = device.type == "cpu"
        # A parallel cumulative sum need not be monotone; on the CPU it is sequential.
        self._is_monotone = self._on_cpu
        # CUDA writes skipped entries to one extra slot.
        self._leaves = torch.zeros(_rounded_up(capacity + 1, LEAF_SHIFT), dtype=torch.float32, device=device)
        self._sums: list[Tensor] = []
        self._minima: list[Tensor] = []
        self._nodes: list[int] = []
        entries = self._leaves.numel()
        widest_top = WIDEST_TOP if self._on_cpu else WIDEST_TOP_ELSEWHERE
        while not self._nodes or entries > widest_top:
            nodes = entries >> (SHIFT if self._nodes else LEAF_SHIFT)
            entries = _rounded_up(nodes, SHIFT)
            self._nodes.append(nodes)
            self._sums.append(torch.zeros(entries, dtype=torch.float64, device=device))
            self._minima.append(torch.full((entries,), torch.inf, dtype=torch.float32, device=device))
        self._zero = torch.zeros((), dtype=torch.float64, device=device)

    def set(self, index: Tensor, value: Tensor | float) -> None:
        """Writes values ``[n]`` to slots ``[n]``; the last of duplicates stays."""
        if not isinstance(value, Tensor) or self._on_cpu:
            self._leaves.numpy()[index.numpy()] = np.asarray(value)  # numpy writes in order: the last duplicate stays
        else:
            ordered, order = torch.sort(index, stable=True)
            last = order[torch.searchsorted(ordered, index, right=True) - 1]
            self._leaves[index] = value[last]  # duplicates write one and the same value, in whatever order
        self._refresh(index)

    def set_checked(
        self, index: Tensor, priority: Tensor, offset: float, exponent: float, limit: int
    ) -> float | Tensor | None:
        """Writes checked priorities and returns the largest; ``None`` if one is invalid."""
        value = priority.add(offset).pow_(exponent)
        if self._on_cpu:  # Bounds are cheaper than masks there.
            low, high = (bound.item() for bound in torch.aminmax(index))
            least, largest = (bound.item() for bound in torch.aminmax(priority))
            if low < -1 or high >= limit or not (least >= 0 and value.amax().item() < torch.inf > largest):
                return None
            if low >= 0:
                self.set(index, value)
                return largest
        sound = (priority >= 0) & (value < torch.inf)
        kept = (index >= 0) & (index < limit) & sound
        is_captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not is_captured and not bool((kept | ((index == -1) & sound)).all()):
            return None
        self.set(torch.where(kept, index, self._capacity), torch.where(kept, value, 0.0))
        written = torch.where(kept, priority, -1.0).amax()
        return written.item() if self._on_cpu else written

    def fill_checked(self, index: Tensor | int, value: float, limit: int) -> bool:
        """Writes one value to slots; ``False`` if a slot is invalid."""
        is_run = self._on_cpu
        if isinstance(index, int):
            first, count, is_run = index, 1, True
        elif is_run:
            first = int(index[0])
            count = index.numel()
            is_run = torch.equal(index, torch.arange(first, first + count, device="cpu"))
        if is_run and 0 <= first <= limit - count:
            self._leaves[first : first + count] = value
            self._refresh_range(first, first + count)
            return True
        index = torch.as_tensor(index, device=self.device).reshape(-1)
        return self.set_checked(index, torch.full_like(index, value, dtype=torch.float32), 0.0, 1.0, limit) is not None

    def get(self, index: Tensor) -> Tensor:
        """Returns the values of slots, float32 ``[n]``."""
        return self._leaves[index]

    def total(self) -> Tensor:
        """Returns the sum of all values, a float64 scalar on the device."""
        return self._sums[-1].sum()

    def min(self) -> Tensor:
        """Returns the smallest positive value, a float32 scalar on the device."""
        return self._minima[-1].amin()

    def bounds(self) -> tuple[float, float]:
        """Returns the sum and the smallest positive value; waits for the device."""
        return float(self.total()), float(self.min())

    def draw(self, uniform: Tensor, over_batch: bool, exponent: float) -> tuple[Tensor, Tensor]:
        """Returns slots ``[n]`` at ``uniform`` ``[n]`` and their powered ratios to the minimum."""
        index = self._descend(uniform * self.total())
        value = self._leaves.index_select(0, index)
        return index, value.div_(value.amin() if over_batch else self.min()).pow_(exponent)

    def draw_at(self, points: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Returns slots ``[n]`` at points in [0, 1) and their probabilities, float64 ``[n]``."""
        total = float(self.total())
        index = self.find(torch.from_numpy(points * total).to(self.device))
        return index, self.get(index).cpu().numpy().astype(np.float64) / total

    def find(self, prefix_sum: Tensor) -> Tensor:
        """Returns the first slots whose cumulative sums exceed ``prefix_sum``, int64 ``[n]``."""
        return self._descend(prefix_sum.clamp_min(0.0))

    def _descend(self, remaining: Tensor) -> Tensor:
        """Returns the slots at which cumulative sums exceed ``remaining``, float64 ``[n]``, not negative."""
        cumulative = self._cumulative(self._sums[-1])
        node = self._first_above(cumulative, remaining)
        remaining = remaining - cumulative.index_select(0, node)
        for level in reversed(self._sums[:-1]):
            cumulative = self._cumulative(level.view(-1, 1 << SHIFT).index_select(0, node))
            child = self._first_above(cumulative, remaining.unsqueeze_(-1))
            remaining = remaining.sub_(cumulative.gather(1, child)).squeeze_(-1)
            node = (node << SHIFT).add_(child.squeeze_(-1))
        cumulative = self._cumulative(self._leaves.view(-1, 1 << LEAF_SHIFT).index_select(0, node))
        return (node << LEAF_SHIFT).add_(self._first_above(cumulative, remaining.unsqueeze_(-1)).squeeze_(-1))

    def _cumulative(self, values: Tensor) -> Tensor:
        """Returns the sums before each entry of rows ``[..., k]``, and last of all, float64 ``[..., k + 1]``."""
        cumulative = torch.zeros(*values.shape[:-1], values.shape[-1] + 1, dtype=torch.float64, device=self.device)
        if self._is_monotone:
            torch.cumsum(values, -1, dtype=torch.float64, out=cumulative[..., 1:])
        else:
            # Entries of zero repeat what is before them and so are never the first to exceed anything.
            added = torch.where(values > 0, values.cumsum(-1, dtype=torch.float64), self._zero)
            cumulative[..., 1:] = added.cummax(-1).values
        return cumulative

    def _first_above(self, cumulative: Tensor, remaining: Tensor) -> Tensor:
        """Returns the first entry after which the sum exceeds ``remaining``; at the end the last that adds to it."""
        width = cumulative.shape[-1] - 1
        if self._on_cpu:
            chosen = torch.searchsorted(cumulative, remaining, right=True).sub_(1)
            if int(chosen.amax()) < width:
                return chosen
        # Only a row of zeros gives 0, which has children.
        below = torch.minimum(remaining, torch.nextafter(cumulative[..., -1:], self._zero)).clamp_min_(0)
        return torch.searchsorted(cumulative, below, right=True).sub_(1).remainder_(width)

    def _refresh(self, index: Tensor) -> None:
        node = index
        for level, nodes in enumerate(self._nodes):
            node = node >> (SHIFT if level else LEAF_SHIFT)
            self._recompute(level, slice(0, nodes) if nodes <= DENSE * index.numel() else node)

    def _refresh_range(self, start: int, stop: int) -> None:
        for level in range(len(self._nodes)):
            shift = SHIFT if level else LEAF_SHIFT
            start = start >> shift
            stop = ((stop - 1) >> shift) + 1
            self._recompute(level, slice(start, stop))

    def _recompute(self, level: int, nodes: Tensor | slice) -> None:
        # The children of a node have sums and minima, [nodes, children]. Leaves have values only.
        children = self._sums[level - 1].view(-1, 1 << SHIFT) if level else self._leaves.view(-1, 1 << LEAF_SHIFT)
        sums = children[nodes]
        minima = self._minima[level - 1].view(-1, 1 << SHIFT)[nodes] if level else threshold(sums, 0.0, torch.inf)
        self._sums[level][nodes] = sums.sum(-1, dtype=torch.float64)
        self._minima[level][nodes] = minima.amin(-1)

    def leaves(self) -> Tensor:
        """Returns a copy of all values, float32 ``[capacity]``."""
        return self._leaves[: self._capacity].clone()

    def load_leaves(self, leaves: Tensor) -> None:
        """Replaces all values, float32 ``[capacity]``, and recomputes every level."""
        self._leaves[: self._capacity] = leaves.to(self.device)
        self._refresh_range(0, self._leaves.numel())

    @property
    def nbytes(self) -> int:
        """Size of leaves, sums, and minima in bytes."""
        return sum(level.nbytes for level in (self._leaves, *self._sums, *self._minima))
