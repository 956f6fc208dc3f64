# SPDX-License-Identifier: Apache-2.0
"""Draws by age: hand-worked probabilities, clocks, versions, saves, recipes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay import Age, PackedStorage, Replay, load_replay, recipes, save_replay
from lightning_replay.divided_draws import Divider
from lightning_replay.samplers import PrioritizedSampler, RecencySampler, ReshuffledSampler, SequenceSampler
from lightning_replay.schedules import Linear
from tests.transitions import numbered_steps


def probabilities(replay: Replay) -> dict[int, float]:
    """The probability of each row that can be drawn, by its number."""
    divider = Divider(replay.sampler, seed=0)
    batch, drawn = replay.sample_shard(divider.divide(20_000, [replay.group_totals()]).parts[0])
    numbers = batch["next", "reward"].flatten().int().tolist()
    return dict(zip(numbers, drawn.probability.tolist(), strict=True))


def aged(recipe: str = "uniform", capacity: int = 4, **options: Any) -> Replay:
    return getattr(recipes, recipe)(capacity, 2, seed=0, **options)


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_weights_halve_with_each_half_life_down_to_the_floor(recipe: str) -> None:
    replay = aged(recipe, age=Age(half_life=1, floor=0.25))
    replay.extend(numbered_steps(0, 4))
    # Ages 3, 2, 1, 0: weights 1/4 (the floor in place of 1/8), 1/4, 1/2, 1, together 2.
    assert probabilities(replay) == pytest.approx({0: 0.125, 1: 0.125, 2: 0.25, 3: 0.5})


def test_a_priority_multiplies_the_weight_of_the_age_and_importance_weights_undo_both() -> None:
    age = Age(half_life=1, floor=0.25)
    replay = aged("prioritized", age=age, priority_exponent=1.0, priority_offset=0.0, importance_exponent=1.0)
    slots = replay.extend(numbered_steps(0, 4))
    replay.update_priority(slots, torch.tensor([4.0, 2.0, 1.0, 1.0]))
    # 4 / 4, 2 / 4, 1 / 2, 1: together 3.
    assert probabilities(replay) == pytest.approx({0: 1 / 3, 1: 1 / 6, 2: 1 / 6, 3: 1 / 3})
    batch = replay.sample()
    expected = {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.5}
    drawn = batch["next", "reward"].flatten().tolist()
    assert batch["priority_weight"].flatten().tolist() == pytest.approx([expected[number] for number in drawn])


def test_a_window_draws_its_rows_alike_and_no_others() -> None:
    replay = aged(capacity=10, age=Age(max_age=2))
    replay.extend(numbered_steps(0, 8))
    assert probabilities(replay) == pytest.approx({5: 1 / 3, 6: 1 / 3, 7: 1 / 3})


@pytest.mark.parametrize("clock", ["env_steps", "updates"])
def test_a_clock_counts_from_the_reading_at_the_insertion(clock: str) -> None:
    replay = aged(age=Age(half_life=10, floor=0.0, clock=clock))
    replay.extend(numbered_steps(0, 2))
    replay.advance(**{clock: 10})
    replay.extend(numbered_steps(2, 1))
    replay.advance(**{clock: 20})
    # Ages 20, 20, 10: weights 1/4, 1/4, 1/2.
    assert probabilities(replay) == pytest.approx({0: 0.25, 1: 0.25, 2: 0.5})


def test_rows_that_nobody_touches_age() -> None:
    replay = aged("prioritized", age=Age(half_life=10, floor=0.5, max_age=30, clock="updates"))
    replay.extend(numbered_steps(0, 1))
    replay.advance(updates=5)
    replay.extend(numbered_steps(1, 1))
    assert probabilities(replay)[1] == pytest.approx(2**0.5 / (1 + 2**0.5))
    replay.advance(updates=25)  # Both are at the floor.
    assert probabilities(replay) == pytest.approx({0: 0.5, 1: 0.5})
    replay.advance(updates=31)  # The first is too old.
    assert probabilities(replay) == pytest.approx({1: 1.0})


def test_versions_are_ages() -> None:
    replay = aged(age={"half_life": 1, "version_key": "policy"})
    replay.extend(numbered_steps(0, 3).set("policy", torch.tensor([0, 1, 2])))
    assert probabilities(replay) == pytest.approx({0: 1 / 7, 1: 2 / 7, 2: 4 / 7})
    replay.extend(numbered_steps(3, 1).set("policy", torch.tensor([2])))
    assert probabilities(replay)[3] == pytest.approx(4 / 11)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (None, "version_key is 'policy' and the rows have"),
        ([2, 1], "each row needs one finite version, which is never below that of the row before"),
        ([0, 0], "which is never below"),
        ([1.0, float("nan")], "one finite version"),
        ([[1, 1], [2, 2]], "one finite version"),
    ],
)
@pytest.mark.parametrize("recipe", ["uniform", "prioritized", "continuous_transition"])
def test_rows_without_versions_or_with_falling_ones_are_refused_before_they_are_stored(
    recipe: str, policy: Any, told: str
) -> None:
    replay = aged(recipe, age={"half_life": 1, "version_key": "policy"})
    kind = {"dtype": torch.float64 if policy is None or isinstance(policy[0], list) else None}
    first = torch.ones(1, 2, **kind) if policy and isinstance(policy[0], list) else torch.ones(1)
    if policy is not None and not isinstance(policy[0], list):
        replay.extend(numbered_steps(0, 1).set("policy", first.double()))
    stored = len(replay)
    rows = numbered_steps(stored, 2)
    if policy is not None:
        rows["policy"] = torch.tensor(policy, dtype=torch.float64)
    with pytest.raises(ValueError, match=told):
        replay.extend(rows)
    assert len(replay) == stored


def test_the_half_life_may_follow_a_schedule() -> None:
    replay = aged(
        "prioritized", age=Age(Linear(1.0, 2.0, duration=10, clock="updates"), floor=0.0), importance_exponent=0
    )
    replay.extend(numbered_steps(0, 2))
    assert probabilities(replay)[0] == pytest.approx(1 / 3)
    replay.advance(updates=10)
    assert probabilities(replay)[0] == pytest.approx(2**-0.5 / (1 + 2**-0.5))


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
@pytest.mark.parametrize("clock", ["rows", "updates"])
def test_a_long_idle_time_and_thousands_of_half_lives_leave_draws_possible(recipe: str, clock: str) -> None:
    options = {"importance_exponent": 0} if recipe == "prioritized" else {}
    replay = aged(recipe, capacity=50, age=Age(half_life=0.5, floor=0.0, clock=clock), **options)
    for number in range(300):
        replay.extend(numbered_steps(number, 1))
        replay.advance(updates=40 * number)
        assert 299 >= replay.sample()["next", "reward"].max() > number - 10
    replay.advance(updates=10**9)
    assert probabilities(replay)[299] > 0.7


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_a_row_that_is_evicted_out_of_turn_is_never_drawn(recipe: str) -> None:
    replay = aged(recipe, capacity=6, age=Age(half_life=1, floor=0.25))
    replay.extend(numbered_steps(0, 8))  # The ring has wrapped.
    before = probabilities(replay)
    replay.sampler.on_evict(torch.tensor([1]))  # row 7, the newest
    after = probabilities(replay)
    assert set(before) - set(after) == {7}
    assert after[6] / after[5] == pytest.approx(before[6] / before[5])
    replay.extend(numbered_steps(8, 1))
    assert probabilities(replay)[8] == pytest.approx(1 / (1 + 0.25 + 3 * 0.25))


def history(replay: Replay, first: int = 0) -> None:
    for number in range(first, first + 12):
        replay.advance(env_steps=3 * number, updates=number)
        replay.extend(numbered_steps(4 * number, 4))
        batch = replay.sample()
        replay.update_priority(batch, torch.linspace(0.1, 2.0, len(batch)))


AGES = [
    Age(half_life=7),
    Age(half_life=5, floor=0.3, max_age=20),
    Age(half_life=9, clock="env_steps"),
    Age(half_life=Linear(2.0, 9.0, duration=12, clock="updates"), floor=0.01, clock="updates"),
]


@pytest.mark.parametrize("age", AGES, ids=str)
@pytest.mark.parametrize("recipe", ["uniform", "prioritized", "mixup", "sequences"])
def test_a_save_draws_the_same_rows_next(recipe: str, age: Age, tmp_path: Path) -> None:
    options = {"length": 2} if recipe == "sequences" else {}
    replay = aged(recipe, capacity=30, age=age, **options)
    history(replay)
    save_replay(replay, tmp_path / "replay")
    loaded = load_replay(tmp_path / "replay")
    for _ in range(2):
        for _ in range(8):
            assert torch.equal(replay.sample()["next", "reward"], loaded.sample()["next", "reward"])
        for one in (replay, loaded):
            history(one, 12)


def test_a_save_without_ages_is_refused() -> None:
    before = aged("prioritized")
    before.extend(numbered_steps(0, 3))
    with pytest.raises(ValueError, match="the saved buffer has no ages, and this one has"):
        aged("prioritized", age=Age(half_life=1, floor=0.25)).load_state_dict(before.state_dict())


def test_a_save_with_another_unit_is_refused() -> None:
    saved = aged("prioritized", age=Age(half_life=1))
    saved.extend(numbered_steps(0, 3))
    other = aged("prioritized", age=Age(half_life=1, clock="updates"))
    with pytest.raises(
        ValueError, match="the saved ages are in 'rows' of 4 slots, and those of this buffer in 'updates'"
    ):
        other.load_state_dict(saved.state_dict())


def test_a_forged_order_of_rows_is_refused() -> None:
    saved = aged("prioritized", age=Age(half_life=1))
    saved.extend(numbered_steps(0, 3))
    state = saved.sampler.state_dict()
    state["ages"]["in_order"] = torch.tensor([0, 9, 1])
    with pytest.raises(ValueError, match="names a slot twice or outside of the storage"):
        aged("prioritized", age=Age(half_life=1)).sampler.load_state_dict(state)


@pytest.mark.parametrize("sampler", [PrioritizedSampler, RecencySampler])
def test_ages_work_in_a_buffer_of_torchrl_that_is_filled_already(sampler: Callable[..., Any]) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=64)
    buffer.extend(TensorDict({"observation": torch.arange(3)}, [3]))
    buffer.set_sampler(sampler(6, age=Age(max_age=1), seed=0))
    buffer.extend(TensorDict({"observation": torch.arange(3, 5)}, [2]))
    assert set(buffer.sample()["observation"].tolist()) == {3, 4}


def test_emptied_buffers_begin_anew() -> None:
    for recipe in ("uniform", "prioritized"):
        replay = aged(recipe, age=Age(half_life=1, floor=0.25))
        replay.extend(numbered_steps(0, 6))
        replay.empty()
        replay.extend(numbered_steps(0, 2))
        assert probabilities(replay) == pytest.approx({0: 1 / 3, 1: 2 / 3})


def test_statistics_show_the_effective_number_of_rows() -> None:
    for recipe in ("uniform", "prioritized"):
        replay = aged(recipe, age=Age(half_life=1, floor=0.25))
        replay.extend(numbered_steps(0, 4))
        assert replay.stats()["effective_sample_size"] == pytest.approx(2**2 / (2 / 16 + 1 / 4 + 1))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Age(), "Age got neither half_life nor max_age; give at least one"),
        (lambda: Age(half_life=0), "half_life is 0; it must be"),
        (lambda: Age(half_life=-3.0), "half_life is -3.0; it must be"),
        (lambda: Age(half_life=Linear(0.0, 3.0, duration=9)), "half_life at reading 0"),
        (lambda: Age(half_life=1, floor=1.5), "floor is 1.5; it must be"),
        (lambda: Age(half_life=1, clock="steps"), "clock is 'steps'; it must be one of 'rows', 'env_steps', 'updates'"),
        (lambda: Age(half_life=1, clock="updates", version_key="policy"), "an age has one unit"),
        (lambda: aged(age={"half_live": 1}), "half_live"),
        (lambda: aged(age=3), "age is 3; it must be an Age or a mapping of its options"),
        (
            lambda: aged("reverse_sweep", goal=lambda steps: steps["reward"] > 0, age=Age(half_life=1)),
            "ReverseSweepSampler",
        ),
        (lambda: aged(draws_on="device", age=Age(half_life=1)), "draws by age are made on the CPU"),
        (lambda: aged("prioritized", draws_on="device", age=Age(half_life=1)), "draws by age are made on the CPU"),
        (lambda: aged("prioritized", age=Age(half_life=1, floor=0)), "the weights of all rows but the oldest vanish"),
        (
            lambda: SequenceSampler(2, base_sampler=PrioritizedSampler(4), age=Age(half_life=1)),
            "priority_exponent and age",
        ),
        (lambda: SequenceSampler(2, device="cpu", age=Age(half_life=1)), "or an age; sequences drawn on a device"),
        (lambda: ReshuffledSampler(age=Age(half_life=1)), "age"),
        (lambda: RecencySampler(4, None), "age is None; give an Age"),
    ],
)
def test_what_has_no_meaning_is_refused_in_a_sentence(make: Callable[[], Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        make()


def test_if_all_rows_are_too_old_the_error_says_so() -> None:
    replay = Replay(storage=PackedStorage(4), sampler=RecencySampler(4, Age(max_age=1, clock="updates")), batch_size=2)
    replay.extend(numbered_steps(0, 2))
    replay.advance(updates=5)
    with pytest.raises(RuntimeError, match="older than max_age 1"):
        replay.sample()


def test_the_formula_takes_arrays() -> None:
    ages = np.array([[0, 1], [2, 5]])
    assert Age(half_life=1, floor=0.3, max_age=4).weight(ages).tolist() == [[1.0, 0.5], [0.3, 0.0]]
