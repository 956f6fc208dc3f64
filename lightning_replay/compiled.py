# SPDX-License-Identifier: Apache-2.0
"""How loops over arrays are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    # Kept on disk where a cache folder is writable; does not hold the GIL.
    try:
        return njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # numba found no folder to write its cache to
        return njit(nogil=True)(kernel)
