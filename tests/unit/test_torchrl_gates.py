# SPDX-License-Identifier: Apache-2.0
"""Each private name of TorchRL that the library uses is there and does what the library expects."""

from __future__ import annotations

import importlib

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    Storage,
    Writer,
)
from torchrl.envs import Transform

from lightning_replay import torchrl_compat
from tests.overridden_names import overridden_names


@pytest.fixture
def storage() -> Storage:
    return LazyTensorStorage(8)


@pytest.fixture
def writer() -> RoundRobinWriter:
    return RoundRobinWriter()


@pytest.fixture
def buffer(storage: Storage, writer: RoundRobinWriter) -> ReplayBuffer:
    """A ring of eight slots that holds five rows."""
    buffer = ReplayBuffer(storage=storage, writer=writer, sampler=SamplerWithoutReplacement(), batch_size=2)
    buffer.extend(TensorDict({"observation": torch.arange(5)}, [5]))
    return buffer


def test_a_storage_knows_its_buffers(storage: Storage) -> None:
    assert not torchrl_compat.attached_buffers(storage)
    buffers = [ReplayBuffer(storage=storage, batch_size=1) for _ in range(2)]
    assert list(torchrl_compat.attached_buffers(storage)) == buffers


def test_a_storage_is_full_once_every_slot_holds_a_row(buffer: ReplayBuffer, storage: Storage) -> None:
    assert not torchrl_compat.is_full(storage)
    buffer.extend(TensorDict({"observation": torch.arange(5)}, [5]))
    assert torchrl_compat.is_full(storage)


def test_a_buffer_has_a_writer_once_it_is_built(buffer: ReplayBuffer, writer: RoundRobinWriter) -> None:
    assert torchrl_compat.writer_of(buffer) is writer
    assert torchrl_compat.writer_of(ReplayBuffer.__new__(ReplayBuffer)) is None


def test_the_length_of_a_storage_of_tensors_is_set(buffer: ReplayBuffer, storage: Storage) -> None:
    """Rows that are written without the cursor are not counted; a list counts its items itself."""
    storage.set(torch.tensor([6, 5]), buffer[:2].clone(), set_cursor=False)
    assert len(storage) == 5
    torchrl_compat.set_length(storage, 7)
    assert len(storage) == 7
    assert storage[5:7]["observation"].tolist() == [1, 0]
    rows = ListStorage(8)
    rows.set(torch.tensor([0, 1]), [1, 2], set_cursor=False)
    torchrl_compat.set_length(rows, 7)
    assert len(rows) == 2


def test_no_slice_crosses_the_newest_slot(storage: Storage, writer: RoundRobinWriter) -> None:
    """All rows are of one episode, so that only the newest slot ends a slice."""
    sampler = SliceSampler(num_slices=64, traj_key="episode")
    buffer = ReplayBuffer(storage=storage, writer=writer, sampler=sampler, batch_size=192)
    buffer.extend(TensorDict({"observation": torch.arange(8), "episode": torch.zeros(8, dtype=torch.int64)}, [8]))
    torchrl_compat.set_newest_slot(storage, 3)
    slices = buffer.sample()["observation"].reshape(64, 3)
    assert set(slices[:, 0].tolist()) == {4, 5, 6, 7, 0, 1}


def test_a_ring_writes_at_its_cursor_next(buffer: ReplayBuffer, writer: RoundRobinWriter) -> None:
    assert torchrl_compat.next_slot(writer) == 5
    buffer.extend(TensorDict({"observation": torch.arange(5)}, [5]))
    assert torchrl_compat.next_slot(writer) == 2


def test_a_writer_counts_its_rows(buffer: ReplayBuffer, writer: RoundRobinWriter) -> None:
    buffer.extend(TensorDict({"observation": torch.arange(5)}, [5]))
    assert torchrl_compat.rows_written(writer) == 10


def test_a_writer_knows_its_storage(buffer: ReplayBuffer, storage: Storage, writer: RoundRobinWriter) -> None:
    assert torchrl_compat.storage_of(writer) is storage


def test_a_sampler_without_replacement_counts_the_batches_that_are_left(buffer: ReplayBuffer) -> None:
    buffer.sample()
    assert torchrl_compat.batches_left(buffer.sampler) == 2
    assert torchrl_compat.batches_left(RandomSampler()) > 1_000_000


def test_a_prioritized_sampler_has_a_capacity_and_others_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrioritizedSampler, "_init", lambda sampler: None)  # the trees need a compiled extension
    assert torchrl_compat.most_priorities(PrioritizedSampler(7, alpha=0.6, beta=0.4)) == 7
    assert torchrl_compat.most_priorities(RandomSampler()) is None


def test_a_slice_sampler_looks_for_trajectories_unless_they_are_named() -> None:
    assert torchrl_compat.finds_trajectories(SliceSampler(num_slices=2))
    assert not torchrl_compat.finds_trajectories(SliceSampler(num_slices=2, traj_key="episode"))


def test_a_buffer_collates_rows_of_its_storage(buffer: ReplayBuffer, storage: Storage) -> None:
    rows = torchrl_compat.collated(buffer, storage.get(torch.tensor([3, 1])))
    assert rows["observation"].tolist() == [3, 1]


def test_a_tensordict_is_assembled_as_by_its_constructor() -> None:
    column = torch.arange(3)
    assembled = torchrl_compat.assemble_unchecked({"observation": column}, torch.Size([3]), torch.device("cpu"))
    expected = TensorDict({"observation": column}, [3], device="cpu")
    assert (assembled == expected).all()
    assert assembled["observation"] is column
    assert (assembled.batch_size, assembled.device) == (expected.batch_size, expected.device)


# Private names of TorchRL that classes of this library override. A name that moves is never called.
OVERRIDDEN = {
    ReplayBuffer: {"_sample"},
    Sampler: {"_empty", "_rng"},
    Storage: {
        "_bump_mutation_revision",
        "_empty",
        "_init",
        "_last_cursor_index",
        "_mutation_revision",
        "_set_last_cursor",
    },
    Transform: {"_inv_call"},
    Writer: {"_empty"},
}


@pytest.mark.parametrize("host", OVERRIDDEN, ids=lambda host: host.__name__)
def test_overridden_private_names_are_those_of_torchrl(host: type) -> None:
    for module in ("agents", "levels.torchrl_parts", "lit", "mixed_replay", "recipes", "samplers", "transforms"):
        importlib.import_module(f"lightning_replay.{module}")
    assert overridden_names(host) == OVERRIDDEN[host], f"private names of {host.__name__} that classes here override"


@pytest.mark.parametrize(
    "name", ["_collate_fn", "_prefetch", "_prefetch_cap", "_prefetch_queue", "_sampler", "_storage", "_write_lock"]
)
def test_a_replay_reads_private_attributes_of_its_base_class(name: str) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2, prefetch=1)
    assert hasattr(buffer, name), f"torchrl.data.ReplayBuffer has no {name}"
