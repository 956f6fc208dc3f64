# SPDX-License-Identifier: Apache-2.0
"""TorchRL's own samplers in a Replay: its seed reaches them, and a loaded or copied buffer goes on with their draws."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrl.data import LazyTensorStorage, RandomSampler, SamplerWithoutReplacement, SliceSampler
from torchrl.data.replay_buffers import SliceSamplerWithoutReplacement

from lightning_replay import PackedStorage, Replay
from lightning_replay.samplers import RandomPairSampler
from tests.transitions import numbered_steps

SLICES: dict[str, Any] = {"num_slices": 4, "end_key": ("next", "done")}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(**SLICES),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(**SLICES),
    "first of pairs": lambda: RandomPairSampler(base_sampler=RandomSampler()),
}
STORAGES = {"packed": PackedStorage, "of TorchRL": LazyTensorStorage, "of TorchRL, auto": "auto"}


def filled(sampler: str, storage: str = "packed", seed: int | None = 0) -> Replay:
    of_rows: Any = STORAGES[storage]
    rows = LazyTensorStorage(64, device="auto") if of_rows == "auto" else of_rows(64)
    replay = Replay(storage=rows, sampler=SAMPLERS[sampler](), batch_size=8, seed=seed)
    replay.extend(numbered_steps(0, 60, done_every=10))
    return replay


def draws(replay: Replay) -> Tensor:
    return torch.cat([replay.sample()["index"] for _ in range(9)])  # more than one pass over the rows


def loaded_from_files(replay: Replay, other: Replay, folder: Path) -> Replay:
    replay.save(folder)
    other.load(folder)
    return other


def loaded(replay: Replay, other: Replay, folder: Path) -> Replay:
    other.load_state_dict(replay.state_dict())
    return other


COPIES: dict[str, Callable[[Replay, Replay, Path], Replay]] = {
    "load": loaded_from_files,
    "load_state_dict": loaded,
    "deepcopy": lambda replay, other, folder: copy.deepcopy(replay),
    "pickle": lambda replay, other, folder: pickle.loads(pickle.dumps(replay)),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_seed_decides_the_draws(sampler: str, storage: str) -> None:
    torch.manual_seed(1)
    expected = draws(filled(sampler, storage))
    torch.manual_seed(2)
    assert torch.equal(draws(filled(sampler, storage)), expected)
    assert not torch.equal(draws(filled(sampler, storage, seed=5)), expected)
    again = filled(sampler, storage, seed=5)
    again.seed(0)
    assert torch.equal(draws(again), expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_copies_go_on_with_the_draws(sampler: str, way: str, seed: int | None, tmp_path: Path) -> None:
    replay = filled(sampler, seed=seed)
    draws(replay)
    other = COPIES[way](replay, filled(sampler, seed=7), tmp_path / "save")
    assert torch.equal(draws(other), draws(replay))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_generator_given_to_the_buffer_decides_the_draws(sampler: str, tmp_path: Path) -> None:
    replays = [filled(sampler, seed=seed) for seed in (0, 7)]
    for replay in replays:
        replay.set_rng(torch.Generator().manual_seed(3))
    first = draws(replays[0])
    assert torch.equal(draws(replays[1]), first)
    other = loaded_from_files(replays[0], filled(sampler), tmp_path / "save")
    replays[0].set_rng(None)
    following = draws(replays[0])
    assert torch.equal(draws(replays[1]), following)
    assert torch.equal(draws(other), following)


def test_a_sampler_that_replaces_another_one_follows_the_seed() -> None:
    replays = [filled("without replacement", seed=seed) for seed in (0, 7)]
    for replay in replays:
        replay.set_sampler(RandomSampler())
        replay.seed(3)
    assert torch.equal(draws(replays[0]), draws(replays[1]))


def test_the_stamp_of_draws_changes_with_a_draw() -> None:
    replay = filled("random")
    before = replay.generator_fingerprint()
    assert replay.generator_fingerprint() == before
    replay.sample()
    assert replay.generator_fingerprint() != before
