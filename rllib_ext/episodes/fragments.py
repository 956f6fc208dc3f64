# SPDX-License-Identifier: Apache-2.0
"""The trajectory of an incoming episode fragment, and the rows of it that are new."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass
class _Known:
    trajectory: int
    next_step: int


class FragmentTracker:
    """Joins the fragments in which EnvRunners send an episode, by ``id_`` and ``t_started``.

    ::

        fragment        t_started  rows   known until   result
        first               0       3          -        rows 0 1 2, new trajectory
        second              3       2          3        rows 3 4, same trajectory
        second again        3       2          5        nothing new, 2 rows counted as duplicates
        overlapping         4       3          5        rows 5 6, same trajectory, 1 duplicate
        one was lost        9       2          7        rows 9 10, new trajectory, 1 gap

    Args:
        remembered: the episodes remembered, finished ones too (so that a fragment sent twice is known); the one that
            was continued longest ago is forgotten first.

    Example:
        >>> fragments = FragmentTracker()
        >>> fragments.place("a", 0, 3), fragments.place("a", 3, 2), fragments.place("a", 3, 2)
        ((0, 0), (0, 0), (0, 2))
    """

    def __init__(self, remembered: int = 4096) -> None:
        self.remembered = remembered
        self.episodes = 0
        self.steps = 0
        self.gaps = 0
        self.duplicates = 0
        self._trajectories = 0
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def place(self, episode_id: str, first_step: int, length: int) -> tuple[int, int]:
        """Returns the trajectory of a fragment's rows and the first new row; ``length`` if none is new."""
        known = self._known.get(episode_id)
        if known is None:
            self.episodes += 1
            known = self._known[episode_id] = _Known(self._next_trajectory(), first_step)
            if len(self._known) > self.remembered:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(episode_id)
        if first_step > known.next_step:
            # The rows are complete transitions; only the link to the previous fragment is lost.
            self.gaps += 1
            known.trajectory = self._next_trajectory()
        first_row = min(max(known.next_step - first_step, 0), length)
        self.duplicates += first_row
        self.steps += length - first_row
        known.next_step = max(known.next_step, first_step + length)
        return known.trajectory, first_row

    def forget_running(self) -> None:
        """Removes every episode, so that further fragments begin new ones; the counts stay."""
        self._known.clear()

    def state(self) -> dict[str, Any]:
        """Returns plain values from which :meth:`load_state` restores everything."""
        return {
            "counts": [self.episodes, self.steps, self.gaps, self.duplicates, self._trajectories],
            "known": [[name, known.trajectory, known.next_step] for name, known in self._known.items()],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state`."""
        self.episodes, self.steps, self.gaps, self.duplicates, self._trajectories = state["counts"]
        self._known = OrderedDict((name, _Known(trajectory, step)) for name, trajectory, step in state["known"])

    def _next_trajectory(self) -> int:
        self._trajectories += 1
        return self._trajectories - 1
