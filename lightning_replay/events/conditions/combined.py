# SPDX-License-Identifier: Apache-2.0
"""Several conditions as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.events.conditions.condition import Condition, ConditionLike, holds, load_state_of, own, state_of
from lightning_replay.saving.spec import recorded
from lightning_replay.validation import checked_entries


class Combination(Condition):
    """Several conditions as one; each is evaluated at every step, because it may follow episodes.

    Raises:
        ValueError: no condition was given.
    """

    def __init__(self, conditions: Sequence[ConditionLike]) -> None:
        several = checked_entries("conditions", conditions, "a sequence of conditions")
        if not several:
            raise ValueError("no condition was given; combine at least one")
        self.conditions: tuple[ConditionLike, ...] = tuple(own(condition) for condition in several)

    def answers(self, steps: TensorDictBase) -> Tensor:
        return torch.stack([holds(condition, steps) for condition in self.conditions])

    def fresh(self) -> Condition:
        return type(self)(self.conditions)

    def end_episodes(self, trajectories: Sequence[int | None]) -> None:
        for condition in self.conditions:
            if isinstance(condition, Condition):
                condition.end_episodes(trajectories)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of every condition."""
        return {"conditions": [state_of(condition) for condition in self.conditions]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for condition, saved in zip(self.conditions, state["conditions"], strict=True):
            load_state_of(condition, saved)


@recorded
class EveryOf(Combination):
    """True where all of the conditions are; see :func:`lightning_replay.events.every_of`."""

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return self.answers(steps).all(0)

    def __repr__(self) -> str:
        return f"every_of({', '.join(map(repr, self.conditions))})"


@recorded
class AnyOf(Combination):
    """True where at least one of the conditions is; see :func:`lightning_replay.events.any_of`."""

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return self.answers(steps).any(0)

    def __repr__(self) -> str:
        return f"any_of({', '.join(map(repr, self.conditions))})"
