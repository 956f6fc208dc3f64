# SPDX-License-Identifier: Apache-2.0
"""Rows are drawn from tables as often as shares, priorities and schedulers say, and the weights undo it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binom, chisquare
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.events import Event, EventTable
from lightning_replay.samplers.tables import ScheduledSampler, TableShares
from lightning_replay.schedulers import Exp3, UniformTasks
from lightning_replay.table_replay import TableReplay
from lightning_replay.tables.tables import Tables
from tests.event_steps import IsTrue, event_steps

NAMES = ["goal", "gap"]


def filled(episodes: int, *, default_share: float = 0.5, **options) -> TableReplay:
    """Episodes of ten steps: in every second one the goal, in every third the gap is reached on the way to it."""
    capacity = {"goal": 60, "gap": 41}
    shares = options.pop("shares", {"goal": 0.3, "gap": 0.2})
    tables = [
        EventTable(name, events=[Event(IsTrue(name), 4)], capacity=capacity[name], share=shares[name], min_size=1)
        for name in NAMES
    ]
    given = {"capacity": 200, "default_share": default_share, "tables": tables, "batch_size": 400, "seed": 3}
    replay = recipes.event_tables(**given | options)
    for episode in range(episodes):
        true = {9: {"goal"}} if episode % 2 == 0 else {}
        if episode % 3 == 0:
            true[6] = {"gap"}
        replay.extend(event_steps(10 * episode, 10, true, NAMES))
    return replay


def draw(replay: TableReplay, draws: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    size = replay.batch_size
    batches = [replay.sampler.sample(replay.storage, size) for _ in range(draws // size)]
    table = torch.cat([info["table"] for _, info in batches]).numpy()
    slots = torch.cat([index for index, _ in batches]).numpy()
    if "priority_weight" not in batches[0][1]:
        return table, slots, None
    return table, slots, torch.cat([info["priority_weight"] for _, info in batches]).double().numpy()


def given_priorities(replay: TableReplay) -> np.ndarray:
    """Random priorities for every slot, given in parts and after others that must leave no trace."""
    length = len(replay.storage)
    priority = torch.rand(length, generator=torch.Generator().manual_seed(3)) + 0.02
    replay.update_priority(torch.arange(length), torch.full((length,), 50.0))
    for part in torch.randperm(length, generator=torch.Generator().manual_seed(4)).split(50):
        replay.update_priority(part, priority[part])
    return priority.double().numpy()


def test_every_row_of_a_table_is_drawn_alike() -> None:
    replay = filled(40)
    table, slots, _ = draw(replay, 300_000)
    for number in range(3):
        held = replay.tables.slots_of(number)
        assert len(held) == replay.tables.capacity[number]
        counts = np.bincount(slots[table == number], minlength=replay.capacity)
        assert counts[held].sum() == counts.sum() == [150_000, 90_000, 60_000][number]
        assert chisquare(counts[held]).pvalue > 1e-4


@pytest.mark.parametrize("exponent", [0.6, 1.0])
def test_rows_of_a_table_are_drawn_in_proportion_to_their_priorities(exponent: float) -> None:
    """Also those appended after the priorities were given, whether they are new or were sent by a later event."""
    replay = filled(40, priority_exponent=exponent)
    priority = given_priorities(replay)
    slots = replay.extend(event_steps(400, 10, {9: {"goal"}}, NAMES)).numpy()
    priority = np.concatenate((priority, np.zeros(replay.capacity - len(priority))))
    priority[slots] = 50.0
    table, drawn, _ = draw(replay, 300_000)
    for number in range(3):
        held = replay.tables.slots_of(number)
        counts = np.bincount(drawn[table == number], minlength=replay.capacity)[held]
        expected = (priority[held] + 1e-6) ** exponent
        assert chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > 1e-4


@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("batch_size", [7, 64, 255])
def test_every_batch_has_the_exact_share_of_every_table(batch_size: int, at_least_one: bool) -> None:
    rng = np.random.default_rng(5)
    tables = Tables({"default": 9, "goal": 9, "gap": 9})
    tables.append_new_to_each(np.repeat(np.arange(3), 5))
    for shares in rng.dirichlet([1, 1, 1], 400):
        given = dict(zip(tables.names, (shares / shares.sum()).tolist(), strict=True))
        sampler = TableShares(given, at_least_one=at_least_one, seed=0)
        rows = sampler.rows_of_tables(tables, batch_size)[0]
        assert rows.sum() == batch_size
        exact = shares * batch_size
        if at_least_one:
            assert rows.min() >= 1
            exact = np.maximum(exact, 1)
        assert (np.abs(rows - exact) < 1 + 2 * at_least_one).all()
        assert (sampler.rows_of_tables(tables, batch_size)[0] == rows).all()


def test_multinomial_numbers_of_rows_are_binomial_in_every_table() -> None:
    """Not their mean alone: fixed numbers have the same. The gap table is not ready; 5/8 and 3/8 are left."""
    tables = Tables({"default": 9, "goal": 9, "gap": 9})
    tables.append_new_to_each(np.repeat(np.arange(2), 5))
    sampler = TableShares({"default": 0.5, "goal": 0.3, "gap": 0.2}, multinomial=True, seed=7)
    rows = np.stack([sampler.rows_of_tables(tables, 8)[0] for _ in range(20_000)])
    assert (rows.sum(1) == 8).all() and not rows[:, 2].any()
    counts = np.bincount(rows[:, 0], minlength=9)
    assert chisquare(counts, binom(8, 5 / 8).pmf(np.arange(9)) * 20_000).pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("near_is_ready", [True, False])
def test_the_tasks_of_batches_follow_the_scheduler(near_is_ready: bool) -> None:
    names = ["target", "far", "near"]
    tables = Tables(dict.fromkeys(names, 9))
    tables.append_new_to_each(np.repeat(np.arange(3), [5, 5, 5 if near_is_ready else 2]))
    sampler = ScheduledSampler(names, Exp3(exploration=0.3), min_size=3, seed=8)
    for task, signal in ((1, 1.0), (1, 0.8), (0, 0.4), (2, 1.0)):
        sampler.scheduler.drawn(task, 0.2)
        sampler.scheduler.progress(task, signal)
    probability = sampler.scheduler.probabilities(sampler.ready(tables))
    counts = sum(sampler.rows_of_tables(tables, 1)[0] for _ in range(40_000))
    assert np.ptp(probability[:2]) > 0.05 and (probability[2] > 0) == near_is_ready
    possible = probability > 0
    assert not counts[~possible].any()
    assert chisquare(counts[possible], probability[possible] * 40_000).pvalue > 1e-4


def test_rows_of_a_task_are_drawn_alike() -> None:
    names = ["target", "far"]
    replay = recipes.parallel_curriculum(names, 50, batch_size=10, scheduler=UniformTasks(), seed=9)
    rows = event_steps(0, 230, {}, [])
    rows["task"] = torch.arange(230) % 7 % 2
    replay.extend(rows)
    slots = torch.cat([replay.sampler.sample(replay.storage, 100)[0] for _ in range(2_000)])
    counts = np.bincount(slots, minlength=100)
    for table in range(2):
        held = counts[replay.tables.slots_of(table)]
        assert chisquare(held).pvalue > 1e-4


def weighted_mean(weight: np.ndarray, value: np.ndarray) -> tuple[float, float]:
    """The mean that the weights make, and its standard deviation."""
    mean = (weight * value).sum() / weight.sum()
    return mean, float(np.sqrt((weight**2 * (value - mean) ** 2).sum()) / weight.sum())


ROUNDED = {"batch_size": 10, "default_share": 0.65, "shares": {"goal": 0.2, "gap": 0.15}}
AT_LEAST_ONE = {"default_share": 0.91, "shares": {"goal": 0.08, "gap": 0.01}, "at_least_one": True}
MIXTURES = {
    "exact shares": {"batch_size": 400},
    "rounded shares": ROUNDED,
    "at least one": ROUNDED | AT_LEAST_ONE,
    "multinomial": ROUNDED | {"multinomial": True},
    "priorities": {"batch_size": 400, "priority_exponent": 0.8, "importance_exponent": 1.0},
    "priorities, rounded": ROUNDED | {"priority_exponent": 1.0, "importance_exponent": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", MIXTURES.values(), ids=MIXTURES.keys())
def test_with_the_mixture_correction_the_weighted_mean_is_the_one_over_the_default_table(options) -> None:
    """20 episodes are 200 steps, all in the default table; the value is large where an event is near."""
    replay = filled(20, correction="mixture", **options)
    priority = given_priorities(replay) if "priority_exponent" in options else np.zeros(replay.capacity)
    tables = replay.tables
    number = np.zeros(replay.capacity)
    number[: len(replay.storage)] = replay.storage.all_rows["action"][: len(replay.storage)].numpy()
    in_goal, in_gap = (tables.position[table] >= 0 for table in (1, 2))
    value = 3.0 * in_goal - 2.0 * in_gap + number / 200 + 2 * np.resize(priority, replay.capacity)
    expected = value[tables.slots_of(0)].mean()
    table, slots, weight = draw(replay, 80_000)
    assert len(np.unique(table)) > 1 and weight is not None
    mean, deviation = weighted_mean(weight, value[slots])
    assert abs(mean - expected) < 5 * deviation
    assert abs(value[slots].mean() - expected) > 12 * deviation, "without weights the mean is far off"


def draw_with_probabilities(replay: TableReplay, draws: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots and raw weights, and of each table the rows drawn and how likely it was."""
    size = replay.batch_size
    batches = [replay.sampler.sample(replay.storage, size) for _ in range(draws // size)]
    slots = torch.cat([index for index, _ in batches]).numpy()
    table, probability, weight = (
        torch.cat([info[key] for _, info in batches]).numpy() for key in ("table", "table_probability", "raw_weight")
    )
    of_tables = np.zeros((2, 3))
    of_tables[0] = np.bincount(table, minlength=3)
    of_tables[1, table] = probability
    assert (of_tables[1, table] == probability).all(), "all rows of a table have the same"
    return slots, weight.astype(np.float64), of_tables


@pytest.mark.slow
@pytest.mark.parametrize("options", MIXTURES.values(), ids=MIXTURES.keys())
def test_raw_weights_need_no_division_and_tables_come_as_often_as_stated(options) -> None:
    """The plain mean of raw weight times value is the mean over the default table."""
    replay = filled(20, correction="mixture", return_probabilities=True, **options)
    if "priority_exponent" in options:
        given_priorities(replay)
    value = 1.0 + np.arange(replay.capacity) / 50
    slots, weight, (counts, probability) = draw_with_probabilities(replay, 50_000)
    products = weight * value[slots]
    expected = value[replay.tables.slots_of(0)].mean()
    assert abs(products.mean() - expected) < 5 * products.std() / np.sqrt(len(products))
    assert probability.sum() == pytest.approx(1.0, abs=1e-6)
    if options.get("multinomial"):
        assert chisquare(counts, probability / probability.sum() * counts.sum()).pvalue > 1e-4
    else:
        np.testing.assert_allclose(counts / counts.sum(), probability, atol=1e-7)


def test_raw_weights_of_the_continuous_correction_sum_over_all_rows() -> None:
    """The mean of raw weight times value is the sum over all rows; the tables come as often as stated."""
    replay = filled(40, batch_size=400, correction="continuous", return_probabilities=True)
    held = (replay.tables.position >= 0).any(0)
    value = 1.0 + np.arange(replay.capacity) / 100
    slots, weight, (counts, probability) = draw_with_probabilities(replay, 200_000)
    products = weight * value[slots]
    assert abs(products.mean() - value[held].sum()) < 5 * products.std() / np.sqrt(len(products))
    assert chisquare(counts, probability / probability.sum() * counts.sum()).pvalue > 1e-4


def stochastic_steps(visits: int, events: int) -> TensorDict:
    """Three states, one action, each visited as often, and an event after it just as often: the lemma's own model."""
    rows = event_steps(0, 3 * visits, {}, ["goal"])
    state = torch.arange(3 * visits) % 3
    happens = torch.zeros(3, visits, dtype=torch.bool)
    for number in range(3):
        happens[number, torch.randperm(visits, generator=torch.Generator().manual_seed(number))[:events]] = True
    rows["observation"], rows["action"] = state.float()[:, None], torch.zeros_like(state)
    rows["next", "observation"] = (state.float()[:, None] + 1) % 3
    rows["next", "goal"] = happens[state, torch.arange(3 * visits) // 3][:, None]
    return rows


def is_in_state_1(steps: TensorDict) -> torch.Tensor:
    return steps["observation"][:, 0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_ablated", [False, True], ids=["alone", "beside a share of 0"])
@pytest.mark.parametrize("correction", ["lemma2_exact", "mixture", "lemma2"])
@pytest.mark.parametrize(
    ("events", "uncorrected", "of_lemma2"), [(30, 0.65, 0.4225 / 1.1225), (5, 0.525, 0.22491)], ids=["30", "5"]
)
def test_lemma2_exact_removes_the_bias_where_its_model_holds(
    correction: str, events: int, uncorrected: float, of_lemma2: float, is_ablated: bool
) -> None:
    """Of 100 outcomes of a state and action 30, or 5, are events: 1 - q = 0.3, or 0.05. Lemma 2 as printed errs.

    Half of the draws are events, and of the others as many as occur: 0.65, or 0.525. With its weights of 1 - q / 2 and
    2 the share is 0.65 * 0.65 / (0.65 * 0.65 + 0.35 * 2), or 0.525 * 0.525 / (0.525 * 0.525 + 0.475 * 2).
    """
    tables = [EventTable("goal", condition=IsTrue("goal"), history_length=1, capacity=100, share=0.5, min_size=1)]
    if is_ablated:
        tables.append(EventTable("one", is_in_state_1, history_length=1, capacity=100, share=0.0, min_size=1))
    replay = recipes.event_tables(300, 100, tables=tables, correction=correction, default_share=0.5, seed=12)
    rows = stochastic_steps(100, events)
    index = replay.extend(rows)
    state = rows["observation"].flatten().numpy()[index.argsort()]
    happened = rows["next", "goal"].flatten().numpy()[index.argsort()]
    _, slots, weight = draw(replay, 100_000)
    expected = of_lemma2 if correction == "lemma2" else events / 100
    assert happened[slots].mean() == pytest.approx(uncorrected, abs=0.005)
    for number in range(3):
        drawn = state[slots] == number
        mean, deviation = weighted_mean(weight[drawn], happened[slots[drawn]].astype(float))
        assert abs(mean - expected) < 5 * deviation < abs(of_lemma2 - events / 100) / 3
    mean, deviation = weighted_mean(weight, (state + 4 * happened * state)[slots])
    assert abs(mean - (1 + 4 * expected)) < 5 * deviation


def test_the_continuous_correction_draws_by_two_priorities_and_undoes_them() -> None:
    """η = 1/2: rows of events are drawn three times as often as others; rows that left all tables never."""
    replay = filled(40, batch_size=400, correction="continuous")
    held = replay.tables.position >= 0
    priority = np.where(held[1:].any(0), 1.5, np.where(held.any(0), 0.5, 0.0))
    assert len(np.unique(priority[: len(replay.storage)])) == 3
    _, slots, weight = draw(replay, 200_000)
    counts, alive = np.bincount(slots, minlength=replay.capacity), priority > 0
    assert not counts[~alive].any()
    assert chisquare(counts[alive], priority[alive] / priority.sum() * len(slots)).pvalue > 1e-4
    value = 2.0 * (priority > 1) + np.arange(replay.capacity) / 500
    mean, deviation = weighted_mean(weight, value[slots])
    assert abs(mean - value[alive].mean()) < 5 * deviation < abs(value[slots].mean() - value[alive].mean()) / 4
