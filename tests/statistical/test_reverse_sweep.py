# SPDX-License-Identifier: Apache-2.0
"""Sweeps come as often as asked, from every goal alike, and the other batches are uniform."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from tensordict import TensorDict

from lightning_replay.replay import Replay
from lightning_replay.samplers import ReverseSweepSampler
from lightning_replay.storage.packed import PackedStorage

LEAST_P_VALUE = 1e-4
CAPACITY, EPISODE, BATCH = 60, 5, 10


def make_replay(sweep_share: float) -> Replay:
    """Episodes of 5 steps; every third one ends at a goal, the last of them having been overwritten in part."""
    number = torch.arange(73)
    done = (number % EPISODE == EPISODE - 1).unsqueeze(1)
    reward = (done & (number % (3 * EPISODE) == EPISODE - 1).unsqueeze(1)).float()
    steps = TensorDict({"number": number, "next": {"reward": reward, "done": done}}, [73])
    sampler = ReverseSweepSampler(lambda rows: rows["next", "reward"] > 0, sweep_share=sweep_share)
    replay = Replay(storage=PackedStorage(CAPACITY), sampler=sampler, batch_size=BATCH, seed=1)
    replay.extend(steps)
    return replay


def is_sweep(numbers: torch.Tensor) -> bool:
    """Ten uniform draws are two runs of five going down once in 10**14."""
    halves = numbers.reshape(2, EPISODE)
    return bool((halves[:, 1:] == halves[:, :-1] - 1).all())


@pytest.mark.slow
@pytest.mark.parametrize("sweep_share", [0.5, 0.2])
def test_share_of_sweeps_and_uniform_rest(sweep_share: float) -> None:
    replay = make_replay(sweep_share)
    batches = [replay.sample()["number"] for _ in range(6_000)]
    uniform = torch.cat([numbers for numbers in batches if not is_sweep(numbers)])
    sweeps = len(batches) - len(uniform) // BATCH
    assert stats.binomtest(sweeps, len(batches), sweep_share).pvalue > LEAST_P_VALUE
    counts = torch.bincount(uniform, minlength=73)[13:]
    assert counts.sum() == len(uniform)
    assert stats.chisquare(counts.numpy()).pvalue > LEAST_P_VALUE


def test_every_goal_episode_is_swept_alike() -> None:
    replay = make_replay(1.0)
    drawn = torch.cat([replay.sample()["number"] for _ in range(3_000)]).reshape(-1, EPISODE)
    # goals at 4 (gone), 19, 34, 49, 64
    starts, counts = drawn[:, 0].unique(return_counts=True)
    assert starts.tolist() == [19, 34, 49, 64]
    assert stats.chisquare(counts.numpy()).pvalue > LEAST_P_VALUE
