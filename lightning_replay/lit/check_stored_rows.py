# SPDX-License-Identifier: Apache-2.0
"""Whether the rows that a replay holds match the rows that environments store, or that an agent accepts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space

from lightning_replay.agents.spaces import ParameterizedActions, is_parameterized
from lightning_replay.envs.building import leaf_spaces, outside_bounds
from lightning_replay.episodes.running import held_slots
from lightning_replay.replay import Replay
from lightning_replay.storage.columns import NOT_STORED
from lightning_replay.storage.packed import read_columns
from lightning_replay.storage.rows import leaves_of, shown

STATE = ("recurrent_state",)  # state of an agent before each step

#: dtype and shape of one row
Column = tuple[torch.dtype, tuple[int, ...]]
Columns = dict[tuple[str, ...], Column]


def row_differences(
    replay: Replay,
    observation_space: Space[Any],
    action_space: Space[Any],
    num_envs: int,
    further: Columns,
    of_agent: bool = False,
) -> list[str]:
    """Returns what differs between stored rows and the rows of ``num_envs`` environments, a clause for each column.

    ``further`` are columns beside the ones that all environments store. Without environments no rows are added, and of
    all columns beside the columns of the spaces only the present ones matter. Spaces ``of_agent`` come from
    :func:`~lightning_replay.agents.spaces.spaces_of_sizes`, whose integers may have any dtype.
    """
    if replay.parts.changes_rows:  # transforms, on their way in
        return []
    if is_parameterized(action_space):  # The agent gives the parameters of all actions.
        actions = ParameterizedActions.of(action_space)
        action_space = Dict(discrete=Discrete(len(actions.boxes)), parameters=Box(actions.low, actions.high))
    actions_of = leaf_spaces(action_space, ("action",))
    spaces = leaf_spaces(observation_space, ("observation",)) | actions_of
    spaces |= leaf_spaces(observation_space, ("next", "observation"))
    spaces = {key: space for key, space in spaces.items() if space.shape is not None}  # else no sizes are given
    expected: Columns = {key: _column_of(space) for key, space in spaces.items()}
    slots = held_slots(replay.storage)
    leaves = leaves_of(replay.storage.get(slots[:1])[0])
    stored: Columns = {key: (dtype, tuple(shape)) for key, dtype, shape in leaves if key not in NOT_STORED}
    if of_agent:  # An agent accepts more dtypes than an environment gives.
        taken = (key for key, space in spaces.items() if key in stored and _takes(key, space, *stored[key]))
        expected |= {key: stored[key] for key in taken}
    ends = {("next", name): (torch.bool, (1,)) for name in ("terminated", "truncated", "done")}
    further = {("next", "reward"): (torch.float32, (1,))} | ends | further
    if num_envs > 1 or (num_envs and ("trajectory",) in stored):
        further["trajectory",] = (torch.int64, ())
    if not num_envs:
        # Losses take rewards and ends of any dtype, and without a dimension.
        is_number = {key: key[0] == "next" and math.prod(shape) == 1 for key, (_, shape) in stored.items()}
        further = {key: column for key, column in further.items() if not is_number.get(key, True)}
    expected |= further
    absent = "no such column"
    source = "agent" if of_agent else "environment"
    differences = [
        f"{shown(key)}: stored {stored.get(key, absent)}, of the {'agent' if key == STATE else source} "
        f"{expected.get(key, absent)}{_remedy(key, stored.get(key), expected.get(key), spaces.get(key))}"
        for key in sorted(expected.keys() | stored.keys() if num_envs else expected)
        if stored.get(key) != expected.get(key)
    ]
    for key, space in spaces.items():
        if stored.get(key) == expected[key] and (key in actions_of or isinstance(space, Discrete | MultiDiscrete)):
            (column,) = read_columns(replay.storage, slots, [key])
            differences += filter(None, [outside_bounds(column.cpu().numpy(), space, shown(key))])
    return differences


def _column_of(space: Space[Any]) -> Column:
    dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
    return torch.float32 if dtype.is_floating_point else dtype, tuple(space.shape or ())


def _takes(key: tuple[str, ...], space: Space[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    if key[0] == "action":  # losses use actions as an index
        return isinstance(space, Discrete) and dtype == torch.int64 and shape == (1,)
    is_open = space.dtype is None or np.dtype(space.dtype).kind == "i"
    return is_open and not dtype.is_floating_point and shape == space.shape


def _remedy(key: tuple[str, ...], stored: Column | None, expected: Column | None, space: Space[Any] | None) -> str:
    if expected is None or (key == STATE and stored is not None):
        return f" (leave it out{'' if expected is None else ' for zeros'}: rows.exclude({shown(key)}))"
    if stored is None:
        known = {STATE: "zeros will do", ("trajectory",): "the number of each row's episode"}
        return f" ({known[key]})" if key in known else ""
    if isinstance(space, Discrete) and stored[1] == (space.n,):
        return " (of one-hot values store argmax(-1))"
    return ""
