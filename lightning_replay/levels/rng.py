# SPDX-License-Identifier: Apache-2.0
"""Generators, and one random number at a time."""

from __future__ import annotations

import torch

from lightning_replay.validation import checked_seed

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
    seed = checked_seed(seed)
    return torch.Generator().manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
