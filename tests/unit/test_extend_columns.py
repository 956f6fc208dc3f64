# SPDX-License-Identifier: Apache-2.0
"""``Replay.extend_columns``: what it accepts, and when it needs no TensorDict."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.envs import Compose, RenameTransform

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.storage import columns as rows_of_columns
from lightning_replay.transforms import NStepTransitions
from tests.attack.states import difference
from tests.transitions import numbered_steps


def columns(first: int = 0, count: int = 1) -> dict[Any, np.ndarray]:
    return {key: value.numpy().copy() for key, value in numbered_steps(first, count).items(True, True)}


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("recipe", [recipes.uniform, recipes.prioritized])
def test_no_tensordict_is_built_for_rows_that_follow_others(recipe, n_steps: int, monkeypatch) -> None:
    replay = recipe(10, 4, n_steps=n_steps, seed=0)
    replay.extend(numbered_steps(0, 3))
    monkeypatch.setattr(rows_of_columns, "rows_of_columns", None)
    assert replay.extend_columns(columns(3, 2)).tolist() == [3, 4]
    assert replay.extend_columns(columns(5, 12)).tolist() == [(5 + place) % 10 for place in range(2, 12)]
    expected = recipe(10, 4, n_steps=n_steps, seed=0)
    for first, count in ((0, 3), (3, 2), (5, 12)):
        expected.extend(numbered_steps(first, count))
    assert difference(replay.state_dict(), expected.state_dict()) is None


@pytest.mark.parametrize("ends", [("terminated", "truncated"), ("terminated",), ("truncated",)])
def test_rows_without_done_get_it_from_the_other_flags_by_either_way(ends: tuple[str, ...], monkeypatch) -> None:
    whole, columns_only, rows_only = (recipes.uniform(20, 4, seed=0) for _ in range(3))
    flags = {"terminated": [False, True, False], "truncated": [False, False, True]}
    left_out = [("next", name) for name in flags if name not in ends]
    for first in (0, 3, 6):
        rows = numbered_steps(first, 3)
        for name, values in flags.items():
            rows["next", name] = torch.tensor(values).unsqueeze(1)
        rows["next", "done"] = torch.tensor([any(flags[name][n] for name in ends) for n in range(3)]).unsqueeze(1)
        rows = rows.exclude(*left_out)
        whole.extend(rows)
        short = rows.exclude(("next", "done"))
        if first == 3:
            monkeypatch.setattr(rows_of_columns, "rows_of_columns", None)
            monkeypatch.setattr(rows_of_columns, "normalized", None)
        given = {key: value.numpy() for key, value in short.items(True, True)}
        if first == 6:  # The reader knows the other form from the rows before.
            given = {key: value[:, 0] if key in rows_of_columns.ONE_EACH else value for key, value in given.items()}
        columns_only.extend_columns(given)
        rows_only.extend(short)
    for other in (columns_only, rows_only):
        assert torch.equal(other[:]["next", "done"], whole[:]["next", "done"])
        assert difference(other.state_dict(), whole.state_dict()) is None


def test_rows_that_lack_another_column_than_done_are_refused() -> None:
    replay = recipes.uniform(10, 4, seed=0)
    replay.extend_columns(columns(0, 2))
    short = columns(2, 2)
    del short["next", "terminated"]
    with pytest.raises(ValueError, match="terminated"):
        replay.extend_columns(short)
    assert len(replay) == 2


@pytest.mark.parametrize("prepare", [
    lambda replay: replay.append_transform(Compose(RenameTransform(["action"], ["move"]))),
    lambda replay: replay.load_state_dict(copy.deepcopy(replay.state_dict())),
    lambda replay: (replay.empty(), replay.set_storage(LazyTensorStorage(10))),
], ids=["transform", "loaded", "storage of TorchRL"])  # fmt: skip
def test_a_part_that_reads_rows_gets_them(prepare, monkeypatch) -> None:
    replay = recipes.uniform(10, 4, seed=0)
    replay.extend(numbered_steps(0, 3))
    prepare(replay)
    monkeypatch.setattr(rows_of_columns, "rows_of_columns", None)
    with pytest.raises(TypeError, match="NoneType"):
        replay.extend_columns(columns(3))


@pytest.mark.parametrize("by_columns", [True, False])
def test_a_column_of_priorities_sets_them(by_columns: bool) -> None:
    replay = recipes.prioritized(10, 4, seed=0, priority_offset=0.0, priority_exponent=1.0)
    for first, errors in ((0, [1.0, 5.0]), (2, [0.5, 3.0])):
        rows = numbered_steps(first, 2).set("td_error", torch.tensor(errors))
        replay.extend_columns(dict(rows.items(True, True))) if by_columns else replay.extend(rows)
    assert replay.state_dict()["sampler"]["tree"]["leaves"][:4].tolist() == [1.0, 5.0, 0.5, 3.0]


def test_an_extend_of_a_subclass_is_called() -> None:
    class Doubled(Replay):
        def extend(self, tensordicts, *, update_priority=None):
            return super().extend(torch.cat([tensordicts, tensordicts]))

    replay = Doubled(storage=PackedStorage(10), batch_size=2)
    for first in range(2):
        replay.extend_columns(columns(first))
    assert len(replay) == 4


def test_arrays_of_every_kind_are_copied() -> None:
    replay = recipes.uniform(10, 4, seed=0)
    rows = numbered_steps(0, 2)
    replay.extend(rows)
    given = columns(0, 2)
    read_only = columns(0, 2)
    for array in read_only.values():
        array.flags.writeable = False
    learned = {key: torch.from_numpy(array) for key, array in given.items()}
    learned["observation"].requires_grad_()
    for kind in (given, read_only, pickle.loads(pickle.dumps(given)), learned):
        replay.extend_columns(kind)
    given["observation"][:] = -1
    assert torch.equal(replay.storage.all_rows["observation"], rows["observation"].repeat(5, 1))


@pytest.mark.parametrize(("given", "error", "message"), [
    ([1, 2], TypeError, "got list"),
    ({}, ValueError, "got no columns"),
    ({"a": np.zeros(2), "b": np.zeros(3)}, ValueError, "got 'a': 2, 'b': 3"),
    ({"a": np.zeros(0)}, ValueError, r"batch size \[N\] with N >= 1; got \[0\]"),
    ({"a": [1.0]}, TypeError, r"the column 'a' is \[1.0\]"),
    ({"a": np.array(1.0)}, TypeError, r"the column 'a' is an array of float64 \[\]"),
    ({"a": np.array(["x"])}, TypeError, "the column 'a' is an array of <U1"),
    ({"next": {"reward": np.zeros(2)}}, TypeError, "the column 'next' is {'reward'"),
    ({3: np.zeros(2)}, TypeError, "got the key 3"),
    ({("next", 1): np.zeros(2)}, TypeError, r"got the key \('next', 1\)"),
    ({"a": np.zeros(2), ("a",): np.zeros(2)}, ValueError, "the column 'a' is given twice"),
    ({"a": np.zeros(2), ("a", "b"): np.zeros(2)}, ValueError, r"'a' is a column, and \('a', 'b'\) is below it"),
])  # fmt: skip
@pytest.mark.parametrize("is_first", [True, False])
def test_other_things_are_refused(given, error, message: str, is_first: bool) -> None:
    replay = recipes.uniform(10, 4, seed=0)
    if not is_first:
        replay.extend(TensorDict({"a": torch.zeros(2, dtype=torch.float64)}, [2]))
    before = replay.state_dict()
    with pytest.raises(error, match=message):
        replay.extend_columns(given)
    assert difference(before, replay.state_dict()) is None


def test_a_sampler_that_checks_rows_gets_them() -> None:
    replay = recipes.neighborhood_mixup(10, 4, num_neighbors=2, seed=0)
    replay.extend(numbered_steps(0, 3))
    before = replay.state_dict()
    with pytest.raises(ValueError, match=r"rows \[0\] have NaN or infinite"):
        replay.extend_columns(columns(3) | {"action": np.full((1, 2), np.inf, np.float32)})
    assert difference(before, replay.state_dict()) is None


def test_returns_are_refused_over_rows_without_rewards_that_a_storage_got_before() -> None:
    replay = recipes.uniform(10, 4, n_steps=3, seed=0)
    rows = numbered_steps(0, 2).exclude(("next", "reward"))
    replay.storage.set(range(2), rows)
    with pytest.raises(ValueError, match=r"the transitions have no \('next', 'reward'\)"):
        replay.extend(rows)
    assert len(replay) == 2


def test_one_row_after_a_load_has_a_generation_above_all_before() -> None:
    replay, other = (recipes.uniform(4, 2, seed=0) for _ in range(2))
    other.extend(numbered_steps(0, 1))
    for _ in range(3):
        replay.extend(numbered_steps(0, 1))
        replay.empty()
    largest = int(replay.storage.generation_of(torch.arange(1)))
    replay.load_state_dict(other.state_dict())
    for first in (1, 2):
        index = replay.extend_columns(columns(first))
        assert index.tolist() == [first] and replay.storage.generation_of(index) > largest


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("as_rows", [False, True])
def test_arrays_may_be_reused_after_the_call(waits: bool, as_rows: bool) -> None:
    def filled(reuses: bool) -> Any:
        replay = Replay(storage=PackedStorage(50), batch_size=4, transform=NStepTransitions(3, 0.9) if waits else None)
        reused = columns(0)
        for step in range(12):
            given = columns(step)
            if reuses:
                for key, column in given.items():
                    reused[key][:] = column
                given = reused
            if as_rows:
                replay.extend(TensorDict({key: torch.from_numpy(column) for key, column in given.items()}, [1]))
            else:
                replay.extend_columns(given)
        return replay[:].to_dict()

    assert difference(filled(True), filled(False)) is None


def test_arrays_of_another_dtype_than_one_without_arrays_are_refused() -> None:
    replay = Replay(storage=PackedStorage(8), batch_size=2)
    replay.extend_columns({"observation": torch.zeros(1, 2, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="bfloat16"):
        replay.extend_columns({"observation": np.zeros((1, 2))})
    assert len(replay) == 1
