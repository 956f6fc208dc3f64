# SPDX-License-Identifier: Apache-2.0
"""The newest row in every batch, with the weight of its priority."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_replay import Replay, load_replay
from lightning_replay.samplers import (
    CombinedSampler,
    ContinuousCorrectionSampler,
    PrioritizedSampler,
    RandomPairSampler,
    ReliabilityAdjustedSampler,
    ReshuffledSampler,
    TableShares,
    UniformSampler,
)
from lightning_replay.storage import PackedStorage
from lightning_replay.writers import RetentionWriter, SurpriseOnly
from tests.transitions import numbered_steps

FIRSTS = {
    "default": lambda: None,
    "uniform": lambda: UniformSampler(seed=1),
    "prioritized": lambda: PrioritizedSampler(8, 1.0, 1.0, 0.0, seed=1),
    "over the batch": lambda: PrioritizedSampler(8, 1.0, 1.0, 0.0, True, seed=1),
    "torch": lambda: PrioritizedSampler(8, 1.0, 1.0, 0.0, backend="torch", seed=1),
    "reliability": lambda: ReliabilityAdjustedSampler(8, seed=1),
    "reshuffled": lambda: ReshuffledSampler(seed=1),
}


def make_replay(first=None, capacity: int = 8, **options) -> Replay:
    return Replay(
        storage=PackedStorage(capacity), sampler=CombinedSampler(first, seed=0), batch_size=4, seed=0, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRSTS)
def test_the_newest_row_is_last(name: str) -> None:
    replay = make_replay(FIRSTS[name]())
    for number in range(12):
        replay.extend(numbered_steps(2 * number, 2))
        batch = replay.sample()
        assert batch["observation"][-1, 0] == 2 * number + 1
        assert len(replay.sample(1)) == 1 and replay.sample(1)["index"].item() == batch["index"][-1]
        if replay.is_prioritized:
            replay.update_priority(batch, torch.rand(4))


def test_weights_are_those_of_a_draw() -> None:
    errors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    for over_batch in (False, True):
        replay = make_replay(PrioritizedSampler(8, 1.0, 0.5, 0.0, over_batch, seed=1))
        replay.update_priority(replay.extend(numbered_steps(0, 4)), errors)
        batch = replay.sample(64)
        least = errors[batch["index"]].min() if over_batch else 1.0
        torch.testing.assert_close(batch["priority_weight"], (errors[batch["index"]] / least) ** -0.5)
        assert int(batch["index"][-1]) == 3
    # A newest row of priority 0, which first never draws, has the largest weight, not an infinite one.
    replay.update_priority(torch.tensor([3]), torch.zeros(1))
    assert replay.sample()["priority_weight"][-1] == 1.0


def test_the_rows_before_are_those_of_first() -> None:
    own = UniformSampler(seed=4)
    replay = make_replay(UniformSampler(seed=4))
    replay._sampler.base_sampler.reseed(4)
    replay.extend(numbered_steps(0, 6))
    assert torch.equal(replay.sample(5)["index"][:-1], own.sample(replay.storage, 4)[0])


def test_where_the_newest_row_has_left_first_draws_all() -> None:
    replay = make_replay(writer=RetentionWriter(SurpriseOnly()))
    slots = replay.extend(numbered_steps(0, 8))
    replay.sampler.on_evict(slots[-1:])
    assert len({tuple(replay.sample()["index"].tolist())[-1] for _ in range(40)}) > 3
    replay.empty()
    assert replay.sampler.state_dict()["newest"] == -1


def test_a_save_draws_on(tmp_path: Path) -> None:
    replay = make_replay(PrioritizedSampler(8, seed=1))
    replay.extend(numbered_steps(0, 6))
    replay.save(tmp_path / "replay")
    again = load_replay(tmp_path / "replay")
    for _ in range(5):
        one, other = replay.sample(), again.sample()
        assert torch.equal(one["index"], other["index"]) and torch.equal(
            one["priority_weight"], other["priority_weight"]
        )
    assert repr(again.sampler).startswith("CombinedSampler(base_sampler=PrioritizedSampler(capacity=8")


@pytest.mark.parametrize("first", [None, PrioritizedSampler(8, seed=1)], ids=["uniform", "prioritized"])
def test_a_state_whose_newest_row_there_is_not_is_refused(first) -> None:
    replay = make_replay(first)
    replay.extend(numbered_steps(0, 6))
    replay.sampler.load_state_dict(replay.sampler.state_dict() | {"newest": 6})
    with pytest.raises(ValueError, match="newest row of the state is in slot 6, which there is not"):
        replay.sample()


@pytest.mark.parametrize(
    "first",
    [RandomPairSampler(), TableShares({"default": 1.0}), ContinuousCorrectionSampler(0.5)],
    ids=lambda first: type(first).__name__,
)
def test_other_batches_are_refused(first) -> None:
    with pytest.raises(TypeError, match="base_sampler is .*it must be a UniformSampler or PrioritizedSampler of rows"):
        CombinedSampler(first)


def test_draws_are_not_divided() -> None:
    with pytest.raises(TypeError, match="draws of CombinedSampler cannot be divided over several replays"):
        make_replay().group_totals()
