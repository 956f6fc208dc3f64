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
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.samplers import PrioritizedSampler, RecencySampler, ReshuffledSampler, SequenceSampler
from lightning_replay.schedules import Linear
from tests.transitions import numbered_steps

GOAL = EventTable("goal", condition=reward_at_least(1.0), history_length=1, capacity=4)


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
        ([-1, 0], r"of new row 0 is \[-1.0\] after 0.0; each row needs one finite version, at least 0"),
        ([2, 1], r"of new row 1 is \[1.0\] after 2.0"),
        ([1.0, float("nan")], r"of new row 1 is \[nan\] after 1.0"),
        ([[1, 1], [2, 2]], r"of new row 0 is \[1.0, 1.0\] after 0.0"),
    ],
)
@pytest.mark.parametrize("recipe", ["uniform", "prioritized", "continuous_transition", "sequences", "event_tables"])
def test_rows_without_versions_or_with_falling_ones_are_refused_before_they_are_stored(
    recipe: str, policy: Any, told: str
) -> None:
    options: dict[str, Any] = {"length": 2} if recipe == "sequences" else {}
    if recipe == "event_tables":
        goal = EventTable("goal", condition=reward_at_least(1.0), history_length=1, capacity=4, share=0.25)
        options = {"tables": [goal], "default_share": 0.75}
    replay = aged(recipe, age={"half_life": 1, "version_key": "policy"}, **options)
    rows = numbered_steps(0, 2)
    if policy is not None:
        rows["policy"] = torch.tensor(policy, dtype=torch.float64)
    with pytest.raises(ValueError, match=told):
        replay.extend(rows)
    assert not len(replay)


@pytest.mark.parametrize("recipe", ["uniform", "prioritized", "continuous_transition"])
def test_versions_below_the_newest_stored_one_are_refused(recipe: str) -> None:
    replay = aged(recipe, age={"half_life": 1, "version_key": "policy"})
    replay.extend(numbered_steps(0, 2).set("policy", torch.tensor([3, 7])))
    with pytest.raises(ValueError, match=r"of new row 0 is \[6.0\] after 7.0"):
        replay.extend(numbered_steps(2, 1).set("policy", torch.tensor([6])))
    assert len(replay) == 2
    replay.extend(numbered_steps(2, 1).set("policy", torch.tensor([7])))
    assert len(replay) == 3


def test_a_nested_version_may_be_given_as_a_list_as_in_a_file() -> None:
    replay = aged(age={"half_life": 1, "version_key": ["next", "policy"]})
    with pytest.raises(ValueError, match=r"version_key is \('next', 'policy'\).*\('next', 'reward'\)"):
        replay.extend(numbered_steps(0, 1))
    replay.extend(numbered_steps(0, 2).set(("next", "policy"), torch.tensor([0, 1])))
    assert probabilities(replay) == pytest.approx({0: 1 / 3, 1: 2 / 3})
    assert replay.sampler.age == Age(half_life=1, version_key=("next", "policy"))


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
    with pytest.raises(ValueError, match="the saved buffer has no ages, but this buffer has an age"):
        aged("prioritized", age=Age(half_life=1, floor=0.25)).load_state_dict(before.state_dict())


def test_a_save_with_another_unit_is_refused() -> None:
    saved = aged("prioritized", age=Age(half_life=1))
    saved.extend(numbered_steps(0, 3))
    other = aged("prioritized", age=Age(half_life=1, clock="updates"))
    told = "the saved ages are in 'rows' of 4 slots, but the ages of this buffer are in 'updates' of 4 slots"
    with pytest.raises(ValueError, match=told):
        other.load_state_dict(saved.state_dict())


def test_a_forged_order_of_rows_is_refused() -> None:
    saved = aged("prioritized", age=Age(half_life=1))
    saved.extend(numbered_steps(0, 3))
    state = saved.sampler.state_dict()
    for forged in ([0, 9, 1], [0, 1, 1], [0, -1, 1]):
        state["ages"]["in_order"] = torch.tensor(forged)
        with pytest.raises(ValueError, match="names a slot twice or outside of the storage"):
            aged("prioritized", age=Age(half_life=1)).sampler.load_state_dict(state)


@pytest.mark.parametrize("sampler", [PrioritizedSampler, RecencySampler])
def test_ages_work_in_a_buffer_of_torchrl_that_is_filled_already(sampler: Callable[..., Any]) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=64)
    buffer.extend(TensorDict({"observation": torch.arange(3)}, [3]))
    buffer.set_sampler(sampler(6, age=Age(max_age=1), seed=0))
    buffer.extend(TensorDict({"observation": torch.arange(3, 5)}, [2]))
    assert set(buffer.sample()["observation"].tolist()) == {3, 4}


def test_torchrl_stores_more_rows_than_slots_with_their_versions() -> None:
    age = Age(half_life=1, floor=0.0, version_key="policy")
    sampler = PrioritizedSampler(4, importance_exponent=0.0, age=age, seed=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=4_000)
    buffer.extend(TensorDict({"policy": torch.arange(3)}, [3]))
    buffer.extend(TensorDict({"policy": torch.arange(3, 13)}, [10]))  # Rows 9, 10, 11, and 12 stay.
    counts = torch.bincount(buffer.sample()["policy"])[9:]
    assert (counts / 4_000).tolist() == pytest.approx([1 / 15, 2 / 15, 4 / 15, 8 / 15], abs=0.03)


@pytest.mark.parametrize("age", [Age(half_life=0.01, floor=0.25), Age(half_life=0.01, floor=0.25, clock="updates")])
@pytest.mark.parametrize("recipe", ["uniform", "prioritized", "surprise_retention"])
def test_buffers_that_are_emptied_after_thousands_of_half_lives_begin_anew(recipe: str, age: Age) -> None:
    replay = aged(recipe, capacity=20, age=age)
    for number in range(40):
        replay.extend(numbered_steps(number, 1))
        replay.advance(updates=number)
    replay.empty()
    replay.extend(numbered_steps(0, 2))
    weight = np.array([0.25, 1.0]) if age.clock == "rows" else np.ones(2)
    assert probabilities(replay) == pytest.approx(dict(enumerate(weight / weight.sum())))


@pytest.mark.parametrize("saved_age", [Age(half_life=1e6), Age(half_life=1e-3), Age(max_age=500)], ids=str)
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_a_save_may_be_loaded_at_a_half_life_of_another_order(recipe: str, saved_age: Age) -> None:
    saved = aged(recipe, capacity=1_500, age=saved_age)
    for number in range(0, 2_000, 100):
        saved.extend(numbered_steps(number, 100))
    saved.sample()
    loaded = aged(recipe, capacity=1_500, age=Age(half_life=1.0, floor=0.01, max_age=4))
    loaded.load_state_dict(saved.state_dict())
    assert probabilities(loaded) == pytest.approx({1_999 - age: 2.0**-age / 1.9375 for age in range(5)})


def test_priorities_near_the_largest_of_float32_are_weighted() -> None:
    replay = aged("prioritized", capacity=50, age=Age(half_life=1, floor=0.25), priority_exponent=1.0)
    slots = replay.extend(numbered_steps(0, 50))
    replay.update_priority(slots, torch.full((50,), 1e38))
    assert probabilities(replay)[49] == pytest.approx(1 / (1 + 0.5 + 48 * 0.25))


@pytest.mark.parametrize("age", [Age(half_life=1e306), Age(half_life=1e300, floor=1e-320)], ids=str)
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_half_lives_without_end_draw_uniformly(recipe: str, age: Age) -> None:
    replay = aged(recipe, age=age)
    replay.extend(numbered_steps(0, 4))
    assert probabilities(replay) == pytest.approx(dict.fromkeys(range(4), 0.25))


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_statistics_last_through_an_idle_time(recipe: str) -> None:
    options = {"importance_exponent": 0} if recipe == "prioritized" else {}
    replay = aged(recipe, age=Age(half_life=1, floor=0.0, clock="updates"), **options)
    replay.extend(numbered_steps(0, 4))
    replay.advance(updates=5_000)
    assert replay.stats()["effective_sample_size"] == pytest.approx(4)


def test_td_errors_are_ignored_without_priorities() -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), sampler=RecencySampler(4, Age(half_life=1), seed=0), batch_size=4
    )
    slots = buffer.extend(TensorDict({"observation": torch.arange(4)}, [4]))
    before = buffer.sampler.state_dict()
    buffer.update_priority(slots, torch.tensor([-1.0, float("nan"), 2.0, 3.0]))
    assert repr(buffer.sampler.state_dict()) == repr(before)


def test_a_draw_from_an_empty_buffer_leaves_the_way_without_a_tree() -> None:
    replay = aged(age=Age(half_life=1))
    with pytest.raises(RuntimeError, match="empty"):
        replay.sample()
    replay.extend(numbered_steps(0, 2))
    assert replay.sampler.state_dict()["newest"] == 1


@pytest.mark.parametrize("multinomial", [False, True])
@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_the_share_of_a_table_whose_rows_are_all_too_old_goes_to_the_others(exponent: float, multinomial: bool) -> None:
    goal = EventTable("goal", condition=reward_at_least(3.0), history_length=1, capacity=4, share=0.5, min_size=1)
    age = Age(max_age=1, clock="updates")
    replay = aged(
        "event_tables", tables=[goal], default_share=0.5, age=age, multinomial=multinomial, priority_exponent=exponent
    )
    replay.extend(numbered_steps(0, 4))
    assert {*replay.sample(32)["table"].tolist()} == {0, 1}
    rows = numbered_steps(4, 3)
    rows["next", "reward"] = torch.zeros(3, 1)
    replay.advance(updates=2)
    replay.extend(rows)
    assert {*replay.sample(32)["table"].tolist()} == {0}
    replay.advance(updates=4)
    with pytest.raises(RuntimeError, match="no row of the .* entries of tables can be drawn: .* older than max_age 1"):
        replay.sample()


@pytest.mark.parametrize("max_age", [None, 5])
def test_the_correction_leaves_the_effect_of_age_and_takes_that_of_shares(max_age: int | None) -> None:
    # Rows 0 to 3 have the ages 3 to 0 and the weights 1/8 to 1, which sum to 15/8. The event table holds rows 0 and 3,
    # whose weights sum to 9/8.
    goal = EventTable(
        "goal",
        condition=lambda rows: rows["observation"][:, 0] % 3 == 0,
        history_length=1,
        capacity=4,
        share=0.5,
        min_size=1,
    )
    replay = aged(
        "event_tables",
        tables=[goal],
        default_share=0.5,
        correction="mixture",
        age=Age(half_life=1, floor=0.0, max_age=max_age),
    )
    replay.extend(numbered_steps(0, 4))
    batch = replay.sample(64)
    in_both = (8 / 15) / (0.5 * 8 / 15 + 0.5 * 8 / 9)
    expected = {0: in_both, 1: 2.0, 2: 2.0, 3: in_both}
    drawn = zip(batch["observation"][:, 0].tolist(), batch["priority_weight"].tolist(), strict=True)
    assert {row: round(weight, 5) for row, weight in drawn}.items() <= {
        row: round(weight, 5) for row, weight in expected.items()
    }.items()
    assert len(batch["observation"][:, 0].unique()) == 4


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
        (lambda: aged(age={"class_path": "Age", "init_args": {"half_live": 1}}), "Did you mean 'half_life'"),
        (lambda: aged("event_tables", tables=[GOAL], correction="continuous", age=Age(half_life=1)), "leave out age"),
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
            "priority_exponent, age, and replace",
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


@pytest.mark.parametrize("sampler", [PrioritizedSampler, RecencySampler])
def test_a_sampler_that_comes_to_a_filled_buffer_draws_before_the_next_rows(sampler) -> None:
    """Rows 3 and 4 of five are one row old at most."""
    replay = recipes.uniform(6, 5, seed=0)
    replay.extend(numbered_steps(0, 5))
    replay.set_sampler(sampler(6, age=Age(max_age=1), seed=0))
    assert {*torch.cat([replay.sample()["index"] for _ in range(20)]).tolist()} == {3, 4}


def test_the_formula_takes_arrays() -> None:
    ages = np.array([[0, 1], [2, 5]])
    assert Age(half_life=1, floor=0.3, max_age=4).weight(ages).tolist() == [[1.0, 0.5], [0.3, 0.0]]
