# SPDX-License-Identifier: Apache-2.0
"""Surprise, on-policyness and their product, by worked numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.retention.surprise import (
    categorical_projection,
    cross_entropy,
    distributional_surprise,
    greedy_on_policyness,
    kl_divergence,
    on_policyness,
    retention_priority,
    squared_td_error,
    surprise,
)

FIXTURE = json.loads((Path(__file__).parents[2] / "fixtures" / "retention_priority.json").read_text())


@pytest.mark.parametrize("case", FIXTURE["cases"], ids=lambda case: case["name"])
def test_priorities_equal_the_worked_ones(case: dict) -> None:
    inputs, expected = case["inputs"], case["expected"]
    values = torch.tensor([inputs["q_values"]], dtype=torch.float64)
    action = torch.tensor([inputs["action"]])
    weight = on_policyness(values, action, q_inverse_temperature=inputs["temperature_beta"])
    delta = torch.tensor([inputs["surprise"]], dtype=torch.float64)
    tolerance = FIXTURE["tolerance_abs"]
    assert abs(float(weight) - expected["on_policyness_weight"]) <= tolerance
    assert abs(float(retention_priority(delta, weight)) - expected["priority"]) <= tolerance
    first = retention_priority(delta, torch.ones(1, dtype=torch.float64))
    assert abs(float(first) - expected["priority_at_first_insertion"]) <= tolerance


def test_a_td_error_surprises_by_its_square() -> None:
    assert squared_td_error(torch.tensor([-3.0, 0.0, 0.5])).tolist() == [9.0, 0.0, 0.25]
    assert surprise(torch.tensor([-3.0])).tolist() == [9.0]


def test_distributions_surprise_by_their_divergence() -> None:
    #   target 1/2 1/2 0, prediction 1/4 1/2 1/4:  1/2 log(1/2 : 1/4) + 1/2 log(1/2 : 1/2) = log(2) / 2
    target = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    current = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]]).log()
    torch.testing.assert_close(kl_divergence(target, current), torch.tensor([math.log(2) / 2, 0.0]))
    entropy = torch.tensor([math.log(2), -sum(p * math.log(p) for p in (0.2, 0.3, 0.5))])
    torch.testing.assert_close(cross_entropy(target, current), kl_divergence(target, current) + entropy)
    assert torch.equal(surprise(target=target, log_probability=current), kl_divergence(target, current))
    other = surprise(target=target, log_probability=current, measure=cross_entropy)
    assert torch.equal(other, cross_entropy(target, current))


@pytest.mark.parametrize(
    ("probabilities", "reward", "discount", "expected"),
    [
        pytest.param([0.2, 0.3, 0.5], 0.0, 1.0, [0.2, 0.3, 0.5], id="unmoved"),
        # the atoms go to -0.5, 0, 0.5: each outer one is shared in halves with the middle
        pytest.param([0.2, 0.4, 0.4], 0.0, 0.5, [0.1, 0.7, 0.2], id="shrunk"),
        # to 0, 0.5, 1
        pytest.param([0.5, 0.0, 0.5], 0.5, 0.5, [0.0, 0.5, 0.5], id="moved"),
        # to -0.5, 0.25, 1, of which the middle one gives three quarters below
        pytest.param([0.0, 1.0, 0.0], 0.25, 0.75, [0.0, 0.75, 0.25], id="the nearer atom gets more"),
        # to 2.2, 3, 3.8: clamped
        pytest.param([0.2, 0.3, 0.5], 3.0, 0.8, [0.0, 0.0, 1.0], id="above the support"),
        pytest.param([0.2, 0.3, 0.5], -9.0, 1.0, [1.0, 0.0, 0.0], id="below the support"),
        # nothing follows: all at the reward
        pytest.param([0.2, 0.3, 0.5], -0.25, 0.0, [0.25, 0.75, 0.0], id="terminated"),
    ],
)
def test_the_projection_shares_each_moved_atom_between_its_neighbours(probabilities, reward, discount, expected):
    support = torch.tensor([-1.0, 0.0, 1.0])
    projected = categorical_projection(
        torch.tensor([probabilities]), torch.tensor([reward]), torch.tensor([discount]), support
    )
    torch.testing.assert_close(projected, torch.tensor([expected]))


def projected_by_loops(probabilities, reward, discount, support):
    count, low, high = len(support), support[0], support[-1]
    result = [0.0] * count
    for probability, atom in zip(probabilities, support, strict=True):
        place = (min(max(reward + discount * atom, low), high) - low) / ((high - low) / (count - 1))
        below = min(math.floor(place), count - 2)
        result[below] += probability * (below + 1 - place)
        result[below + 1] += probability * (place - below)
    return result


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 51),
    low=st.floats(-20, 5),
    width=st.floats(0.5, 30),
    rows=st.lists(st.tuples(st.floats(-30, 30), st.floats(0, 1)), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_the_projection_equals_the_papers_loops_and_keeps_the_whole_probability(count, low, width, rows, seed):
    support = torch.linspace(low, low + width, count, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(len(rows), count, generator=generator, dtype=torch.float64)
    probabilities /= probabilities.sum(1, keepdim=True)
    reward, discount = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    projected = categorical_projection(probabilities, reward, discount, support)
    oracle = [
        projected_by_loops(row.tolist(), float(r), float(d), support.tolist())
        for row, r, d in zip(probabilities, reward, discount, strict=True)
    ]
    torch.testing.assert_close(projected, torch.tensor(oracle, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(projected.sum(1), torch.ones(len(rows), dtype=torch.float64))


def test_float32_leaves_no_probability_outside_the_support_at_its_ends():
    for low, high, atoms in ((-10.0, 10.0, 51), (-0.7, 1.9, 27), (0.0, 0.3, 7)):
        support = torch.linspace(low, high, atoms)
        all_of_it = torch.full((2, atoms), 1 / atoms)
        projected = categorical_projection(all_of_it, torch.tensor([99.0, -99.0]), torch.ones(2), support)
        torch.testing.assert_close(projected[[0, 1], [-1, 0]], torch.ones(2))


def test_a_distribution_surprises_by_its_projected_target() -> None:
    """Atoms -1 0 1. The certain 1 moves to 1/4, three quarters below; where it terminated the target is the reward::

    reward  discount   target            prediction        divergence
    -1/2    3/4        0    3/4  1/4     1/4  1/2  1/4     3/4 log(3/2)
    -1      0          1    0    0       1/4  1/2  1/4     log 4
    0       1          0    0    1       0    0    1       0
    """
    support = torch.tensor([-1.0, 0.0, 1.0])
    following = torch.tensor([[0.0, 0.0, 1.0]] * 3)
    prediction = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]]).log()
    reward, discount = torch.tensor([-0.5, -1.0, 0.0]), torch.tensor([0.75, 0.0, 1.0])
    found = distributional_surprise(prediction, following, reward, discount, support)
    torch.testing.assert_close(found, torch.tensor([0.75 * math.log(1.5), math.log(4), 0.0]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    crossed = distributional_surprise(prediction, following, reward, discount, support, measure=cross_entropy)
    torch.testing.assert_close(crossed, found + torch.tensor([entropy, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("log_probability", (4, 1)),
        ("log_probability", (4, 2, 3)),
        ("next_probability", (4, 2)),
        ("next_probability", (1, 3)),
        ("reward", (4, 1)),
        ("discount", (1,)),
        ("support", (2,)),
    ],
)
def test_shapes_that_would_be_broadcast_are_refused(name: str, shape: tuple[int, ...]) -> None:
    sizes = {"log_probability": (4, 3), "next_probability": (4, 3), "reward": (4,), "discount": (4,), "support": (3,)}
    arguments = {key: torch.zeros(size) for key, size in (sizes | {name: shape}).items()}
    with pytest.raises(ValueError, match=r"must be \[B, N\]"):
        distributional_surprise(**arguments)


def test_an_atom_of_no_chance_adds_nothing_though_it_was_held_impossible() -> None:
    target, current = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, -math.inf]])
    assert kl_divergence(target, current) == 0 and cross_entropy(target, current) == 0
    assert kl_divergence(target.flip(1), current) == math.inf


def test_a_divergence_is_never_negative_by_rounding() -> None:
    target = torch.softmax(torch.randn(1000, 51), -1)
    assert (kl_divergence(target, target.log()) >= 0).all()


def test_cross_entropy_can_be_learned_from() -> None:
    logits = torch.tensor([[0.0, 200.0]], requires_grad=True)
    cross_entropy(torch.tensor([[0.0, 1.0]]), logits.log_softmax(-1)).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    "given", [{}, {"target": torch.ones(1, 1)}, {"td_error": torch.ones(1), "log_probability": torch.ones(1, 1)}]
)
def test_surprise_needs_one_kind_of_prediction(given: dict) -> None:
    with pytest.raises(ValueError, match="give td_error alone, or target and log_probability"):
        surprise(**given)


def test_actions_come_as_numbers_or_one_hot() -> None:
    values = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0]])
    expected = on_policyness(values, torch.tensor([2, 1]))
    assert torch.equal(on_policyness(values, torch.tensor([[2], [1]])), expected)
    for dtype in (torch.int64, torch.bool, torch.float32):
        one_hot = torch.tensor([[0, 0, 1], [0, 1, 0]]).to(dtype)
        assert torch.equal(on_policyness(values, one_hot), expected)


@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0])
def test_an_illegal_action_takes_no_part(inverse_temperature: float) -> None:
    values = torch.tensor([[0.0, -math.inf, 0.0]])
    weights = [
        float(on_policyness(values, torch.tensor([action]), q_inverse_temperature=inverse_temperature))
        for action in range(3)
    ]
    assert weights == [0.5, 0.0, 0.5]


def test_greedy_actions_count_fully_and_equals_alike() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0]]).expand(3, 3)
    weight = greedy_on_policyness(values, torch.arange(3), epsilon=0.25)
    assert weight.tolist() == [0.25, 1.0, 1.0]


def test_a_value_that_is_no_number_does_not_pass_for_an_action_that_is_not_greedy() -> None:
    values = torch.tensor([[1.0, math.nan], [1.0, 2.0]])
    weight = greedy_on_policyness(values, torch.tensor([0, 0]), epsilon=0.25)
    assert weight.isnan().tolist() == [True, False]


def test_an_exponent_of_surprise_anneals_it_away() -> None:
    delta, weight = torch.tensor([4.0, 0.25]), torch.tensor([0.5, 1.0])
    assert retention_priority(delta, weight).tolist() == [2.0, 0.25]
    assert retention_priority(delta, weight, surprise_exponent=0.5).tolist() == [1.0, 0.5]
    assert retention_priority(delta, weight, surprise_exponent=0.0).tolist() == [0.5, 1.0]


def test_a_power_of_surprise_beyond_all_numbers_stays_one() -> None:
    priority = retention_priority(torch.tensor([1e30, 1e30]), torch.tensor([0.0, 0.5]), surprise_exponent=2.0)
    assert priority.tolist() == [0.0, torch.finfo(torch.float32).max / 2]


@pytest.mark.parametrize(
    ("values", "action", "error", "message"),
    [
        (torch.ones(2), torch.zeros(2, dtype=torch.int64), ValueError, r"floating point \[B, A\].* \[2\]"),
        (torch.ones(2, 3, dtype=torch.int64), torch.tensor([0, 0]), ValueError, "floating point"),
        (torch.ones(2, 3), torch.zeros(3, dtype=torch.int64), ValueError, r"whole numbers \[2\] or one-hot \[2, 3\]"),
        (torch.ones(2, 3), torch.zeros(2), ValueError, r"got torch.float32 \[2\]"),
        (torch.ones(2, 3), torch.tensor([0, 3]), IndexError, r"actions are 0..3; action_values are of 0..2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(values, action, error, message) -> None:
    with pytest.raises(error, match=message):
        on_policyness(values, action)
