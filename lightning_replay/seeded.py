# SPDX-License-Identifier: Apache-2.0
"""A generator of its own for everything that draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_replay.validation import checked_seed


class Seeded:
    """Owns the generator it draws from, so that a saved buffer goes on with the same draws.

    Call :meth:`_seed_generator` in the constructor. TorchRL's ``buffer.set_rng(generator)`` replaces the
    generator through ``_rng``; the ``None`` TorchRL sets when a buffer is built without a generator is ignored.
    """

    _generator: torch.Generator

    def _seed_generator(self, seed: int | None, device: torch.device | str = "cpu") -> None:
        seed = checked_seed(seed)
        generator = torch.Generator(device=device)
        generator.manual_seed(int(torch.randint(2**62, ()).item()) if seed is None else seed)
        object.__setattr__(self, "_generator", generator)

    @property
    def _rng(self) -> torch.Generator:
        return self._generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        if generator is not None:
            object.__setattr__(self, "_generator", generator)

    def reseed(self, seed: int) -> None:
        """Starts the generator anew from ``seed``."""
        self._generator.manual_seed(seed)

    def draw_state(self) -> Any:
        """Returns what a draw changes, for :meth:`undo_draw`: the generator's state."""
        return self._rng.get_state()

    def undo_draw(self, state: Any) -> None:
        """Undoes the draws since :meth:`draw_state`: the next one is what the first of them was."""
        self._rng.set_state(state)

    def generator_state(self) -> Tensor:
        """State of the generator, uint8, for a saved buffer."""
        return self._generator.get_state()

    def set_generator_state(self, state: Tensor) -> None:
        """Takes up the draws where :meth:`generator_state` was read."""
        self._generator.set_state(state.cpu().to(torch.uint8))
