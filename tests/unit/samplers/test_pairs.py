# SPDX-License-Identifier: Apache-2.0
"""Pairs of rows, over uniform and prioritized first elements, in TorchRL's buffer and in ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay.replay import Replay
from lightning_replay.samplers import (
    ContinuousTransitionSampler,
    NeighborhoodMixupSampler,
    PrioritizedSampler,
    RandomPairSampler,
    ReverseSweepSampler,
)
from lightning_replay.samplers.pairs import PairSampler
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.transforms import MixPairs
from tests.transitions import connected, numbered_steps


class NextSlot(PairSampler):
    """Pairs a row with the slot after it, and notes what it learns."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.learned: list[list[int]] = []

    def partners(self, index: Tensor, storage: Any) -> Tensor:
        return (index + 1) % len(storage)

    def on_insert(self, index: Tensor, storage: Any) -> None:
        self.learned.append(index.tolist())


def make_buffer(sampler: Any, capacity: int = 8, batch_size: int = 4, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=sampler,
        batch_size=batch_size,
        transform=MixPairs(seed=0),
        **options,
    )


def prioritized(capacity: int = 8) -> PrioritizedSampler:
    return PrioritizedSampler(capacity=capacity, priority_exponent=1.0, importance_exponent=1.0, priority_offset=0.0)


def priorities(buffer: TensorDictReplayBuffer) -> list[float]:
    """Each row's priority over the smallest: with an importance exponent of 1 the inverse of its weight."""
    index, info = buffer.sampler.base_sampler.sample(buffer.storage, 4000)
    found = {int(slot): float(weight) for slot, weight in zip(index, info["priority_weight"], strict=True)}
    return [round(1 / found[slot], 3) for slot in range(len(buffer))]


def test_a_batch_of_pairs_becomes_a_batch_of_mixed_rows() -> None:
    buffer = make_buffer(NextSlot(seed=0))
    buffer.extend(numbered_steps(0, 8))
    batch = buffer.sample()
    assert (
        batch.batch_size == torch.Size([4]) and batch["index"].shape == (4, 2) and batch["index"].dtype == torch.int64
    )
    assert torch.equal(batch["index"][:, 1], (batch["index"][:, 0] + 1) % 8)
    first, second = buffer.storage.get(batch["index"])["observation"].unbind(1)
    weight = batch["mixup_coefficient"].unsqueeze(1)
    torch.testing.assert_close(batch["observation"], weight * first + (1 - weight) * second)


def test_new_rows_are_learned_once_in_order() -> None:
    sampler = NextSlot()
    buffer = make_buffer(sampler, capacity=5)
    buffer.extend(numbered_steps(0, 3))
    buffer.add(numbered_steps(0, 1)[0])
    buffer.extend(numbered_steps(0, 2))
    assert sampler.learned == [[0, 1, 2], [3], [4, 0]]
    buffer.extend(numbered_steps(0, 12))  # more than the ring holds: the last five rows
    assert sampler.learned[-1] == [3, 4, 0, 1, 2]


def test_rows_stored_before_the_sampler_came_are_learned() -> None:
    storage = LazyTensorStorage(8)
    TensorDictReplayBuffer(storage=storage, batch_size=2).extend(numbered_steps(0, 3))
    at_sample, at_write = NextSlot(), NextSlot(base_sampler=prioritized())
    TensorDictReplayBuffer(storage=storage, sampler=at_sample, batch_size=2).sample()
    buffer = TensorDictReplayBuffer(storage=storage, sampler=at_write, batch_size=2)
    buffer.writer._cursor = 3
    buffer.extend(numbered_steps(0, 2).exclude("index"))
    assert at_sample.learned == [[0, 1, 2], [3, 4]]
    assert at_write.learned == [[0, 1, 2], [3, 4]]
    drawn = torch.cat([buffer.sample()["index"] for _ in range(50)])
    assert drawn.unique().tolist() == [0, 1, 2, 3, 4]


def test_emptying_forgets_and_an_empty_buffer_is_refused() -> None:
    sampler = NextSlot()
    buffer = make_buffer(sampler)
    with pytest.raises(RuntimeError, match="empty"):
        sampler.sample(buffer.storage, 4)
    buffer.extend(numbered_steps(0, 3))
    buffer.empty()
    buffer.extend(numbered_steps(0, 2))
    assert sampler.learned == [[0, 1, 2], [0, 1]]


def test_td_errors_of_pairs_update_the_first_of_each() -> None:
    sampler = NextSlot(base_sampler=prioritized())
    buffer = make_buffer(sampler)
    buffer.extend(numbered_steps(0, 4))
    assert sampler.uses_priorities
    buffer.update_priority(torch.tensor([[0, 1], [2, 3]]), torch.tensor([4.0, 2.0]))
    assert priorities(buffer) == [4.0, 1.0, 2.0, 1.0]
    batch = buffer.sample()
    assert batch["priority_weight"].shape == (4,)
    batch["td_error"] = torch.full((4,), 8.0)
    buffer.update_tensordict_priority(batch)
    drawn = set(batch["index"][:, 0].tolist())
    expected = [8.0 if slot in drawn else [4.0, 1.0, 2.0, 1.0][slot] for slot in range(4)]
    smallest = min(expected)
    assert priorities(buffer) == [priority / smallest for priority in expected]


def test_td_errors_of_pairs_update_both_when_asked_and_firsts_count_more() -> None:
    sampler = NextSlot(base_sampler=prioritized(), update_partners=True)
    buffer = make_buffer(sampler)
    buffer.extend(numbered_steps(0, 7))
    # 1 is the partner in the first pair and leads the second; 6 is in none
    pairs = torch.tensor([[0, 1], [1, 2], [3, 3], [4, 5]])
    buffer.update_priority(pairs, torch.tensor([4.0, 2.0, 8.0, 16.0]))
    assert priorities(buffer) == [4.0, 2.0, 2.0, 8.0, 16.0, 16.0, 1.0]


def test_our_buffer_gives_td_errors_to_both() -> None:
    sampler = RandomPairSampler(base_sampler=prioritized(), update_partners=True)
    replay = Replay(storage=PackedStorage(8), sampler=sampler, transform=MixPairs(), batch_size=4, seed=0)
    replay.extend(numbered_steps(0, 8))
    assert replay.is_prioritized
    batch = replay.sample()
    replay.update_priority(batch["index"], torch.full((4,), -5.0), generation=batch["generation"])
    drawn = set(batch["index"].flatten().tolist())
    assert priorities(replay) == [5.0 if slot in drawn else 1.0 for slot in range(8)]


def test_td_errors_are_ignored_over_a_uniform_draw() -> None:
    sampler = NextSlot(seed=0)
    buffer = make_buffer(sampler)
    buffer.extend(numbered_steps(0, 4))
    assert not sampler.uses_priorities
    batch = buffer.sample()
    assert "priority_weight" not in batch
    batch["td_error"] = torch.ones(4)
    buffer.update_tensordict_priority(batch)


def test_a_generator_given_to_pairs_is_that_of_their_first_rows_too_also_after_a_load() -> None:
    buffer, again = (make_buffer(RandomPairSampler(base_sampler=prioritized())) for _ in range(2))
    buffer.set_rng(torch.Generator().manual_seed(3))
    buffer.extend(numbered_steps(0, 8))
    buffer.sample()
    again.load_state_dict(buffer.state_dict())
    for _ in range(3):
        assert (buffer.sample() == again.sample()).all()


def test_what_it_cannot_learn_from_is_refused() -> None:
    with pytest.raises(ValueError, match="got no storage"):
        RandomPairSampler().mark_update(torch.tensor([0]))
    with pytest.raises(ValueError, match="not of one dimension; build the storage with ndim=1"):
        RandomPairSampler().mark_update(torch.zeros(3, 2, dtype=torch.int64), storage=LazyTensorStorage(4, ndim=2))


def test_bytes_are_those_of_its_parts() -> None:
    assert RandomPairSampler().nbytes == 0
    assert RandomPairSampler(base_sampler=prioritized()).nbytes == prioritized().nbytes > 0


@pytest.mark.parametrize("pairs", [RandomPairSampler, ContinuousTransitionSampler])
@pytest.mark.parametrize("how", ["by slot", "by trajectory"])
def test_the_first_sampler_gets_ends_of_episodes(pairs: Any, how: str) -> None:
    """Steps 0 and 1 of an episode, its end, and step 2, from which no sweep goes back."""
    sweep = ReverseSweepSampler(lambda steps: steps["next", "reward"].flatten() > 0, sweep_share=1.0, seed=0)
    replay = Replay(storage=PackedStorage(8), sampler=pairs(sweep), batch_size=2)
    steps = connected(numbered_steps(0, 3).set(("next", "reward"), torch.tensor([[0.0], [0.0], [1.0]])))
    replay.extend(steps[:2])
    if how == "by slot":
        replay.sampler.end_episodes(torch.tensor([1]))
    else:
        replay.sampler.end_episodes(torch.zeros(0, dtype=torch.int64), [None])
    replay.extend(steps[2:])
    assert sweep.sample(replay.storage, 3)[0].tolist() == [2, 2, 2]
    if pairs is ContinuousTransitionSampler:
        assert replay.sampler.partners(torch.arange(3), replay.storage).tolist() == [1, 1, 2]


@pytest.mark.parametrize("pairs", [RandomPairSampler, ContinuousTransitionSampler, NeighborhoodMixupSampler])
def test_rows_that_the_first_sampler_refuses_are_not_stored(pairs: Any) -> None:
    first = ReverseSweepSampler(lambda steps: steps["next", "reward"].flatten() > 0, done_key=("next", "over"))
    replay = Replay(storage=PackedStorage(8), sampler=pairs(base_sampler=first), batch_size=2)
    with pytest.raises(ValueError, match="done_key= of ReverseSweepSampler"):
        replay.extend(numbered_steps(0, 1))
    assert len(replay) == 0
