# SPDX-License-Identifier: Apache-2.0
"""Saves of a sharded replay loaded into another number of shards, from any file system, or from one replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs

from lightning_replay import recipes
from lightning_replay.events import EventTable
from lightning_replay.sharded import ShardedReplay
from tests.event_steps import IsTrue, event_steps
from tests.unit.sharded.local_replay import coordinator_of, shards_of, steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_replays")]  # Ray starts once

LENGTHS = (5, 3, 8, 1, 7, 2, 6, 4, 9, 5)


def built(num_shards: int, recipe: str = "prioritized", **options: Any) -> ShardedReplay:
    given: dict[str, Any] = {"capacity": 120, "batch_size": 8, "seed": 3, "wait_timeout_s": 0.05} | options
    return ShardedReplay(recipe, num_shards, **given)


def fill(replay: Any) -> None:
    """Gives ten episodes in two fragments each, three at a time side by side; the last one runs. Rows are 100 e + t."""
    for first in range(0, len(LENGTHS), 3):
        together = range(first, min(first + 3, len(LENGTHS)))
        for is_second in (False, True):
            for episode in together:
                start, stop = (LENGTHS[episode] // 2, LENGTHS[episode]) if is_second else (0, LENGTHS[episode] // 2)
                ends = is_second and episode < len(LENGTHS) - 1
                if start < stop:
                    replay.extend(steps(100 * episode + start, stop - start, episode, ends=ends))


def prioritize(replays: list[Any]) -> None:
    for replay in replays:
        slots = replay.oldest_first()
        replay.update_priority(slots, replay.storage.get(slots)["action"].float())


class Contents:
    """Rows by number, with priority, trajectory and the number of the next row that is linked."""

    def __init__(self, replays: list[Any]) -> None:
        self.columns: dict[int, list[Any]] = {}
        self.priority: dict[int, float] = {}
        self.following: dict[int, int | None] = {}
        self.order: list[list[int]] = []
        for replay in replays:
            if not len(replay):
                continue
            slots = replay.oldest_first()
            rows, successor = replay.storage.get(slots), replay.successors(slots)
            priority = replay.sampler.priority_of(slots)
            numbers = rows["action"].tolist()
            number_at = dict(zip(slots.tolist(), numbers, strict=True))
            assert not self.columns.keys() & set(numbers)
            for place, number in enumerate(numbers):
                leaves = rows[place].exclude("index", "generation").items(True, True)
                self.columns[number] = sorted((str(key), value.tolist()) for key, value in leaves)
                if priority is not None:
                    self.priority[number] = priority[place].item()
                if successor is not None:
                    self.following[number] = number_at.get(int(successor[place]))
            self.order.append(numbers)


def expected_contents() -> tuple[dict[int, int | None], dict[int, list[float]]]:
    following, rows = {}, {}
    for episode, length in enumerate(LENGTHS):
        for t in range(length):
            number = 100 * episode + t
            following[number] = number + 1 if t + 1 < length else None
            rows[number] = [float(number), float(number + 1), float(t + 1 == length and episode + 1 < len(LENGTHS))]
    return following, rows


@pytest.mark.parametrize("exponent", [1.0, 0.6])
def test_rows_priorities_links_and_order_are_those_saved_after_two_three_and_one_shards(
    tmp_path: Path, exponent: float
) -> None:
    options = {"n_steps": 3, "discount": 1.0, "priority_exponent": exponent, "priority_offset": 0.0}
    replay = built(2, **options)
    fill(replay)
    prioritize(shards_of(replay))
    following, rows = expected_contents()
    storage = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    for count in (3, 1, 2):
        replay.save("save", filesystem=storage)
        replay = built(count, **options, seed=count)
        replay.load("save", filesystem=storage)
        found = Contents(shards_of(replay))
        assert found.following == following
        assert found.priority == {number: pytest.approx(number, rel=0 if exponent == 1 else 4e-6) for number in rows}
        for number, (observation, after, terminated) in rows.items():
            columns = dict(found.columns[number])
            assert columns["observation"] == [observation] and columns["('next', 'observation')"] == [after]
            assert columns["('next', 'terminated')"] == [bool(terminated)] and columns["trajectory"] == number // 100
        for numbers in found.order:
            for episode in range(len(LENGTHS)):
                own = [number for number in numbers if number // 100 == episode]
                assert own in ([], list(range(100 * episode, 100 * episode + LENGTHS[episode])))
        sizes = [len(numbers) for numbers in found.order]
        assert len(sizes) == count and max(sizes) - min(sizes) <= max(LENGTHS)
        assert len(replay) == replay.write_count == sum(LENGTHS)
    batch = torch.cat([replay.sample(100) for _ in range(5)])
    ends = torch.tensor([100 * (number // 100) + LENGTHS[number // 100] - 1 for number in batch["action"].tolist()])
    used = torch.minimum(ends - batch["action"] + 1, torch.tensor(3))
    assert batch["steps_to_next_obs"][:, 0].tolist() == used.tolist()


def test_clocks_draws_and_the_limiter_continue(tmp_path: Path) -> None:
    options = {"samples_per_insert": 1.0, "error_buffer": 1000.0}
    replay = built(2, **options)
    fill(replay)
    replay.update_priority(replay.sample(), torch.full((8,), 5000.0))
    replay.sample()
    for one in shards_of(replay):  # new rows get the largest priority that was ever given
        one.update_priority(one.oldest_first(), torch.ones(len(one)))
    coordinator_of(replay).shards.lost.rows = 3
    replay.save(tmp_path.as_uri())
    before = replay.stats()
    other = built(3, **options)
    other.extend(steps(900, 3))
    drawn = other.sample()
    other.load(tmp_path)
    stats = other.stats()
    for name in ("num_draws", "num_rows", "num_rows_inserted", "rate_limiter", "rows_lost"):
        assert stats[name] == before[name]
    assert sum(stats["mass"]) == pytest.approx(sum(before["mass"]), rel=1e-5)
    other.update_priority(drawn, torch.full((8,), 1e6))  # of rows that are gone
    assert len(other) == sum(LENGTHS) and sum(other.stats()["mass"]) == pytest.approx(sum(before["mass"]), rel=1e-5)
    assert other.stats()["td_errors_dropped"] == 8
    (slot,) = other.extend(steps(5000, 1)).tolist()
    shard, own = divmod(slot, 2**40)
    stored = shards_of(other)[shard].sampler.priority_of(torch.tensor([own]))
    assert stored.item() == pytest.approx(5000.0, rel=1e-5)


def test_a_further_process_does_not_continue_the_episodes_of_a_save(tmp_path: Path) -> None:
    replay = built(2, n_steps=3)
    fill(replay)
    replay.save(tmp_path)
    other = built(3, n_steps=3)
    other.load(tmp_path)
    other.extend(steps(2000, 2, len(LENGTHS) - 1))  # the number of the one that ran
    found = Contents(shards_of(other))
    assert found.following[904] is None and found.following[2000] == 2001
    assert dict(found.columns[2000])["trajectory"] == 2**40 + len(LENGTHS) - 1


def test_episodes_of_different_shards_under_one_number_stay_apart(tmp_path: Path) -> None:
    replay = built(2, n_steps=3)
    for shard, one in enumerate(shards_of(replay)):
        one.extend(steps(100 * shard, 3, 7, ends=False))
        one.extend(steps(100 * shard + 50, 2, 8))
        one.extend(steps(100 * shard + 60, 2, 8))
    replay.save(tmp_path)
    other = built(1, n_steps=3)
    other.load(tmp_path)
    found = Contents(shards_of(other))
    assert found.following == Contents(shards_of(replay)).following
    names = {number: dict(columns)["trajectory"] for number, columns in found.columns.items()}
    assert [len({names[number] for number in part}) for part in ((0, 1, 2), (100, 101, 102), (50, 51))] == [1, 1, 1]
    assert len({names[number] for number in (0, 50, 60, 100, 150, 160)}) == 6
    assert sorted({names[number] for number in (0, 50, 100)} & {7, 8}) == [7, 8]


def test_rows_that_event_tables_keep_out_of_an_episode_are_not_linked_to_later_ones(tmp_path: Path) -> None:
    table = EventTable("hit", IsTrue("hit"), capacity=8, history_length=2, share=0.5)
    options = {"recipe": "event_tables", "capacity": 10, "batch_size": 4, "n_steps": 3, "tables": [table]}
    replay = built(2, **options)
    for first in (0, 100):
        replay.extend(event_steps(first, 20, {3: {"hit"}}, ["hit"]))
    replay.save(tmp_path)
    kept = [[2, 3, 15, 16, 17, 18, 19], [102, 103, 115, 116, 117, 118, 119]]
    before = Contents(shards_of(replay))
    assert sorted(before.order) == kept and before.following[3] is None
    other = built(1, **options)
    other.load(tmp_path)
    found = Contents(shards_of(other))
    assert found.following == before.following
    assert sorted(shards_of(other)[0].table("hit")["action"].tolist()) == [2, 3, 102, 103]


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_replay_without_shards_and_trajectories_is_dealt_out(tmp_path: Path, n_steps: int) -> None:
    options = {"n_steps": n_steps, "priority_exponent": 1.0, "priority_offset": 0.0}
    alone = recipes.prioritized(120, 8, **options)
    for episode, length in enumerate(LENGTHS):
        alone.extend(steps(100 * episode, length, ends=episode + 1 < len(LENGTHS)))
    prioritize([alone])
    alone.save(tmp_path)
    other = built(3, **options)
    other.load(tmp_path)
    found, before = Contents(shards_of(other)), Contents([alone])
    assert found.following == before.following and found.priority == before.priority
    assert len(found.order) == 3
    names = {number: dict(columns)["trajectory"] for number, columns in found.columns.items()}
    assert len(set(names.values())) == len({(number // 100, name) for number, name in names.items()}) == len(LENGTHS)
    stats = other.stats()
    assert stats["num_rows_inserted"] == 50 and stats["num_draws"] == 0 and stats["rate_limiter"]["balance"] == 0.0
    with pytest.raises(ValueError, match="rows have other columns than those stored"):
        other.extend(steps(6000, 2).exclude("observation"))
    other.extend(steps(6000, 2))
    assert dict(Contents(shards_of(other)).columns[6000])["trajectory"] >> 40 == 1  # as of a further process
    assert other.sample().shape == (8,)


def test_rows_that_have_not_changed_are_linked(tmp_path: Path) -> None:
    replay = built(2, capacity=40)
    for first in (0, 20):  # more than 1 MiB for each shard, less is not linked
        replay.extend(steps(first, 20, image=torch.full((20, 128, 128), float(first))))
    replay.save(tmp_path / "first")
    replay.save(tmp_path / "second", previous=tmp_path / "first")
    files = [file for file in (tmp_path / "second").rglob("*") if file.is_file()]
    assert sorted(file.parts[-3] for file in files if file.stat().st_nlink == 2) == ["shard-0", "shard-1"]


def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    for recipe, capacity in (("uniform", 120), ("prioritized", 200), ("surprise_retention", 120)):
        replay = built(2, recipe, capacity=capacity)
        fill(replay)
        replay.save(tmp_path / f"{recipe}-{capacity}")
    recipes.uniform(120, 8).save(tmp_path / "plain")
    replay = built(3)
    fill(replay)
    stored = [one.storage.get(one.oldest_first()) for one in shards_of(replay)]
    for name, error, message in (
        ("uniform-120", ValueError, "{'recipe': 'uniform'.* this one is of {'recipe': 'prioritized'"),
        ("prioritized-200", ValueError, "capacity"),
        ("plain", ValueError, "sampler"),
        ("nothing", FileNotFoundError, "no saved replay buffer in .*nothing: replay.json is missing"),
    ):
        with pytest.raises(error, match=message):
            replay.load(tmp_path / name)
    kept = built(3, "surprise_retention")
    with pytest.raises(ValueError, match="rows kept by importance.*Give num_shards the number of the save"):
        kept.load(tmp_path / "surprise_retention-120")
    for one, rows in zip(shards_of(replay), stored, strict=True):
        assert (one.storage.get(one.oldest_first()) == rows).all()
    assert replay.sample().shape == (8,) and coordinator_of(replay).shards.epochs.tolist() == [1, 1, 1]
