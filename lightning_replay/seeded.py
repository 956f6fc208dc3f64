# SPDX-License-Identifier: Apache-2.0
"""Seeded generators: one for every part that draws."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_replay.validation import checked_seed

_STEPS = 2**53  # floats of equal spacing in [0, 1)


def seeded_generator(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a generator; ``None`` seeds it from torch's global one. Other seeds than of 64 bits are refused."""
    seed = checked_seed(seed)
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)


def uniform(generator: torch.Generator) -> float:
    """Draws a float from [0, 1) at half the cost of ``torch.rand``."""
    return int(torch.randint(_STEPS, (), generator=generator, device="cpu")) / _STEPS


class Seeded:
    """A part with a generator of its own, so that a saved buffer continues with the same draws.

    Call :meth:`_seed_generator` in the constructor. TorchRL's ``buffer.set_rng(generator)`` replaces the generator
    through ``_rng``; ``None``, which TorchRL sets in buffers that are built without a generator, is ignored.
    """

    _generator: torch.Generator

    def _seed_generator(self, seed: int | None, device: torch.device | str = "cpu") -> None:
        object.__setattr__(self, "_generator", seeded_generator(seed, device))

    @property
    def _rng(self) -> torch.Generator:
        return self._generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        if generator is not None:
            object.__setattr__(self, "_generator", generator)

    def reseed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def generator_state(self) -> Tensor:
        """Returns the state of the generator, uint8, for a saved buffer."""
        return self._generator.get_state()

    def set_generator_state(self, state: Tensor) -> None:
        self._generator.set_state(state.cpu().to(torch.uint8))
