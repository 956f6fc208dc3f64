# SPDX-License-Identifier: Apache-2.0
"""With ``replace=False``, no batch of any recipe has a row, a sequence, or a group twice, whatever happened before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay import Age, Replay, recipes
from tests.recipe_options import built, fitting
from tests.transitions import numbered_steps

CAPACITY = 24
BATCH = 4
CASES: dict[str, dict[str, Any]] = {
    name: {} for name in sorted(set(recipes.known()) - {"prioritized", "reverse_sweep"})
}
PRIORITIES = {"priority_exponent": 1.0, "importance_exponent": 0.5}
for _name in ("prioritized", "event_tables", "parallel_curriculum", "sequences", "neighborhood_mixup", "groups"):
    CASES[f"{_name}, priorities"] = PRIORITIES
CASES["surprise_retention, uniform"] = {"priority_exponent": 0.0}
CASES["uniform, aged"] = {"age": Age(half_life=3.0)}
CASES["uniform, aged by updates"] = {"age": Age(half_life=3.0, floor=0.1, clock="updates")}
CASES["prioritized, aged"] = {"age": Age(half_life=3.0, floor=0.1)}
CASES["event_tables, aged"] = {"age": Age(half_life=3.0)}
CASES["uniform, window"] = {"age": Age(max_age=5)}


def built_for(case: str) -> Replay:
    return built(case.partition(",")[0], capacity=CAPACITY, batch_size=BATCH, seed=0, replace=False, **CASES[case])


def first(batch: TensorDict) -> list[int]:
    index = batch["index"]
    return (index[:, 0] if index.ndim == 2 else index).tolist()


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15, deadline=None)
@given(
    actions=st.lists(st.one_of(st.integers(1, 9), st.sampled_from(["draw", "end", "load"])), min_size=1, max_size=12),
    magnitude=st.sampled_from([0.1, 30.0]),
)
def test_nothing_is_twice_in_a_batch(case: str, actions: list[int | str], magnitude: float) -> None:
    replay = built_for(case)
    given_rows = 0
    for action in [*actions, 9, 9, "draw", "draw"]:
        if isinstance(action, int):
            replay.extend(fitting(replay, numbered_steps(given_rows, action, done_every=7)))
            given_rows += action
        elif action == "end":
            replay.end_episodes()
        elif action == "load":
            other = built_for(case)
            other.load_state_dict(replay.state_dict())
            replay = other
        else:
            try:
                batch = replay.sample()
            except RuntimeError:
                assert given_rows < 40  # tables and sequences need some rows
                continue
            assert len(set(first(batch))) == BATCH
            assert (batch["index"] < CAPACITY + 80).all()
            if replay.takes_feedback:
                errors = torch.full(batch["index"].shape if replay.sequence_length else (BATCH,), 0.01)
                errors.view(-1)[0] = magnitude
                replay.update_priority(batch, errors)
