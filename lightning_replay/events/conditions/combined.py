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
    """Several conditions as one; every one of them is asked about every step, so that all can follow the episodes."""

    conditions: tuple[ConditionLike, ...]

    def answers(self, steps: TensorDictBase) -> Tensor:
        """Returns the values of the conditions, bool ``[number of conditions, N]``."""
        return torch.stack([holds(condition, steps) for condition in self.conditions])

    def fresh(self) -> Condition:
        """The same combination of fresh conditions."""
        return type(self)(self.conditions)  # type: ignore[call-arg]

    def end_episodes(self, trajectories: Sequence[int | None]) -> None:
        """Tells every condition."""
        for condition in self.conditions:
            if isinstance(condition, Condition):
                condition.end_episodes(trajectories)

    def state_dict(self) -> dict[str, Any]:
        """The state of every condition."""
        return {"conditions": [state_of(condition) for condition in self.conditions]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        for condition, saved in zip(self.conditions, state["conditions"], strict=True):
            load_state_of(condition, saved)


@recorded
class EveryOf(Combination):
    """True where all of the conditions are; see :func:`lightning_replay.events.every_of`."""

    def __init__(self, conditions: Sequence[ConditionLike]) -> None:
        self.conditions = _several(conditions)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Whether all conditions hold at each step."""
        return self.answers(steps).all(0)

    def __repr__(self) -> str:
        return f"every_of({', '.join(map(repr, self.conditions))})"


@recorded
class AnyOf(Combination):
    """True where at least one of the conditions is; see :func:`lightning_replay.events.any_of`."""

    def __init__(self, conditions: Sequence[ConditionLike]) -> None:
        self.conditions = _several(conditions)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Whether a condition holds at each step."""
        return self.answers(steps).any(0)

    def __repr__(self) -> str:
        return f"any_of({', '.join(map(repr, self.conditions))})"


def _several(conditions: Sequence[ConditionLike]) -> tuple[ConditionLike, ...]:
    several = checked_entries("conditions", conditions, "a sequence of conditions")
    if not several:
        raise ValueError("no condition was given; combine at least one")
    return tuple(own(condition) for condition in several)
