# SPDX-License-Identifier: Apache-2.0
"""Sum trees: sums over rows that change one at a time, and draws in proportion to the rows."""

from __future__ import annotations

__all__ = ["StalenessTree", "SumTree"]


class SumTree:
    """Binary tree of sums: setting a row and finding a prefix take log2(rows) steps.

    Every sum is recomputed from its two halves, so that rounding errors do not accumulate; sums of ints are exact.
    """

    def __init__(self) -> None:
        self._size = 1
        self.nodes: list[float] = [0, 0]  # node 1 is the root, rows start at _size

    @property
    def total(self) -> float:
        """Sum over all rows."""
        return self.nodes[1]

    @property
    def first_leaf(self) -> int:
        """Index of the node of row 0."""
        return self._size

    def __setitem__(self, row: int, value: float) -> None:
        if row >= self._size:
            self._grow(row)
        nodes, node = self.nodes, self._size + row
        nodes[node] = value
        while node > 1:
            node >>= 1
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]

    def fill(self, values: list[float]) -> None:
        """Replaces all rows at once."""
        self._size = 1 << max(len(values) - 1, 0).bit_length()
        self.nodes = [0] * self._size + values + [0] * (self._size - len(values))
        for node in range(self._size - 1, 0, -1):
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, prefix: float) -> int:
        """Returns the row in whose part of the total ``prefix`` lies; never a row of 0 unless the total is 0.

        Args:
            prefix: at least 0 and below :attr:`total`.
        """
        nodes, node = self.nodes, 1
        while node < self._size:
            node *= 2
            # rounding may put the prefix at the end of the left half while the right half is empty
            if prefix >= nodes[node] and nodes[node + 1] > 0:
                prefix -= nodes[node]
                node += 1
        return node - self._size

    def _grow(self, row: int) -> None:
        leaves = self.nodes[self._size :]
        self.fill(leaves + [0] * (row + 1 - len(leaves)))


class StalenessTree:
    """Draws rows in proportion to the age of their timestamps, exactly, in integers."""

    def __init__(self) -> None:
        self._count = SumTree()
        self._timestamps = SumTree()
        self._rows = 0

    def put(self, row: int, timestamp: int) -> None:
        """Adds a row or changes its timestamp."""
        if row == self._rows:
            self._count[row] = 1
            self._rows += 1
        elif self._timestamps.nodes[self._timestamps.first_leaf + row] == timestamp:
            return  # the usual case: the level is scored for its newest episode
        self._timestamps[row] = timestamp

    def fill(self, timestamps: list[int]) -> None:
        """Replaces all rows at once: row k has ``timestamps[k]``."""
        self._rows = len(timestamps)
        self._count.fill([1] * len(timestamps))
        self._timestamps.fill(list(timestamps))

    def total(self, now: int) -> int:
        """Returns the sum of ``now - timestamp`` over the rows."""
        return int(now * self._count.total - self._timestamps.total)

    def find(self, now: int, prefix: int) -> int:
        """Returns the row in whose part of :meth:`total` ``prefix`` lies; ``prefix`` is in [0, total)."""
        count, timestamps, node = self._count.nodes, self._timestamps.nodes, 1
        while node < self._count.first_leaf:
            node *= 2
            left = now * count[node] - timestamps[node]
            if prefix >= left:
                prefix -= int(left)
                node += 1
        return node - self._count.first_leaf
