# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import (
    OfflineToOnlineReplayBuffer,
    RoundRobinWriter,
    Sequence,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.offline_to_online import prefill_replay_buffer

from lightning_replay.replay import Replay
from lightning_replay.storage.packed import PackedStorage, read_columns
from lightning_replay.writers import FirstInFirstOutWriter
from tests.transitions import numbered_steps

MIXED = {
    "observation": {"pixels": torch.randint(255, (6, 2, 4, 4), dtype=torch.uint8), "speed": torch.randn(6, 3)},
    "action": torch.arange(6),
    "mask": torch.rand(6, 5) > 0.5,
    "weight": torch.randn(6).double(),
    "half": torch.randn(6, 2).to(torch.bfloat16),
    "next": {"reward": torch.randn(6, 1)},
}


def filled(rows: TensorDict, capacity: int = 10) -> PackedStorage:
    storage = PackedStorage(capacity)
    storage.set(slice(0, rows.shape[0]), rows)
    return storage


def test_every_dtype_and_shape_comes_back_bit_for_bit() -> None:
    rows = TensorDict(MIXED, [6])
    storage = filled(rows)
    index = torch.tensor([5, 0, 3, 3])
    drawn = storage.get(index)
    assert (drawn.exclude("generation") == rows[index]).all()
    for key in rows.keys(True, True):
        assert drawn[key].dtype == rows[key].dtype, key
        assert drawn[key].shape == (4, *rows[key].shape[1:]), key
    pairs = storage.get(torch.tensor([[0, 5], [2, 2], [4, 1]]))
    assert pairs.shape == (3, 2) and (pairs[:, 1].exclude("generation") == rows[torch.tensor([5, 2, 1])]).all()


def test_drawn_rows_are_copies_and_grow_no_graph() -> None:
    rows = numbered_steps(0, 4)
    rows["observation"].requires_grad_(True)
    storage = filled(rows)
    drawn = storage.get(torch.tensor([1]))
    assert not drawn["observation"].requires_grad
    drawn["observation"].fill_(99.0)
    assert storage.get(torch.tensor([1]))["observation"][0, 0] == 1


def test_generation_counts_the_writes_of_each_slot() -> None:
    storage = filled(numbered_steps(0, 4))
    storage.set(torch.tensor([1, 2]), numbered_steps(10, 2))
    assert storage.generation_of(torch.arange(5)).tolist() == [1, 2, 2, 1, 0]
    storage._empty()
    storage.set(slice(0, 1), numbered_steps(0, 1))
    assert storage.generation_of(torch.tensor([0])).item() == 3, "emptying a slot counts like a write"


def test_rows_are_aligned_and_bytes_are_exact() -> None:
    storage = filled(numbered_steps(0, 4), capacity=100)
    #        observation 12 + action 8 + next observation 12 + reward 4 + 3 flags + generation 8 = 47 -> 64
    assert storage.row_bytes == 64
    assert storage.nbytes == 6_400 == storage.all_packed.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda rows: rows.exclude("action"), "action"),
        (lambda rows: rows.set("extra", torch.zeros(2)), "extra"),
        (lambda rows: rows.set("observation", torch.zeros(2, 4)), "observation"),
        (lambda rows: rows.set("action", torch.zeros(2, 2, dtype=torch.int64)), "action"),
        (lambda rows: rows.set(("next", "reward"), torch.zeros(2, 1).double()), r"\('next', 'reward'\): stored"),
        (lambda rows: rows.set("next/reward", torch.zeros(2, 1)), "'next/reward': stored no such column"),
        (lambda rows: rows.set("observation", rows["observation"].bfloat16()), "given .torch.bfloat16, .3,"),
        (lambda rows: rows.to("meta"), "device"),
    ],
)
def test_columns_that_change_are_refused_and_nothing_is_written(change, named) -> None:
    storage = filled(numbered_steps(0, 4))
    before = storage.all_packed.clone()
    with pytest.raises(ValueError, match=f"nothing was written.*{named}"):
        storage.set(slice(4, 6), change(numbered_steps(4, 2)))
    assert torch.equal(before, storage.all_packed)
    assert len(storage) == 4


def test_more_than_is_free_is_refused_before_anything_is_allocated() -> None:
    storage = PackedStorage(10**12)
    with pytest.raises(MemoryError, match=r"needs 64,000,000,000,000 bytes .* are free"):
        storage.set(slice(0, 1), numbered_steps(0, 1))
    assert storage.nbytes == 0


def test_bad_arguments_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="device is 'meta'.* it must be a device"):
        PackedStorage(10, device="meta")
    with pytest.raises(ValueError, match="needs device"):
        PackedStorage(10, device="mps", memmap=str(tmp_path))
    with pytest.raises(RuntimeError, match="call extend first"):
        PackedStorage(10).get(torch.tensor([0]))
    with pytest.raises(TypeError, match="dense tensors"):
        PackedStorage(10).set(slice(0, 1), TensorDict({"text": "words"}, [1]))
    with pytest.raises(KeyError, match="no column 'colour'"):
        read_columns(filled(numbered_steps(0, 2)), torch.tensor([0]), ["colour"])


def test_memory_mapped_rows_equal_those_in_memory_and_leave_no_file(tmp_path) -> None:
    storage = PackedStorage(10, memmap=str(tmp_path))
    rows = TensorDict(MIXED, [6])
    storage.set(slice(0, 6), rows)
    assert (storage.get(torch.arange(6)).exclude("generation") == rows).all()
    assert list(tmp_path.iterdir()) == [], "the scratch file has no name, so nothing is left behind"


@pytest.mark.parametrize(
    "writer", [RoundRobinWriter, TensorDictRoundRobinWriter, partial(TensorDictMaxValueWriter, "key")]
)
def test_torchrls_writers_may_add_an_index_to_any_row(writer) -> None:
    replay = TensorDictReplayBuffer(storage=PackedStorage(4), writer=writer(), batch_size=2)
    steps = numbered_steps(0, 4).set("key", torch.tensor([3.0, 0.0, 4.0, 5.0]))
    replay.extend(steps[:2])
    replay.add(steps[2].clone())
    replay.extend(steps[3:].exclude("index"))
    assert replay[:]["index"].tolist() == [0, 1, 2, 3] and "generation" not in replay[:]
    replay[1] = numbered_steps(7, 1).set("key", torch.ones(1))[0]
    assert replay[:]["observation"][:, 0].tolist() == [0, 7, 2, 3]
    batch = replay.sample()
    assert batch.keys() == {*steps.keys(), "index"}
    assert replay[batch["index"]]["observation"].equal(batch["observation"])


def test_an_index_of_its_own_is_read_inside_a_branch_and_ignored_outside() -> None:
    replay = Replay(storage=PackedStorage(4), batch_size=4)
    replay.extend(numbered_steps(0, 2).set(("info", "index"), torch.tensor([7, 8])))
    replay.extend(replay.sample(1))
    assert replay[:]["info", "index"].tolist()[:2] == [7, 8] and "index" not in replay[:]
    with pytest.raises(ValueError, match="Different: ..info., .index..: stored .*, given no such column"):
        replay.extend(numbered_steps(0, 2).set("index", torch.arange(2)))


@pytest.mark.parametrize(
    ("buffer", "storage"),
    [
        (TensorDictReplayBuffer, LazyTensorStorage),
        (TensorDictReplayBuffer, PackedStorage),
        (ReplayBuffer, PackedStorage),
    ],
)
def test_batches_of_an_offline_and_an_online_half_have_the_same_columns(buffer, storage) -> None:
    offline = buffer(storage=storage(10))
    offline.extend(numbered_steps(0, 10))
    online = OfflineToOnlineReplayBuffer(offline_dataset=offline, online_storage=PackedStorage(10), batch_size=8)
    online.extend(numbered_steps(100, 5))
    batch = online.sample()
    assert ((batch["observation"][:, 0] >= 100) == torch.arange(8).ge(4)).all()
    prefilled = prefill_replay_buffer(TensorDictReplayBuffer(storage=PackedStorage(20)), offline, n_samples=6)
    prefilled.extend(numbered_steps(0, 3))
    assert len(prefilled) == 9


def test_torchrls_sequences_read_single_columns() -> None:
    unit = Sequence(length=2, episode_boundary="stop")
    replay = TensorDictReplayBuffer(storage=PackedStorage(8), sample_unit=unit, batch_size=4)
    replay.extend(numbered_steps(0, 8, done_every=4))
    assert replay.storage["next", "reward"].flatten().tolist() == list(range(8))
    first, second = replay.sample()["observation"][:, 0].view(4, 2).unbind(1)
    assert (second == first + 1).all() and (first % 4 < 3).all()


@pytest.mark.parametrize("writer", [FirstInFirstOutWriter, RoundRobinWriter])
@pytest.mark.parametrize("earlier", [0, 2])
def test_rows_that_are_no_tensordict_are_refused_in_torchrls_buffers(writer, earlier) -> None:
    replay = ReplayBuffer(storage=PackedStorage(4), writer=writer(), batch_size=2)
    if earlier:
        replay.extend(numbered_steps(0, earlier))
    with pytest.raises(TypeError, match="holds rows of a TensorDict; got Tensor. Nothing was stored"):
        replay.extend(torch.zeros(3, 2))
    assert len(replay) == earlier


def test_slices_of_every_kind_write_the_slots_they_name_and_ints_must_be_slots() -> None:
    storage = PackedStorage(capacity=6)
    storage.set(2, numbered_steps(7, 1)[0])
    assert len(storage) == 3 and storage[2]["observation"].tolist() == [7, 7, 7]
    storage.set(slice(None), numbered_steps(0, 6))
    storage.set(slice(4, None, -3), numbered_steps(10, 2))
    assert storage.get(torch.arange(6))["next", "reward"].flatten().tolist() == [0, 11, 2, 3, 10, 5]
    for slot in (-1, 6):
        with pytest.raises(IndexError, match=f"cursor is {slot}; it must be a slot from 0 to 5"):
            storage.set(slot, numbered_steps(0, 1)[0])


def test_slots_of_a_tensor_that_are_none_are_refused_and_nothing_is_written() -> None:
    storage = PackedStorage(capacity=6)
    storage.set(slice(0, 4), numbered_steps(0, 4))
    before = storage.all_packed.clone()
    for slots in ([0, 6], [-1, 2], [10**7, 1]):
        with pytest.raises(IndexError, match="they must be from 0 to 5. Nothing was written"):
            storage.set(torch.tensor(slots), numbered_steps(10, 2))
    with pytest.raises(ValueError, match="cursor is empty"):
        storage.set(torch.zeros(0, dtype=torch.int64), numbered_steps(10, 2)[:0])
    assert len(storage) == 4 and torch.equal(storage.all_packed, before)


def test_an_empty_state_that_is_loaded_during_a_save_does_not_change_what_is_saved() -> None:
    storage = PackedStorage(capacity=6)
    storage.set(slice(0, 6), numbered_steps(0, 6))
    before = storage.state_dict()["rows"].clone()
    with storage.frozen_state() as state:
        storage.load_state_dict(PackedStorage(capacity=6).state_dict())
        assert (state["rows"].tensor() == before).all()


def test_a_state_with_too_many_emptied_slots_is_refused_and_nothing_is_loaded() -> None:
    storage, other = PackedStorage(capacity=6), PackedStorage(capacity=6)
    storage.set(slice(0, 6), numbered_steps(0, 6))
    other.set(slice(0, 4), numbered_steps(10, 4))
    before = storage.state_dict()["rows"].clone()
    with pytest.raises(ValueError, match="at most 2 slots; nothing was loaded"):
        storage.load_state_dict(other.state_dict() | {"emptied": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(ValueError, match="capacity 6 and this one 7"):
        PackedStorage(capacity=7).load_state_dict(other.state_dict())
    assert (storage.state_dict()["rows"] == before).all()


def test_branches_without_columns_hold_nothing_and_stop_nothing() -> None:
    storage = PackedStorage(4)
    rows = TensorDict({"observation": torch.ones(2, 3), "empty": TensorDict({}, [2])}, [2])
    storage.set(slice(0, 2), rows)
    storage.set(slice(2, 4), rows.exclude("empty"))
    assert len(storage) == 4 and "empty" not in storage.all_rows.keys()  # noqa: SIM118


@pytest.mark.parametrize("of_columns", ["contiguous", "strided", "without NumPy"])
def test_rows_are_the_same_bytes_written_one_by_one_together_or_scattered(of_columns: str) -> None:
    generator = torch.Generator().manual_seed(0)
    columns = {
        "flag": torch.rand(20, 1, generator=generator) > 0.5,
        "count": torch.randint(9, (20,), generator=generator),
        "observation": torch.randn(20, 5, generator=generator),
        "image": torch.randint(255, (20, 2, 3), dtype=torch.uint8, generator=generator),
        "none": torch.zeros(20, 0),
        "step": torch.randint(9, (20, 2), generator=generator),
    }
    if of_columns == "strided":
        columns["observation"] = torch.randn(5, 20, generator=generator).T
    if of_columns == "without NumPy":
        columns["observation"] = columns["observation"].bfloat16()
    rows = TensorDict(columns, [20])
    one_by_one, together, scattered = (PackedStorage(24) for _ in range(3))
    for storage in (one_by_one, together, scattered):
        storage.set(slice(0, 1), rows[:1])
        storage._least_generation = 3
    for slot in range(20):
        one_by_one.set(slice(slot, slot + 1), rows[slot : slot + 1])
    together.set(slice(0, 20), rows)
    order = torch.randperm(20, generator=generator)
    scattered.set(order, rows[order])
    assert one_by_one.all_packed.equal(together.all_packed) and scattered.all_packed.equal(together.all_packed)
    assert one_by_one.generation_of(torch.arange(21)).tolist() == [4] * 20 + [0]
    assert all(torch.equal(one_by_one.get(slice(0, 20)).get(key), value) for key, value in columns.items())
