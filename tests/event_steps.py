# SPDX-License-Identifier: Apache-2.0
"""Numbered steps that say themselves which events they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.events import EventTable
from lightning_replay.saving.spec import rebuildable
from lightning_replay.table_replay import TableReplay


@rebuildable
class IsTrue:
    """The event of this name, as the steps of :func:`event_steps` carry it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return steps["next", self.name]


def event_steps(
    first: int, count: int, events: Mapping[int, set[str]], names: Sequence[str], *, ends: bool = True
) -> TensorDict:
    """``count`` steps numbered from ``first``, the last of which ends the episode; ``events`` by place in it."""
    number = torch.arange(first, first + count)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[-1] = ends
    true = {name: torch.tensor([[name in events.get(step, ())] for step in range(count)]) for name in names}
    following = {
        "observation": number.float()[:, None] + 1,
        "reward": torch.zeros(count, 1),
        "terminated": done,
        "truncated": torch.zeros_like(done),
        "done": done,
        **true,
    }
    return TensorDict({"observation": number.float()[:, None], "action": number, "next": following}, [count])


def fill(replay: TableReplay, episodes: int = 3, first: int = 0) -> None:
    """Episodes of five steps, the fourth of which is the goal."""
    for start in range(first, first + 5 * episodes, 5):
        replay.extend(event_steps(start, 5, {3: {"goal"}}, ["goal"]))


def six_steps(least_of_goal: int = 1, **options: Any) -> TableReplay:
    """Six steps in slots 0 to 5; the goal, at the last but one, sends slots 3 and 4 to its table."""
    table = EventTable("goal", condition=IsTrue("goal"), history_length=2, capacity=4, min_size=least_of_goal)
    given = {"capacity": 6, "batch_size": 4, "priority_exponent": 1.0, "priority_offset": 0.0, "seed": 0}
    replay = recipes.event_tables(tables=[table], **given | options)
    replay.extend(event_steps(0, 6, {4: {"goal"}}, ["goal"]))
    return replay


def by_row(replay: TableReplay, *names: str, row: str = "index") -> dict[tuple[int, int], Any]:
    """What 60 batches have for each row, by its table and ``row``: the weight, or the columns ``names``."""
    found = {}
    for batch in (replay.sample() for _ in range(60)):
        columns = [batch[name] for name in names or ("priority_weight",)]
        assert all(column.dtype == torch.float32 and column.shape == batch["table"].shape for column in columns)
        assert batch["table"].dtype == torch.int64
        values = zip(*map(Tensor.tolist, columns), strict=True) if names else columns[0].tolist()
        found.update(zip(zip(batch["table"].tolist(), batch[row].tolist(), strict=True), values, strict=True))
    return found
