# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from lightning_replay import load_replay, recipes
from lightning_replay.storage.observations_once import ObservationStorage
from lightning_replay.storage.packed import PackedStorage, read_columns
from lightning_replay.transforms import NStepTransitions
from tests.attack.states import difference
from tests.transitions import numbered_steps


def rows_of(pairs: list[tuple[float, float]], *, width: int = 3) -> TensorDict:
    """Rows by their observation and the next one, each a number in all entries."""
    own, following = torch.tensor(pairs).unbind(1)
    observations = (own[:, None].expand(-1, width).clone(), following[:, None].expand(-1, width).clone())
    return TensorDict({"observation": observations[0], "next": {"observation": observations[1]}}, [len(pairs)])


def storage_of(pairs: list[tuple[float, float]], capacity: int = 6) -> ObservationStorage:
    storage = ObservationStorage(capacity)
    storage.set(slice(0, len(pairs)), rows_of(pairs))
    return storage


def held(storage: PackedStorage) -> list[tuple[float, float]]:
    rows = storage.get(torch.arange(len(storage)))
    return [*zip(rows["observation"][:, 0].tolist(), rows["next", "observation"][:, 0].tolist(), strict=True)]


#    slot           0        1        2        3
#    row          0 -> 1   1 -> 2   2 -> 9   5 -> 6
#    next is in   slot 1   slot 2   beside   beside
def test_the_next_observation_of_a_row_is_the_observation_of_the_row_that_follows() -> None:
    pairs = [(0.0, 1.0), (1.0, 2.0), (2.0, 9.0), (5.0, 6.0)]
    storage = storage_of(pairs)
    assert storage.stats() == {"last_observations": 2}
    assert storage._next.places.tolist() == [2, 3, -1, -2, 0, 0]
    assert held(storage) == pairs


def test_the_last_observation_of_an_episode_that_was_cut_off_stays() -> None:
    storage = storage_of([(0.0, 1.0), (1.0, 2.0), (7.0, 8.0), (8.0, 9.0)])  # 2 is the end of the first episode
    assert held(storage)[1] == (1.0, 2.0) and storage.stats()["last_observations"] == 2


def test_a_row_continues_a_stored_one_whatever_was_stored_in_between() -> None:
    storage = storage_of([(0.0, 1.0), (10.0, 11.0)])
    storage.set(slice(2, 4), rows_of([(11.0, 12.0), (1.0, 2.0)]))  # the other environment first
    assert storage._next.places.tolist() == [4, 3, -2, -1, 0, 0]
    assert held(storage) == [(0.0, 1.0), (10.0, 11.0), (11.0, 12.0), (1.0, 2.0)]


def test_a_row_keeps_its_next_observation_if_the_row_with_it_is_overwritten() -> None:
    storage = storage_of([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)])
    storage.set(slice(1, 2), rows_of([(50.0, 51.0)]))
    assert held(storage) == [(0.0, 1.0), (50.0, 51.0), (2.0, 3.0)]
    assert storage.stats()["last_observations"] == 3
    storage.set(slice(0, 1), rows_of([(60.0, 50.0)]))  # found only by later rows, so that it is kept beside
    assert held(storage)[0] == (60.0, 50.0) and storage.stats()["last_observations"] == 3


def test_zeros_of_two_signs_and_nans_of_two_payloads_are_different_observations() -> None:
    words = torch.tensor([0x7FC00001, 0x7FC00002, -0x80000000, 0], dtype=torch.int32)
    own = words.view(torch.float32).unsqueeze(1)
    following = torch.roll(own, -1, 0)
    following[2] = -0.0  # row 3 starts with 0.0
    storage = ObservationStorage(4)
    storage.set(slice(0, 4), TensorDict({"observation": own, "next": {"observation": following}}, [4]))
    rows = storage.get(torch.arange(4))
    assert torch.equal(rows["observation"].contiguous().view(torch.int32).flatten(), words)
    expected = following.contiguous().view(torch.int32)
    assert torch.equal(rows["next", "observation"].contiguous().view(torch.int32), expected)
    assert storage.stats()["last_observations"] == 2


def test_all_columns_of_an_observation_are_compared_together() -> None:
    storage = ObservationStorage(4)
    steps = rows_of([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)])
    steps["critic_observation"] = torch.tensor([0, 1, 5], dtype=torch.int16)
    steps["next", "critic_observation"] = torch.tensor([1, 2, 3], dtype=torch.int16)
    storage.set(slice(0, 3), steps)
    assert storage._next.places.tolist() == [2, -1, -2, 0]
    rows = storage.get(torch.tensor([1]))
    assert rows["next", "critic_observation"].tolist() == [2] and rows["next", "observation"][0, 0] == 2.0


def test_columns_are_those_of_packed_rows() -> None:
    steps = numbered_steps(0, 8, trajectory=3)
    steps["observation"] = TensorDict({"place": steps["observation"], "goal": steps["observation"][:, :1] > 4}, [8])
    steps["next", "observation"] = TensorDict(
        {"place": steps["next", "observation"], "goal": steps["next", "observation"][:, :1] > 4}, [8]
    )
    once, twice = ObservationStorage(8), PackedStorage(8)
    for storage in (once, twice):
        storage.set(slice(0, 8), steps)
    index = torch.tensor([[5, 0], [7, 7]])
    assert [*once.get(index).keys(True, True)] == [*twice.get(index).keys(True, True)]
    for key in twice.get(index).keys(True, True):
        expected = twice.get(index).get(key)
        assert torch.equal(once.get(index).get(key), expected) and torch.equal(once.column(key, index), expected)
    branch = read_columns(once, index.flatten(), [("next", "observation")])[0]
    assert torch.equal(branch["place"], twice.get(index.flatten())["next", "observation", "place"])
    assert torch.equal(once.get(slice(2, 4))["observation", "place"], steps["observation", "place"][2:4])
    assert torch.equal(once.get(("next", "reward")), steps["next", "reward"])
    assert torch.equal(once.get(3)["next", "observation", "place"], steps["next", "observation", "place"][3])
    assert torch.equal(once.readable_rows["observation", "place"], steps["observation", "place"])
    assert once.column("nothing", index) is None and not once.has_column("observation_words")


def test_a_slot_that_there_is_not_is_refused() -> None:
    storage = storage_of([(0.0, 1.0)])
    for slots in ([6], [-1]):
        with pytest.raises(IndexError, match="from 0 to 5"):
            storage.get(torch.tensor(slots))
    with pytest.raises(RuntimeError, match="call extend first"):
        ObservationStorage(3).get(torch.tensor([0]))


def test_copies_and_saves_are_the_same_and_go_on_alike(tmp_path: Path) -> None:
    replay = recipes.uniform(8, 4, seed=0, observations="once")
    replay.extend(numbered_steps(0, 11, done_every=4, trajectory=0))
    replay.save(tmp_path / "saved")
    others = [copy.deepcopy(replay), load_replay(tmp_path / "saved")]
    for one in (replay, *others):
        one.extend(numbered_steps(11, 3, trajectory=0))
        assert held(one.storage) == held(replay.storage)
        assert one.stats()["last_observations"] == replay.stats()["last_observations"] == 1
    assert difference(*(one.sample().to_dict() for one in others)) is None


def test_a_save_holds_the_rows_of_its_moment(tmp_path: Path) -> None:
    storage = storage_of([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)], capacity=4)
    before = held(storage)
    loaded = ObservationStorage(4)
    with storage.frozen_state() as state:
        storage.set(torch.tensor([1, 3]), rows_of([(3.0, 4.0), (4.0, 5.0)]))
        loaded.load_state_dict(state | {"rows": state["rows"].tensor()})
    assert held(loaded) == before and held(storage)[0] == before[0]


@pytest.mark.parametrize(
    "change",
    [
        {"places": torch.tensor([9, -1], dtype=torch.int32)},
        {"places": torch.tensor([2, 2], dtype=torch.int32), "last_observations": torch.zeros(0, 2, dtype=torch.int64)},
        {"places": torch.tensor([2, -2], dtype=torch.int32)},
        {"places": torch.tensor([2, -1])},
        {"last_observations": torch.zeros(1, 3, dtype=torch.int64)},
        {"columns": [{"key": ["observation"], "dtype": "float32", "shape": [3]}]},
    ],
    ids=["beyond", "twice", "out of order", "dtype", "width", "columns"],
)
def test_a_forged_save_is_refused_and_nothing_is_loaded(change: dict) -> None:
    state = storage_of([(0.0, 1.0), (1.0, 2.0)]).state_dict()
    storage = storage_of([(5.0, 6.0)])
    with pytest.raises(ValueError, match="load another save"):
        storage.load_state_dict(state | change)
    assert held(storage) == [(5.0, 6.0)]


def test_an_empty_save_empties_it() -> None:
    storage = storage_of([(0.0, 1.0), (1.0, 2.0)])
    storage.load_state_dict(ObservationStorage(6).state_dict())
    assert len(storage) == 0 and storage.stats()["last_observations"] == 0


def test_a_save_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    replay = recipes.uniform(8, 4, observations="once")
    replay.extend(numbered_steps(0, 4))
    with pytest.raises(ValueError, match="PackedStorage"):
        recipes.uniform(8, 4).load_state_dict(replay.state_dict())


def test_rows_in_a_file(tmp_path: Path) -> None:
    storage = ObservationStorage(4, memmap=str(tmp_path))
    storage.set(slice(0, 2), rows_of([(0.0, 1.0), (1.0, 2.0)]))
    assert held(storage) == [(0.0, 1.0), (1.0, 2.0)]


def test_in_a_buffer_of_torchrl() -> None:
    buffer = TensorDictReplayBuffer(storage=ObservationStorage(8), batch_size=4)
    buffer.extend(numbered_steps(0, 12))
    batch = buffer.sample()
    assert torch.equal(batch["next", "observation"], batch["observation"] + 1)
    assert torch.equal(buffer[:]["next", "observation"], buffer[:]["observation"] + 1)


def test_returns_that_are_formed_before_they_are_stored_share_observations() -> None:
    replay = recipes.uniform(32, 4, observations="once", transform=NStepTransitions(3, 0.5), n_steps=1)
    replay.extend(numbered_steps(0, 20, trajectory=0))
    assert len(replay) == 18  # the returns of the last two steps wait for the next ones
    assert replay.stats()["last_observations"] == 3


def test_any_batch_size_finds_the_rows_before() -> None:
    one, many = ObservationStorage(64), ObservationStorage(64)
    steps = [numbered_steps(100 * name, 16) for name in range(4)]
    many.set(slice(0, 64), torch.cat(steps))
    for step in range(16):
        rows = torch.cat([each[step : step + 1] for each in steps])
        one.set(slice(4 * step, 4 * step + 4), rows)
    assert one.stats() == many.stats() == {"last_observations": 4}


def test_memory_is_about_half() -> None:
    storages = [PackedStorage(16_384), ObservationStorage(16_384)]
    steps = numbered_steps(0, 16_384)
    for storage in storages:
        rows = steps.clone()
        for place in ((), ("next",)):
            rows[*place, "observation"] = rows[*place, "observation"][:, :1].expand(-1, 98).clone()
        storage.set(slice(0, 16_384), rows)
    assert storages[1].nbytes < 0.56 * storages[0].nbytes


def test_what_cannot_be_stored_once_is_refused() -> None:
    with pytest.raises(ValueError, match="observations is 'one'; it must be one of 'twice', 'once'"):
        recipes.uniform(8, observations="one")
    with pytest.raises(ValueError, match="frame_stack is 4"):
        recipes.uniform(8, observations="once", frame_stack=4)
    with pytest.raises(ValueError, match="device is 'meta'"):
        ObservationStorage(8, device="meta")
    replay = recipes.uniform(8, observations="once")
    for wrong in (numbered_steps(0, 4).exclude(("next", "observation")), numbered_steps(0, 4)):
        if ("next", "observation") in wrong.keys(True):
            wrong["observation_words"] = torch.zeros(4)
        with pytest.raises(ValueError, match="Nothing was stored"):
            replay.extend(wrong)
        assert len(replay) == 0
    replay.extend(numbered_steps(0, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.float64])
def test_any_dtype(dtype: torch.dtype) -> None:
    storage = ObservationStorage(5)
    states = torch.arange(6).view(6, 1, 1).expand(6, 3, 1).to(dtype)
    storage.set(slice(0, 5), TensorDict({"x": states[:5], "next": {"x": states[1:]}}, [5]))
    rows = storage.get(torch.arange(5))
    assert torch.equal(rows["x"], states[:5]) and torch.equal(rows["next", "x"], states[1:])


def test_arrays_that_are_read_only_or_lie_apart() -> None:
    replay = recipes.uniform(8, 4, observations="once")
    states = np.arange(20, dtype=np.float32).reshape(5, 4)
    states.flags.writeable = False
    wide = np.zeros((5, 8), np.float32)
    wide[:, ::2] = states + 1
    done = np.zeros((5, 1), bool)
    for _ in range(2):
        columns = {"observation": states, ("next", "observation"): wide[:, ::2], ("next", "done"): done}
        replay.extend_columns(columns)
    assert torch.equal(replay[:]["next", "observation"], replay[:]["observation"] + 1)
