# SPDX-License-Identifier: Apache-2.0
"""Segments of episodes for tests of levels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict


def segment(
    rewards: Sequence[float] = (0.0,),
    values: Sequence[float] | None = None,
    *,
    done: bool = True,
    terminated: bool | None = None,
    last_value: float = 0.0,
    logits: Sequence[Sequence[float]] | None = None,
) -> TensorDict:
    """Steps ``[T]`` of one episode, values 0 if absent; a done one is terminated unless said otherwise."""
    length = len(rewards)
    value = torch.tensor(values if values is not None else [0.0] * length, dtype=torch.float64)
    ends, dies = torch.zeros(2, length, dtype=torch.bool).unbind()
    ends[-1], dies[-1] = done, done if terminated is None else terminated
    following = {
        "reward": torch.tensor(rewards, dtype=torch.float64),
        "state_value": torch.cat((value[1:], torch.tensor([last_value], dtype=torch.float64))),
        "terminated": dies,
        "truncated": ends & ~dies,
        "done": ends,
    }
    steps = TensorDict({"state_value": value, "next": TensorDict(following, [length])}, [length])
    if logits is not None:
        steps["logits"] = torch.tensor(logits, dtype=torch.float64)
    return steps


def scored(score: float, *, done: bool = True, length: int = 1) -> TensorDict:
    """Steps whose :func:`first_reward` is ``score``."""
    return segment([score] * length, done=done)


def first_reward(steps: TensorDict) -> float:
    """A score that tests choose: the mean reward."""
    return float(steps["next", "reward"].mean())
