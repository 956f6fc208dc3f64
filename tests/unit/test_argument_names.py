# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
from typing import Any, get_args, get_type_hints

import pytest

from lightning_replay import recipes
from lightning_replay.levels import LevelBuffer
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.saving.spec import rebuildable
from lightning_replay.writers import FirstInFirstOutWriter


@pytest.mark.parametrize(
    ("owner", "given", "message"),
    [
        (PrioritizedSampler, "alpha", "PrioritizedSampler has no argument 'alpha'; accepted are capacity, priority_ex"),
        (PrioritizedSampler, "priority_exponents", "'priority_exponents'. Did you mean 'priority_exponent'"),
        (recipes.uniform, "alpha", "uniform has no argument 'alpha'; accepted are capacity, batch_size, n_steps"),
        (LevelBuffer, "score_step", "LevelBuffer has no argument 'score_step'. Did you mean 'score_step_size'"),
        (FirstInFirstOutWriter, "alpha", "has no argument 'alpha'; accepted are none"),
    ],
)
def test_an_unknown_argument_is_refused_with_those_that_are_accepted(owner, given: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        owner(**{given: 1})


class Halved(PrioritizedSampler):
    """A subclass with a constructor of its own."""

    def __init__(self, alpha: float = 1.0, **options: object) -> None:
        super().__init__(4, alpha / 2, **options)


@rebuildable
class Anything:
    def __init__(self, **options: object) -> None:
        self.options = options


def test_subclasses_have_arguments_of_their_own() -> None:
    assert Halved(alpha=0.8, seed=0).priority_exponent == 0.4
    with pytest.raises(TypeError, match="PrioritizedSampler has no argument 'beta'; accepted are"):
        Halved(beta=0.4)
    assert Anything(alpha=1).options == {"alpha": 1}


def test_every_option_of_a_recipe_is_documented_once() -> None:
    for function in recipes.known().values():
        (shared,) = get_args(get_type_hints(function)["options"])
        own = [*inspect.signature(function).parameters][:-1]
        assert set(own) - documented(function) <= {"capacity", "batch_size"}, function
        assert documented(shared) == set(shared.__annotations__)
        assert not documented(shared) & documented(function)


def documented(owner: Any) -> set[str]:
    section = inspect.cleandoc(owner.__doc__).partition("Args:\n")[2].partition("\n\n")[0]
    return {line.split(":")[0].strip() for line in section.splitlines() if line[4:5].strip()}
