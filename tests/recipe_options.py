# SPDX-License-Identifier: Apache-2.0
"""Every recipe built alike, whatever it needs to be told besides its capacity."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.replay import Replay
from lightning_replay.schedules import Constant

TASKS = ["target", "near"]
ROW_RECIPES = sorted(set(recipes.known()) - {"sequences"})  # whose batches are rows or pairs, with returns over n steps
#: Those whose draws can be divided over shards: a group is drawn whole.
DIVIDED_RECIPES = sorted(set(ROW_RECIPES) - {"groups"})


def required_options(name: str, capacity: int) -> dict[str, Any]:
    """What the recipe must be given for ``capacity`` rows, or as many for each task."""
    if name == "parallel_curriculum":
        return {"tasks": TASKS, "capacity_per_task": capacity, "min_size": 1}
    if name == "event_tables":
        table = EventTable("high", condition=reward_at_least(20.0), history_length=3, capacity=10, min_size=1)
        return {"capacity": capacity, "tables": [table]}
    if name == "reverse_sweep":
        return {"capacity": capacity, "goal": reward_at_least(20.0)}
    if name == "hindsight":  # of steps without goals: no row is relabelled, and what gives rewards is not called
        keys = {"achieved_key": "observation", "desired_key": "observation"}
        return {"capacity": capacity, "reward": Constant(0.0), "share": 0.0, **keys}
    if name == "sequences":
        return {"capacity": capacity, "length": 2, "overlap": 1}
    if name == "groups":  # of single rows, so that any number of them can be stored
        return {"capacity": capacity, "group_size": 1}
    return {"capacity": capacity}


def built(name: str, *, capacity: int, **options: Any) -> Replay:
    return recipes.by_name(name)(**required_options(name, capacity), **options)


def fitting(replay: Replay, steps: TensorDict) -> TensorDict:
    """The steps, with a task each where the buffer has tasks."""
    if replay.tasks:
        steps["task"] = torch.arange(len(steps)) % len(replay.tasks)
    return steps
