# SPDX-License-Identifier: Apache-2.0
"""A sharded replay in one process: what it stores, draws and saves."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from lightning_replay import load_replay, recipes
from lightning_replay.saves import save_id
from lightning_replay.saving import DamagedFileError
from lightning_replay.sharded import ShardedReplay
from tests.unit.sharded.local_replay import built, coordinator_of, filled, numbers, shards_of, steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_replays")]  # Ray starts once


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


def returns(replay: ShardedReplay) -> dict[int, int]:
    """How many steps each row's return has, by its action."""
    batch = torch.cat([replay.sample(100) for _ in range(3)])
    return dict(zip(batch["action"].tolist(), batch["steps_to_next_obs"].flatten().tolist(), strict=True))


def test_rows_that_were_refused_or_came_too_early_do_not_cut_their_episode() -> None:
    replay = built("uniform", samples_per_insert=4.0, error_buffer=8.0, n_steps=3)
    replay.extend(steps(0, 1, ends=False))  # which fills
    replay.extend(steps(1, 2, ends=False))
    for ends in (True, False):
        with pytest.raises(TimeoutError, match="no more rows may be inserted"):
            replay.extend(steps(3, 1, ends=ends))
    replay.sample()
    with pytest.raises(ValueError, match="rows have other columns than those stored"):
        replay.extend(steps(3, 1, task=torch.zeros(1)))
    replay.extend(steps(3, 1))
    assert [one for one in numbers(replay) if one] == [[0, 1, 2, 3]]
    batch = torch.cat([replay.sample() for _ in range(1)] + [one.sample(64) for one in shards_of(replay) if len(one)])
    found = dict(zip(batch["action"].tolist(), batch["steps_to_next_obs"].flatten().tolist(), strict=True))
    assert found == {0: 3, 1: 3, 2: 2, 3: 1}


def test_rows_that_a_shard_refuses_do_not_cut_their_episode() -> None:
    replay = ShardedReplay("parallel_curriculum", 2, tasks=["a", "b"], capacity_per_task=50, batch_size=6, n_steps=3)
    task = torch.zeros(3, dtype=torch.int64)
    replay.extend(steps(0, 3, ends=False, task=task))
    with pytest.raises(ValueError, match="task"):
        replay.extend(steps(3, 3, task=task + 9))
    replay.extend(steps(3, 3, task=task))
    assert returns(replay) == {0: 3, 1: 3, 2: 3, 3: 3, 4: 2, 5: 1}


def test_td_errors_reach_their_rows_after_a_shard_was_started_thousands_of_times() -> None:
    replay = filled(priority_exponent=1.0)
    coordinator_of(replay).shards.epochs += 5_000
    replay.update_priority(replay.sample(), torch.full((8,), 9.0))
    assert replay.stats()["td_errors_dropped"] == 0 and sum(replay.stats()["mass"]) > 41


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


def test_signals_of_retention_arrive_with_the_td_errors() -> None:
    replay = ShardedReplay("surprise_retention", 2, capacity=100, batch_size=8, seed=0)
    for first in (0, 20):
        replay.extend(steps(first, 20))
    batch = replay.sample()
    with pytest.raises(ValueError, match="surprise"):  # here, and not in a shard
        replay.update_priority(batch, torch.zeros(8), surprise=torch.full((8,), torch.nan))
    replay.update_priority(batch, torch.zeros(8), surprise=1.0 + batch["action"])
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
