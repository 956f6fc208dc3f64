# SPDX-License-Identifier: Apache-2.0
"""The priority index: sums and minima over slots, in plain torch on any device and in numba on the CPU."""

from __future__ import annotations

from lightning_replay.priority_tree.tree import PriorityTree

__all__ = ["PriorityTree"]
