# SPDX-License-Identifier: Apache-2.0
"""What parts declare, and what TorchRL's own get in its place."""

from __future__ import annotations

import pytest
import torch
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement, TensorDictRoundRobinWriter

from lightning_replay import PackedStorage, Replay, parts, recipes, samplers, transforms, writers
from lightning_replay.parts import Insertion, ReplaySampler, ReplayTransform, ReplayWriter, declared_sampler
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
    assert parts.declared_writer(TensorDictRoundRobinWriter()).keeps_order


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
