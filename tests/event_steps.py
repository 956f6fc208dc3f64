# SPDX-License-Identifier: Apache-2.0
"""Numbered steps that say themselves which events they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay.saving.spec import recorded


@recorded
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
