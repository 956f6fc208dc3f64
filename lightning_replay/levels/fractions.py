# SPDX-License-Identifier: Apache-2.0
"""Generators, and one random number at a time."""

from __future__ import annotations

from numbers import Integral

import torch

from lightning_replay.levels.options import check_option

__all__ = ["fraction", "seeded_generator"]

_STEPS = 2**53  # as many as float64 tells apart


def fraction(generator: torch.Generator) -> float:
    """Uniform in [0, 1); half the cost of ``torch.rand``, which makes and reads a tensor of floats."""
    return int(torch.randint(_STEPS, (), generator=generator)) / _STEPS


def seeded_generator(seed: int | None) -> torch.Generator:
    """One of its own; ``None`` seeds it from torch's global generator.

    Raises:
        TypeError: a seed that is no whole number.
        ValueError: one that does not fit into 64 bits.
    """
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    check_option("seed", seed, Integral, "a whole number that fits into 64 bits, or None", -(2**63), 2**64 - 1)
    return torch.Generator().manual_seed(int(seed))
