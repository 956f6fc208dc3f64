# SPDX-License-Identifier: Apache-2.0
"""Writers of this library over TorchRL's storages: what they keep of the rows, refusals, feedback, and saves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    StorageEnsemble,
    TensorDictReplayBuffer,
)

from lightning_replay import PackedStorage, Replay
from lightning_replay.samplers import (
    PrioritizedSampler,
    RandomPairSampler,
    ScheduledSampler,
    TableShares,
    UniformSampler,
)
from lightning_replay.schedulers import UniformTasks
from lightning_replay.storage import torchrl_rows
from lightning_replay.storage.packed import rows_of
from lightning_replay.writers import FirstInFirstOutWriter, RetentionWriter, SurpriseOnly, TaskTableWriter
from tests.torchrl_parts import PARTS, built, played
from tests.transitions import numbered_steps, task_steps

OF_TORCHRL = {"tensors": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}
BUFFERS = [Replay, ReplayBuffer, TensorDictReplayBuffer]
WRITERS = ("event tables", "tasks", "retention")


def prioritized(capacity: int = 3) -> PrioritizedSampler:
    return PrioritizedSampler(capacity, priority_exponent=1.0, priority_offset=0.0, seed=0)


def retaining(buffer: type = ReplayBuffer, storage: Any = None, **others: Any) -> Any:
    """A buffer of three slots that keeps the rows of the largest surprise."""
    parts = {"sampler": prioritized(), "writer": RetentionWriter(SurpriseOnly()), "batch_size": 2} | others
    return buffer(storage=LazyTensorStorage(3) if storage is None else storage, **parts)


def of_tasks(buffer: type = ReplayBuffer, storage: type = LazyTensorStorage) -> Any:
    """A buffer that keeps the last two rows of each of two tasks."""
    sampler = ScheduledSampler(["a", "b"], UniformTasks(), seed=0)
    return buffer(storage=storage(4), sampler=sampler, writer=TaskTableWriter(["a", "b"], 2), batch_size=2)


def numbers(buffer: Any, slots: list[int]) -> list[float]:
    rows = [buffer.storage.get(slot) for slot in slots]
    return [float(row["observation"][0]) for row in rows]


@pytest.mark.parametrize("storage", OF_TORCHRL.values(), ids=OF_TORCHRL)
def test_the_oldest_row_of_a_task_leaves_by_hand(storage: type) -> None:
    """Rows 0, 1, 2 of task a and 3 of b: row 2 frees the slot of row 0, and row 5 takes that slot."""
    buffer = of_tasks(storage=storage)
    assert buffer.extend(task_steps([0, 0])).tolist() == [0, 1]
    assert buffer.extend(task_steps([0, 1], first=2)).tolist() == [2, 3]
    assert len(buffer) == 4
    tables = buffer.writer.tables
    assert (tables.slots_of(0).tolist(), tables.slots_of(1).tolist()) == ([1, 2], [3])
    assert buffer.extend(task_steps([1], first=5)).tolist() == [0]
    assert numbers(buffer, [0, 1, 2, 3]) == [5.0, 1.0, 2.0, 3.0]
    assert rows_of(buffer.storage).generation_of(torch.arange(4)).tolist() == [2, 1, 1, 1]
    assert len(buffer) == 4
    assert rows_of(buffer.storage).occupancy is tables


@pytest.mark.parametrize("storage", OF_TORCHRL.values(), ids=OF_TORCHRL)
def test_a_row_of_little_surprise_leaves_by_hand(storage: type) -> None:
    """TD errors 3, 1, 2 of rows 0, 1, 2: row 3 takes the slot of row 1, and a row of least surprise is refused."""
    buffer = retaining(storage=storage(3))
    assert buffer.extend(numbered_steps(0, 3)).tolist() == [0, 1, 2]
    buffer.update_priority(torch.tensor([0, 1, 2]), torch.tensor([3.0, 1.0, 2.0]))
    assert buffer.writer.retention_priority(torch.arange(3)).tolist() == [9.0, 1.0, 4.0]
    assert buffer.sampler.priority_of(torch.arange(3)).tolist() == [3.0, 1.0, 2.0]
    assert buffer.add(numbered_steps(3, 1)[0]) == 1
    buffer.writer.initial_surprise = lambda rows: rows["observation"][:, 0] * 0
    assert buffer.add(numbered_steps(4, 1)[0]) == -1
    assert buffer.extend(numbered_steps(5, 2)).tolist() == [-1, -1]
    assert numbers(buffer, [0, 1, 2]) == [0.0, 3.0, 2.0]


@pytest.mark.parametrize("storage", OF_TORCHRL.values(), ids=OF_TORCHRL)
def test_the_first_rows_may_be_more_than_the_capacity(storage: type) -> None:
    """Of four rows of equal surprise the first one leaves, so that the last one is written into slot 0."""
    buffer = retaining(storage=storage(3))
    assert buffer.extend(numbered_steps(0, 4)).tolist() == [-1, 1, 2, 0]
    assert numbers(buffer, [0, 1, 2]) == [3.0, 1.0, 2.0]
    assert len(buffer) == 3


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_one_td_error_and_one_slot_reach_the_writer(buffer: type) -> None:
    replay = retaining(buffer)
    replay.extend(numbered_steps(0, 3))
    replay.update_priority(1, 0.5)
    replay.update_priority(torch.tensor([0, 2]), 2.0)
    assert replay.writer.retention_priority(torch.arange(3)).tolist() == [4.0, 0.25, 4.0]


def test_the_first_priorities_of_new_rows_are_the_samplers_alone() -> None:
    """TorchRL's buffer of TensorDicts gives new rows their ``td_error``, and a single row a default."""
    buffer = retaining(TensorDictReplayBuffer)
    buffer.extend(numbered_steps(0, 2).set("td_error", torch.tensor([5.0, 6.0])))
    assert buffer.sampler.priority_of(torch.arange(2)).tolist() == [5.0, 6.0]
    assert buffer.writer.retention_priority(torch.arange(2)).tolist() == [1.0, 1.0]
    buffer.add(numbered_steps(2, 1).set("td_error", torch.tensor([7.0]))[0])
    assert buffer.writer.retention_priority(torch.arange(3)).tolist() == [1.0, 1.0, 1.0]
    buffer.update_priority(torch.tensor(2), torch.tensor(3.0))
    assert buffer.writer.retention_priority(torch.arange(3)).tolist() == [1.0, 1.0, 9.0]


def test_td_errors_of_slots_that_extend_returned_reach_the_writer() -> None:
    """A loop may compute the TD errors of new rows: their slots are those of ``extend``, -1 for a refused row."""
    buffer = retaining(TensorDictReplayBuffer)
    slots = buffer.extend(numbered_steps(0, 2))
    buffer.update_priority(slots, torch.tensor([2.0, 3.0]))
    assert buffer.writer.retention_priority(torch.arange(2)).tolist() == [4.0, 9.0]
    buffer.update_priority(torch.tensor([-1, 1]), torch.tensor([9.0, 1.0]))
    assert buffer.writer.retention_priority(torch.arange(2)).tolist() == [4.0, 1.0]
    plain = retaining(ReplayBuffer)
    slot = plain.add(numbered_steps(0, 1)[0])
    plain.update_priority(torch.tensor(slot), torch.tensor(3.0))
    assert plain.writer.retention_priority(torch.arange(1)).tolist() == [9.0]


@pytest.mark.parametrize(
    ("index", "td_error", "error", "match"),
    [
        ([0, 2], [1.0, 1.0], IndexError, "of 2 rows|2 rows are stored|lie in 0..1"),
        ([0, 1], [1.0, float("nan")], ValueError, "finite"),
    ],
)
@pytest.mark.parametrize("sampler", [prioritized, lambda: UniformSampler(seed=0)], ids=["prioritized", "uniform"])
def test_wrong_feedback_changes_nothing(
    sampler: Callable[[], Any], index: list[int], td_error: list[float], error: type[Exception], match: str
) -> None:
    buffer = retaining(sampler=sampler())
    buffer.extend(numbered_steps(0, 2))
    with pytest.raises(error, match=match):
        buffer.update_priority(torch.tensor(index), torch.tensor(td_error))
    assert buffer.writer.retention_priority(torch.arange(2)).tolist() == [1.0, 1.0]


def test_another_sampler_that_passes_nothing_is_refused_at_the_next_rows() -> None:
    buffer = retaining()
    buffer.extend(numbered_steps(0, 2))
    buffer.set_sampler(RandomSampler())
    with pytest.raises(TypeError, match=r"a ReplayBuffer with the RandomSampler of torchrl passes it none; use light"):
        buffer.extend(numbered_steps(2, 1))
    assert len(buffer) == 2
    tasks = of_tasks()
    tasks.set_sampler(UniformSampler())
    with pytest.raises(TypeError, match="the sampler is a UniformSampler, which would draw slots that no table"):
        tasks.extend(task_steps([0]))


class Learning(FirstInFirstOutWriter):
    """A writer of a user that keeps the feedback that it gets."""

    needs_feedback = True

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Any] = []

    def read_feedback(self, count: int, td_error: Any, signals: Any) -> Any:
        return td_error

    def update_priority(self, index: Any, feedback: Any, *, both: bool = False) -> None:
        self.got.append((index.tolist(), feedback.tolist()))


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
def test_a_writer_of_a_user_gets_td_errors(storage: type, buffer: type) -> None:
    replay = buffer(storage=storage(4), sampler=prioritized(4), writer=Learning(), batch_size=2)
    replay.extend(numbered_steps(0, 3))
    replay.update_priority(torch.tensor([0, 2]), torch.tensor([1.0, 4.0]))
    assert replay.writer.got == [([0, 2], [1.0, 4.0])]


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("both", [False, True])
def test_a_writer_gets_the_td_errors_of_pairs_once(both: bool, buffer: type) -> None:
    """The sampler of pairs passes its priorities to another one, which passes the writer nothing."""
    sampler = RandomPairSampler(base_sampler=prioritized(4), update_partners=both)
    replay = buffer(storage=LazyTensorStorage(4), sampler=sampler, writer=Learning(), batch_size=2)
    replay.extend(numbered_steps(0, 3))
    replay.update_priority(torch.tensor([[0, 1], [2, 1]]), torch.tensor([1.0, 4.0]))
    assert replay.writer.got == [([[0, 1], [2, 1]], [1.0, 4.0])]
    kept = retaining(buffer, sampler=RandomPairSampler(base_sampler=prioritized(), update_partners=both))
    kept.extend(numbered_steps(0, 3))
    kept.update_priority(torch.tensor([[0, 1], [2, 1]]), torch.tensor([2.0, 4.0]))
    expected = [4.0, 16.0, 16.0] if both else [4.0, 1.0, 16.0]
    assert kept.writer.retention_priority(torch.arange(3)).tolist() == expected


@pytest.mark.parametrize("storage", OF_TORCHRL.values(), ids=OF_TORCHRL)
def test_a_replay_drops_td_errors_of_rows_that_have_left(storage: type) -> None:
    replay = of_tasks(Replay, storage)
    replay.extend(task_steps([0, 0, 1, 1]))
    batch = replay.sample()
    assert torch.equal(batch["generation"], torch.ones(2, dtype=torch.int64))
    replay = retaining(Replay, storage(3))
    replay.extend(numbered_steps(0, 3))
    replay.update_priority(torch.arange(3), torch.tensor([3.0, 1.0, 2.0]), generation=torch.tensor([1, 1, 1]))
    replay.extend(numbered_steps(3, 1))  # into slot 1
    replay.update_priority(torch.arange(3), torch.full((3,), 5.0), generation=torch.tensor([1, 1, 1]))
    assert replay.writer.retention_priority(torch.arange(3)).tolist() == [25.0, 9.0, 25.0]
    assert replay.stats()["stale_updates_dropped"] == 1


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_torchrls_conditional_updates_find_rows_by_generations(buffer: type) -> None:
    replay = of_tasks(buffer)
    replay.extend(task_steps([0, 0]))
    _, info = replay.sample(return_info=True)
    assert torch.as_tensor(info["index_generation"]).tolist() == [1, 1]
    replay.extend(task_steps([0, 0, 1], first=2))  # slots 2, 3, and then 0
    patch = {"observation": torch.full((3, 3), 9.0)}
    slots, generation = torch.tensor([0, 2, 3]), torch.ones(3, dtype=torch.int64)
    assert replay.update_if_present(index=slots, generation=generation, patch=patch).updated.tolist() == [
        False,
        True,
        True,
    ]
    assert FirstInFirstOutWriter().generations_of(torch.arange(2)).tolist() == [-1, -1]


SAVES: dict[str, Callable[[Any, Any, Path], Any]] = {
    "state_dict": lambda buffer, other, folder: other.load_state_dict(copy.deepcopy(buffer.state_dict())) or other,
    "dumps": lambda buffer, other, folder: (buffer.dumps(folder), other.loads(folder)) and other,
    "pickle": lambda buffer, other, folder: pickle.loads(pickle.dumps(buffer)),
    "deepcopy": lambda buffer, other, folder: copy.deepcopy(buffer),
}


NOT_OF_TORCHRL = {("pickle", "LazyMemmapStorage"), ("dumps", "ListStorage")}


@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage", "ListStorage"])
@pytest.mark.parametrize("buffer", ["Replay", "ReplayBuffer", "TensorDictReplayBuffer"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_loaded_buffer_goes_on_like_the_saved_one(
    name: str, buffer: str, storage: str, way: str, tmp_path: Path
) -> None:
    if (way, storage) in NOT_OF_TORCHRL and not (way == "dumps" and buffer == "Replay"):
        pytest.skip(f"TorchRL does not save a {storage} by {way}")
    part = PARTS[name]
    first = built(buffer, part, storage)
    played(first, part, range(4))
    other = built(buffer, part, storage)
    played(other, part, range(9, 11))  # rows, priorities, and draws that the load replaces
    loaded = SAVES[way](first, other, tmp_path / "save")
    kept, restored = rows_of(first.storage), rows_of(loaded.storage)
    assert restored is not kept
    assert restored.generations.tolist() == kept.generations.tolist()
    assert torch.equal(restored.occupancy.slots(), kept.occupancy.slots())
    assert played(loaded, part, range(4, 8)) == played(first, part, range(4, 8))


def test_new_rows_after_a_load_have_larger_generations_than_any_before() -> None:
    """TD errors of a batch that was drawn before the load find no row of it."""
    first, other = of_tasks(), of_tasks()
    first.extend(task_steps([0, 0]))
    for _ in range(4):
        other.extend(task_steps([0, 0]))
    assert rows_of(other.storage).generations.tolist() == [2, 2, 2, 2]
    other.load_state_dict(first.state_dict())
    assert rows_of(other.storage).generations.tolist() == [1, 1, 0, 0]
    other.extend(task_steps([1, 1]))
    assert rows_of(other.storage).generations.tolist() == [1, 1, 3, 3]


def test_generations_continue_in_an_emptied_buffer() -> None:
    buffer = of_tasks()
    buffer.extend(task_steps([0, 0, 1]))
    buffer.empty()
    assert (len(buffer), buffer.writer.tables.count) == (0, 0)
    assert rows_of(buffer.storage).generations.tolist() == [2, 2, 2, 0]
    assert buffer.extend(task_steps([1])).tolist() == [0]
    assert rows_of(buffer.storage).generations.tolist() == [3, 2, 2, 0]
    kept = retaining()
    kept.extend(numbered_steps(0, 3))
    kept.empty()
    assert kept.extend(numbered_steps(3, 1)).tolist() == [0]
    assert rows_of(kept.storage).generations.tolist() == [3, 2, 2]


def test_a_state_of_another_size_or_storage_is_refused() -> None:
    rows = torchrl_rows.TorchRLRows(LazyTensorStorage(3))
    state = rows.state_dict()
    for wrong in (torch.zeros(4, dtype=torch.int64), torch.zeros(3), torch.full((3,), -1)):
        with pytest.raises(ValueError, match=r"the saved generations are .* here int64 \[3\].*Nothing was loaded"):
            rows.load_state_dict(state | {"generations": wrong})
    packed = retaining(storage=PackedStorage(3))
    with pytest.raises(ValueError, match=r"a RetentionWriter needs \['rows_beside'\] too"):
        retaining().writer.load_state_dict(packed.writer.state_dict())
    assert "rows_beside" not in packed.writer.state_dict()


def test_a_writer_that_moves_to_a_packed_storage_keeps_nothing_beside_it() -> None:
    writer = RetentionWriter(SurpriseOnly())
    retaining(writer=writer)
    assert writer.tracks_generations
    moved = copy.deepcopy(writer)  # The writer itself belongs to the first buffer.
    retaining(writer=moved, storage=PackedStorage(3)).extend(numbered_steps(0, 2))
    assert not moved.tracks_generations
    assert "rows_beside" not in moved.state_dict()


WRONG_STORAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "dimensions": (lambda: LazyTensorStorage(4, ndim=2), "a LazyTensorStorage with ndim=2"),
    "a list without a size": (ListStorage, "a ListStorage with ndim=1 and max_size=9223372036854775807"),
}


@pytest.mark.parametrize(("storage", "match"), WRONG_STORAGES.values(), ids=WRONG_STORAGES)
@pytest.mark.parametrize("build", [retaining, of_tasks], ids=["retention", "tables"])
def test_other_storages_are_refused(build: Any, storage: Callable[[], Any], match: str) -> None:
    with pytest.raises(TypeError, match=f"Writer got {match}.*it writes into a PackedStorage.*Use PackedStorage"):
        build(storage=storage()) if build is retaining else build(storage=lambda size: storage())


def test_an_ensemble_of_storages_is_refused() -> None:
    ensemble = StorageEnsemble(LazyTensorStorage(3), LazyTensorStorage(3))
    with pytest.raises(TypeError, match="RetentionWriter got a StorageEnsemble"):
        RetentionWriter().register_storage(ensemble)


def test_a_storage_of_too_few_rows_is_refused() -> None:
    sampler = TableShares({"a": 1.0}, seed=0)
    with pytest.raises(ValueError, match=r"the storage has 3 rows and TaskTableWriter needs 4.*LazyTensorStorage\(4\)"):
        ReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler, writer=TaskTableWriter(["a"], 4), batch_size=1)


WRONG_ROWS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no TensorDict": (lambda: [{"observation": 1}], TypeError, "rows of a TensorDict; got list"),
    "another shape": (
        lambda: task_steps([0]).set("observation", torch.zeros(1, 4)),
        ValueError,
        r"Different: 'observation': stored \(torch.float32, \(3,\)\), given \(torch.float32, \(4,\)\)",
    ),
    "another column": (
        lambda: task_steps([0]).set("more", torch.zeros(1)),
        ValueError,
        "'more': stored no such column",
    ),
    "fewer columns": (lambda: task_steps([0]).exclude("action"), ValueError, "'action': .*given no such column"),
    "another task": (lambda: task_steps([2]), ValueError, "the column 'task' holds .2."),
}


@pytest.mark.parametrize(("rows", "error", "match"), WRONG_ROWS.values(), ids=WRONG_ROWS)
@pytest.mark.parametrize("storage", OF_TORCHRL.values(), ids=OF_TORCHRL)
def test_wrong_rows_change_nothing(storage: type, rows: Callable[[], Any], error: type[Exception], match: str) -> None:
    buffer = of_tasks(storage=storage)
    buffer.extend(task_steps([0, 1]))
    with pytest.raises(error, match=match):
        buffer.writer.extend(rows())
    assert (len(buffer), buffer.writer.tables.count, buffer.write_count) == (2, 2, 2)
    assert numbers(buffer, [0, 1]) == [0.0, 1.0]


def test_refused_first_rows_fix_no_columns() -> None:
    buffer = of_tasks()
    with pytest.raises(ValueError, match="need a column 'task'"):
        buffer.extend(numbered_steps(0, 2))
    assert buffer.extend(task_steps([0, 1]).exclude("action")).tolist() == [0, 1]


def test_rows_of_different_lengths_and_objects_are_refused() -> None:
    nested = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(TypeError, match="the column 'tokens' has rows of different lengths"):
        retaining().extend(numbered_steps(0, 2).set("tokens", nested))
    with pytest.raises(TypeError, match="column 'name' is a NonTensorData; a packed row holds dense tensors"):
        retaining().extend(TensorDict({"observation": torch.ones(2), "name": "x"}, [2]))


def test_a_list_keeps_copies_of_the_rows() -> None:
    buffer, steps = of_tasks(storage=ListStorage), task_steps([0, 1])
    buffer.extend(steps)
    steps["observation"].zero_()
    assert numbers(buffer, [0, 1]) == [0.0, 1.0]


def test_slots_of_given_rows_and_generations_are_not_stored() -> None:
    """A batch of a buffer may be stored in another one."""
    buffer = of_tasks(TensorDictReplayBuffer)
    buffer.extend(task_steps([0, 1]))
    batch = buffer.sample(2)
    buffer.extend(batch)
    assert {"index", "generation", "index_generation"}.isdisjoint(map(str, buffer.storage.get(0).keys()))


def test_a_part_of_the_storage_is_filled_in_order() -> None:
    """A storage larger than the tables never counts a slot that was not written."""
    sampler = ScheduledSampler(["a", "b"], UniformTasks(), seed=0)
    writer = TaskTableWriter(["a", "b"], 2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, writer=writer, batch_size=2)
    for first in range(6):
        buffer.extend(task_steps([0, 1], first=2 * first))
        assert len(buffer) == min(2 * first + 2, 4)


def test_ends_of_episodes_in_a_replay_over_a_storage_of_torchrl() -> None:
    """Rows of which one is refused do not follow each other."""
    for storage in (PackedStorage(3), LazyTensorStorage(3)):
        replay = retaining(Replay, storage, n_steps=2, discount=1.0)
        replay.extend(numbered_steps(0, 3))
        replay.update_priority(torch.arange(3), torch.tensor([3.0, 1.0, 2.0]))
        assert replay.extend(numbered_steps(3, 1)).tolist() == [1]
        assert replay.successors(torch.arange(3)).tolist() == [-1, -1, 1]


def test_a_spawned_process_gets_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = of_tasks(storage=LazyMemmapStorage)
    buffer.extend(task_steps([0]))
    monkeypatch.setattr(torchrl_rows, "get_spawning_popen", object)
    with pytest.raises(RuntimeError, match="in its process which slots hold a row.*ShardedReplay"):
        pickle.dumps(buffer.writer)
