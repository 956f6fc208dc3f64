# SPDX-License-Identifier: Apache-2.0
"""A sampler or a writer knows the rows of one storage, so a buffer over another storage refuses it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer, TensorDictRoundRobinWriter

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.samplers import PrioritizedSampler, RandomPairSampler, TableShares, UniformSampler
from lightning_replay.writers import EventTableWriter, FirstInFirstOutWriter, RetentionWriter, SurpriseOnly
from tests.transitions import numbered_steps

SHARED = "belongs to another buffer, and knows the slots .* build one"


def over(capacity: int = 8, build: Any = Replay, **parts: Any) -> Any:
    storage = PackedStorage(capacity) if build is Replay else LazyTensorStorage(capacity)
    return build(storage=storage, batch_size=4, **parts)


def tables() -> EventTableWriter:
    return EventTableWriter(8, [EventTable("high", reward_at_least(3.0), history_length=2, capacity=4)])


PARTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "prioritized": ("sampler", lambda: PrioritizedSampler(8)),
    "uniform": ("sampler", UniformSampler),
    "TorchRL's sampler": ("sampler", RandomSampler),
    "pairs": ("sampler", lambda: RandomPairSampler(PrioritizedSampler(8))),
    "ring": ("writer", FirstInFirstOutWriter),
    "retention": ("writer", lambda: RetentionWriter(SurpriseOnly())),
    "TorchRL's writer": ("writer", TensorDictRoundRobinWriter),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_replay_refuses_a_part_of_another_replay(part) -> None:
    role, build = PARTS[part]
    shared = build()
    first = over(**{role: shared})
    with pytest.raises(ValueError, match=f"the {type(shared).__name__} {SHARED}"):
        over(**{role: shared})
    second = over()
    before = getattr(second, f"_{role}")
    with pytest.raises(ValueError, match=f"the {type(shared).__name__} {SHARED}"):
        getattr(second, f"set_{role}")(shared)
    assert getattr(second, f"_{role}") is before
    for replay in (first, second):
        replay.extend(numbered_steps(0, 3))
        assert replay.sample()["index"].max() < 3


def test_a_base_sampler_belongs_to_one_replay() -> None:
    shared = PrioritizedSampler(8)
    first = over(sampler=shared)
    with pytest.raises(ValueError, match=f"the PrioritizedSampler {SHARED}"):
        over(sampler=RandomPairSampler(shared))
    first.set_sampler(RandomPairSampler(shared))


@pytest.mark.parametrize("build", [Replay, TensorDictReplayBuffer])
def test_a_refused_writer_of_tables_still_writes_into_its_own_buffer(build) -> None:
    writer = tables()

    def buffer() -> Any:
        return over(writer.num_slots, build, writer=writer, sampler=TableShares({"default": 0.5, "high": 0.5}))

    first = buffer()
    first.extend(numbered_steps(0, 4))
    with pytest.raises(ValueError, match=f"the EventTableWriter {SHARED}"):
        buffer()
    first.extend(numbered_steps(4, 2))
    assert first.sample()["index"].max() < len(first) == 6


def test_a_sampler_in_two_buffers_of_torchrl_is_refused_with_the_first_rows_of_the_second() -> None:
    shared = PrioritizedSampler(8)
    first, second = (over(build=TensorDictReplayBuffer, sampler=shared) for _ in range(2))
    first.extend(numbered_steps(0, 2))
    with pytest.raises(ValueError, match=f"the PrioritizedSampler {SHARED}"):
        second.extend(numbered_steps(0, 6))
    assert first.sample()["index"].max() < 2


def test_parts_may_come_to_the_same_storage() -> None:
    storage = PackedStorage(8)
    sampler = PrioritizedSampler(8)
    writer = FirstInFirstOutWriter()
    first, second = (Replay(storage=storage, sampler=sampler, writer=writer, batch_size=4) for _ in range(2))
    first.set_sampler(second.set_sampler(UniformSampler()))
    first.set_storage(PackedStorage(8))


@pytest.mark.parametrize("writer", [FirstInFirstOutWriter, TensorDictRoundRobinWriter])
def test_parts_may_leave_a_buffer_that_is_gone(writer) -> None:
    parts = {"sampler": PrioritizedSampler(8), "writer": writer()}
    over(**parts)
    over(**parts)
    over(**{role: copy.deepcopy(part) for role, part in parts.items()})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
def test_copies_of_parts_are_free(copied) -> None:
    replay = recipes.prioritized(8, 4, seed=0)
    replay.extend(numbered_steps(0, 6))
    twin = copied(replay)
    assert torch.equal(twin.sample()["index"], replay.sample()["index"])
    twin.extend(numbered_steps(6, 2))
    with pytest.raises(ValueError, match=SHARED):
        over(sampler=twin.sampler)
    over(sampler=copied(PrioritizedSampler(8)), writer=FirstInFirstOutWriter()).extend(numbered_steps(0, 2))
    over(sampler=copied(replay.sampler))


def test_set_sampler_refuses_fewer_slots() -> None:
    replay = over()
    with pytest.raises(ValueError, match="capacity of PrioritizedSampler is 4 and that of the storage 8"):
        replay.set_sampler(PrioritizedSampler(4))
    assert isinstance(replay.sampler, UniformSampler)


@pytest.mark.parametrize("pairs", [False, True])
def test_buffers_of_torchrl_refuse_a_sampler_with_fewer_slots(pairs) -> None:
    base = PrioritizedSampler(4)
    sampler = RandomPairSampler(base) if pairs else base
    match = "capacity of PrioritizedSampler is 4 and that of the storage 8; build the sampler with capacity=8"
    with pytest.raises(ValueError, match=match):
        over(build=TensorDictReplayBuffer, sampler=sampler).extend(numbered_steps(0, 2))
    with pytest.raises(ValueError, match=match):
        over(build=TensorDictReplayBuffer, sampler=sampler, writer=FirstInFirstOutWriter())


@pytest.mark.parametrize("build", [UniformSampler, lambda: PrioritizedSampler(8), RandomPairSampler])
def test_torchrls_update_priority_names_the_ways_for_a_batch(build) -> None:
    buffer = over(build=TensorDictReplayBuffer, sampler=build())
    buffer.extend(numbered_steps(0, 6))
    batch = buffer.sample()
    with pytest.raises(TypeError, match=r"a TensorDict was given; call update_priority\(batch\['index'\]"):
        buffer.update_priority(batch, torch.rand(4))
