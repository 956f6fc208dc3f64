# SPDX-License-Identifier: Apache-2.0
"""The newest row of each running episode, which is truncated if the episode is interrupted."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torch import Tensor

    from lightning_replay.replay import Replay
    from rllib_ext.episodes.fragments import FragmentTracker


class RunningEpisodes:
    """Tracks the newest rows of running episodes, and truncates interrupted episodes.

    Args:
        replay: whose rows are single steps.
        fragments: whose limit of remembered episodes holds here too.
    """

    def __init__(self, replay: Replay, fragments: FragmentTracker) -> None:
        self._replay = replay
        self._fragments = fragments
        self._slots: OrderedDict[int, int] = OrderedDict()  # trajectory -> slot of its newest row

    def follow(self, rows: TensorDictBase, index: Tensor) -> int:
        """Updates the newest rows after ``extend``, given rows and slots; returns 0, as no more rows were stored."""
        trajectory = rows["trajectory"].numpy()
        last_rows = np.flatnonzero(np.diff(trajectory, append=-1))
        done, slots = rows["next", "done"].numpy(), np.full(len(rows), -1)
        entered = self._replay.last_insertion.rows
        slots[entered if isinstance(entered, slice) else entered.numpy(force=True)] = index.numpy(force=True)
        for row in last_rows.tolist():
            self._slots.pop(int(trajectory[row]), None)
            if not done[row, 0] and slots[row] >= 0:  # the writer may refuse rows
                self._slots[int(trajectory[row])] = int(slots[row])
        while len(self._slots) > self._fragments.remembered:  # their EnvRunner was lost
            self._slots.popitem(last=False)
        return 0

    def close(self) -> int:
        """Truncates all running episodes; returns 0, as no more rows were stored."""
        import torch

        storage: Any = self._replay.storage
        if self._slots:
            slots = torch.tensor(list(self._slots.values()), device=storage.device)
            names = torch.tensor(list(self._slots), device=storage.device)
            still_there = storage.all_rows["trajectory"][slots].flatten() == names  # others were overwritten
            is_held = storage.occupancy.held(slots)
            if is_held is not None:
                still_there &= is_held
            slots = slots[still_there]
            self._replay.truncate(slots, storage.generation_of(slots))
        self._slots.clear()
        return 0

    def state(self) -> list[list[int]]:
        """Returns plain values for :meth:`load_state`."""
        return [[trajectory, slot] for trajectory, slot in self._slots.items()]

    def load_state(self, state: list[list[int]]) -> None:
        """Restores :meth:`state`."""
        self._slots = OrderedDict((trajectory, slot) for trajectory, slot in state)
