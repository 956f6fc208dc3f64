# SPDX-License-Identifier: Apache-2.0
"""Conversion of recorded data sets to transitions."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from tensordict import TensorDict


def minari_transitions(dataset: Any, *, dtype: torch.dtype | None = torch.float32) -> TensorDict:
    """Returns every step of a Minari data set ``[N]``, in time order, for ``replay.extend``.

    The column ``trajectory``, int64 ``[N]``, is the number of the episode. TorchRL's own data sets need no conversion:
    ``replay.extend(dataset[:])``.

    Args:
        dataset: from ``minari.load_dataset``.
        dtype: of every floating-point column; ``None`` keeps them as recorded.

    Raises:
        ValueError: the data set has no episode.
        TypeError: observations or actions are neither arrays nor dictionaries of arrays.
    """
    episodes = [_episode_rows(episode, number, dtype) for number, episode in enumerate(dataset.iterate_episodes())]
    if not episodes:
        raise ValueError("the data set has no episode; pass a Minari data set with recorded steps")
    return torch.cat(episodes)


def _episode_rows(episode: Any, number: int, dtype: torch.dtype | None) -> TensorDict:
    steps = len(episode.rewards)
    terminated, truncated = (
        torch.from_numpy(numpy.asarray(ends, dtype=bool)).reshape(steps, 1)
        for ends in (episode.terminations, episode.truncations)
    )
    rows = {
        # One observation more than steps: the last one is only a successor.
        "observation": _columns(episode.observations, dtype, slice(0, steps)),
        "action": _columns(episode.actions, dtype),
        "next": {
            "observation": _columns(episode.observations, dtype, slice(1, steps + 1)),
            "reward": _columns(numpy.asarray(episode.rewards), dtype).reshape(steps, 1),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        },
        "trajectory": torch.full((steps,), number, device="cpu"),
    }
    return TensorDict(rows, [steps])


def _columns(value: Any, dtype: torch.dtype | None, rows: slice = slice(None)) -> Any:
    if isinstance(value, dict):
        return {key: _columns(item, dtype, rows) for key, item in value.items()}
    if not isinstance(value, numpy.ndarray):
        raise TypeError(
            f"observations and actions must be arrays or dictionaries of arrays; got {type(value).__name__}. "
            "Flatten the spaces of the data set first"
        )
    column = torch.from_numpy(value[rows])
    return column.to(dtype) if dtype is not None and column.is_floating_point() else column
