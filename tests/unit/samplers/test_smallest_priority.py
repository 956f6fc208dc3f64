# SPDX-License-Identifier: Apache-2.0
"""Loss-adjusted priorities: smaller ones are raised to the smallest, by every way in which they are set."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lightning_replay import Replay, recipes
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.storage import PackedStorage
from tests.stored import tree_leaves
from tests.transitions import numbered_steps

LAP = {"min_priority": 1.0, "priority_exponent": 0.4, "importance_exponent": 0.0, "priority_offset": 0.0}
ERRORS = torch.tensor([0.0, -0.3, 1.0, -3.0])
RAISED = torch.tensor([1.0, 1.0, 1.0, 3.0])


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("way", ["batch", "signed errors", "sampler", "column"])
def test_priorities_are_raised(backend: str, way: str) -> None:
    sampler = PrioritizedSampler(8, 0.4, 0.0, 0.0, backend=backend, min_priority=1.0)
    replay = Replay(storage=PackedStorage(8), sampler=sampler, batch_size=4)
    steps = numbered_steps(0, 4)
    slots = replay.extend(steps.set("td_error", ERRORS.unsqueeze(1)) if way == "column" else steps)
    if way == "batch":
        generation = replay.storage.generation_of(slots)
        replay.update_priority(slots, ERRORS, generation=generation)  # by the compiled pass where there is one
    elif way == "signed errors":
        replay.update_priority(slots, ERRORS)
    elif way == "sampler":
        sampler.update_priority(slots, ERRORS.abs(), storage=replay.storage)
    torch.testing.assert_close(tree_leaves(replay)[slots], RAISED**0.4)
    torch.testing.assert_close(sampler.priority_of(slots), RAISED)
    assert sampler.default_priority == 3.0
    assert (replay.sample()["priority_weight"] == 1.0).all()


def test_refused_priorities_stay_refused() -> None:
    sampler = PrioritizedSampler(8, min_priority=1.0)
    replay = Replay(storage=PackedStorage(8), sampler=sampler, batch_size=4)
    slots = replay.extend(numbered_steps(0, 4))
    before = tree_leaves(replay)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError):
            sampler.update_priority(slots, torch.tensor([1.0, wrong, 1.0, 1.0]), storage=replay.storage)
    for wrong in (float("nan"), float("inf")):
        for options in ({}, {"generation": replay.storage.generation_of(slots)}):
            with pytest.raises(ValueError):
                replay.update_priority(slots, torch.tensor([1.0, wrong, 1.0, 1.0]), **options)
    assert torch.equal(tree_leaves(replay), before)


def test_the_first_rows_have_no_smaller_one() -> None:
    sampler = PrioritizedSampler(8, 1.0, priority_offset=0.0, min_priority=5.0)
    Replay(storage=PackedStorage(8), sampler=sampler, batch_size=4).extend(numbered_steps(0, 2))
    assert sampler.priority_of(torch.tensor([0, 1])).tolist() == [5.0, 5.0]


def test_priorities_of_a_save_without_the_option_are_raised(tmp_path: Path, caplog) -> None:
    plain = recipes.prioritized(8, 4, **{**LAP, "min_priority": 0.0})
    plain.update_priority(plain.extend(numbered_steps(0, 4)), ERRORS)
    state = plain.state_dict()
    replay = recipes.prioritized(8, 4, **LAP)
    with caplog.at_level(logging.WARNING):
        replay.load_state_dict(state)
    assert "min_priority 1.0 (saved: 0.0)" in caplog.text
    assert replay.sampler.priority_of(torch.tensor([1, 2, 3])).tolist() == pytest.approx([1.0, 1.0, 3.0])
    # The same buffer restores every bit.
    replay.save(tmp_path / "buffer")
    again = recipes.prioritized(8, 4, **LAP)
    again.load(tmp_path / "buffer")
    found, expected = map(tree_leaves, (again, replay))
    assert torch.equal(found, expected)
