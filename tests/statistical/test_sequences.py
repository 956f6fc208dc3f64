# SPDX-License-Identifier: Apache-2.0
"""Sequences are drawn with their probabilities, and the weights undo these."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from lightning_replay import recipes
from lightning_replay.replay import Replay
from lightning_replay.samplers import SequenceSampler
from lightning_replay.storage import PackedStorage
from tests.transitions import numbered_steps


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0])
def test_drawn_counts_and_weights_of_sequences(exponent: float) -> None:
    """Episodes of 2 to 13 steps through a ring that has overwritten some; 60,000 draws."""
    options = {"priority_exponent": exponent, "importance_exponent": 0.6, "priority_offset": 0.01}
    replay = recipes.sequences(90, 50, length=5, overlap=3, seed=3, **options)
    first = 0
    for steps in (13, 2, 7, 9, 4, 12, 5, 3, 11, 8, 6, 13, 10, 12):
        rows = numbered_steps(first, steps)
        rows["next", "done"][-1] = rows["next", "terminated"][-1] = True
        replay.extend(rows)
        first += steps
    batch = replay.sample(8_000)
    starts = batch["index"][:, 0].unique()
    error = torch.rand(len(starts), 5, generator=torch.Generator().manual_seed(0)) + 0.05
    if exponent:
        everything = torch.stack([batch["index"][batch["index"][:, 0] == start][0] for start in starts])
        replay.update_priority(everything, error)
        counts = torch.cat((torch.ones(len(starts), 1), everything.diff() != 0), 1).bool()
        largest = torch.where(counts, error, 0).amax(1)
        mean = torch.where(counts, error, 0).sum(1) / counts.sum(1)
        mass = (0.9 * largest + 0.1 * mean + 0.01).double() ** exponent
    else:
        mass = torch.ones(len(starts), dtype=torch.float64)
    drawn = torch.zeros(90)
    for _ in range(120):
        batch = replay.sample(500)
        drawn += torch.bincount(batch["index"][:, 0], minlength=90)
        if exponent:
            place = torch.searchsorted(starts, batch["index"][:, 0].contiguous())
            weight = (mass / mass.min())[place] ** -0.6
            torch.testing.assert_close(
                batch["priority_weight"].double(), weight.unsqueeze(1).expand(-1, 5), rtol=1e-4, atol=0
            )
    assert drawn.sum() == drawn[starts].sum() == 60_000
    assert chisquare(drawn[starts].double().numpy(), (mass / mass.sum() * 60_000).numpy()).pvalue > 1e-4


def test_sequences_drawn_on_a_device_are_equally_likely_and_those_of_the_cpu() -> None:
    """100,000 draws; the CPU is the device."""
    replays = [
        Replay(storage=PackedStorage(90), sampler=SequenceSampler(5, 3, device=device), batch_size=50, seed=3)
        for device in (None, "cpu")
    ]
    first = 0
    for steps in (13, 2, 7, 9, 4, 12, 5, 3, 11, 8, 6, 13, 10, 12):
        rows = numbered_steps(first, steps)
        rows["next", "done"][-1] = rows["next", "terminated"][-1] = True
        for replay in replays:
            replay.extend(rows)
        first += steps
    on_cpu, on_device = (replay.sample(100_000 // size) for replay, size in zip(replays, (10, 1), strict=True))
    starts, counts = on_device["index"][:, 0].unique(return_counts=True)
    assert starts.tolist() == on_cpu["index"][:, 0].unique().tolist()
    assert chisquare(counts.numpy()).pvalue > 1e-4
