# SPDX-License-Identifier: Apache-2.0
"""The prioritized approximation loss against draws by loss-adjusted priorities."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import huber_loss

from lightning_replay.losses import pal_loss


@pytest.mark.parametrize(("exponent", "least"), [(0.4, 1.0), (0.6, 0.5), (0.0, 2.0)])
def test_its_gradient_is_that_of_huber_losses_under_draws_by_lap(exponent: float, least: float) -> None:
    errors = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    errors[0] = 0.0
    probability = errors.abs().clamp(min=least) ** exponent
    probability /= probability.sum()
    drawn, uniform = (errors.clone().requires_grad_() for _ in range(2))
    (probability * huber_loss(drawn, torch.zeros_like(drawn), reduction="none", delta=least)).sum().backward()
    pal_loss(uniform, exponent, least).mean().backward()
    torch.testing.assert_close(uniform.grad, drawn.grad, rtol=1e-12, atol=1e-15)


def test_worked_numbers() -> None:
    # The mean of max(|δ|, 1) ** 0.5 is (1 + 2) / 2; above 1 the loss is |δ| ** 1.5 / 1.5.
    rows = pal_loss(torch.tensor([-0.5, 4.0]), priority_exponent=0.5)
    torch.testing.assert_close(rows, torch.tensor([0.125 / 1.5, 8.0 / 1.5 / 1.5]))


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="priority_exponent is -1"):
        pal_loss(torch.ones(2), -1.0)
    with pytest.raises(ValueError, match="min_priority is 0"):
        pal_loss(torch.ones(2), min_priority=0.0)
