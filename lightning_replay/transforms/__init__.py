# SPDX-License-Identifier: Apache-2.0
"""What happens to a batch between the storage and the loss, or to steps between the environment and the storage."""

from __future__ import annotations

from lightning_replay.transforms.mixup import MixPairs, MixStates, mixup_coefficients
from lightning_replay.transforms.n_step import NStepTransitions
from lightning_replay.transforms.noise import GaussianNoise

__all__ = ["GaussianNoise", "MixPairs", "MixStates", "NStepTransitions", "mixup_coefficients"]
