# SPDX-License-Identifier: Apache-2.0
"""How loops over arrays are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, njit


def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    # NUMBA_DISABLE_JIT runs the loops in Python. Hashes multiply modulo 2**64, and NumPy would warn of each product.
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return np.errstate(over="ignore")(kernel)
    # Kept on disk where a cache folder is writable; does not hold the GIL.
    try:
        return njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # numba found no folder to write its cache to
        return njit(nogil=True)(kernel)
