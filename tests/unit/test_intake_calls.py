# SPDX-License-Identifier: Apache-2.0
"""The number of Python lines and calls of one extend does not grow with the number of its rows."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import Condition, EventTable, first_in_episode, reward_at_least, sustained
from lightning_replay.transforms import NStepTransitions

FEW, MANY = 1_024, 3_072
STORED_STEPS = 8  # of each environment
IS_NEAR = reward_at_least(0.7)


def distance(achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any]) -> np.ndarray:
    return np.abs(achieved - desired).sum(-1)


BUFFERS: dict[str, Callable[[int], Any]] = {
    "returns": lambda capacity: recipes.uniform(capacity, n_steps=3),
    "prioritized returns": lambda capacity: recipes.prioritized(capacity, n_steps=3),
    "sequences": lambda capacity: recipes.sequences(capacity, length=4),
    "prioritized sequences": lambda capacity: recipes.sequences(capacity, length=4, priority_exponent=0.9),
    "hindsight": lambda capacity: recipes.hindsight(
        capacity, reward=distance, achieved_key="observation", desired_key="goal"
    ),
    "reverse sweep": lambda capacity: recipes.reverse_sweep(capacity, goal=IS_NEAR),
    "continuous transitions": lambda capacity: recipes.continuous_transition(capacity),
    "returns formed before": lambda capacity: Replay(
        storage=PackedStorage(capacity), transform=NStepTransitions(3, 0.9)
    ),
    "event table": lambda capacity: of_events(capacity, IS_NEAR),
    "event table that forgets": lambda capacity: of_events(capacity, IS_NEAR, forget_stale=True),
    "event table, sequences": lambda capacity: of_events(capacity, IS_NEAR, sequence_length=4),
    "event table, prioritized": lambda capacity: of_events(capacity, IS_NEAR, priority_exponent=0.6),
    "event table, sustained": lambda capacity: of_events(capacity, sustained(reward_at_least(0.2), 2)),
    "event table, first in an episode": lambda capacity: of_events(capacity, first_in_episode(IS_NEAR)),
    "retention": lambda capacity: recipes.surprise_retention(capacity),
    "retention by surprise": lambda capacity: recipes.surprise_retention(
        capacity, initial_surprise=lambda rows: rows["next", "reward"].flatten()
    ),
    "tables of tasks": lambda capacity: recipes.parallel_curriculum(["first", "second"], capacity // 2),
}


def of_events(capacity: int, condition: Condition, **options: Any) -> Any:
    table = EventTable("near", condition, history_length=5, capacity=capacity)
    most = capacity // STORED_STEPS  # Each environment has a history.
    return recipes.event_tables(capacity, tables=[table], max_trajectories=most, **options)


def steps(num_envs: int) -> Iterator[TensorDict]:
    """Steps of environments with numbers in [0, 1); at every eighth step half of the episodes end.

    The goal is the observation, so that hindsight computes the stored rewards.
    """
    generator = torch.Generator().manual_seed(0)
    seen, trajectory = torch.rand(num_envs, 1, generator=generator), torch.arange(num_envs)
    step = 0
    while True:
        after = torch.rand(num_envs, 1, generator=generator)
        step += 1
        done = (torch.rand(num_envs, 1, generator=generator) < 0.5) & (step % 8 == 0)
        following = {"observation": after, "reward": (after - seen).abs(), "terminated": done, "done": done}
        following["truncated"] = torch.zeros_like(done)
        columns = {"observation": seen, "goal": seen, "trajectory": trajectory, "next": following}
        columns["task"] = trajectory % 2
        yield TensorDict(columns, [num_envs])
        seen = torch.where(done, torch.rand(num_envs, 1, generator=generator), after)
        trajectory = torch.where(done.flatten(), trajectory + num_envs, trajectory)


def calls_of(work: Callable[[], object]) -> Counter[str]:
    """Counts lines in Python that run and calls of built-in functions, by the name of the function."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            found[argument.__qualname__] += 1

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            found[frame.f_code.co_qualname] += 1
        return trace

    # Hypothesis times each collection of garbage in Python.
    gc.disable()
    before = sys.gettrace(), sys.getprofile()
    sys.setprofile(note)
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        gc.enable()
    return found


def calls_of_steps(build: Callable[[int], Any], num_envs: int) -> list[Counter[str]]:
    """Calls of each insert of eight steps into a full buffer; many episodes end in one step and begin in the next."""
    replay, stream = build(num_envs * STORED_STEPS), steps(num_envs)
    for _ in range(3 * 8 + 4):
        replay.extend(next(stream))
    return [calls_of(lambda: replay.extend(next(stream))) for _ in range(8)]


@pytest.mark.parametrize("name", BUFFERS)
def test_calls_do_not_grow_with_the_number_of_rows(name: str) -> None:
    few, many = (calls_of_steps(BUFFERS[name], num_envs) for num_envs in (FEW, MANY))
    for step, (of_few, of_many) in enumerate(zip(few, many, strict=True)):
        # Some steps need a line more, for memory that grows in blocks.
        assert of_many.total() <= of_few.total() + 30, (step, (of_many - of_few).most_common(5))
