# SPDX-License-Identifier: Apache-2.0
"""Seeded generators, and single random numbers from them."""

from __future__ import annotations

import torch

from lightning_replay.validation import checked_seed

__all__ = ["seeded_generator", "uniform"]

_STEPS = 2**53  # floats of equal spacing in [0, 1)


def uniform(generator: torch.Generator) -> float:
    """Draws a float from [0, 1) at half the cost of ``torch.rand``."""
    return int(torch.randint(_STEPS, (), generator=generator)) / _STEPS


def seeded_generator(seed: int | None) -> torch.Generator:
    """Creates a generator; ``None`` seeds it from torch's global generator.

    Raises:
        TypeError: a seed that is not a whole number.
        ValueError: a seed that does not fit into 64 bits.
    """
    seed = checked_seed(seed)
    return torch.Generator().manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
