# SPDX-License-Identifier: Apache-2.0
"""Scores of segments: the numeric cases, hand-worked ones, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lightning_replay.levels import scores
from tests.level_steps import segment

CASES = json.loads((Path(__file__).parents[2] / "fixtures" / "plr_score_functions.json").read_text())
TOLERANCE = CASES["tolerance_abs"]


@pytest.fixture(params=CASES["cases"], ids=lambda case: case["name"])
def case(request):
    return request.param


def steps_of(inputs: dict) -> torch.Tensor:
    done = inputs["last_step_is_terminal"]
    steps = segment(
        inputs["rewards"],
        inputs["values"],
        done=True,
        terminated=done,
        last_value=inputs["value_of_state_after_last_step"],
        logits=inputs["logits"],
    )
    return steps


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("policy_entropy_normalised", lambda gamma, lam: scores.PolicyEntropy()),
        ("policy_min_margin", lambda gamma, lam: scores.MinMargin()),
        ("policy_least_confidence", lambda gamma, lam: scores.LeastConfidence()),
        ("one_step_td_error", lambda gamma, lam: scores.OneStepTdError(gamma)),
        ("gae_signed", scores.SignedGae),
        ("gae_magnitude_l1_value_loss", scores.L1ValueLoss),
        ("positive_value_loss", scores.PositiveValueLoss),
    ],
)
def test_segments_score_as_in_the_numeric_cases(case, name, build):
    inputs = case["inputs"]
    score = build(inputs["gamma"], inputs["gae_lambda"])
    assert float(score(steps_of(inputs))) == pytest.approx(case["expected"][name], abs=TOLERANCE)
    columns = steps_of(inputs).apply(lambda leaf: leaf.unsqueeze(-1) if leaf.ndim == 1 else leaf)
    assert float(score(columns)) == pytest.approx(case["expected"][name], abs=TOLERANCE), "columns [T, 1] are accepted"


def test_step_by_step_numbers(case):
    inputs, steps = case["inputs"], steps_of(case["inputs"])
    values = (steps["next", "reward"], steps["state_value"], steps["next", "state_value"], steps["next", "terminated"])
    deltas = scores.td_errors(*values, discount=inputs["gamma"])
    torch.testing.assert_close(
        deltas, torch.tensor(case["expected"]["td_errors"], dtype=torch.float64), atol=TOLERANCE, rtol=0
    )
    advantages = scores.generalized_advantages(
        *values, steps["next", "done"], discount=inputs["gamma"], gae_lambda=inputs["gae_lambda"]
    )
    torch.testing.assert_close(
        advantages, torch.tensor(case["expected"]["advantages"], dtype=torch.float64), atol=TOLERANCE, rtol=0
    )


def test_scores_by_hand():
    only = segment([1.0], [0.25], last_value=8.0)
    assert float(scores.OneStepTdError(0.5)(only)) == 0.75
    assert float(scores.L1ValueLoss(0.5, 0.5)(only)) == 0.75
    cut = segment([1.0], [0.25], terminated=False, last_value=8.0)
    assert float(scores.L1ValueLoss(0.5, 0.5)(cut)) == 4.75, "a time limit bootstraps"
    ends, never, rewards, values = torch.tensor([True, False]), torch.zeros(2, dtype=torch.bool), [1.0, 2.0], [0.5, 0.0]
    columns = (torch.tensor(rewards), torch.zeros(2), torch.tensor(values))
    ended = scores.generalized_advantages(*columns, ends, ends, discount=1.0, gae_lambda=1.0)
    cut = scores.generalized_advantages(*columns, never, ends, discount=1.0, gae_lambda=1.0)
    assert (ended.tolist(), cut.tolist()) == ([1.0, 2.0], [1.5, 2.0])
    logits = torch.tensor([[0.0, -math.inf], [50.0, 50.0]])
    assert float(scores.policy_entropy(logits)) == pytest.approx(0.5)
    assert math.isnan(scores.policy_entropy(torch.full((2, 3), math.nan)))
    assert float(scores.max_mc(torch.tensor([0.5, 1.0]), 2.0)) == 1.25


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scores.policy_entropy(torch.zeros(3)), "give \\[T, A\\]"),
        (lambda: scores.min_margin(torch.zeros(3, 1)), "two actions"),
        (lambda: scores.max_mc(torch.zeros(0), 1.0), "no step"),
        (lambda: scores.max_mc(torch.zeros(2, 2), 1.0), "of one episode"),
        (
            lambda: scores.one_step_td_error(torch.zeros(2), torch.zeros(3), torch.zeros(2), torch.zeros(2)),
            "one value per step",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_scores_declare_the_discounts_they_have():
    assert scores.discounts_of(scores.L1ValueLoss(0.9, 0.5)) == {"discount": 0.9, "gae_lambda": 0.5}
    assert scores.discounts_of(scores.OneStepTdError(0.0)) == {"discount": 0.0}
    assert scores.discounts_of(scores.PolicyEntropy()) == scores.discounts_of(None) == {}
    assert scores.discounts_of(lambda steps: steps["next", "reward"].max()) == {}


def test_functions_of_tensors_are_named_and_score_as_their_classes():
    steps = segment([1.0, 0.0], [0.25, 2.0], terminated=False, last_value=4.0)
    following = steps["next"]
    columns = (steps["state_value"], following["state_value"], following["terminated"], following["done"])
    kinds = {"l1_value_loss": scores.L1ValueLoss, "positive_value_loss": scores.PositiveValueLoss}
    for name, kind in (kinds | {"gae": scores.SignedGae}).items():
        function = getattr(scores, name)
        assert (function.__name__, function.__module__) == (name, scores.__name__)
        assert function(following["reward"], *columns, discount=0.9, gae_lambda=0.5) == kind(0.9, 0.5)(steps)
