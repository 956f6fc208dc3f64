# SPDX-License-Identifier: Apache-2.0
"""Sums and minima over slots in plain torch, on any device; on CUDA without host synchronisation."""
# ruff: noqa: D102 - the methods are described once, in priority_tree.PriorityTree.

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import threshold

# Measured over 32, 64 and 128 with 256 draws and updates on the CPU.
SHIFT = 6
FAN_OUT = 1 << SHIFT
# The highest level is searched as one row, however wide up to this: cheaper than one more level of blocks.
WIDEST_TOP = 4096


def _rounded_up(count: int) -> int:
    return -(-count // FAN_OUT) * FAN_OUT


class TorchTree:
    """Back end of :class:`lightning_replay.priority_tree.PriorityTree` for any device; validates only where stated.

    Node ``n`` of ``sums[l]`` is the sum of entries ``64 n`` to ``64 n + 63`` of the level below, the leaves at first.
    Shapes never depend on values and nothing is read back, so that every method but :meth:`has_mass` and :meth:`bounds`
    can be captured in a CUDA graph; :meth:`set_checked` and :meth:`fill_checked` then skip what they would refuse.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.device = device
        self._capacity = capacity
        self._on_cpu = device.type == "cpu"
        # A parallel cumulative sum need not be monotone; on the CPU it is sequential.
        self._is_monotone = self._on_cpu
        # One slot more than the capacity, into which CUDA writes entries to be skipped.
        self._leaves = torch.zeros(_rounded_up(capacity + 1), device=device)
        self._sums: list[Tensor] = []
        self._minima: list[Tensor] = []
        self._nodes: list[int] = []
        entries = self._leaves.numel()
        while not self._nodes or entries > WIDEST_TOP:
            nodes = entries // FAN_OUT
            entries = _rounded_up(nodes)
            self._nodes.append(nodes)
            self._sums.append(torch.zeros(entries, dtype=torch.float64, device=device))
            self._minima.append(torch.full((entries,), torch.inf, device=device))
        self._zero = torch.zeros((), dtype=torch.float64, device=device)

    def set(self, index: Tensor, value: Tensor) -> None:
        if self._on_cpu:
            self._leaves.numpy()[index.numpy()] = value.numpy()  # numpy writes in order: the last duplicate stays
        else:
            ordered, order = torch.sort(index, stable=True)
            last = order[torch.searchsorted(ordered, index, right=True) - 1]
            self._leaves[index] = value[last]  # duplicates write one and the same value, in whatever order
        self._refresh(index)

    def set_checked(
        self, index: Tensor, priority: Tensor, offset: float, exponent: float, limit: int
    ) -> float | Tensor | None:
        value = priority.add(offset).pow_(exponent)
        if self._on_cpu:
            return self._set_checked_on_cpu(index, priority, value, limit)
        kept = (index >= 0) & (index < limit) & (priority >= 0) & (value < torch.inf)
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            sound = (priority >= 0) & (value < torch.inf)
            if not bool((kept | ((index == -1) & sound)).all()):
                return None
        self.set(torch.where(kept, index, self._capacity), torch.where(kept, value, 0.0))
        return torch.where(kept, priority, -1.0).amax()

    def _set_checked_on_cpu(self, index: Tensor, priority: Tensor, value: Tensor, limit: int) -> float | None:
        low, high = (bound.item() for bound in torch.aminmax(index))
        least, largest = (bound.item() for bound in torch.aminmax(priority))
        if low < -1 or high >= limit or not (least >= 0 and value.amax().item() < torch.inf):
            return None
        if low == -1:
            kept = index >= 0
            index, value, priority = index[kept], value[kept], priority[kept]
            if not index.numel():
                return -1.0
            largest = priority.amax().item()
        self.set(index, value)
        return largest

    def fill_checked(self, index: Tensor | int, value: float, limit: int) -> bool:
        if isinstance(index, int):
            if index < -1 or index >= limit:
                return False
            if index >= 0:
                self._fill_range(index, index + 1, value)
            return True
        if self._on_cpu:
            first, count = int(index[0]), index.numel()
            if 0 <= first <= limit - count and torch.equal(index, torch.arange(first, first + count)):
                self._fill_range(first, first + count, value)
                return True
        filled = torch.full(index.shape, value, device=self.device)
        return self.set_checked(index, filled, 0.0, 1.0, limit) is not None

    def _fill_range(self, start: int, stop: int, value: float) -> None:
        self._leaves[start:stop] = value
        self._refresh_range(start, stop)

    def get(self, index: Tensor) -> Tensor:
        return self._leaves[index]

    def total(self) -> Tensor:
        return self._sums[-1].sum()

    def min(self) -> Tensor:
        return self._minima[-1].amin()

    def bounds(self) -> tuple[float, float]:
        return float(self.total()), float(self.min())

    def has_mass(self) -> bool:
        return bool(self.total() > 0)

    def draw(self, uniform: Tensor, over_batch: bool, exponent: float) -> tuple[Tensor, Tensor]:
        index = self.find(uniform * self.total())
        value = self._leaves.index_select(0, index)
        return index, value.div_(value.amin() if over_batch else self.min()).pow_(exponent)

    def find(self, prefix_sum: Tensor) -> Tensor:
        node = prefix_sum.new_zeros(0, dtype=torch.int64)
        remaining = prefix_sum
        for level in (*reversed(self._sums), self._leaves):
            if level is self._sums[-1]:
                node, before = self._choose_in_row(level, remaining)
            else:
                child, before = self._choose_in_blocks(level.view(-1, FAN_OUT).index_select(0, node), remaining)
                node = (node << SHIFT).add_(child)
            if level is not self._leaves:
                remaining = remaining - before
        return node

    def _cumulative(self, values: Tensor) -> Tensor:
        cumulative = values.cumsum(-1, dtype=torch.float64)
        if self._is_monotone:
            return cumulative
        # Entries of zero repeat what is before them and so are never the first to exceed anything.
        return torch.where(values > 0, cumulative, self._zero).cummax(-1).values

    def _choose_in_row(self, row: Tensor, remaining: Tensor) -> tuple[Tensor, Tensor]:
        cumulative = self._cumulative(row)
        # At or past the end: the last entry that adds to the sum; in a row of zeros: 0, which has children.
        below = torch.minimum(remaining, torch.nextafter(cumulative[-1], self._zero)).clamp_min_(0)
        chosen = torch.searchsorted(cumulative, below, right=True).remainder_(row.numel())
        return chosen, cumulative.index_select(0, chosen).sub_(row.index_select(0, chosen))

    def _choose_in_blocks(self, blocks: Tensor, remaining: Tensor) -> tuple[Tensor, Tensor]:
        cumulative = self._cumulative(blocks)
        below = torch.minimum(remaining, torch.nextafter(cumulative[:, -1], self._zero)).clamp_min_(0)
        chosen = torch.searchsorted(cumulative, below.unsqueeze(-1), right=True).bitwise_and_(FAN_OUT - 1)
        before = cumulative.gather(1, chosen).sub_(blocks.gather(1, chosen))
        return chosen.squeeze(-1), before.squeeze(-1)

    def _refresh(self, index: Tensor) -> None:
        """Recomputes every node above the slots in ``index`` from its children."""
        node = index
        for level, nodes in enumerate(self._nodes):
            node = node >> SHIFT
            self._recompute(level, slice(0, nodes) if nodes <= index.numel() else node)

    def _refresh_range(self, start: int, stop: int) -> None:
        for level in range(len(self._nodes)):
            start, stop = start >> SHIFT, ((stop - 1) >> SHIFT) + 1
            self._recompute(level, slice(start, stop))

    def _recompute(self, level: int, nodes: Tensor | slice) -> None:
        below = (self._leaves, *self._sums)[level]
        blocks = self._blocks(below, nodes)
        self._sums[level][nodes] = blocks.sum(-1, dtype=torch.float64)
        if level == 0:
            self._minima[0][nodes] = threshold(blocks, 0.0, torch.inf).amin(-1)
        else:
            self._minima[level][nodes] = self._blocks(self._minima[level - 1], nodes).amin(-1)

    @staticmethod
    def _blocks(level: Tensor, nodes: Tensor | slice) -> Tensor:
        blocks = level.view(-1, FAN_OUT)
        return blocks[nodes] if isinstance(nodes, slice) else blocks.index_select(0, nodes)

    def leaves(self) -> Tensor:
        return self._leaves[: self._capacity].clone()

    def load_leaves(self, leaves: Tensor) -> None:
        self._leaves[: self._capacity] = leaves.to(self.device)
        self._rebuild()

    def clear(self) -> None:
        self._leaves.zero_()
        self._rebuild()

    def _rebuild(self) -> None:
        self._refresh_range(0, self._leaves.numel())

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in (self._leaves, *self._sums, *self._minima))
