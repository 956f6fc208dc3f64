# SPDX-License-Identifier: Apache-2.0
"""A row follows another only if it starts with the observation that the other ended with."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import SliceSampler

from lightning_replay import PackedStorage, Replay, load_replay, recipes
from lightning_replay.episodes.returns import EpisodeTracker
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.samplers import ContinuousTransitionSampler
from tests.recipe_options import ROW_RECIPES, built, fitting
from tests.transitions import numbered_steps

MIXED = "rows of several environments or runs are mixed"


def stored(replay: Replay) -> TensorDict:
    return replay.storage.get(replay.storage.occupancy.slots())


def first(number: int, count: int = 10) -> TensorDict:
    return numbered_steps(number, count, trajectory=0)


def second_collector(replay: Replay, tmp_path) -> Replay:
    replay.extend(fitting(replay, first(0)))
    replay.extend(fitting(replay, first(500)))
    return replay


def resumed(replay: Replay, tmp_path) -> Replay:
    replay.extend(fitting(replay, first(0)))
    replay.save(tmp_path)
    replay = load_replay(tmp_path)
    replay.extend(fitting(replay, first(500)))
    return replay


def resumed_in_the_same_state(replay: Replay, tmp_path) -> Replay:
    """The environment was reset to just the observation that the saved run had ended with."""
    replay.extend(fitting(replay, first(0)))
    replay.save(tmp_path)
    replay = load_replay(tmp_path)
    replay.extend(fitting(replay, first(10)))
    return replay


def loaded_into_another(replay: Replay, tmp_path) -> Replay:
    replay.extend(fitting(replay, first(0)))
    state = replay.state_dict()
    replay.empty()
    replay.load_state_dict(state)
    replay.extend(fitting(replay, first(500)))
    return replay


def processes(replay: Replay, tmp_path) -> Replay:
    """Two collectors in turn, each of whose episodes has the number 0."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{MIXED}")
        for step in range(10):
            replay.extend(fitting(replay, torch.cat([first(step, 1), first(500 + step, 1)])))
    return replay


def without_numbers(replay: Replay, tmp_path) -> Replay:
    replay.extend(fitting(replay, numbered_steps(0, 10)))
    replay.extend(fitting(replay, numbered_steps(500, 10)))
    return replay


ENTRIES = [second_collector, resumed, resumed_in_the_same_state, loaded_into_another, processes, without_numbers]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ROW_RECIPES)
def test_no_recipe_joins_two_runs(name: str, entry: Callable[..., Replay], tmp_path) -> None:
    """Rows of the numbers 0 to 9 are of one run, and those from 10 or 500 on of another."""
    replay = entry(built(name, capacity=50, batch_size=4, n_steps=3, discount=1.0, seed=0), tmp_path)
    rows = stored(replay)
    slots, runs = torch.arange(len(rows)), (rows["observation"][:, 0] >= 10).int()
    following = replay.successors(slots)
    if following is None:  # formed before they are stored, of numbers below 27 or above 500
        assert ((rows["next", "observation"][:, 0] > 10).int() == runs).all()
        return
    linked = following >= 0
    assert (runs[slots[linked]] == runs[following[linked]]).all()
    if entry is not processes and not replay.tasks:
        assert int(linked.sum()) == 18


def test_pairs_and_sweeps_and_tables_do_not_join_two_runs(tmp_path) -> None:
    for entry in ENTRIES:
        replay = entry(recipes.continuous_transition(50, 32, seed=0), tmp_path / entry.__name__)
        unwrap, partner = replay.sampler.sample(replay.storage, 200)[0].unbind(1)
        numbers = stored(replay)["observation"][:, 0]
        assert ((numbers[unwrap] >= 10) == (numbers[partner] >= 10)).all(), entry
        table = EventTable("high", condition=reward_at_least(10.0), history_length=5, capacity=30, min_size=1)
        replay = entry(recipes.event_tables(50, 4, tables=[table], seed=0), tmp_path / f"{entry.__name__} tables")
        assert (replay.table("high")["observation"][:, 0] >= 10).all(), entry


def test_rows_that_do_connect_go_on_after_a_load_that_restores_environments(tmp_path) -> None:
    replay = recipes.uniform(50, 4, n_steps=3, seed=0)
    replay.extend(first(0))
    replay.save(tmp_path)
    for loaded, expected in ((load_replay(tmp_path, end_episodes=False), 10), (load_replay(tmp_path), -1)):
        assert loaded.successors(torch.arange(10)).tolist()[-1] == -1
        before = loaded[:].clone()
        loaded.extend(first(10, 1))
        assert loaded.successors(torch.arange(10)).tolist()[-1] == expected
        assert loaded[:10]["next", "truncated"].flatten().tolist() == [False] * 9 + [expected < 0]
        assert torch.equal(before["observation"], loaded[:10]["observation"])
    with pytest.raises(TypeError, match="end_episodes is 'no'"):
        load_replay(tmp_path, end_episodes="no")


def test_two_environments_without_numbers_are_reported_once() -> None:
    replay = recipes.uniform(100, 64, n_steps=3, discount=1.0, seed=0)
    rows = [torch.cat([numbered_steps(step, 1), numbered_steps(500 + step, 1)]) for step in range(20)]
    for pair in rows[:8]:
        replay.extend(pair)
    report = f"17 of 17 rows .*{MIXED}.* column 'trajectory'.*check_continuity=False"
    with pytest.warns(UserWarning, match=report) as found:
        for pair in rows[8:]:
            replay.extend(pair)
    assert len(found) == 1
    assert (replay.sample()["steps_to_next_obs"] == 1).all()
    named = recipes.event_tables(
        100, 1, tables=[EventTable("high", condition=reward_at_least(9.0), history_length=2, capacity=9)], seed=0
    )
    with pytest.warns(UserWarning, match=r"column \('collector', 'traj_ids'\)") as found:
        for pair in rows:
            named.extend(pair.clone().set(("collector", "traj_ids"), torch.zeros(2, dtype=torch.int64)))
    assert len(found) == 1


def test_the_check_is_an_option() -> None:
    for name in ("uniform", "continuous_transition"):
        replay = built(name, capacity=50, n_steps=3, batch_size=4, check_continuity=False)
        second_collector(replay, None)
        assert replay.successors(torch.tensor([9])).tolist() == [10]
    for checks, expected in ((True, -1), (False, 10)):
        replay = second_collector(recipes.uniform(50, 4, check_continuity=checks), None)
        replay.follow_episodes(EpisodeTracker(n_steps=3, discount=0.9))
        assert replay.successors(torch.tensor([9])).tolist() == [expected]
    table = EventTable("high", condition=reward_at_least(500.0), history_length=3, capacity=30, min_size=1)
    replay = second_collector(recipes.event_tables(50, 4, tables=[table], check_continuity=False), None)
    assert replay.table("high")["observation"][:3, 0].tolist() == [8, 9, 500]


@pytest.mark.parametrize(
    ("ended", "begins", "continues"),
    [
        (torch.tensor([[float("nan"), 1.0]]), torch.tensor([[float("nan"), 1.0]]), True),
        (torch.tensor([[0.0]]), torch.tensor([[-0.0]]), False),
        (torch.tensor([[1.0, 2.0]]).bfloat16(), torch.tensor([[1.0, 2.0]]).bfloat16(), True),
        (torch.tensor([[1.0, 2.0]]).bfloat16(), torch.tensor([[1.0, 3.0]]).bfloat16(), False),
        (torch.tensor([True]), torch.tensor([True]), True),
        (torch.tensor([5]), torch.tensor([6]), False),
        (torch.arange(9_000.0).view(1, 90, 100), torch.arange(9_000.0).view(1, 90, 100), True),
        (torch.arange(9_000.0).view(1, 90, 100), torch.arange(9_000.0).view(1, 90, 100) + 1, False),
        (torch.zeros(1, 0), torch.zeros(1, 0), True),
    ],
)
@pytest.mark.parametrize("how", ["one", "many", "torchrl"])
def test_observations_of_any_kind_are_compared_bit_for_bit(ended, begins, continues: bool, how: str) -> None:
    storage = LazyTensorStorage(8) if how == "torchrl" else PackedStorage(8)
    replay = Replay(storage=storage, n_steps=2, batch_size=2, check_finite=False)
    flags = torch.zeros(2, 1, dtype=torch.bool)
    following = {"observation": torch.cat([ended, ended]), "reward": torch.zeros(2, 1)}
    following |= {"terminated": flags, "truncated": flags, "done": flags}
    rows = TensorDict({"observation": torch.cat([begins, begins]), "next": following}, [2])
    if how == "one":
        replay.extend(rows[:1])
        replay.extend(rows[1:])
    else:
        replay.extend(rows)
    assert replay.successors(torch.tensor([0])).tolist() == [1 if continues else -1]


def test_rows_of_returns_and_rows_without_observations_are_linked_by_their_numbers() -> None:
    for change in (
        lambda rows: rows.set("steps_to_next_obs", torch.ones(10, 1)),
        lambda rows: rows.exclude("observation"),
    ):
        sampler = ContinuousTransitionSampler()
        replay = Replay(storage=PackedStorage(50), sampler=sampler, batch_size=2)
        replay.extend(change(first(0)))
        replay.extend(change(first(500)))
        assert sampler.partners(torch.tensor([9]), replay.storage).tolist() == [10]


def test_nested_observations_are_compared_and_other_columns_are_not() -> None:
    """``step`` is the same before and after each step, and ``camera`` alone differs in the third row."""
    rows = numbered_steps(0, 4)
    for branch in (rows, rows["next"]):
        state, camera = branch.pop("observation"), branch["reward"] if "reward" in branch else torch.zeros(4, 1)
        branch["observation"] = TensorDict({"state": state, "camera": torch.zeros_like(camera)}, [4])
        branch["step"] = torch.arange(4)
    rows["observation", "camera"][2] = 1
    replay = Replay(storage=PackedStorage(8), n_steps=2, batch_size=2)
    replay.extend(rows)
    assert replay.successors(torch.arange(4)).tolist() == [1, -1, 3, -1]


def test_slices_of_a_column_of_numbers_that_begin_again_are_refused() -> None:
    replay = Replay(
        storage=PackedStorage(50), sampler=SliceSampler(slice_len=4, traj_key="trajectory"), batch_size=8, seed=0
    )
    replay.extend(first(0))
    assert replay.sample()["trajectory"].shape == (8,)
    replay.extend(first(500))
    with pytest.raises(ValueError, match=r"1 episodes end beside another one of the same 'trajectory'.*end_key="):
        replay.sample()
    replay.set_sampler(SliceSampler(slice_len=4, end_key=("next", "done")))
    for _ in range(20):
        runs = (replay.sample()["observation"][:, 0].view(-1, 4) >= 500).int()
        assert (runs == runs[:, :1]).all()


def test_a_copy_compares_rows_of_its_own() -> None:
    replay = recipes.uniform(5_000, 4, n_steps=3, seed=0)
    replay.extend(first(0))
    rows_and_links = 5_000 * (replay.storage.row_bytes + 20)
    assert len(pickle.dumps(replay)) < rows_and_links + 20_000, "views of all rows are no part of a copy"
    for again in (copy.deepcopy(replay), pickle.loads(pickle.dumps(replay))):
        again.extend(first(10))
        again.extend(first(500))
        assert again.successors(torch.tensor([9, 19])).tolist() == [10, -1]
    assert replay.successors(torch.tensor([9])).tolist() == [-1]


def test_the_newest_row_of_a_ring_written_at_once_goes_on() -> None:
    replay = Replay(
        storage=PackedStorage(10), sampler=SliceSampler(slice_len=2, end_key=("next", "done")), batch_size=4
    )
    replay.extend(first(0))
    assert not replay[:]["next", "done"].any()
    bare = Replay(storage=PackedStorage(10), sampler=SliceSampler(slice_len=2, traj_key="trajectory"), batch_size=4)
    bare.extend(first(0).exclude(("next", "done"), ("next", "terminated"), ("next", "truncated")))
    assert bare.sample()["trajectory"].shape == (4,)


def test_episodes_that_were_forgotten_are_not_kept(tmp_path) -> None:
    table = EventTable("high", condition=reward_at_least(900.0), history_length=3, capacity=30, min_size=1)
    replay = recipes.event_tables(50, 4, tables=[table], max_trajectories=2, forget_stale=True, seed=0)
    for number in range(20):
        replay.extend(numbered_steps(10 * number, 2, trajectory=number))
    state = replay.state_dict()
    assert len(state["writer"]["running"]["trajectory"]) == 2
    replay.load_state_dict(state)
    replay.extend(numbered_steps(500, 1, trajectory=19))
    replay.save(tmp_path)
    running = load_replay(tmp_path).state_dict()["writer"]["running"]
    assert running["trajectory"].tolist() == [18, 19]


def test_a_state_that_is_loaded_after_a_file_goes_on(tmp_path) -> None:
    replay = recipes.uniform(50, 4, n_steps=3, seed=0)
    replay.extend(first(0))
    replay.save(tmp_path)
    state = replay.state_dict()
    replay.load(tmp_path)
    replay.load_state_dict(state)
    replay.extend(first(10))
    assert replay.successors(torch.tensor([9])).tolist() == [10]
