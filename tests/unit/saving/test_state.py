# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from lightning_replay import load_replay, recipes
from lightning_replay.saving import DamagedFileError, read_state, write_state
from lightning_replay.saving.states import join_state
from tests import level_steps
from tests.saves import names_in
from tests.transitions import numbered_steps


def test_nested_values_come_back(tmp_path) -> None:
    state = {
        "a": torch.arange(3),
        "b": {"c": None, "d": [1, 2.5, "x", {"e": torch.zeros(2, 0)}], "f.g": True},
        "strided": torch.arange(6).view(2, 3).T,
        "word": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    write_state(tmp_path, state)
    again = read_state(tmp_path)
    assert torch.equal(again["a"], state["a"]) and torch.equal(again["strided"], state["strided"])
    assert again["word"].dtype == torch.bfloat16
    assert again["b"]["d"][:3] == [1, 2.5, "x"] and again["b"]["d"][3]["e"].shape == (2, 0)
    assert again["b"]["c"] is None and again["b"]["f.g"] is True
    state = {"a": {"b": torch.tensor(1), "c": [torch.tensor(2)]}, "a.b": torch.tensor(3), "a.c.0": torch.tensor(4)}
    write_state(tmp_path, state)
    again = read_state(tmp_path)
    assert [again["a"]["b"], again["a"]["c"][0], again["a.b"], again["a.c.0"]] == [1, 2, 3, 4]
    rows = torch.arange(6)
    write_state(tmp_path, {"all": rows, "some": rows[2:4], "again": rows})
    again = read_state(tmp_path)
    assert [again[name].tolist() for name in ("all", "some", "again")] == [rows.tolist(), [2, 3], rows.tolist()]


def test_the_state_of_a_tensordict_keeps_its_nesting_and_batch_sizes(tmp_path) -> None:
    """TensorDict's state has flat keys; what they meant is in an attribute of the dictionary."""
    data = TensorDict({"a": torch.arange(6), "next": TensorDict({"b": torch.ones(6, 2)}, [6, 2])}, [6])
    write_state(tmp_path, {"data": data.state_dict(), "shape": torch.Size([3]), "device": torch.device("cpu")})
    again = read_state(tmp_path)
    assert again["shape"] == torch.Size([3]) and again["device"] == torch.device("cpu")
    loaded = TensorDict().load_state_dict(again["data"], strict=False)
    assert loaded.batch_size == (6,) and loaded["next"].batch_size == (6, 2)
    assert torch.equal(loaded["next", "b"], data["next", "b"]) and loaded.device == data.device


def test_what_is_still_to_be_conjugated_is_written_as_it_reads(tmp_path) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    negative = number[:1].conj().imag
    state = {"conjugate": number.conj(), "negative": negative, "leaf": torch.ones(2, requires_grad=True)}
    assert state["conjugate"].is_conj() and negative.is_neg() and negative.is_contiguous()
    write_state(tmp_path, state)
    again = read_state(tmp_path)
    assert again["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert again["negative"].tolist() == [-2]
    assert again["leaf"].tolist() == [1, 1] and not again["leaf"].requires_grad


def test_what_is_not_plain_and_where_nothing_was_saved_is_said(tmp_path) -> None:
    with pytest.raises(TypeError, match=r"'sampler.clock' is a object"):
        write_state(tmp_path, {"sampler": {"clock": object()}})
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="no state was saved"):
            read_state(directory)


@pytest.mark.parametrize("values", [{"$tensor": "b"}, {"a": 1}, {"$dict": 3}, {"$size": "x"}, {"$device": "nowhere"}])
def test_values_that_do_not_fit_the_tensors_are_refused_as_damaged(values) -> None:
    with pytest.raises(DamagedFileError, match="do not fit together"):
        join_state(values, {"a": torch.arange(3)})


@pytest.mark.slow
def test_values_nested_without_end_are_refused_as_damaged() -> None:
    values: dict = {"$dict": {}}
    for _ in range(100_000):
        values = {"$dict": {"a": values}}
    with pytest.raises(DamagedFileError, match="RecursionError"):
        join_state(values, {})


def test_parts_in_one_directory_do_not_replace_each_other(tmp_path) -> None:
    replay = recipes.prioritized(capacity=8, batch_size=2, seed=0)
    replay.sampler.dumps(tmp_path)
    replay.sampler.dumps(tmp_path)
    with pytest.raises(ValueError, match="holds the state of a PrioritizedSampler.*Give each a directory of its own"):
        replay.writer.dumps(tmp_path)
    replay.sampler.loads(tmp_path)
    assert names_in(tmp_path) == ["state", "state.json"]


def test_a_replay_and_levels_may_lie_in_one_directory_beside_folders_of_the_user(tmp_path) -> None:
    (tmp_path / "data-imagenet").mkdir()
    replay, levels = recipes.uniform(capacity=8, batch_size=2, seed=0), level_steps.buffer(3)
    replay.extend(numbered_steps(0, 8))
    level_steps.play(levels, 1, 0.5)
    for _ in range(2):
        replay.save(tmp_path)
        levels.save(tmp_path)
    assert len(load_replay(tmp_path)) == 8
    again = level_steps.buffer(3)
    again.load(tmp_path)
    assert len(again) == 1
    assert sorted(names_in(tmp_path)) == ["data", "data", "replay.json", "state", "state.json"]
