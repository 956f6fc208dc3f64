# SPDX-License-Identifier: Apache-2.0
"""The trajectory of an incoming episode fragment, and the rows of it that are new."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


class FragmentTracker:
    """Joins the fragments in which EnvRunners send an episode, by ``id_`` and ``t_started``.

    ::

        fragment        t_started  rows   next step    result
        first               0       3          -        rows 0 1 2, new trajectory
        second              3       2          3        rows 3 4, same trajectory
        second again        3       2          5        nothing new, 2 rows counted as duplicates
        overlapping         4       3          5        rows 5 6, same trajectory, 1 duplicate
        one was lost        9       2          7        rows 9 10, new trajectory, 1 gap

    Finished episodes are remembered too, to recognize a fragment that is sent twice; the one continued longest ago is
    removed first.

    Example:
        >>> fragments = FragmentTracker()
        >>> fragments.place("a", 0, 3), fragments.place("a", 3, 2), fragments.place("a", 3, 2)
        ((0, 0), (0, 0), (0, 2))
    """

    def __init__(self, remembered: int = 4096) -> None:
        self.remembered = remembered
        self.episodes: int = 0
        self.steps: int = 0
        self.gaps: int = 0
        self.duplicates: int = 0
        self._trajectories = 0
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()  # trajectory and next step, by episode

    def place(self, episode_id: str, first_step: int, length: int) -> tuple[int, int]:
        """Returns the trajectory of a fragment's rows and the first new row; ``length`` if none is new."""
        known = self._known.pop(episode_id, None)
        if known is None or first_step > known[1]:
            # After a gap the rows are complete transitions; only the link to the fragment before is lost.
            self.episodes += known is None
            self.gaps += known is not None
            known = self._trajectories, first_step
            self._trajectories += 1
        trajectory, next_step = known
        first_row = min(next_step - first_step, length)
        self.duplicates += first_row
        self.steps += length - first_row
        self._known[episode_id] = trajectory, max(next_step, first_step + length)
        if len(self._known) > self.remembered:
            self._known.popitem(last=False)
        return trajectory, first_row

    def forget_running(self) -> None:
        """Removes every episode, so that further fragments begin new trajectories; the counts stay."""
        self._known.clear()

    def state(self) -> dict[str, Any]:
        return {
            "counts": [self.episodes, self.steps, self.gaps, self.duplicates, self._trajectories],
            "known": [[episode_id, *known] for episode_id, known in self._known.items()],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.episodes, self.steps, self.gaps, self.duplicates, self._trajectories = state["counts"]
        self._known = OrderedDict((name, (trajectory, step)) for name, trajectory, step in state["known"])
