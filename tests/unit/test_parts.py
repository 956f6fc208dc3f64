# SPDX-License-Identifier: Apache-2.0
"""What parts declare, and what TorchRL's own get in its place."""

from __future__ import annotations

import pytest
import torch
from torchrl.data import LazyTensorStorage, ListStorage
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement, TensorDictRoundRobinWriter

from lightning_replay import PackedStorage, Replay, parts, recipes, samplers, schedulers, transforms, writers
from lightning_replay.declared import declared_sampler, declared_writer
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.parts import Insertion, ReplaySampler, ReplayTransform, ReplayWriter
from lightning_replay.writers import FirstInFirstOutWriter, RetentionWriter
from tests.transitions import numbered_steps


@pytest.mark.parametrize(
    ("exported", "base"),
    [(samplers, ReplaySampler), (writers, ReplayWriter), (transforms, ReplayTransform)],
    ids=["samplers", "writers", "transforms"],
)
def test_every_exported_part_is_of_its_base_class(exported, base) -> None:
    classes = [getattr(exported, name) for name in exported.__all__]
    kinds = (parts.Sampler, parts.Writer, parts.Transform)
    found = [one for one in classes if isinstance(one, type) and issubclass(one, kinds)]
    assert len(found) >= 3 and all(issubclass(one, base) for one in found)


def test_torchrls_parts_get_the_defaults() -> None:
    hooks = declared_sampler(RandomSampler())
    assert not hooks.uses_priorities and hooks.nbytes == 0 and hooks.num_slots is None
    sampler = samplers.UniformSampler()
    assert declared_sampler(sampler) is sampler
    assert declared_writer(TensorDictRoundRobinWriter()).keeps_order


def test_parts_that_are_replaced_are_read_anew() -> None:
    replay = recipes.uniform(8, 4, seed=0)
    assert not replay.is_prioritized
    replay.set_sampler(samplers.PrioritizedSampler(8, seed=0))
    replay.extend(numbered_steps(0, 4))
    assert replay.is_prioritized
    replay.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert (replay.sample(64)["index"] == 0).float().mean() > 0.8
    replay.set_sampler(SamplerWithoutReplacement())
    assert not replay.is_prioritized and sorted(replay.sample()["index"].tolist()) == [0, 1, 2, 3]


def test_a_ring_whose_extend_is_overridden_stores_by_it() -> None:
    class Doubling(FirstInFirstOutWriter):
        def extend(self, data):
            return super().extend(data.set("action", data["action"] * 0 + 2))

    replay = Replay(storage=PackedStorage(8), writer=Doubling(), batch_size=2)
    index = replay.extend(numbered_steps(0, 3))
    assert index.tolist() == [0, 1, 2] and replay.last_insertion == Insertion(index, slice(0, 3))
    assert (replay.storage.get(index)["action"] == 2).all()


def test_a_writer_that_stores_by_insert_is_not_overridden_at_extend_alone() -> None:
    with pytest.raises(TypeError, match=r"Mine overrides extend, and RetentionWriter stores rows by insert\(data\)"):

        class Mine(RetentionWriter):
            def extend(self, data):
                return super().extend(data)


def test_given_priorities_go_to_the_rows_that_entered() -> None:
    """Of six rows into four slots the last four enter, with the last four priorities."""
    replay = recipes.prioritized(4, 2, priority_exponent=1.0, priority_offset=0.0, seed=0)
    replay.extend(numbered_steps(0, 6).set("td_error", torch.arange(6.0)))
    leaves = replay.sampler.state_dict()["tree"]["leaves"]
    rows = replay.storage.get(torch.arange(4))["observation"][:, 0]
    assert torch.equal(leaves, rows)


TABLES = [EventTable("high", condition=reward_at_least(3.0), history_length=2, capacity=8, min_size=1)]
SAMPLERS = {
    "uniform": samplers.UniformSampler,
    "prioritized": lambda: samplers.PrioritizedSampler(32),
    "neighborhood mixup": lambda: samplers.NeighborhoodMixupSampler(num_neighbors=2),
    "continuous transition": samplers.ContinuousTransitionSampler,
    "random pairs": samplers.RandomPairSampler,
    "reverse sweep": lambda: samplers.ReverseSweepSampler(reward_at_least(3.0)),
    "shares of event tables": lambda: samplers.TableShares({"default": 0.5, "high": 0.5}),
    "shares of task tables": lambda: samplers.TableShares({"a": 0.5, "b": 0.5}),
    "scheduled": lambda: samplers.ScheduledSampler(["a", "b"], schedulers.UniformTasks()),
    "continuous correction": lambda: samplers.ContinuousCorrectionSampler(event_share=0.5),
}
WRITERS = {
    "ring": FirstInFirstOutWriter,
    "retention": lambda: RetentionWriter(writers.SurpriseOnly()),
    "event tables": lambda: writers.EventTableWriter(16, TABLES),
    "task tables": lambda: writers.TaskTableWriter(["a", "b"], 8),
    "TorchRL's ring": TensorDictRoundRobinWriter,
}
STORAGES = [PackedStorage, LazyTensorStorage, ListStorage]
OF_OTHER_TABLES = {("shares of event tables", "task tables"), ("shares of task tables", "event tables")}


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage.__name__)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_parts_work_together_or_are_refused_when_the_buffer_is_built(sampler, writer, storage) -> None:
    if (sampler, writer) in OF_OTHER_TABLES:
        pytest.skip("names tables that the writer has not, which only a draw can find")
    chosen = SAMPLERS[sampler]()
    transform = transforms.MixPairs(0.4, keys=["observation"]) if chosen.draws_pairs else None
    try:
        replay = Replay(
            storage=storage(32), sampler=chosen, writer=WRITERS[writer](), transform=transform, batch_size=4, seed=0
        )
    except (TypeError, ValueError) as refusal:
        assert any(
            name in str(refusal) for name in ("PackedStorage", "LazyTensorStorage", "TableWriter", "TableShares")
        )
        return
    rows = numbered_steps(0, 10).set("task", torch.arange(10) % 2)
    replay.extend(rows)
    for _ in range(3):
        batch = replay.sample()
        if replay.is_prioritized:
            replay.update_priority(batch, torch.ones(4))
    assert len(batch) == 4
