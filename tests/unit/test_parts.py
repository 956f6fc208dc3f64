# SPDX-License-Identifier: Apache-2.0
"""What parts declare, and what TorchRL's own get in its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement, TensorDictRoundRobinWriter

from lightning_replay import PackedStorage, Replay, parts, recipes, samplers, schedulers, transforms, writers
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.parts import ReplaySampler, ReplayTransform, ReplayWriter, as_replay_sampler
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
    hooks = as_replay_sampler(RandomSampler())
    assert not hooks.uses_priorities and hooks.nbytes == 0 and hooks.num_slots is None
    sampler = samplers.UniformSampler()
    assert as_replay_sampler(sampler) is sampler


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


@pytest.mark.parametrize("base", [FirstInFirstOutWriter, RetentionWriter, writers.EventTableWriter])
def test_a_writer_is_not_overridden_at_extend_alone(base) -> None:
    """``Replay`` stores rows by ``insert``; TorchRL's buffers by ``extend``, which calls it."""
    with pytest.raises(TypeError, match=rf"Mine overrides extend, and {base.__name__} stores rows by insert\(data\)"):
        type("Mine", (base,), {"extend": lambda self, data: super(base, self).extend(data)})


def test_a_writer_whose_insert_is_overridden_stores_by_it() -> None:
    class Doubling(FirstInFirstOutWriter):
        def insert(self, data):
            return super().insert(data.set("action", data["action"] * 0 + 2))

    for build in (Replay, TensorDictReplayBuffer):
        replay = build(storage=PackedStorage(8), writer=Doubling(), batch_size=2)
        for first in (0, 3):
            index = replay.extend(numbered_steps(first, 3))
            assert (replay.storage.get(index)["action"] == 2).all()


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
    "groups": lambda: samplers.GroupSampler(2, samplers.PrioritizedSampler(16)),
    "reshuffled": samplers.ReshuffledSampler,
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
    transform = transforms.MixPairs(0.4, keys=["observation"]) if isinstance(chosen, samplers.PairSampler) else None
    try:
        replay = Replay(
            storage=storage(32), sampler=chosen, writer=WRITERS[writer](), transform=transform, batch_size=4, seed=0
        )
    except (TypeError, ValueError) as refusal:
        assert any(
            name in str(refusal)
            for name in ("PackedStorage", "LazyTensorStorage", "TableWriter", "TableShares", "FirstInFirstOutWriter")
        )
        return
    rows = numbered_steps(0, 10).set("task", torch.arange(10) % 2)
    replay.extend(rows)
    for _ in range(3):
        batch = replay.sample()
        if replay.is_prioritized:
            replay.update_priority(batch, torch.ones(4))
    assert len(batch) == 4


class Named(ReplaySampler):
    """Draws one of the stored rows, and remembers what it was told of in a tensor and a list."""

    saved_attributes = ("seen", "names")

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._seed_generator(seed)
        self.seen, self.names = torch.zeros(2), ["a"]
        self.drawn = torch.zeros(0, dtype=torch.int64)

    def sample(self, storage, batch_size: int):
        self.drawn = torch.randint(len(storage), (batch_size,), generator=self._generator)
        return self.drawn, {}

    def _empty(self) -> None:
        self.seen = torch.zeros(2)


def test_saved_attributes_and_the_generator_are_a_parts_state(tmp_path) -> None:
    first, second = Named(seed=1), Named(seed=2)
    first.seen[0], first.names = 3.0, ["a", "b"]
    state = first.state_dict()
    assert set(state) == {"seen", "names", "generator"}
    first.seen[1] = 9.0
    first.names.append("c")
    second.load_state_dict(state)
    assert second.seen.tolist() == [3.0, 0.0] and second.names == ["a", "b"]
    second.seen[1] = 7.0
    second.names.append("d")
    assert state["seen"].tolist() == [3.0, 0.0] and state["names"] == ["a", "b"], "a state is a copy on both sides"
    first.load_state_dict(state)
    storage = range(100)
    assert torch.equal(first.sample(storage, 20)[0], Named(seed=1).sample(storage, 20)[0])
    first.dumps(tmp_path / "part")
    second.loads(tmp_path / "part")
    assert torch.equal(first.sample(storage, 20)[0], second.sample(storage, 20)[0])


def test_a_subclass_may_add_entries_to_the_state() -> None:
    class Counting(samplers.UniformSampler):
        mine = 0

        def state_dict(self):
            return {**super().state_dict(), "mine": self.mine}

        def load_state_dict(self, state_dict):
            state_dict = dict(state_dict)
            self.mine = state_dict.pop("mine")
            super().load_state_dict(state_dict)

    first, second = Counting(seed=0), Counting(seed=1)
    first.mine = 3
    second.load_state_dict(first.state_dict())
    assert second.mine == 3 and torch.equal(second.sample(range(9), 5)[0], Counting(seed=0).sample(range(9), 5)[0])


def test_what_a_part_does_not_have_is_refused() -> None:
    part = Named(seed=0)
    with pytest.raises(ValueError, match=r"has the entries \['seen'\], and a Named needs \['names', 'generator'\] too"):
        part.load_state_dict({"seen": torch.ones(2)})
    assert part.seen.tolist() == [0.0, 0.0]
    del part.names
    with pytest.raises(AttributeError, match="saved_attributes of Named names 'names', which is not an attribute"):
        part.state_dict()
    methods = {"sample": Named.sample, "_empty": Named._empty}
    silent: type[ReplaySampler] = type("Silent", (ReplaySampler,), methods)
    for call in (silent().state_dict, lambda: Replay(storage=PackedStorage(4), sampler=silent(), batch_size=2)):
        with pytest.raises(TypeError, match="Silent declares no state: set saved_attributes"):
            call()
    stateless: type[ReplaySampler] = type("Stateless", (ReplaySampler,), {**methods, "saved_attributes": ()})
    assert stateless().state_dict() == {}


class Noisy(ReplayTransform):
    saved_attributes = ("calls",)

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._seed_generator(seed)
        self.calls = 0

    def forward(self, batch):
        self.calls += 1
        return batch.set("noise", torch.rand(len(batch), generator=self._generator))


def test_a_transforms_generator_and_attributes_are_saved(tmp_path) -> None:
    first, second = (
        Replay(storage=PackedStorage(20), transform=Noisy(), sampler=Named(), batch_size=4, seed=seed)
        for seed in (0, 1)
    )
    first.extend(numbered_steps(0, 10))
    assert first.transform[0].calls == 0, "it is called with batches alone"
    first.sample()
    first.save(tmp_path / "buffer")
    second.load(tmp_path / "buffer")
    one, other = first.sample(), second.sample()
    assert torch.equal(one["index"], other["index"]) and torch.equal(one["noise"], other["noise"])
    assert second.transform[0].calls == 2


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (torch.zeros(3, dtype=torch.int64), r"torch.int64 \[3\]"),
        (torch.zeros(4, 1, dtype=torch.int64), r"torch.int64 \[4, 1\]"),
        (torch.zeros(4, dtype=torch.int32), r"torch.int32 \[4\]"),
        ([0, 1, 2, 3], "list"),
    ],
)
def test_what_a_users_sampler_draws_is_checked(returned, got: str) -> None:
    class Wrong(Named):
        def sample(self, storage, batch_size: int):
            return returned, {}

    replay = Replay(storage=PackedStorage(9), sampler=Wrong(), batch_size=4)
    replay.extend(numbered_steps(0, 9))
    with pytest.raises(ValueError, match=rf"sample of Wrong returned {got}, and a batch needs slots, int64 \[4\]"):
        replay.sample()


@pytest.mark.parametrize(
    ("slots", "rows", "message"),
    [
        ([-1, 0], [0, 1], "slots reaches from -1 to 0; there are 5"),
        ([0, 5], [0, 1], "slots reaches from 0 to 5; there are 5"),
        ([0, 0], [0, 1], "slots has entries twice"),
        ([0, 1], [1, 0], "rows is not ascending"),
        ([0, 1], [1, 3], "rows reaches from 1 to 3; there are 3"),
        ([0], [0, 1], r"rows is torch.int64 \[2\]; give int64 \[n\]"),
        ([0.0], [0], r"slots is torch.float32 \[1\]"),
    ],
)
def test_write_rows_refuses_what_is_no_slot_or_row(slots, rows, message: str) -> None:
    storage = LazyTensorStorage(5)
    with pytest.raises(ValueError, match=message):
        writers.write_rows(storage, numbered_steps(0, 3), torch.tensor(slots), torch.tensor(rows))
    assert len(storage) == 0


class Foreign(ReplaySampler):
    """Draws by TorchRL's name of a generator, and has something else under the name of ours."""

    saved_attributes = ()

    def __init__(self) -> None:
        super().__init__()
        self._generator = np.random.default_rng(0)

    def sample(self, storage, batch_size: int):
        return torch.randint(len(storage), (batch_size,), generator=self._rng), {}

    def _empty(self) -> None: ...


class ByTorchRL(Foreign):
    def __init__(self) -> None:
        super().__init__()
        del self._generator


def test_set_rng_reaches_a_sampler_without_a_generator_of_its_own() -> None:
    drawn = []
    for seed in (1, 2):  # of the global generator, by which nothing is drawn
        torch.manual_seed(seed)
        replay = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=ByTorchRL(), batch_size=6)
        replay.extend(numbered_steps(0, 100))
        replay.set_rng(torch.Generator().manual_seed(7))
        drawn.append(replay.sample()["index"].tolist())
    assert drawn[0] == drawn[1]


def test_another_object_under_the_name_of_the_generator_is_left_alone() -> None:
    replay = Replay(storage=PackedStorage(8), sampler=Foreign(), batch_size=2)
    replay.extend(numbered_steps(0, 4))
    replay.seed(0)
    assert "generator" not in replay.state_dict()["sampler"]


def test_a_first_sampler_without_a_declared_state_is_refused_when_built() -> None:
    silent = type("Silent", (ReplaySampler,), {"sample": Foreign.sample, "_empty": Foreign._empty})
    with pytest.raises(TypeError, match="Silent declares no state"):
        Replay(storage=PackedStorage(8), sampler=samplers.RandomPairSampler(base_sampler=silent()), batch_size=2)


def test_a_refused_state_of_tables_changes_no_count() -> None:
    one, other = (recipes.parallel_curriculum(["a", "b"], size, 2) for size in (4, 8))
    before = other.writer.state_dict()["write_count"]
    state = one.writer.state_dict() | {"write_count": before + 5}
    with pytest.raises(ValueError, match="build them with the saved capacities"):
        other.writer.load_state_dict(state)
    assert other.writer.state_dict()["write_count"] == before


def test_add_takes_one_transition() -> None:
    replay = recipes.uniform(8, 4)
    with pytest.raises(ValueError, match=r"a TensorDict of batch size \[\]; got \[3\]"):
        replay.add(numbered_steps(0, 3))
    with pytest.raises(TypeError, match="got dict"):
        replay.add({})
    assert len(replay) == 0
