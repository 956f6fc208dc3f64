# SPDX-License-Identifier: Apache-2.0
"""What the experiment on refilled groups rests on: which groups a batch has, and how a replayed answer counts."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.benchmarks.learning.experiments.prompts import example


@pytest.fixture(scope="module")
def grpo() -> ModuleType:
    example()
    return example("grpo_replay")


class Script:
    """Generates batches of groups with given advantages in place of a model; each group has its own number."""

    def __init__(self, *batches: list[float]) -> None:
        self.batches = iter(batches)
        self.version = 0
        self.groups = 0

    def __call__(self) -> TensorDict:
        advantage = torch.tensor(next(self.batches))
        number = torch.arange(self.groups, self.groups + len(advantage))
        self.groups += len(advantage)
        # Half of the answers of a group are above its mean, and half are below.
        signs = torch.tensor([1.0, -1.0]).repeat(4)
        version = torch.full((8 * len(advantage),), self.version)
        columns = {"number": number.repeat_interleave(8), "advantage": torch.outer(advantage, signs).flatten()}
        return TensorDict(columns | {"log_prob": torch.zeros(len(version)), "version": version}, [len(version)])


def numbers(rows: TensorDict) -> list[int]:
    """The numbers of the groups of a batch, each of which has eight rows side by side."""
    grouped = rows["number"].view(-1, 8)
    assert (grouped == grouped[:, :1]).all()
    return grouped[:, 0].tolist()


def test_groups_with_a_gradient_come_first_in_their_order(grpo: ModuleType) -> None:
    rows = Script([0.0, 0.5, 0.0, 1.0])()
    assert grpo.has_gradient(rows).tolist() == [False, True, False, True]
    assert numbers(grpo.informative_first(rows, 3)) == [1, 3, 0]


def test_after_the_refill_all_groups_have_a_gradient_if_the_replay_has_enough(grpo: ModuleType) -> None:
    refilled = grpo.Refilled(max_age=2, capacity=96, seed=0)
    generate = Script([1.0, 0.0, 1.0, 0.5], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    assert numbers(refilled(generate)) == [0, 2, 3, 1]  # nothing is stored yet
    generate.version = 1
    batch = refilled(generate)
    assert grpo.has_gradient(batch).all()
    fresh, *replayed = numbers(batch)
    assert fresh == 6 and sorted(replayed) == [0, 2, 3]  # each of them once
    assert batch["version"].view(-1, 8)[:, 0].tolist() == [1, 0, 0, 0]
    generate.version = 2
    batch = refilled(generate)
    assert sorted(numbers(batch)) == [0, 2, 3, 6]


def test_only_groups_of_the_last_policies_refill_a_batch(grpo: ModuleType) -> None:
    refilled = grpo.Refilled(max_age=2, capacity=96, seed=0)
    generate = Script([1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    batches = []
    for generate.version in range(4):
        batches.append(numbers(refilled(generate)))
    assert batches[1][0] == 3 and {*batches[1][1:]} < {0, 1, 2}
    assert {*batches[2]} <= {0, 1, 2, 3}
    # Only one group of version 1 and later has a gradient. The other places keep their groups.
    assert batches[3] == [3, 9, 10]


def test_groups_are_generated_until_enough_have_a_gradient_or_draws_are_over(grpo: ModuleType) -> None:
    generate = Script([1.0, 0.0], [0.0, 0.0], [0.5, 1.0], [1.0, 1.0])
    assert numbers(grpo.drawn_again(generate)) == [0, 4]
    assert generate.groups == 6
    generate = Script([1.0, 0.0], [0.0, 0.0], [0.5, 1.0])
    assert numbers(grpo.drawn_again(generate, most_draws=2)) == [0, 1]
    assert generate.groups == 4


class OneNumber(torch.nn.Module):
    """Gives each answer the same log-probability, which is the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(()))

    def log_probability(self, question: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        return self.value.expand(len(question))


@pytest.mark.parametrize(
    ("behavior", "advantage", "gradient"),
    [
        (0.0, 1.0, 1.0),  # The policy that wrote the answer learns from it: the ratio is 1.
        (0.1, 1.0, 0.904837),  # exp(0 - 0.1), inside of the clip
        (-1.0, 1.0, 0.0),  # The new policy has made the answer likelier by more than a fifth already.
        (-1.0, -1.0, -2.718282),  # A wrong answer that became likelier is corrected.
        (1.0, -1.0, 0.0),  # A wrong answer that became rarer is left alone.
    ],
)
def test_the_clipped_ratio_corrects_for_the_policy_that_wrote_an_answer(
    grpo: ModuleType, behavior: float, advantage: float, gradient: float
) -> None:
    columns: dict[str, Any] = {"question": torch.zeros(8, 6), "written": torch.zeros(8, 3)}
    columns |= {"advantage": torch.full((8,), advantage), "log_prob": torch.full((8,), behavior)}
    generate = grpo.Generator(OneNumber(), iter(()))
    batch = next(grpo.learn(generate, lambda _: TensorDict(columns, [8]), learning_rate=1e-3))
    assert len(batch) == 8 and generate.version == 1
    assert -float(generate.model.value.grad) == pytest.approx(gradient, abs=1e-5)
