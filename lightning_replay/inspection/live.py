# SPDX-License-Identifier: Apache-2.0
"""What a buffer in use holds."""

from __future__ import annotations

from lightning_replay.inspection.contents import LevelContents, ReplayContents, contents_of, levels_of
from lightning_replay.levels.selector import LevelSelector
from lightning_replay.replay import Replay
from lightning_replay.saves import present_state
from lightning_replay.saving.spec import describe


def look_at(buffer: Replay | LevelSelector) -> ReplayContents | LevelContents:
    """Returns what a buffer holds; it is not changed, and others wait meanwhile.

    Reads rewards, ends and trajectories of all rows once, O(N).

    Raises:
        TypeError: neither a replay nor a level source.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from lightning_replay import recipes
        >>> replay = recipes.uniform(capacity=4, batch_size=2)
        >>> _ = replay.extend(TensorDict({"observation": torch.zeros(6, 3)}, [6]))
        >>> contents = look_at(replay)
        >>> contents.ages, contents.draws.effective_rows
        (array([1, 0, 3, 2]), 4.0)
    """
    if isinstance(buffer, LevelSelector):
        return levels_of(buffer.state_dict())
    if not isinstance(buffer, Replay):
        raise TypeError(f"buffer is a {type(buffer).__name__}; it must be a Replay or a level source")
    with present_state(buffer) as state:
        return contents_of(state, describe(buffer))
