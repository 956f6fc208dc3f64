# SPDX-License-Identifier: Apache-2.0
"""A sharded replay in one process: what it stores, draws and saves."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_replay import load_replay, recipes
from lightning_replay.saves import save_id
from lightning_replay.saving import DamagedFileError
from lightning_replay.sharded import ShardedReplay
from lightning_replay.sharded.coordinator import NotYet
from tests.frame_steps import IMAGE_KEYS, frame_rows, stacks_in, stacks_of
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


@pytest.mark.parametrize("clock", ["env_steps", "updates"])
def test_ages_count_from_the_clocks_of_all_shards(clock: str) -> None:
    replay = built(age={"half_life": 10, "clock": clock})
    for first in range(0, 12, 4):  # before the first draw
        replay.extend(steps(first, 4))
    replay.sample()
    replay.extend(steps(12, 4))
    replay.advance(env_steps=30, updates=20)
    replay.extend(steps(16, 4))
    found = {}
    for shard in shards_of(replay):
        slots = shard.oldest_first()
        births = shard.state_dict()["sampler"]["ages"]["births"][slots].tolist()
        found |= dict(zip(shard.storage.get(slots)["action"].tolist(), births, strict=True))
    expected = {"env_steps": [0, 4, 8, 12, 30], "updates": [0, 0, 0, 1, 20]}[clock]
    assert [found[number] for number in range(20)] == [birth for birth in expected for _ in range(4)]


def test_the_frames_of_two_cameras_are_stored_once_in_their_shard(tmp_path: Path) -> None:
    options = {"frame_stack": 2, "image_key": IMAGE_KEYS[1], "frame_capacity": 60, "n_steps": 2}
    replay = built(**options)
    for first in (0, 20, 40):
        stacks = stacks_of(range(first, first + 7), 2)
        replay.extend(frame_rows(stacks, first=first, trajectory=first, done=True, key=IMAGE_KEYS[1]))
    assert numbers(replay) == [[*range(6), *range(40, 46)], [*range(20, 26)]]
    assert [one.storage.frames_held for one in shards_of(replay)] == [14, 7]
    assert [one.storage.frame_capacity for one in shards_of(replay)] == [30, 30]
    replay.save(tmp_path / "saved")
    again = built(**options)
    again.load(tmp_path / "saved")
    for _ in range(3):
        batch, same = (one.sample().exclude("generation") for one in (replay, again))  # which counts the loads
        assert len(stacks_in(batch, IMAGE_KEYS[1])) == 8 and (batch == same).all()


def test_td_errors_reach_their_rows_from_any_copy() -> None:
    replay = filled(priority_exponent=1.0, priority_offset=0.0)
    batch = replay.sample()
    assert replay.awaits_priorities
    copy.deepcopy(replay).update_priority(batch, 1.0 + batch["action"].float())
    replay.update_tensordict_priority(batch[:1].set("td_error", batch["action"][:1].float() + 1))
    replay.update_priority(batch[1:2].set("td_error", batch["action"][1:2].float() + 1))
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


@pytest.mark.parametrize("observations", ["twice", "once"])
def test_a_save_has_the_same_rows_and_the_same_next_draws(tmp_path: Path, observations: str) -> None:
    replay = filled(samples_per_insert=1.0, error_buffer=1000.0, observations=observations)
    replay.update_priority(batch := replay.sample(), batch["action"].float())
    replay.save(tmp_path / "first")
    drawn = [replay.sample()["index"].tolist() for _ in range(3)]
    stored, stats = numbers(replay), replay.stats()
    other = built(samples_per_insert=1.0, error_buffer=1000.0, seed=9, observations=observations)
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


def test_ranks_get_disjoint_parts_of_one_draw() -> None:
    replay = filled(batch_size=10)
    replay.update_priority(batch := replay.sample(), torch.arange(10.0) + batch["action"])
    twin = copy.deepcopy(coordinator_of(replay).draws.divider("replay").state_dict())
    whole = replay.sample()
    coordinator_of(replay).draws.divider("replay").load_state_dict(twin)
    ranks = [replay.for_rank(rank, 2) for rank in range(2)]
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 have not requested the next batch.*Every rank must"):
        ranks[0].sample()
    shares = [ranks[1].sample(), ranks[0].sample()][::-1]
    assert [len(share) for share in shares] == [5, 5]
    for key in ("index", "priority_weight", "action", "generation"):
        assert torch.cat([share[key] for share in shares]).tolist() == whole[key].tolist()
    assert replay.stats()["num_draws"] == 3


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_neither_shards_nor_ranks_have_a_row_twice(recipe: str) -> None:
    replay = filled(recipe=recipe, batch_size=20, replace=False)
    for _ in range(10):
        batch = replay.sample()
        assert len(batch["index"].unique()) == 20
        replay.update_priority(batch, batch["action"].float())
    ranks = [replay.for_rank(rank, 2) for rank in range(2)]
    with pytest.raises(TimeoutError, match="Every rank must"):
        ranks[0].sample()
    parts = [ranks[1].sample()["index"], ranks[0].sample()["index"]]
    assert len(torch.cat(parts).unique()) == 20
    with pytest.raises(RuntimeError, match="replace is False, and a batch needs [0-9]+ different rows"):
        for _ in range(20):
            replay.sample(40)


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


def test_a_curriculum_draws_one_task_for_all_ranks_and_takes_progress() -> None:
    replay = ShardedReplay("parallel_curriculum", 2, tasks=["far", "near"], capacity_per_task=50, batch_size=4, seed=0)
    assert replay.tasks == ["far", "near"] and replay.capacity == 100
    for number in range(8):
        replay.extend(steps(10 * number, 5, number, task=torch.full((5,), number % 2)))
    ranks = [replay.for_rank(rank, 2) for rank in range(2)]
    tasks = []
    for _ in range(20):
        shares = [None, None]
        assert isinstance(coordinator_of(replay).call("0", "draw_share", 1.0, (0, 2, {})), NotYet)
        shares[1] = ranks[1].sample()
        shares[0] = ranks[0].sample()
        (task,) = set(torch.cat([one["task"] for one in shares]).tolist())
        tasks.append(task)
    assert set(tasks) == {0, 1}
    replay.progress("near", 0.5)
    assert len(replay.actor_tasks(3)) == 3
    with pytest.raises(ValueError, match="task is 'middle'"):
        replay.progress("middle", 0.5)


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": "prioritised"}, ValueError, "there is no recipe 'prioritised'.*Did you mean 'prioritized'"),
        ({"num_shards": 101}, ValueError, "num_shards is 101 and capacity is 100; every shard holds at least one row"),
        ({"prefetch": 2}, ValueError, "prefetch is an option of a replay in one process"),
        ({"samples_per_insert": 4.0, "error_buffer": 7.0}, ValueError, "error_buffer is 7.*Give at least 8"),
        ({"wait_timeout_s": 0.0}, ValueError, "wait_timeout_s"),
        ({"batch_size": 101}, ValueError, "capacity 100 is below batch_size 101"),
        ({"recipe": 3}, TypeError, "recipe"),
        ({"nonsense": 3}, TypeError, "accepted are name, .*samples_per_insert, .*restart_shards, .*capacity, "),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        built(**options)


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
        *(
            (steps(0, 3).set(("next", name), torch.zeros(3, count)), ValueError, f"{name}.* one value for each row")
            for name in ("reward", "terminated", "truncated", "done")
            for count in (0, 2)
        ),
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
    with pytest.raises(TypeError, match="no td_error"):
        replay.update_tensordict_priority(batch)
    assert replay.awaits_priorities and np.isclose(sum(replay.stats()["mass"]), 40, rtol=1e-4)


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    replay = filled()
    with pytest.raises(TypeError, match="filesystem is 's3'; it must be a file system of pyarrow, or None"):
        replay.save(tmp_path, filesystem="s3")
    with pytest.raises(NotImplementedError, match="this replay has no curriculum"):
        replay.progress("near", 0.5)
    with pytest.raises(NotImplementedError, match="this replay has no curriculum"):
        replay.actor_tasks(1)


def test_a_save_of_another_capacity_is_refused_with_both(tmp_path: Path) -> None:
    filled().save(tmp_path)
    for num_shards in (2, 3):
        other = built(num_shards=num_shards, capacity=50)
        with pytest.raises(ValueError, match=r"a sharded replay of .*'capacity': 100\}\}, and this one is of .* 50\}"):
            other.load(tmp_path)
        assert len(other) == 0


def test_a_replay_of_the_same_name_has_the_same_options() -> None:
    coordinator = coordinator_of(built(priority_exponent=0.5, samples_per_insert=1.0, error_buffer=9.0))
    options = coordinator.options
    assert coordinator.key_for(copy.deepcopy(options)) == coordinator.key_for(options)
    for name, ours, value in (("priority_exponent", 0.5, 0.6), ("capacity", 100, 99), ("n_steps", None, 3)):
        other = dataclasses.replace(options, of_recipe=options.of_recipe | {name: value, "seed": 77})
        with pytest.raises(ValueError, match=rf"built with {{'{name}': {ours}}}; this one has {{'{name}': {value}}}"):
            coordinator.key_for(other)
    with pytest.raises(ValueError, match="'samples_per_insert': 1.0}; this one"):
        coordinator.key_for(dataclasses.replace(options, limits=options.limits | {"samples_per_insert": 2.0}))
