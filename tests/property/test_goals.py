# SPDX-License-Identifier: Apache-2.0
"""Relabelled batches against plain Python, over interleaved environments, eviction, tables and returns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay import recipes
from lightning_replay.events import EventTable
from lightning_replay.replay import Replay
from lightning_replay.transforms import RelabelGoals
from tests.goal_steps import OWN_GOAL, GoalOracle, costly, goal_rows, reached

pytestmark = pytest.mark.filterwarnings("ignore:.*another reward than RelabelGoals computes")  # 100 is stored
DISCOUNT = 0.5


def event(rows):
    return rows["observation", "achieved_goal"][:, 0] % 5 == 2


def build(kind: str, strategy: str, n_steps: int) -> Replay:
    columns = [("observation", "observation")]  # twice the number of the step, two times
    relabel = RelabelGoals(strategy, share=0.7, reward=costly, terminated=reached, reward_keys=columns)
    options = {"batch_size": 12, "n_steps": n_steps, "discount": DISCOUNT, "transform": relabel, "seed": 3}
    if kind == "tables":
        tables = [EventTable("event", condition=event, history_length=3, capacity=6, min_size=1)]
        return recipes.event_tables(6, tables=tables, min_size=1, **options)
    if kind == "on a device":
        return recipes.uniform(12, draws_on="device", **options)
    return recipes.known()[kind](12, **options)


steps = st.tuples(st.integers(0, 2), st.integers(1, 5), st.sampled_from(["go on", "done", "lost"]))


@pytest.mark.slow
@settings(max_examples=25)
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "tables", "on a device"])
@given(
    strategy=st.sampled_from(["future", "final", "episode"]),
    n_steps=st.integers(1, 3),
    given_steps=st.lists(steps, min_size=1, max_size=10),
)
def test_every_row_is_what_its_goal_makes_of_it(kind, strategy, n_steps, given_steps) -> None:
    replay, again = build(kind, strategy, n_steps), build(kind, strategy, n_steps)
    oracle = GoalOracle(strategy, n_steps, DISCOUNT, cost=4.0)
    names, newest = {0: 0, 1: 1, 2: 2}, {0: 0, 1: 1_000, 2: 2_000}  # of the running episode of each environment
    for environment, count, what in given_steps:
        numbers = range(newest[environment], newest[environment] + count)
        replay.extend(goal_rows(numbers, names[environment], done=what == "done"))
        oracle.done |= {numbers[-1]} if what != "go on" else set()
        newest[environment] += count
        if what == "lost":  # its newest row is truncated, and a row is left out
            replay.end_episodes([names[environment]])
            oracle.truncated.add(numbers[-1])
            newest[environment] += 1
        if what != "go on":
            names[environment] += 10
            newest[environment] += 100
        if environment == 1:
            again.load_state_dict(replay.state_dict())
            assert (again.sample() == replay.sample()).all()
        # Rows that left their tables are followed until their slots are written again.
        stored = replay.storage.get(torch.arange(len(replay.storage)))
        rows = {int(number) for number in stored["observation", "achieved_goal"][:, 0]}
        assert (stored["observation", "desired_goal"] == OWN_GOAL).all()
        batch = replay.sample()
        for row in batch:
            number, goal = int(row["observation", "achieved_goal"][0]), row["observation", "desired_goal"]
            assert goal[0] == goal[1] and torch.equal(goal, row["next", "observation", "desired_goal"])
            assert row["observation", "observation"][0] == 2 * number
            if goal[0] != OWN_GOAL:
                assert int(goal[0]) in oracle.goals(number, rows)
            expected = oracle.row(number, float(goal[0]), rows)
            found = row["next"]
            assert found["observation", "achieved_goal"][0] == expected["next"]
            assert found["reward"].item() == expected["reward"]
            for flag in ("terminated", "truncated", "done"):
                assert found[flag].item() == expected[flag], flag
            if n_steps > 1:
                assert row["steps_to_next_obs"].item() == expected["steps"]
                assert row["discount"].item() == expected["remaining"]
