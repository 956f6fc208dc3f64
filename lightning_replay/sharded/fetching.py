# SPDX-License-Identifier: Apache-2.0
"""Objects of several owners fetched from Ray's object store, some of which may be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError


def fetched(references: Sequence[ray.ObjectRef[Any]]) -> list[Any]:
    """Returns the objects in order, ``None`` for those that were lost with the process or node that had them."""
    try:
        return list(ray.get(references))  # one call, because each has a round trip
    except ObjectLostError:
        return [_fetched_alone(reference) for reference in references]


def _fetched_alone(reference: ray.ObjectRef[Any]) -> Any:
    try:
        return ray.get(reference)
    except ObjectLostError:
        return None
