# SPDX-License-Identifier: Apache-2.0
"""Levels that several processes share: one draw divided, outcomes gathered, and states that one process also has."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from lightning_replay.levels import LevelBatchSampler, LevelBuffer, LevelSet, UniformLevels, scores
from lightning_replay.levels.ranks import Ranks
from tests.prompt_ranks import BATCH, BATCHES, PROMPTS, levels_of, one_process, outcomes_of, run


def joined(parts: Iterable[Sequence[int]]) -> list[int]:
    return [*itertools.chain.from_iterable(parts)]


@pytest.mark.parametrize(("world_size", "group_size"), [(2, 1), (3, 1), (2, 8), (5, 2)])
def test_one_draw_is_divided_into_whole_groups(world_size: int, group_size: int) -> None:
    ranks = [
        LevelBatchSampler(levels_of(seed=0), 12, rank=rank, world_size=world_size, group_size=group_size)
        for rank in range(world_size)
    ]
    parts = [next(iter(sampler)) for sampler in ranks]
    together = joined(parts)
    assert len(together) == 12 * world_size and len({*together}) == 12 * world_size // group_size
    for part in parts:
        groups = [[*group] for _, group in itertools.groupby(part)]
        assert {len(group) for group in groups} == {group_size}
    alone = next(iter(LevelBatchSampler(levels_of(seed=0), 12 * world_size, group_size=group_size)))
    assert together == alone
    whole = [
        next(
            iter(
                LevelBatchSampler(levels_of(0), len(alone), rank=r, world_size=2, divides=False, group_size=group_size)
            )
        )
        for r in range(2)
    ]
    assert whole == [alone, alone]


def test_parts_of_any_length() -> None:
    for length, world_size in itertools.product(range(9), range(1, 5)):
        parts = [Ranks(rank, world_size).part([*range(length)]) for rank in range(world_size)]
        assert joined(parts) == [*range(length)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rank": 0}, "rank is 0 and world_size is None; give both"),
        ({"rank": 2, "world_size": 2}, "rank is 2 and world_size is 2; ranks are counted from 0 to 1"),
        ({"rank": 0, "world_size": 0}, "world_size is 0"),
        ({"group_size": 5}, "batch_size is 12 in 1 processes, and group_size is 5"),
        ({"rank": 0, "world_size": 100}, "has 1200 different levels, and there are 200"),
        ({"expire_after": 0}, "expire_after is 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        next(iter(LevelBatchSampler(levels_of(0), 12, **options)))


def test_processes_that_are_not_connected_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    levels = levels_of(0)
    for draw in (lambda: levels.next_levels(4), lambda: next(iter(LevelBatchSampler(levels, 4)))):
        with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 2 .* call torch.distributed.init_process_group\(\)"):
            draw()
    assert levels.episodes == 0
    levels.share(rank=0, world_size=1)
    assert len(levels.next_levels(4)) == 4


def worker(rank: int, world_size: int, folder: Path, seed_of_rank: bool, num_batches: int) -> Any:
    levels = levels_of(seed=rank if seed_of_rank else 0)
    seen = []
    for level_ids in LevelBatchSampler(levels, BATCH // world_size, num_batches):
        # One process has its outcomes in rows, and another has them one by one, as TRL does.
        if rank % 2:
            repeated = [one for one in level_ids for _ in range(2)]
            levels.record(repeated, outcomes=outcomes_of(level_ids).flatten())
        else:
            got = levels.record(level_ids, outcomes=outcomes_of(level_ids))
            assert torch.equal(got, scores_of(levels, level_ids))
        seen.append(level_ids)
    return seen, levels.probabilities().to_dict(), levels.stats()


def scores_of(levels: LevelBuffer, level_ids: list[int]) -> torch.Tensor:
    known = levels.probabilities()
    place = {level_id: number for number, level_id in enumerate(known["level_id"].tolist())}
    return known["score"][[place[level_id] for level_id in level_ids]]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "seed_of_rank"), [(2, False), (3, True)])
def test_processes_draw_together_what_one_process_draws(world_size: int, seed_of_rank: bool, tmp_path: Path) -> None:
    found = run(tmp_path, world_size, worker, seed_of_rank, BATCHES)
    batches = [joined(parts) for parts in zip(*(seen for seen, *_ in found), strict=True)]
    assert batches == one_process()
    (_, known, stats), *others = found
    for _, other, other_stats in others:
        assert stats == other_stats and all(torch.equal(known[name], other[name]) for name in known)
    assert stats["in_flight"] == 0


def refusals(rank: int, world_size: int, folder: Path) -> list[str]:
    levels = levels_of(0)
    told = []

    def refused(call: Any) -> None:
        before = repr(levels.state_dict())
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call()
        assert repr(levels.state_dict()) == before
        told.append(str(caught.value))

    refused(lambda: levels.next_levels(3))
    levels.share()
    drawn = levels.next_levels(3).tolist()
    refused(lambda: levels.record([999 if rank else 1], outcomes=[1.0]))
    refused(lambda: levels.record(drawn, outcomes=[1.0, 0.0, 2.0 - rank]))
    if rank:  # the process that has nothing to tell calls record, too
        levels.record([], outcomes=[])
    else:
        levels.record(drawn, outcomes=[1.0, 0.0, 1.0])
    assert len(levels) == 3
    levels.abandon_levels([] if rank == 0 else drawn)
    assert levels.stats()["in_flight"] == 0
    if rank == 0:
        levels.draw_batch(2)
    refused(lambda: levels.record([1], outcomes=[1.0]))
    levels.synchronize()
    levels.record([rank], outcomes=[1.0])
    named = [{"id": number + rank} for number in range(5)]
    for other in (LevelSet(range(5 + rank)), LevelSet(named, name="id"), LevelSet(named)):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            LevelBuffer(other, score=scores.Learnability(), seed=0).share()
        told.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        next(iter(LevelBatchSampler(levels, batch_size=1 + rank)))
    told.append(str(caught.value))
    return told


@pytest.mark.slow
def test_what_one_process_gets_wrong_every_process_refuses(tmp_path: Path) -> None:
    first, second = run(tmp_path, 2, refusals)
    for told in (first, second):
        assert "torch.distributed connects 2 processes" in told[0] and "levels.share()" in told[0]
        assert "drawn or learned different things" in told[3]
    assert "rank 1 refused its values" in first[1] and "level_id has [999]" in first[1]
    assert second[1].startswith("level_id has [999]")
    assert first[2].startswith("outcomes of level") and "rank 0 refused its values" in second[2]
    assert first[4] == second[4] and first[4].startswith("the processes have [5, 6] levels, by rank")
    assert first[5].startswith("the processes have [5, 5] levels, by rank, and these are not the same ones")
    assert "not the same ones" in first[5] and "rank 1 refused its values" in first[6]
    assert "are not the saved ones" in second[6]
    assert first[7].startswith("the processes draw batches of [2, 4] levels, by rank")


def dies(rank: int, world_size: int, folder: Path) -> Any:
    levels = levels_of(seed=rank)
    sampler = LevelBatchSampler(levels, BATCH // world_size, BATCHES)
    seen = []
    for number, level_ids in enumerate(sampler):
        if number == 4 and rank == 1:
            torch.save(seen, folder / f"{rank}.pt")
            os._exit(0)
        try:
            levels.record(level_ids, outcomes=outcomes_of(level_ids))
        except RuntimeError:
            break
        seen.append(level_ids)
        if rank == 0:
            torch.save((levels.state_dict(), sampler.state_dict()), folder / "checkpoint.pt")
    torch.save(seen, folder / f"{rank}.pt")
    os._exit(0)  # the group of a lost process can end no other way


def resumes(rank: int, world_size: int, folder: Path, checkpoint: Path) -> Any:
    levels = levels_of(seed=7 + rank)
    sampler = LevelBatchSampler(levels, BATCH // world_size, BATCHES)
    if rank == 0:  # the others take its state
        of_levels, of_sampler = torch.load(checkpoint, weights_only=False)
        levels.load_state_dict(of_levels)
        sampler.load_state_dict(of_sampler)
    seen = []
    for level_ids in sampler:
        levels.record(level_ids, outcomes=outcomes_of(level_ids))
        seen.append(level_ids)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_after_a_process_was_killed_another_number_goes_on_where_one_process_would_be(
    world_size: int, tmp_path: Path
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    before = run(tmp_path / "first", 2, dies)
    after = run(tmp_path / "second", world_size, resumes, tmp_path / "first" / "checkpoint.pt")
    seen = [*zip(*before, strict=True), *zip(*after, strict=True)]
    assert [joined(parts) for parts in seen] == one_process()
    assert len(before[0]) == 4


def test_draws_that_nobody_recorded_come_back() -> None:
    # A trainer that skips the batches that it has seen draws them, and records none of them.
    levels = levels_of(0)
    sampler = LevelBatchSampler(levels, 20, expire_after=100)
    batches = iter(sampler)
    skipped = {one for level_ids in itertools.islice(batches, 8) for one in level_ids}
    assert levels.stats()["expired"] == 40 and levels.stats()["in_flight"] == 120
    asked = set()
    for level_ids in itertools.islice(batches, 100):
        asked |= {*level_ids}
        levels.record(level_ids, outcomes=outcomes_of(level_ids))
    assert skipped <= asked
    assert levels.stats()["expired"] == 160 - len(levels.running.draws()) and levels.stats()["in_flight"] == 0


def test_by_default_a_draw_lasts_for_32_batches_and_4096_draws() -> None:
    levels = UniformLevels(10_000, seed=0)
    levels.next_levels(100)
    for _ in range(40):
        levels.next_levels(100)
    assert levels.stats()["expired"] == 0
    levels.next_levels(100)
    assert levels.stats()["expired"] == 100
    large = UniformLevels(10_000, seed=0)
    for _ in range(33):
        large.next_levels(1_000)
    assert large.stats()["expired"] == 0
    large.next_levels(1_000)
    assert large.stats()["expired"] == 1_000


def test_expired_draws_are_counted_in_a_save_and_a_late_outcome_counts() -> None:
    levels, again = levels_of(0), levels_of(1)
    levels.expire_after = 4
    first = levels.next_levels(4).tolist()
    levels.next_levels(1)
    levels.next_levels(1)
    again.load_state_dict(levels.state_dict())
    assert again.stats() == levels.stats() and again.stats()["expired"] == 4
    assert torch.equal(again.next_levels(3), levels.next_levels(3))
    assert levels.record(first, outcomes=outcomes_of(first)).shape == (4,)
    assert len(levels) == 4 and not distributed.is_initialized() and len(PROMPTS) == 200
