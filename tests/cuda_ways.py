# SPDX-License-Identifier: Apache-2.0
"""The ways that parts take on CUDA, on the CPU."""

from __future__ import annotations

from lightning_replay.priority_tree import PriorityTree


def sums_as_on_cuda(tree: PriorityTree) -> PriorityTree:
    """Has a tree of torch take the cumulative sums of CUDA, which need not be monotone."""
    backend = tree._backend
    backend._on_cpu = backend._is_monotone = False
    return tree
