# SPDX-License-Identifier: Apache-2.0
"""Where the newest row of each running episode is, to be closed if the episode is interrupted."""

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
    """Remembers the newest rows of running episodes, and marks them truncated when these are interrupted.

    Args:
        replay: whose rows are single steps.
        fragments: says how many episodes are remembered; those of lost EnvRunners are forgotten some time.
    """

    def __init__(self, replay: Replay, fragments: FragmentTracker) -> None:
        self._replay = replay
        self._fragments = fragments
        self._slots: OrderedDict[int, int] = OrderedDict()  # trajectory -> slot of its newest row

    def follow(self, rows: TensorDictBase, index: Tensor) -> int:
        """Called with what was given to ``extend`` and the slots it returned; 0, as no more rows were stored."""
        trajectory = rows["trajectory"].numpy()
        last_rows = np.flatnonzero(np.diff(trajectory, append=-1))
        done, slots = rows["next", "done"].numpy(), np.full(len(rows), -1)
        # Writers that may leave rows out say which entered; others keep the last of more than they have room for.
        entered = getattr(self._replay.writer, "entered", slice(len(rows) - len(index), None))
        slots[entered if isinstance(entered, slice) else entered.numpy()] = index.numpy(force=True)
        for row in last_rows.tolist():
            self._slots.pop(int(trajectory[row]), None)
            if not done[row, 0] and slots[row] >= 0:  # the writer may refuse rows
                self._slots[int(trajectory[row])] = int(slots[row])
        while len(self._slots) > self._fragments.remembered:  # their EnvRunner was lost
            self._slots.popitem(last=False)
        return 0

    def close(self) -> int:
        """Ends all that run; 0, as no more rows were stored."""
        import torch

        storage: Any = self._replay.storage
        if self._slots:
            slots = torch.tensor(list(self._slots.values()), device=storage.device)
            names = torch.tensor(list(self._slots), device=storage.device)
            still_there = storage.all_rows["trajectory"][slots].flatten() == names  # others were overwritten
            live = getattr(storage, "live_slots", None)
            if live is not None:
                still_there &= torch.from_numpy(live.contains(slots.cpu().numpy())).to(storage.device)
            slots = slots[still_there]
            self._replay.truncate(slots, storage.generation_of(slots))
        self._slots.clear()
        return 0

    def state(self) -> list[list[int]]:
        """Plain values from which :meth:`load_state` restores everything."""
        return [[trajectory, slot] for trajectory, slot in self._slots.items()]

    def load_state(self, state: list[list[int]]) -> None:
        """Restores what :meth:`state` returned."""
        self._slots = OrderedDict((trajectory, slot) for trajectory, slot in state)
