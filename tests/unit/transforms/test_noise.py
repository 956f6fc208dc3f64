# SPDX-License-Identifier: Apache-2.0
"""Noise on transitions."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.transforms import GaussianNoise
from tests.transitions import numbered_steps

DISTURBED = ("observation", "action", ("next", "observation"), ("next", "reward"))


def make_steps(count: int, value: float = 1.0) -> TensorDict:
    flags = torch.arange(count).reshape(-1, 1) % 3 == 0
    following = {
        "observation": torch.full((count, 2), value),
        "reward": torch.full((count, 1), value),
        "terminated": flags,
        "truncated": ~flags,
        "done": torch.ones_like(flags),
    }
    return TensorDict(
        {"observation": torch.full((count, 2), value), "action": torch.full((count, 1), value), "next": following},
        [count],
    )


def test_zeros_stay_under_multiplicative_noise() -> None:
    batch = GaussianNoise(sigma=9.0, kind="multiplicative", seed=0)(make_steps(5, value=0.0))
    assert all((batch[key] == 0).all() for key in DISTURBED)


def test_other_keys_pairs_and_no_noise() -> None:
    batch = GaussianNoise(keys=["action", ["next", "reward"]], seed=0)(make_steps(3))
    assert (batch["action"] != 1).all() and (batch["next", "reward"] != 1).all()
    assert (batch["observation"] == 1).all() and (batch["next", "observation"] == 1).all()
    assert (GaussianNoise(sigma=0.0)(make_steps(3))["observation"] == 1).all()
    assert GaussianNoise()(make_steps(6).reshape(3, 2)).batch_size == (3, 2)


def test_a_key_of_several_stands_for_everything_under_it_once() -> None:
    parts = {"arm": torch.zeros(5_000, 1), "base": {"x": torch.zeros(5_000, 1)}}
    batch = GaussianNoise(sigma=1.0, keys=["action", ("action", "arm")], seed=0)(TensorDict({"action": parts}, [5_000]))
    assert batch["action", "arm"].std() == pytest.approx(1.0, abs=0.05), "not disturbed twice"
    assert batch["action", "base", "x"].std() == pytest.approx(1.0, abs=0.05)


def test_the_recipe_disturbs_what_the_paper_does_and_leaves_the_stored_rows() -> None:
    replay = recipes.noisy(capacity=50, batch_size=40, sigma=0.01, seed=0)
    steps = numbered_steps(10, 20, done_every=4)
    replay.extend(steps)
    batch = replay.sample()
    drawn = steps[batch["index"]]
    for key in DISTURBED:
        difference = batch[key] - drawn[key]
        assert (difference != 0).all() and difference.abs().max() < 0.06
    for flag in ("terminated", "truncated", "done"):
        assert torch.equal(batch["next", flag], drawn["next", flag])
    assert torch.equal(replay.storage.get(torch.arange(20))["observation"], steps["observation"])


def test_keys_and_kind_are_options_of_the_recipe() -> None:
    replay = recipes.noisy(capacity=50, batch_size=40, keys=[("next", "reward")], kind="multiplicative", seed=0)
    replay.extend(numbered_steps(10, 20))
    batch = replay.sample()
    assert torch.equal(batch["observation"][:, :1], batch["index"].unsqueeze(1) + 10.0)
    ratio = batch["next", "reward"] / batch["observation"][:, :1]
    assert (ratio != 1).all() and ratio.std() == pytest.approx(0.1, rel=0.4)


def test_entries_that_cannot_be_disturbed_are_refused_and_nothing_is_changed() -> None:
    steps = make_steps(2)
    steps["action"] = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'action' has dtype torch.int64; .*or name other keys with keys="):
        GaussianNoise()(steps)
    assert (steps["observation"] == 1).all()
    with pytest.raises(ValueError, match=r"\('next', 'terminated'\) has dtype torch.bool"):
        GaussianNoise(keys=["next"])(steps)
    with pytest.raises(ValueError, match=r"the batch has no \('next', 'rewards'\); name the columns"):
        GaussianNoise(keys=[("next", "rewards")])(steps)
