# SPDX-License-Identifier: Apache-2.0
"""How loops over arrays are compiled, and what ``torch.compile`` leaves out."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numba import config, njit

_CALLED_BY_LOOPS = ("sample", "extend", "extend_columns", "add", "mark_update", "update_priority")


def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: compiles a loop over arrays with numba at the first call."""
    # NUMBA_DISABLE_JIT runs the loops in Python. Hashes multiply modulo 2**64, and NumPy would warn of each product.
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return np.errstate(over="ignore")(kernel)
    # Kept on disk if a cache folder is writable. Does not hold the GIL.
    try:
        return njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # numba found no folder to write its cache to
        return njit(nogil=True)(kernel)


def inlined(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: puts a function into the compiled loops that call it."""
    inline: Callable[..., Any] = njit(inline="always")(kernel)
    return inline


class BreaksGraphs:
    """Its subclasses' methods that training loops and TorchRL's buffers call break the graph of ``torch.compile``.

    Dynamo would trace the compiler of numba, which ends in a ``RecursionError``, and compile each call again: the
    methods read generators, counters, and locks.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _CALLED_BY_LOOPS:
            method = vars(cls).get(name)
            if isinstance(method, FunctionType):
                setattr(cls, name, torch.compiler.disable(method))
