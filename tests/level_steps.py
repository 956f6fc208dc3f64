# SPDX-License-Identifier: Apache-2.0
"""Segments of episodes and small level buffers for tests of levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from lightning_replay.levels import LevelBuffer


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


def buffer(levels: Any = 10, **options: Any) -> LevelBuffer:
    """One scored by :func:`first_reward`."""
    return LevelBuffer(levels, **{"score": first_reward, "seed": 0, **options})


def play(levels: LevelBuffer, level_id: int, score: float, actor: int | str = 0) -> float | None:
    """One episode of a single step on a level."""
    levels.start(actor, level_id)
    return levels.update(actor, level_id, scored(score), episode_done=True)


def column(levels: LevelBuffer, name: str) -> dict[int, float]:
    """A column of ``probabilities()`` by level."""
    shown = levels.probabilities()
    return dict(zip(shown["level_id"].tolist(), shown[name].tolist(), strict=True))
