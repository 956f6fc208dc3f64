# SPDX-License-Identifier: Apache-2.0
"""Base class of transforms that draw random numbers."""

from __future__ import annotations

from lightning_replay.parts import ReplayTransform
from lightning_replay.seeded import Seeded


class RandomTransform(Seeded, ReplayTransform):
    """Draws from a generator of its own, whose state TorchRL saves with the buffer."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self._seed_generator(seed)
