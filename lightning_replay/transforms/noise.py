# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise on drawn transitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.parts import ReplayTransform
from lightning_replay.saving.spec import recorded
from lightning_replay.seeded import Seeded
from lightning_replay.transforms.mixing import as_path
from lightning_replay.validation import checked_choice, checked_keys, checked_number

NOISY_KEYS: tuple[str | tuple[str, ...], ...] = ("observation", "action", ("next", "observation"), ("next", "reward"))
NOISE_KINDS = ("additive", "multiplicative")


@recorded
class GaussianNoise(Seeded, ReplayTransform):
    """Disturbs every component of a batch by an independent draw from ``N(0, sigma**2)``: ``value + noise``.

    State, action, reward and next state of every row get noise of their own, terminal rows included; the flags and all
    other entries stay, and so do the stored rows. Actions may leave their bounds. Baseline of the NMER paper (Sander et
    al. 2022, https://arxiv.org/abs/2205.09117), as the paper words it. The authors' code is multiplicative,
    ``value * (1 + noise)``, and draws one vector of noise for the whole batch; here no two components share a draw.

    Args:
        sigma: standard deviation, additive in the unit of each entry; 0.1 is the value of the authors' code.
        keys: what is disturbed: floating entries, a key of several stands for everything under it. Name others where
            actions are discrete.
        kind: ``"additive"`` or ``"multiplicative"``, which leaves zeros as they are.
        seed: of the transform's own generator, whose state is part of :meth:`state_dict`.

    Raises:
        ValueError: ``sigma`` is negative or not finite, another ``kind``; when called, an entry that is missing or not
            floating.
        TypeError: ``sigma`` is no number, or ``keys`` is no sequence of keys.

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
        self.sigma = checked_number("sigma", sigma, 0.0)
        self.kind: str = checked_choice("kind", kind, NOISE_KINDS)
        self._noisy_paths = checked_keys("keys", keys)
        self._seed_generator(seed)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Disturbs a batch of any shape; the batch itself is changed."""
        generator = self._rng
        # a dictionary: keys that overlap disturb an entry once, and one that is refused leaves the batch as it was
        leaves = {leaf: value for path in self._noisy_paths for leaf, value in _leaves(tensordict, path)}
        for leaf, value in leaves.items():
            noise = torch.randn(value.shape, generator=generator, device=generator.device).to(value)
            scale = value if self.kind == "multiplicative" else 1.0
            tensordict.set(leaf, value + self.sigma * noise * scale)
        return tensordict

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the generator's state; TorchRL saves it with the buffer."""
        return {"generator": self.generator_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`get_extra_state` returned."""
        self.set_generator_state(state["generator"])


def _leaves(tensordict: TensorDictBase, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Every entry at or under ``path``, with its own path.

    Raises:
        ValueError: none, or one that is not floating.
    """
    found = tensordict.get(path, None)
    if found is None:
        raise ValueError(f"the batch has no {_shown(path)}; name the entries that get noise with keys=")
    nested = isinstance(found, TensorDictBase)
    entries = [((*path, *as_path(key)), value) for key, value in found.items(True, True)] if nested else [(path, found)]
    for leaf, value in entries:
        if not value.is_floating_point():
            raise ValueError(
                f"{_shown(leaf)} has dtype {value.dtype}; GaussianNoise disturbs floating entries. "
                "Convert it before it is stored, or name other keys with keys=."
            )
        yield leaf, value


def _shown(path: tuple[str, ...]) -> str:
    return repr(path if len(path) > 1 else path[0])
