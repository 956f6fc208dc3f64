# SPDX-License-Identifier: Apache-2.0
"""Noise on states."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from lightning_replay.transforms import GaussianNoise


def make_steps(count: int = 20_000) -> TensorDict:
    following = {"observation": torch.ones(count, 2), "reward": torch.zeros(count, 1)}
    return TensorDict(
        {"observation": torch.ones(count, 2), "action": torch.zeros(count, 1), "next": following}, [count]
    )


def test_every_component_of_both_states_gets_noise_of_its_own() -> None:
    batch = GaussianNoise(sigma=0.5, seed=0)(make_steps())
    noise = torch.cat([batch["observation"], batch["next", "observation"]], dim=1) - 1
    torch.testing.assert_close(noise.std(0), torch.full((4,), 0.5), rtol=0.03, atol=0)
    assert noise.mean(0).abs().max() < 0.02
    assert (torch.corrcoef(noise.T) - torch.eye(4)).abs().max() < 0.05  # neither shared nor multiplied
    assert (batch["action"] == 0).all() and (batch["next", "reward"] == 0).all()


def test_other_keys_pairs_and_no_noise() -> None:
    batch = GaussianNoise(keys=["action"], seed=0)(make_steps(3))
    assert (batch["action"] != 0).all() and (batch["observation"] == 1).all()
    assert (GaussianNoise(sigma=0.0)(make_steps(3))["observation"] == 1).all()
    assert GaussianNoise()(make_steps(6).reshape(3, 2)).batch_size == (3, 2)


def test_state_goes_on_with_the_same_noise() -> None:
    one, again = GaussianNoise(seed=0), GaussianNoise(seed=1)
    again.load_state_dict(one.state_dict())
    assert torch.equal(one(make_steps(9))["observation"], again(make_steps(9))["observation"])


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="sigma is -1"):
        GaussianNoise(sigma=-1)
    steps = make_steps(2)
    steps["observation"] = torch.zeros(2, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"'observation' has dtype torch.uint8"):
        GaussianNoise()(steps)
