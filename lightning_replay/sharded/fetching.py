# SPDX-License-Identifier: Apache-2.0
"""Rows in Ray's object store, whose objects have several owners, some of which may be lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

_LEAST_S = 0.1  # for each of several objects, where some of them could not be fetched in time


class Block(NamedTuple):
    """Rows ``start`` to ``stop`` of an object in the object store."""

    reference: ray.ObjectRef[Any]
    start: int
    stop: int


def cut_blocks(blocks: Sequence[Block], start: int, stop: int) -> list[Block]:
    """Returns rows ``start`` to ``stop`` of those in the blocks, one after the other."""
    cut, position = [], 0
    for reference, first, last in blocks:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            cut.append(Block(reference, first + low - position, first + high - position))
        position += last - first
    return cut


def fetched(references: Sequence[ray.ObjectRef[Any]], timeout_s: float) -> list[Any]:
    """Returns objects that were put, in order; ``None`` for one that was lost with the process or node that had it.

    After ``timeout_s`` it counts as lost, as its process may hang.
    """
    deadline = time.monotonic() + timeout_s
    try:
        return list(ray.get(references, timeout=timeout_s))  # one call, because each has a round trip
    except RayError:
        return [_fetched_alone(reference, deadline) for reference in references]


def _fetched_alone(reference: ray.ObjectRef[Any], deadline: float) -> Any:
    try:
        return ray.get(reference, timeout=max(deadline - time.monotonic(), _LEAST_S))
    except RayError:
        return None
