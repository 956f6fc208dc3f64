# SPDX-License-Identifier: Apache-2.0
"""The priority index: sums and minima over slots, in numba on the CPU and in plain torch on any device."""

from lightning_replay.priority_tree.tree import PriorityTree

__all__ = ["PriorityTree"]
