# SPDX-License-Identifier: Apache-2.0
"""What samplers refuse beyond the numbers of their constructors: parts, attributes that are set, and priorities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage

from lightning_replay.samplers import (
    PrioritizedSampler,
    RandomPairSampler,
    TableShares,
)
from lightning_replay.schedules import Linear


@pytest.mark.parametrize("sampler", [PrioritizedSampler(4, seed=0), TableShares({"default": 1.0}, seed=0)])
@pytest.mark.parametrize(
    ("name", "shown", "value", "error"),
    [
        ("beta", "importance_exponent", -1, ValueError),
        ("beta", "importance_exponent", "0.4", TypeError),
        ("importance_exponent", "importance_exponent", True, TypeError),
        ("importance_exponent", "importance_exponent at reading 9 of Linear.*", Linear(0.4, 7.0, 9), ValueError),
        ("alpha", "priority_exponent", -0.1, ValueError),
        ("alpha", "priority_exponent", None, TypeError),
        ("priority_exponent", "priority_exponent", "0.6", TypeError),
    ],
)
def test_what_is_set_later_is_checked_alike(sampler, name: str, shown: str, value: Any, error) -> None:
    before = sampler.beta, sampler.alpha
    with pytest.raises(error, match=f"^{shown} is .*; it must be a"):
        setattr(sampler, name, value)
    assert (sampler.beta, sampler.alpha) == before


def test_numbers_of_numpy_may_be_set_as_the_schedulers_of_torchrl_do() -> None:
    sampler = PrioritizedSampler(4, importance_exponent=0.4, seed=0)
    sampler.beta, sampler.alpha = np.clip(0.5, -np.inf, np.inf), np.float32(0.25)
    assert (sampler.beta, sampler.alpha) == (0.5, 0.25) and type(sampler.alpha) is float


@pytest.mark.parametrize("priority", [torch.tensor([1.0 + 1j]), 1j, torch.zeros(1, dtype=torch.complex128)])
def test_complex_priorities_are_refused_and_nothing_is_changed(priority: Any) -> None:
    storage, sampler = LazyTensorStorage(4), PrioritizedSampler(4, seed=0)
    storage.set(torch.arange(4), torch.zeros(4, 1))
    sampler.mark_update(torch.arange(4), storage=storage)
    pairs = RandomPairSampler(first=sampler, seed=0)
    before = sampler.state_dict()["tree"]["leaves"]
    for update in (sampler.update_priority, pairs.update_priority):
        with pytest.raises(TypeError, match=r"priority is torch.complex\d+; it must be real"):
            update(torch.tensor([0]), priority, storage=storage)
    assert torch.equal(sampler.state_dict()["tree"]["leaves"], before)
