# SPDX-License-Identifier: Apache-2.0
"""Whether the rows that a replay holds are those that environments of a data module store."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, Space

from lightning_replay.agents.spaces import ParameterizedActions, is_parameterized
from lightning_replay.envs.fitting import outside_bounds, parts_of
from lightning_replay.episodes.running import held_slots
from lightning_replay.replay import Replay
from lightning_replay.storage.columns import NOT_STORED
from lightning_replay.storage.packed import read_columns
from lightning_replay.storage.rows import leaves_of, shown

__all__ = ["Columns", "row_differences"]

#: dtype and shape of one row, by key
Columns = dict[tuple[str, ...], tuple[torch.dtype, tuple[int, ...]]]


def row_differences(
    replay: Replay, observation_space: Space[Any], action_space: Space[Any], num_envs: int, further: Columns
) -> list[str]:
    """Returns what differs between stored rows and those of ``num_envs`` environments, a clause for each column.

    ``further`` are columns of the environments beside those that all store.
    """
    if replay._changes_rows:  # transforms, on their way in
        return []
    if is_parameterized(action_space):  # as the agent gives it, with the parameters of all actions
        actions = ParameterizedActions.of(action_space)
        action_space = Dict(discrete=Discrete(len(actions.boxes)), parameters=Box(actions.low, actions.high))
    actions_of = parts_of(action_space, ("action",))
    spaces = parts_of(observation_space, ("observation",)) | actions_of
    spaces |= parts_of(observation_space, ("next", "observation"))
    expected: Columns = {key: _column_of(space) for key, space in spaces.items()}
    slots = held_slots(replay.storage)
    row = replay.storage.get(slots[:1])[0]
    stored: Columns = {key: (dtype, tuple(shape)) for key, dtype, shape in leaves_of(row) if key not in NOT_STORED}
    if num_envs:  # else no rows are added, and columns of the spaces alone matter
        ends = {("next", name): (torch.bool, (1,)) for name in ("terminated", "truncated", "done")}
        expected |= {("next", "reward"): (torch.float32, (1,))} | ends | further
        if num_envs > 1 or ("trajectory",) in stored:
            expected["trajectory",] = (torch.int64, ())
    absent = "no such column"
    differences = [
        f"{shown(key)}: stored {stored.get(key, absent)}, of the environment {expected.get(key, absent)}"
        for key in sorted(expected.keys() | stored.keys() if num_envs else expected)
        if stored.get(key) != expected.get(key)
    ]
    for key, space in actions_of.items():
        if stored.get(key) == expected[key]:
            (column,) = read_columns(replay.storage, slots, [key])
            differences += filter(None, [outside_bounds(column.cpu().numpy(), space, shown(key))])
    return differences


def _column_of(space: Space[Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
    return torch.float32 if dtype.is_floating_point else dtype, tuple(space.shape or ())
