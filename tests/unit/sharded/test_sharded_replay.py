# SPDX-License-Identifier: Apache-2.0
"""A sharded replay in one process: what it stores, draws, refuses and saves, for every recipe."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_replay import load_replay, recipes
from lightning_replay.checkpoint.replay import save_id
from lightning_replay.saving import DamagedFileError
from lightning_replay.sharded import ShardedReplay
from tests.unit.sharded.local_replay import coordinator_of, shards_of, started_here, steps

pytestmark = pytest.mark.slow  # Ray starts once


@pytest.fixture(autouse=True)
def _here(shared_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started_here(monkeypatch)


def built(recipe: str = "prioritized", num_shards: int = 2, **options: Any) -> ShardedReplay:
    given: dict[str, Any] = {"capacity": 100, "batch_size": 8, "seed": 3, "wait_timeout_s": 0.05} | options
    return ShardedReplay(recipe, num_shards, **given)


def filled(**options: Any) -> ShardedReplay:
    replay = built(**options)
    for first, count in ((0, 4), (4, 30), (34, 6)):
        replay.extend(steps(first, count))
    return replay


def numbers(replay: ShardedReplay) -> list[list[int]]:
    """The actions stored in each shard, oldest first."""
    return [one.storage.get(one.oldest_first())["action"].tolist() if len(one) else [] for one in shards_of(replay)]


def test_episodes_are_dealt_out_whole_and_the_index_has_the_shard_and_the_slot() -> None:
    replay = built()
    assert replay.extend(steps(0, 2)).tolist() == [0, 1]
    assert replay.extend(steps(2, 3, ends=False)).tolist() == [2**40, 2**40 + 1, 2**40 + 2]
    assert replay.extend(steps(5, 1)).tolist() == [2**40 + 3]  # of the running episode
    assert replay.add(steps(6, 1)[0]).tolist() == [2]
    assert numbers(replay) == [[0, 1, 6], [2, 3, 4, 5]]
    assert len(replay) == replay.write_count == 7
    batch = replay.sample()
    stored = {
        slot + (shard << 40): number for shard, one in enumerate(numbers(replay)) for slot, number in enumerate(one)
    }
    assert batch["action"].tolist() == [stored[index] for index in batch["index"].tolist()]
    assert batch["priority_weight"].tolist() == [1.0] * 8 and batch["trajectory"].dtype == torch.int64


def test_td_errors_reach_their_rows_from_any_copy() -> None:
    replay = filled(priority_exponent=1.0, priority_offset=0.0)
    batch = replay.sample()
    assert replay.awaits_priorities
    copy.deepcopy(replay).update_priority(batch, 1.0 + batch["action"].float())
    replay.update_tensordict_priority(batch[:1].set("td_error", batch["action"][:1].float() + 1))
    assert not replay.awaits_priorities
    len(replay)
    for one in shards_of(replay):
        slots = one.oldest_first()
        action = one.storage.get(slots)["action"]
        expected = torch.where(torch.isin(action, batch["action"]), 1.0 + action, 1.0)
        torch.testing.assert_close(one.sampler.priority_of(slots), expected)


def test_a_further_process_numbers_trajectories_apart_and_returns_do_not_mix() -> None:
    replay = built("uniform", n_steps=2, discount=0.5)
    other = copy.deepcopy(replay)
    for first in (0, 2):  # both give rows of trajectory 7 in turn
        replay.extend(steps(first, 2, 7, ends=False))
        other.extend(steps(first + 10, 2, 7, ends=False))
    batch = torch.cat([replay.sample() for _ in range(20)])
    assert set(batch["trajectory"].tolist()) == {7, 2**40 + 7}
    action, used = batch["action"], batch["steps_to_next_obs"][:, 0]
    expected = torch.where(action % 10 == 3, action.float(), action + 0.5 * (action + 1))
    assert (used == torch.where(action % 10 == 3, 1, 2)).all()
    torch.testing.assert_close(batch["next", "reward"][:, 0], expected)


def truncated(replay: ShardedReplay) -> list[int]:
    rows = torch.cat([one.storage.get(one.oldest_first()) for one in shards_of(replay)])
    return sorted(rows["action"][rows["next", "truncated"][:, 0]].tolist())


def test_new_rows_get_the_largest_priority_of_all_shards() -> None:
    replay = filled(priority_exponent=1.0, priority_offset=0.0)
    batch = replay.sample()
    replay.update_priority(batch, torch.where(batch["index"] < 2**40, 50.0, 1.0))
    assert (batch["index"] < 2**40).any()
    len(replay)
    replay.extend(steps(100, 30))  # into the first shard, so that the second has fewer now
    slots = replay.extend(steps(200, 2))
    assert (slots >= 2**40).all()
    assert shards_of(replay)[1].sampler.priority_of(slots - 2**40).tolist() == [50.0, 50.0]


def test_draws_ahead_are_whole_batches_and_no_part_of_a_save(tmp_path: Path) -> None:
    replay = filled(num_prefetch=2)
    assert [len(replay.sample()) for _ in range(3)] == [8, 8, 8]
    assert replay.stats()["draws_in_flight"] == 2
    replay.save(tmp_path)
    replay.load(tmp_path)
    assert replay.stats()["draws_in_flight"] == 0 and len(replay.sample()) == 8


def test_ended_episodes_are_those_of_the_process() -> None:
    replay = built("uniform")
    other = copy.deepcopy(replay)
    replay.extend(steps(0, 2, 7, ends=False))
    replay.extend(steps(2, 2, 8, ends=False))
    other.extend(steps(4, 2, 7, ends=False))
    replay.end_episodes(range(8))
    assert truncated(replay) == [1]
    replay.end_episodes()
    assert truncated(replay) == [1, 3]  # and not the other's


def test_ranks_get_disjoint_parts_of_one_draw() -> None:
    replay = filled(batch_size=10)
    replay.update_priority(batch := replay.sample(), torch.arange(10.0) + batch["action"])
    twin = copy.deepcopy(coordinator_of(replay)._draws.divider("replay").state_dict())
    whole = replay.sample()
    coordinator_of(replay)._draws.divider("replay").load_state_dict(twin)
    ranks = [replay.for_rank(rank, 2) for rank in range(2)]
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 have not asked for the next batch"):
        ranks[0].sample()
    shares = [ranks[1].sample(), ranks[0].sample()][::-1]
    assert [len(share) for share in shares] == [5, 5]
    for key in ("index", "priority_weight", "action", "generation"):
        assert torch.cat([share[key] for share in shares]).tolist() == whole[key].tolist()
    coordinator = coordinator_of(replay)
    assert coordinator.stats()["num_draws"] == 3


def test_a_rank_that_restarts_begins_all_anew() -> None:
    replay = filled()
    first = [replay.for_rank(rank, 2) for rank in range(2)]
    with pytest.raises(TimeoutError):
        first[0].sample()
    again = [replay.for_rank(rank, 2) for rank in range(2)]
    with pytest.raises(TimeoutError):  # the request of the former rank 0 does not count
        again[1].sample()
    replay.for_rank(0, 1)
    with pytest.raises(ValueError, match="shares draws with 2 ranks, and 1 entered since"):
        again[0].sample()


def test_draws_and_inserts_wait_for_each_other() -> None:
    #                        balance after   0      8 draws allowed behind and ahead
    replay = built(samples_per_insert=2.0, error_buffer=8.0)
    with pytest.raises(TimeoutError, match="no more rows may be drawn: 0 were inserted and 0 drawn"):
        replay.sample()
    replay.extend(steps(0, 5))  # the first row only fills: 8 draws are due
    with pytest.raises(
        TimeoutError, match=r"no more rows may be inserted: 5 were inserted and 0 drawn, with samples_per"
    ):
        replay.extend(steps(5, 5))
    replay.sample()  # none is due
    replay.sample()  # 8 ahead
    with pytest.raises(TimeoutError, match="drawn: 5 were inserted and 16 drawn"):
        replay.sample()
    replay.extend(steps(5, 4))
    assert replay.sample().shape == (8,) and replay.stats()["rate_limiter"]["balance"] == -8.0
    with pytest.raises(ValueError, match="batch_size is 9; a rank, and a replay with samples_per_insert"):
        replay.sample(9)


def test_a_save_has_the_same_rows_and_the_same_next_draws(tmp_path: Path) -> None:
    replay = filled(samples_per_insert=1.0, error_buffer=1000.0)
    replay.update_priority(batch := replay.sample(), batch["action"].float())
    replay.save(tmp_path / "first")
    drawn = [replay.sample()["index"].tolist() for _ in range(3)]
    stored, stats = numbers(replay), replay.stats()
    other = built(samples_per_insert=1.0, error_buffer=1000.0, seed=9)
    other.extend(steps(500, 3))
    other.load(tmp_path / "first")
    assert numbers(other) == stored and other.write_count == 40
    assert [other.sample()["index"].tolist() for _ in range(3)] == drawn
    assert other.stats()["rate_limiter"] == stats["rate_limiter"]
    other.save(tmp_path / "second", previous=tmp_path / "first")
    assert save_id(tmp_path / "first") != save_id(tmp_path / "second")
    with pytest.raises(FileNotFoundError, match="A sharded replay is there"):
        load_replay(tmp_path / "first")


def test_a_save_that_one_shard_cannot_read_changes_nothing(tmp_path: Path) -> None:
    replay = filled()
    replay.save(tmp_path)
    replay.extend(steps(100, 5))
    stored = numbers(replay)
    (damaged,) = tmp_path.glob("shards-*/shard-1/replay.json")
    damaged.write_text("{}")
    with pytest.raises(DamagedFileError):
        replay.load(tmp_path)
    assert numbers(replay) == stored
    assert len(replay.sample()) == 8


def test_a_curriculum_draws_one_task_for_all_ranks_and_takes_progress() -> None:
    replay = ShardedReplay("parallel_curriculum", 2, tasks=["far", "near"], capacity_per_task=50, batch_size=4, seed=0)
    assert replay.tasks == ["far", "near"] and replay.capacity == 100
    for number in range(8):
        replay.extend(steps(10 * number, 5, number, task=torch.full((5,), number % 2)))
    ranks = [replay.for_rank(rank, 2) for rank in range(2)]
    tasks = []
    for _ in range(20):
        shares = [None, None]
        coordinator_of(replay)._shares.missing(0, 2)  # rank 0 has asked
        shares[1] = ranks[1].sample()
        shares[0] = ranks[0].sample()
        (task,) = set(torch.cat([one["task"] for one in shares]).tolist())
        tasks.append(task)
    assert set(tasks) == {0, 1}
    replay.progress("near", 0.5)
    assert len(replay.actor_tasks(3)) == 3
    with pytest.raises(ValueError, match="task is 'middle'"):
        replay.progress("middle", 0.5)


def test_signals_of_retention_arrive_with_the_td_errors() -> None:
    replay = ShardedReplay("surprise_retention", 2, capacity=100, batch_size=8, seed=0)
    for first in (0, 20):
        replay.extend(steps(first, 20))
    batch = replay.sample()
    replay.update_priority(batch, torch.zeros(8), surprise=1.0 + batch["action"])
    len(replay)
    len(replay)
    alone = recipes.surprise_retention(100, 8)
    alone.extend(steps(0, 40))
    alone.update_priority(batch["action"], torch.zeros(8), surprise=1.0 + batch["action"])
    for one in shards_of(replay):
        slots = one.oldest_first()
        action = one.storage.get(slots)["action"]
        is_drawn = torch.isin(action, batch["action"])
        found = one.writer.retention_priority(slots)[is_drawn]
        torch.testing.assert_close(found, alone.writer.retention_priority(action[is_drawn]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": "prioritised"}, ValueError, "there is no recipe 'prioritised'.*Did you mean 'prioritized'"),
        ({"num_shards": 101}, ValueError, "num_shards is 101 and capacity is 100; every shard holds at least one row"),
        ({"num_shards": 0}, ValueError, "num_shards is 0"),
        ({"alpha": 0.5}, TypeError, "priority_exponent here"),
        ({"prefetch": 2}, ValueError, "prefetch is of a replay in one process"),
        ({"samples_per_insert": 4.0, "error_buffer": 7.0}, ValueError, "error_buffer is 7.*Give at least 8"),
        ({"wait_timeout_s": 0.0}, ValueError, "wait_timeout_s"),
        ({"batch_size": 101}, ValueError, "capacity 100 is below batch_size 101"),
        ({"recipe": 3}, TypeError, "recipe"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        built(**options)


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (0, 3, "batch_size is 8, and 3 processes cannot draw equal shares of it; give a multiple of 3"),
        (2, 2, "rank is 2 of 2 processes; ranks are 0 to 1"),
    ],
)
def test_bad_shares(rank: int, world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built().for_rank(rank, world_size)


def test_bad_rows_change_nothing() -> None:
    replay = built()
    with pytest.raises(RuntimeError, match="the sharded replay is empty; call extend before sample"):
        replay.sample()
    lacking = steps(0, 3).exclude(("next", "reward"), ("next", "terminated"), ("next", "truncated"))
    good = steps(0, 3)
    for rows, error, message in (
        (good[:0], ValueError, r"batch size \[N\] with N >= 1"),
        (good.reshape(3, 1), ValueError, r"got \[3, 1\]"),
        ({"observation": 1}, TypeError, "extend takes a TensorDict"),
        (steps(0, 3).set(("next", "reward"), torch.full((3, 1), torch.nan)), ValueError, "reward"),
    ):
        with pytest.raises(error, match=message):
            replay.extend(rows)
    assert len(replay) == 0
    replay.extend(good)
    with pytest.raises(ValueError, match="rows have other columns than those stored"):
        replay.extend(lacking)
    assert len(replay) == 3
    curriculum = ShardedReplay("parallel_curriculum", 2, tasks=["a", "b"], capacity_per_task=9, batch_size=2)
    with pytest.raises(ValueError, match="task"):  # which a shard refuses, not this process
        curriculum.extend(good)
    curriculum.extend(steps(0, 3, task=torch.zeros(3, dtype=torch.int64)))
    assert len(curriculum) == 3


def test_bad_feedback_changes_nothing() -> None:
    replay, other = filled(), filled()
    batch = replay.sample()
    for arguments, error, message in (
        ((batch, torch.ones(7)), ValueError, "one finite value for each of the 8 rows of the batch"),
        ((batch, torch.full((8,), torch.nan)), ValueError, "8 of them NaN or infinite"),
        ((batch,), TypeError, "no td_error"),
        ((batch["index"], torch.ones(8)), TypeError, "give the batch, or generation="),
        ((batch.exclude("index"), torch.ones(8)), TypeError, "a batch without 'index'"),
        ((other.sample(), torch.ones(8)), ValueError, "8 of 8 rows were not drawn from this sharded replay"),
    ):
        with pytest.raises(error, match=message):
            replay.update_priority(*arguments)
    with pytest.raises(TypeError, match="the signal 'surprize'"):
        replay.update_priority(batch, torch.ones(8), surprize=torch.ones(8))
    with pytest.raises(ValueError, match="surprise has 7 rows and the batch 8"):
        replay.update_priority(batch, torch.ones(8), surprise=torch.ones(7))
    with pytest.raises(ValueError, match="the batch has no 'td_error'"):
        replay.update_tensordict_priority(batch)
    with pytest.raises(TypeError, match="call sample"):
        replay[0]
    assert replay.awaits_priorities and np.isclose(sum(replay.stats()["mass"]), 40, rtol=1e-4)
