# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise on stored states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs import Transform

from lightning_replay.recorded import recorded
from lightning_replay.samplers.seeded import Seeded

NOISY_KEYS: tuple[NestedKey, ...] = ("observation", ("next", "observation"))


@recorded
class GaussianNoise(Seeded, Transform):
    """Adds an independent draw from ``N(0, sigma**2)`` to every component of every state of a batch.

    The state and the next state of a transition get independent noise; action, reward and flags stay. The stored
    rows are not changed. Baseline of the NMER paper (Sander et al. 2022, https://arxiv.org/abs/2205.09117), as the
    paper words it; the authors' code multiplies by one noise vector shared by the whole batch instead.

    Args:
        sigma: standard deviation, in the unit of the observations; 0.1 is the authors' value.
        keys: what gets noise; add ``"action"`` or ``("next", "reward")`` to disturb these too.
        seed: of the transform's own generator, whose state is part of :meth:`state_dict`.

    Raises:
        ValueError: ``sigma`` is negative or not finite, or an entry is not floating.

    Example:
        >>> from tensordict import TensorDict
        >>> step = TensorDict({"observation": torch.zeros(2, 3), "next": {"observation": torch.zeros(2, 3)}}, [2])
        >>> bool((GaussianNoise(sigma=0.1, seed=0)(step)["observation"] != 0).all())
        True
    """

    def __init__(self, sigma: float = 0.1, keys: Sequence[NestedKey] = NOISY_KEYS, seed: int | None = None) -> None:
        if not (math.isfinite(sigma) and sigma >= 0):
            raise ValueError(f"sigma is {sigma}; a standard deviation must be finite and >= 0.")
        super().__init__()
        self._seed_generator(seed)
        self.sigma = sigma
        self._noisy_keys = [tuple(key) if isinstance(key, list) else key for key in keys]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Adds the noise to a batch of any shape."""
        generator = self._rng
        for key in self._noisy_keys:
            value = tensordict.get(key)
            if not value.is_floating_point():
                raise ValueError(
                    f"{key!r} has dtype {value.dtype}; GaussianNoise disturbs floating entries. "
                    "Convert it before it is stored, or name other keys with keys=."
                )
            noise = torch.randn(value.shape, generator=generator, device=generator.device)
            tensordict.set(key, torch.add(value, noise.to(value), alpha=self.sigma))
        return tensordict

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the generator's state; TorchRL saves it with the buffer."""
        return {"generator": self.generator_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`get_extra_state` returned."""
        self.set_generator_state(state["generator"])
