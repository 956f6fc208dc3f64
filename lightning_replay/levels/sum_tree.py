# SPDX-License-Identifier: Apache-2.0
"""Sum trees: sums over rows that change one at a time, and draws in proportion to the rows."""

from __future__ import annotations

__all__ = ["SumTree"]


class SumTree:
    """Binary tree of sums: setting a row and finding a prefix take log2(rows) steps.

    Every sum is recomputed from its two halves, so that rounding errors do not accumulate; sums of ints are exact.
    """

    def __init__(self) -> None:
        self.first_leaf: int = 1  # node of row 0
        self.nodes: list[float] = [0, 0]  # node 1 is the root

    @property
    def total(self) -> float:
        """Sum over all rows."""
        return self.nodes[1]

    def __setitem__(self, row: int, value: float) -> None:
        if row >= self.first_leaf:
            leaves = self.nodes[self.first_leaf :]
            self.fill(leaves + [0] * (row + 1 - len(leaves)))
        nodes, node = self.nodes, self.first_leaf + row
        nodes[node] = value
        while node > 1:
            node >>= 1
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]

    def fill(self, values: list[float]) -> None:
        """Replaces all rows at once."""
        self.first_leaf = 1 << max(len(values) - 1, 0).bit_length()
        self.nodes = [0] * self.first_leaf + values + [0] * (self.first_leaf - len(values))
        for node in range(self.first_leaf - 1, 0, -1):
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, prefix: float) -> int:
        """Returns the row in whose part of the total ``prefix`` lies; never a row of 0 unless the total is 0.

        Args:
            prefix: at least 0 and below :attr:`total`.
        """
        nodes, node = self.nodes, 1
        while node < self.first_leaf:
            node *= 2
            # rounding may put the prefix at the end of the left half while the right half is empty
            if prefix >= nodes[node] and nodes[node + 1] > 0:
                prefix -= nodes[node]
                node += 1
        return node - self.first_leaf
