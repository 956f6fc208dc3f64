# SPDX-License-Identifier: Apache-2.0
"""TD errors of a training step of Stable-Baselines3 change what its next steps draw, as the formula has it."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from scipy.stats import chisquare
from torch.nn import functional

from lightning_replay.sb3 import RecipeBuffer

EXPONENT, ROWS = 0.7, 24


def test_rows_are_drawn_by_the_errors_of_the_loss_that_followed_their_draw() -> None:
    plane = spaces.Box(0, 99, (1,), np.float32)
    buffer = RecipeBuffer(ROWS, plane, spaces.Discrete(2), "cpu", priority_exponent=EXPONENT, seed=3)
    for place in range(ROWS):
        buffer.add(np.full((1, 1), place), np.zeros((1, 1)), np.zeros(1), np.full(1, 0.1 + place), np.ones(1), [{}])
    seen: set[int] = set()
    while len(seen) < ROWS:  # of each row the value is 0, and the error is the reward
        drawn = buffer.sample(64)
        target = drawn.rewards + (1 - drawn.dones) * 0.99 * torch.ones(64, 1)
        functional.mse_loss(torch.zeros(64, 1), target)
        seen |= set(drawn.observations.flatten().int().tolist())
    draws = torch.cat([buffer.sample(64).observations.flatten() for _ in range(400)]).int().numpy()
    priority = (0.1 + np.arange(ROWS) + 1e-6) ** EXPONENT
    expected = priority / priority.sum() * len(draws)
    assert chisquare(np.bincount(draws, minlength=ROWS), expected).pvalue > 1e-4
