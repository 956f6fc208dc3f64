# SPDX-License-Identifier: Apache-2.0
"""Surprise, on-policyness and their product, by worked numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lightning_replay.surprise import (
    cross_entropy,
    greedy_on_policyness,
    kl_divergence,
    on_policyness,
    retention_priority,
    squared_td_error,
    surprise,
)

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "retention_priority.json").read_text())


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


def test_the_two_measures_order_transitions_differently() -> None:
    target = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    current = torch.tensor([[0.5, 0.5], [0.6, 0.4]]).log()
    assert kl_divergence(target, current).argmax() == 1 and cross_entropy(target, current).argmax() == 0


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
    "given",
    [{}, {"target": torch.ones(1, 1)}, {"td_error": torch.ones(1), "log_probability": torch.ones(1, 1)}],
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
