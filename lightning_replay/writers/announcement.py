# SPDX-License-Identifier: Apache-2.0
"""Rows just written, and rows among them that were not stored, passed on to the buffers of a storage."""

from __future__ import annotations

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.links import missing_steps, trajectory_of
from lightning_replay.parts import BufferHooks


def announce(storage: Storage, index: Tensor, entered: np.ndarray, data: TensorDictBase) -> None:
    """Calls the buffers of a storage with rows just written, and with where steps between them are missing.

    No return and no partner then goes from a row over a missing step to a later one.

    Args:
        storage: the rows are in.
        index: int64 ``[n]``, their slots.
        entered: int64 ``[n]`` ascending, which of the rows that were given they are.
        data: the rows that were given, TensorDict ``[N]``, in time order within each trajectory.
    """
    missing = missing_steps(trajectory_of(data), entered, data.shape[0]) if len(entered) < data.shape[0] else None
    for buffer in storage._attached_entities:
        hooks = buffer if isinstance(buffer, BufferHooks) else None  # TorchRL's buffers follow no episodes
        if missing is not None and hooks is not None:
            hooks.break_episodes(missing.trajectories)
        if len(index):
            buffer.mark_update(index)
        if missing is not None and hooks is not None:
            hooks.cut(index[missing.last_before.to(index.device)])
