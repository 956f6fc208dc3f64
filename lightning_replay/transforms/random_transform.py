# SPDX-License-Identifier: Apache-2.0
"""Base class of transforms that draw random numbers."""

from __future__ import annotations

from typing import Any

from lightning_replay.parts import ReplayTransform
from lightning_replay.seeded import Seeded


class RandomTransform(Seeded, ReplayTransform):
    """Draws from a generator of its own, whose state TorchRL saves with the buffer."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self._seed_generator(seed)

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the state that TorchRL saves with the buffer."""
        return {"generator": self.generator_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`get_extra_state` returned."""
        self.set_generator_state(state["generator"])
