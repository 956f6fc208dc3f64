# SPDX-License-Identifier: Apache-2.0
"""Objects of several owners fetched from Ray's object store, some of which may be lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

_LEAST_S = 0.1  # for each of several objects, where some of them could not be fetched in time


def fetched(references: Sequence[ray.ObjectRef[Any]], timeout_s: float) -> list[Any]:
    """Returns the objects in order, ``None`` for those that were lost with the process or node that had them.

    Args:
        references: of objects that were put, and of no results of tasks.
        timeout_s: seconds after which one counts as lost, as its process may hang.
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
