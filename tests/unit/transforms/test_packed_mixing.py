# SPDX-License-Identifier: Apache-2.0
"""Batches mixed as packed rows are those that are mixed column by column."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import Compose

from lightning_replay.replay import Replay
from lightning_replay.samplers import NeighborhoodMixupSampler, RandomPairSampler
from lightning_replay.storage import PackedStorage
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.transforms import MixPairs, NStepTransitions

ROWS = 40


class ByColumn(MixPairs):
    """Its batches are mixed by ``forward``, as those of every subclass."""


def transitions(rows: int = ROWS, dtype: torch.dtype = torch.float32, **columns: Any) -> TensorDict:
    """Rows of which every fifth terminates, whose columns would overflow or be NaN if they were mixed across it."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=generator).to(dtype)

    terminated = (torch.arange(rows) % 5 == 4).unsqueeze(1)
    following = random(3).masked_fill(terminated, torch.nan)
    return TensorDict(
        {
            "observation": random(3),
            "action": random(2),
            "extra": random(),
            "number": torch.arange(rows),
            "next": {
                "observation": following,
                "reward": random(1),
                "terminated": terminated,
                "truncated": torch.zeros_like(terminated),
                "done": terminated.clone(),
            },
            **columns,
        },
        [rows],
    )


def batches(kind: type[MixPairs], rows: TensorDict, sampler: Any = None, **options: Any) -> list[TensorDict]:
    replay = Replay(
        storage=PackedStorage(ROWS),
        sampler=sampler or RandomPairSampler(seed=3),
        transform=kind(**options),
        batch_size=16,
        check_finite=False,
        seed=5,
    )
    replay.extend(rows)
    return [replay.sample() for _ in range(3)]


def check_equal(mine: list[TensorDict], theirs: list[TensorDict]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert one.batch_size == other.batch_size
        for key in one.keys(True, True):
            torch.testing.assert_close(one[key], other[key], rtol=1e-6, atol=1e-6, equal_nan=True, msg=str(key))


@pytest.mark.parametrize(
    "options",
    [{}, {"fraction": 0.5}, {"keys": ["observation", ("next", "reward")]}, {"keys": ["observation", "next", "extra"]}],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_is_the_one_that_columns_give(options: dict[str, Any], dtype: torch.dtype) -> None:
    rows = transitions(dtype=dtype)
    check_equal(batches(MixPairs, rows, **options), batches(ByColumn, rows, **options))


def test_rows_with_their_returns_discount_are_mixed_where_it_is_equal() -> None:
    rows = transitions(discount=torch.tensor([0.9, 0.81]).repeat(ROWS // 2).unsqueeze(1))
    mine = batches(MixPairs, rows)
    check_equal(mine, batches(ByColumn, rows))
    assert any(bool((batch["mixup_coefficient"] < 1).any()) for batch in mine)


def test_terminal_rows_and_rows_paired_with_themselves_stay_bit_for_bit() -> None:
    rows = transitions()
    for batch in batches(MixPairs, rows):
        index = batch["index"]
        left = rows["next", "terminated"][index].flatten(1).any(1) | (index[:, 0] == index[:, 1])
        assert left.any() and torch.equal(batch["mixup_coefficient"] == 1, left)
        for key in ("observation", ("next", "observation"), ("next", "reward")):
            first = rows[key][index[:, 0]]
            assert torch.equal(batch[key][left].view(torch.int32), first[left].view(torch.int32))
            assert not torch.equal(batch[key][~left], first[~left])


def test_both_generations_are_in_the_batch_where_both_get_feedback() -> None:
    sampler = NeighborhoodMixupSampler(update_partners=True, seed=0, feature_keys=("observation", "action"))
    (batch, *_) = batches(MixPairs, transitions(), sampler)
    assert batch["generation"].shape == (16, 2)


def test_a_missing_key_is_refused_with_its_name() -> None:
    transform, storage = MixPairs(keys=["observation", "goal"]), PackedStorage(ROWS)
    storage.set(slice(0, ROWS), transitions())
    with pytest.raises(ValueError, match="the batch has no 'goal'; MixPairs mixes"):
        transform._mix_stored(storage, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="the storage is empty"):
        MixPairs()._mix_stored(PackedStorage(3), torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.parametrize("slot", [-1, ROWS, 10**7])
def test_a_slot_that_is_none_is_refused(slot: int) -> None:
    class Beyond(RandomPairSampler):
        def sample(self, storage, batch_size):
            index, info = super().sample(storage, batch_size)
            index[0, 1] = slot
            return index, info

    replay = Replay(storage=PackedStorage(ROWS), sampler=Beyond(seed=0), transform=MixPairs(seed=0), batch_size=8)
    replay.extend(transitions().apply(lambda column: torch.nan_to_num(column)))
    with pytest.raises(IndexError):
        replay.sample()


def test_the_stored_rows_stay_and_the_transform_can_be_pickled_after_use() -> None:
    transform, storage = MixPairs(seed=0), PackedStorage(ROWS)
    storage.set(slice(0, ROWS), transitions())
    before = storage.all_packed.clone()
    index = torch.randint(ROWS, (16, 2), generator=torch.Generator().manual_seed(0))
    transform._mix_stored(storage, index)
    assert torch.equal(storage.all_packed, before)
    restored = pickle.loads(pickle.dumps(transform))
    check_equal([transform._mix_stored(storage, index)], [restored._mix_stored(storage, index)])


def test_returns_formed_at_the_draw_and_stacks_of_frames_are_mixed_by_column() -> None:
    replay = Replay(
        storage=PackedStorage(ROWS), sampler=RandomPairSampler(seed=0), transform=MixPairs(), n_steps=2, batch_size=8
    )
    with pytest.warns(UserWarning, match="rows of several environments or runs are mixed, were shuffled"):
        replay.extend(transitions().apply(lambda column: torch.nan_to_num(column)))
    assert {"discount", "mixup_coefficient"} <= set(replay.sample().keys())
    stacks = torch.zeros(ROWS, 2, 8, 8, dtype=torch.uint8)
    rows = transitions().apply(lambda column: torch.nan_to_num(column))
    rows["pixels"] = rows["next", "pixels"] = stacks
    frames = Replay(
        storage=FrameStorage(ROWS, 2, frame_capacity=100),
        sampler=RandomPairSampler(seed=0),
        transform=MixPairs(),
        batch_size=8,
    )
    frames.extend(rows)
    assert frames.sample()["pixels"].shape == (8, 2, 8, 8)


def test_returns_formed_before_they_are_stored_are_mixed() -> None:
    transform = [NStepTransitions(2, 0.9), MixPairs()]
    replay = Replay(
        storage=PackedStorage(ROWS), sampler=RandomPairSampler(seed=0), transform=Compose(*transform), batch_size=8
    )
    replay.extend(transitions().apply(lambda column: torch.nan_to_num(column)))
    assert replay.sample()["observation"].shape == (8, 3)
