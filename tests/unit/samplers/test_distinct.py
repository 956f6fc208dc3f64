# SPDX-License-Identifier: Apache-2.0
"""Draws without replacement: which rows are drawn again, their weights and tables, refusals, saves, and shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay import Age, PackedStorage, Replay, load_replay, recipes
from lightning_replay.divided_draws import Divider
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.samplers import (
    GroupSampler,
    PrioritizedSampler,
    RecencySampler,
    ReshuffledSampler,
    SequenceSampler,
    TableShares,
    UniformSampler,
    distinct,
)
from lightning_replay.schedules import Linear
from tests.divided import Shards
from tests.recipe_options import built, fitting
from tests.transitions import numbered_steps

PRIORITIES = {"priority_exponent": 1.0, "priority_offset": 0.0, "importance_exponent": 0.5}


def filled(replay: Replay, count: int = 12) -> Replay:
    replay.extend(fitting(replay, numbered_steps(0, count, done_every=100)))
    return replay


def test_only_repeats_are_drawn_again() -> None:
    """The rows of a draw with replacement that come first stay in their places."""
    for build in (recipes.uniform, recipes.prioritized):
        different = 0
        for seed in range(30):
            first, kept = (filled(build(12, 4, seed=seed, replace=replace)).sample() for replace in (True, False))
            repeats = [slot in first["index"][:place] for place, slot in enumerate(first["index"])]
            is_kept = first["index"] == kept["index"]
            assert [bool(one) for one in is_kept] == [not one for one in repeats]
            assert len(kept["index"].unique()) == 4
            different += any(repeats)
        assert 5 < different < 25


@pytest.mark.parametrize("normalize_over_batch", [True, False])
@pytest.mark.parametrize("size", [2, 7])
def test_weights_are_those_of_draws_with_replacement(size: int, normalize_over_batch: bool) -> None:
    """Also of rows that were drawn again, and of those that are drawn by reading all priorities."""
    replay = filled(
        recipes.prioritized(8, size, replace=False, seed=1, normalize_over_batch=normalize_over_batch, **PRIORITIES),
        8,
    )
    priority = torch.tensor([1.0, 1.0, 2.0, 4.0, 4.0, 9.0, 16.0, 1000.0])
    replay.update_priority(torch.arange(8), priority)
    for _ in range(20):
        batch = replay.sample()
        own = priority[batch["index"]]
        least = own.min() if normalize_over_batch else 1.0
        torch.testing.assert_close(batch["priority_weight"], (own / least) ** -0.5)
        assert len(batch["index"].unique()) == size


def test_a_schedule_counts_each_batch_once() -> None:
    for replace in (True, False):
        schedule = Linear(0.0, 1.0, 10)
        replay = filled(recipes.prioritized(12, 8, replace=replace, importance_exponent=schedule, seed=0))
        for _ in range(5):
            replay.sample()
        assert replay.sampler.beta == 0.5


@pytest.mark.parametrize(
    ("build", "needed", "held"),
    [
        (lambda **o: recipes.uniform(20, 9, **o), 9, 8),
        (lambda **o: recipes.prioritized(20, 9, **o), 9, 8),
        (lambda **o: recipes.uniform(20, 4, age=Age(max_age=2), **o), 4, 3),
        (lambda **o: recipes.uniform(20, 4, age=Age(max_age=0, clock="updates"), **o), 9, 8),
        (lambda **o: recipes.mixup(20, 9, **o), 9, 8),
        (lambda **o: recipes.sequences(20, 5, length=2, **o), 5, 4),
        (lambda **o: recipes.surprise_retention(20, 9, **o), 9, 8),
    ],
)
def test_too_few_rows_are_refused_at_the_draw(build: Callable[..., Replay], needed: int, held: int) -> None:
    replay = filled(build(replace=False, seed=0), 8)
    told = rf"^replace is False, and a batch needs {needed} different rows or sequences, of which {held} can be drawn"
    with pytest.raises(RuntimeError, match=told):
        replay.sample(needed)
    assert sorted(set(_first(replay.sample(held)))) == sorted(_first(replay.sample(held)))
    filled(build(seed=0), 8).sample(needed)


def _first(batch: TensorDict) -> list[int]:
    index = batch["index"]
    return (index[:, 0] if index.ndim == 2 else index).tolist()


def test_rows_of_priority_zero_do_not_count() -> None:
    replay = filled(recipes.prioritized(20, 3, replace=False, seed=0, **PRIORITIES), 8)
    replay.update_priority(torch.arange(8), torch.tensor([0.0, 0, 0, 1, 0, 0, 1e-30, 0]))
    assert sorted(_first(replay.sample(2))) == [3, 6]
    with pytest.raises(RuntimeError, match="needs 3 different rows or sequences, of which 2 can be drawn"):
        replay.sample()


def events(share: float, **options: Any) -> Replay:
    """Rows 10 and 11 of twelve are in the event table."""
    late = EventTable("late", condition=reward_at_least(10.0), history_length=1, capacity=4, share=share, min_size=1)
    return filled(recipes.event_tables(20, 8, tables=[late], default_share=1 - share, min_size=1, seed=0, **options))


@pytest.mark.parametrize("options", [{}, {"priority_exponent": 0.5}, {"age": Age(half_life=3.0)}])
def test_a_row_in_two_tables_is_drawn_once_and_small_tables_come_first(options: dict[str, Any]) -> None:
    """The event table has two rows and gives two, so that the default table never gives one of them."""
    replay = events(0.25, replace=False, **options)
    for _ in range(30):
        batch = replay.sample()
        assert batch["table"].tolist() == [0] * 6 + [1] * 2
        assert len(batch["index"].unique()) == 8
        assert sorted(batch["next", "reward"].flatten()[6:].tolist()) == [10.0, 11.0]
    assert replay.sampler.rows_drawn.tolist() == [180, 60]
    with pytest.raises(RuntimeError, match="needs 3 different rows or sequences of table 'late', of which 2 can be"):
        replay.sample(12)


def test_corrections_count_the_shares_of_the_whole_batch() -> None:
    """``1 / |B_0|`` over the probability of a row: 12 rows, 6 of 8 drawn from them, and 2 of 8 from two of them."""
    replay = events(0.25, replace=False, correction="mixture")
    for _ in range(20):
        batch = replay.sample()
        in_both = batch["next", "reward"].flatten() >= 10
        expected = torch.where(in_both, (1 / 12) / (0.75 / 12 + 0.25 / 2), (1 / 12) / (0.75 / 12))
        torch.testing.assert_close(batch["priority_weight"], expected)


def test_a_curriculum_draws_different_rows_of_its_task() -> None:
    replay = filled(built("parallel_curriculum", capacity=20, batch_size=6, seed=0, replace=False))
    for _ in range(20):
        batch = replay.sample()
        assert len(batch["index"].unique()) == 6 and len(batch["task"].unique()) == 1
    with pytest.raises(RuntimeError, match="needs 7 different rows or sequences of table '(target|near)', of which 6"):
        replay.sample(7)


@pytest.mark.parametrize("name", ["uniform", "prioritized", "surprise_retention", "event_tables"])
def test_no_part_of_a_divided_draw_has_a_row_twice(name: str) -> None:
    # The shards have 12 and 9 rows, and a batch of 12 is drawn.
    def build() -> Replay:
        options = {"default_share": 0.75} if name == "event_tables" else {}
        return built(name, capacity=40, batch_size=12, seed=1, replace=False, **options)

    shards = Shards(build, [[6, 6], [9]])
    for _ in range(30):
        numbers, columns = shards.draw(8)
        assert len(set(numbers.tolist())) == 8
    assert ("priority_weight" in columns) == (name in ("prioritized", "surprise_retention"))


def test_passes_draw_each_row_once_before_any_again() -> None:
    for name in ("uniform", "mixup", "continuous_transition", "neighborhood_mixup", "s4rl", "noisy", "hindsight"):
        replay = filled(built(name, capacity=20, batch_size=4, seed=0, replace="pass"))
        for _ in range(2):
            assert sorted(slot for _ in range(3) for slot in _first(replay.sample())) == [*range(12)]
    replay = filled(recipes.groups(20, 4, group_size=2, replace="pass", seed=0))
    for _ in range(2):
        assert sorted(torch.cat([replay.sample()["index"] for _ in range(3)]).tolist()) == [*range(12)]
    assert isinstance(replay.sampler.base_sampler, ReshuffledSampler)


PASS = "^replace is 'pass', and a pass draws rows or groups uniformly, without priorities, ages, tables, and sequences"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: recipes.prioritized(9, replace="pass"), PASS),
        (lambda: recipes.uniform(9, replace="pass", age=Age(half_life=3)), PASS),
        (lambda: recipes.uniform(9, replace="pass", draws_on="device"), PASS),
        (lambda: recipes.mixup(9, replace="pass", age=Age(half_life=3)), PASS),
        (lambda: recipes.groups(8, group_size=2, replace="pass", priority_exponent=0.5), PASS),
        (lambda: recipes.sequences(9, length=2, replace="pass"), PASS),
        (lambda: built("event_tables", capacity=9, replace="pass"), PASS),
        (lambda: built("parallel_curriculum", capacity=9, replace="pass"), PASS),
        (lambda: built("reverse_sweep", capacity=9, replace="pass"), PASS),
        (lambda: UniformSampler(replace="pass"), PASS),
        (lambda: built("reverse_sweep", capacity=9, replace=False), "^replace is False, and ReverseSweepSampler draws"),
        (
            lambda: built("event_tables", capacity=9, replace=False, correction="continuous"),
            "draws from all tables at once with priorities of its own; leave out replace",
        ),
        (
            lambda: built("event_tables", capacity=9, replace=False, sequence_length=2),
            "^replace is False and sequence_length is 2; ",
        ),
        (
            lambda: recipes.uniform(9, replace=False, draws_on="device"),
            "^replace is False and slots are drawn on 'cpu'; draws without replacement are made on the CPU. Leave out",
        ),
        (lambda: PrioritizedSampler(9, replace=False, device="cpu"), "^replace is False and slots are drawn on 'cpu'"),
        (lambda: SequenceSampler(2, replace=False, device="cpu"), "^replace is False and slots are drawn on 'cpu'"),
        (lambda: SequenceSampler(2, base_sampler=UniformSampler(), replace=False), "leave out base_sampler, or"),
        (
            lambda: GroupSampler(2, UniformSampler(replace=False)),
            "with replace=False, and fresh groups are not drawn by it; give replace=False to GroupSampler alone",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_in_a_sentence(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize("recipe", ["uniform", "reverse_sweep", "groups", "event_tables", "mixup"])
def test_another_value_is_refused(recipe: str) -> None:
    for value in ("never", 0, None, 2.5):
        with pytest.raises(TypeError, match=f"^replace is {value!r}; it must be True, False, or, of a recipe that"):
            built(recipe, capacity=10, replace=value)


KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "prioritized": PRIORITIES,
    "uniform, age": {"age": Age(half_life=1.0)},
    "event_tables": {},
    "sequences": {"priority_exponent": 0.5},
    "neighborhood_mixup": {},
    "groups": {"fresh_share": 0.5},
    "groups, pass": {"replace": "pass"},
    "uniform, pass": {"replace": "pass"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_buffer_goes_on_with_the_same_draws(kind: str, tmp_path: Path) -> None:
    """Batches of 5 of 8 rows, so that most have repeats, and some come from the masses of all rows."""
    name = kind.partition(",")[0]
    size = 4 if name == "event_tables" else 5
    replay = filled(built(name, capacity=20, batch_size=size, seed=0, **{"replace": False} | KINDS[kind]), 8)
    for step in range(6):
        if replay.takes_feedback and name == "prioritized":
            replay.update_priority(torch.arange(8), torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 10.0**step]))
        replay.sample()
    replay.save(tmp_path / "saved")
    loaded = load_replay(tmp_path / "saved")
    other = built(name, capacity=20, batch_size=size, seed=9, **{"replace": False} | KINDS[kind])
    other.load_state_dict(replay.state_dict())
    for one in (loaded, other):
        assert one.sampler.replace == replay.sampler.replace
    for _ in range(6):
        expected = replay.sample()["index"]
        assert torch.equal(loaded.sample()["index"], expected) and torch.equal(other.sample()["index"], expected)


def test_a_mixed_replay_draws_different_rows_of_each_side() -> None:
    sides = {"online": recipes.prioritized(40, replace=False), "offline": recipes.uniform(40, replace=False)}
    for side in sides.values():
        filled(side)
    mixed = recipes.mixed(**sides, share=0.5, batch_size=16, seed=0)
    for _ in range(20):
        batch = mixed.sample()
        assert len(batch["index"].unique()) == 16
        mixed.update_priority(batch, torch.rand(16))


def test_torchrl_buffers_take_the_samplers() -> None:
    for sampler in (UniformSampler(replace=False, seed=0), PrioritizedSampler(9, replace=False, seed=0)):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=8)
        buffer.extend(TensorDict({"observation": torch.arange(9)}, [9]))
        for _ in range(10):
            batch = buffer.sample()
            assert len(batch["index"].unique()) == 8
            batch["td_error"] = torch.rand(8)
            buffer.update_tensordict_priority(batch)
    storage = LazyTensorStorage(20, ndim=2)
    sampler = PrioritizedSampler(20, replace=False, seed=0)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=18)
    buffer.extend(TensorDict({"observation": torch.arange(20).view(4, 5)}, [4, 5]))
    assert len(buffer.sample()["observation"].unique()) == 18


def test_prefetched_batches_have_different_rows() -> None:
    replay = filled(recipes.uniform(12, 8, replace=False, prefetch=2, seed=0))
    for _ in range(10):
        assert len(replay.sample()["index"].unique()) == 8


def test_a_ring_of_ages_stays_one_without_the_masses() -> None:
    sampler = RecencySampler(1000, Age(half_life=900.0), seed=0, replace=False)
    replay = Replay(storage=PackedStorage(1000), sampler=sampler, batch_size=64)
    filled(replay, 1000)
    for _ in range(20):
        assert len(replay.sample()["index"].unique()) == 64
    assert sampler._newest == 999


def test_a_row_with_nearly_all_priority_takes_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = filled(recipes.prioritized(40, 32, replace=False, seed=0, **PRIORITIES), 40)
    replay.update_priority(torch.arange(40), torch.tensor([1e9] + [1.0] * 39))
    calls: list[int] = []
    rows_at = PrioritizedSampler._rows_at

    def counted(self: Any, storage: Any, groups: np.ndarray, points: np.ndarray) -> Any:
        calls.append(len(points))
        return rows_at(self, storage, groups, points)

    monkeypatch.setattr(PrioritizedSampler, "_rows_at", counted)
    assert len(replay.sample()["index"].unique()) == 32
    assert calls == [32, 31, 31, 31, 31] and distinct.FEWEST_ROUNDS == 4


def test_a_table_whose_rows_another_one_took_is_named() -> None:
    """Both event tables hold the same two rows, and each is to give two."""
    tables = [
        EventTable(name, condition=reward_at_least(10.0), history_length=1, capacity=4, share=0.25, min_size=1)
        for name in ("one", "two")
    ]
    replay = filled(recipes.event_tables(20, 8, tables=tables, default_share=0.5, min_size=1, seed=0, replace=False))
    with pytest.raises(RuntimeError, match="needs 2 different rows or sequences of table 'two', of which 0 can be"):
        replay.sample()
    assert isinstance(replay.sampler, TableShares)
    with pytest.raises(TypeError, match="draws of SequenceSampler cannot be divided"):
        Divider(SequenceSampler(2, replace=False))
