# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise on drawn transitions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from lightning_replay.options import checked_choice, checked_keys, checked_number
from lightning_replay.parts import ReplayTransform
from lightning_replay.saving.spec import rebuildable
from lightning_replay.transforms.mixup import floating_columns

NOISY_KEYS: tuple[str | tuple[str, ...], ...] = ("observation", "action", ("next", "observation"), ("next", "reward"))


@rebuildable
class GaussianNoise(ReplayTransform):
    """Disturbs every component of a batch by an independent draw from ``N(0, sigma**2)``: ``value + noise``.

    State, action, reward and next state of every row get separate noise, also terminal rows. Flags, other
    entries and the stored rows stay as they are. Actions may leave their bounds. Baseline of the NMER paper (Sander et
    al. 2022, https://arxiv.org/abs/2205.09117), as described there. The authors' code is multiplicative,
    ``value * (1 + noise)``, and draws one vector of noise for the whole batch. Here no two components share a draw.

    Args:
        sigma: Standard deviation, additive in the unit of each entry. 0.1 is the value of the authors' code.
        keys: Floating entries to disturb. A nested key stands for all under it. Name others if actions are discrete.
        kind: Kind of noise, ``"additive"`` or ``"multiplicative"``, which leaves zeros as they are.
        seed: Seed for the transform's own generator, whose state is part of :meth:`state_dict`.

    Raises:
        ValueError: ``sigma`` is negative or not finite, another ``kind``. When called, a missing or not floating entry.

    Example:
        >>> from tensordict import TensorDict
        >>> step = TensorDict({"observation": torch.zeros(2, 3), "next": {"observation": torch.ones(2, 3)}}, [2])
        >>> noisy = GaussianNoise(sigma=0.1, keys=["observation"], seed=0)(step)
        >>> bool((noisy["observation"] != 0).all()), bool((noisy["next", "observation"] == 1).all())
        (True, True)
    """

    def __init__(
        self,
        sigma: float = 0.1,
        keys: Sequence[NestedKey] = NOISY_KEYS,
        kind: str = "additive",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._seed_generator(seed)
        self.sigma: float = checked_number("sigma", sigma, 0.0)
        self.kind: str = checked_choice("kind", kind, ("additive", "multiplicative"))
        self._noisy_paths = checked_keys("keys", keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Disturbs a batch of any shape. The batch itself is changed."""
        generator = self._rng
        for leaf, value in floating_columns(tensordict, self._noisy_paths, "GaussianNoise").items():
            noise = torch.randn(value.shape, dtype=torch.float32, generator=generator, device=generator.device)
            scale = value if self.kind == "multiplicative" else 1.0
            tensordict.set(leaf, value + self.sigma * noise.to(value) * scale)
        return tensordict
