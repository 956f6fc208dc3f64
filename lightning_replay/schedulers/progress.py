# SPDX-License-Identifier: Apache-2.0
"""Progress signals for the schedulers of a curriculum, computed from the returns of each task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from lightning_replay.saving.spec import recorded
from lightning_replay.validation import checked_count, checked_number


class ReturnProgress(ABC):
    """Turns the returns of episodes into progress signals in [0, 1], separately for each task.

    Call :meth:`episode` at the end of every episode and pass its result, unless ``None``, to the buffer's
    ``progress``. A scheduler learns once from each signal, so ``every`` sets how often it does.

    Args:
        low: least return, the signal 0.
        high: greatest return, the signal 1.
        window: newest episodes of a task that count.
        every: episodes of a task from one signal to the next.

    Raises:
        ValueError: ``low`` is not below ``high``, or ``window`` or ``every`` is too small.
    """

    least_episodes: int = 1

    def __init__(self, low: float, high: float, window: int = 100, every: int = 10) -> None:
        self.low: float = checked_number("low", low)
        self.high: float = checked_number("high", high)
        if not self.low < self.high:
            raise ValueError(f"low is {low} and high is {high}; give the least and the greatest return, low < high")
        self.window: int = checked_count("window", window, self.least_episodes, of="episodes")
        self.every: int = checked_count("every", every, of="episodes")
        self._returns: dict[int, deque[float]] = {}
        self._episodes: dict[int, int] = {}

    def episode(self, task: int, episode_return: float) -> float | None:
        """Takes the undiscounted return of an episode that ended.

        Returns:
            A new signal in [0, 1] at every ``every``-th episode of the task, ``None`` at the others.

        Raises:
            ValueError: the return is NaN or infinite.
        """
        if not math.isfinite(episode_return):
            raise ValueError(
                f"the return of an episode of task {task} is {episode_return}; a progress signal needs finite returns"
            )
        returns = self._returns.setdefault(task, deque(maxlen=self.window))
        returns.append(float(episode_return))
        self._episodes[task] = self._episodes.get(task, 0) + 1
        if self._episodes[task] % self.every or len(returns) < self.least_episodes:
            return None
        return min(max(self.signal(list(returns)), 0.0), 1.0)

    @abstractmethod
    def signal(self, returns: list[float]) -> float:
        """Computes the signal of a task from its newest returns, oldest first; clipped to [0, 1] afterwards."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "returns": {str(task): list(returns) for task, returns in self._returns.items()},
            "episodes": {str(task): episodes for task, episodes in self._episodes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._returns = {int(task): deque(returns, maxlen=self.window) for task, returns in state["returns"].items()}
        self._episodes = {int(task): int(episodes) for task, episodes in state["episodes"].items()}


@recorded
class MeanReturn(ReturnProgress):
    """Mean of the newest returns of a task: ``(mean - low) / (high - low)``, clipped to [0, 1].

    The signal of Distributed Parallel Curriculum Experience Replay, as far as its figure 7 shows it: it is highest for
    tasks that are played well.

    Args:
        low: least return, the signal 0.
        high: greatest return, the signal 1; 5 for a goal of the half-field tasks.
        window: newest episodes of a task that count.
        every: episodes of a task from one signal to the next.

    Example:
        >>> progress = MeanReturn(low=0.0, high=5.0, every=2)
        >>> [progress.episode(0, value) for value in (0.0, 5.0, 5.0, 0.0)]
        [None, 0.5, None, 0.5]
    """

    def signal(self, returns: list[float]) -> float:
        return (math.fsum(returns) / len(returns) - self.low) / (self.high - self.low)


@recorded
class ReturnChange(ReturnProgress):
    """Change of the returns of a task: ``|newer mean - older mean| / (high - low)``, clipped to [0, 1].

    The means are those of the newer and of the older half of the window; the middle one of an odd number of returns
    counts in neither. A task that is mastered, or out of reach, has signal 0, so a scheduler prefers tasks that are
    being learned or forgotten.

    Args:
        low: least return.
        high: greatest return; a change from ``low`` to ``high`` is the signal 1.
        window: newest episodes of a task that count, at least 2.
        every: episodes of a task from one signal to the next.

    Example:
        >>> progress = ReturnChange(low=0.0, high=5.0, window=4, every=4)
        >>> [progress.episode(0, value) for value in (0.0, 0.0, 0.0, 5.0)]
        [None, None, None, 0.5]
    """

    least_episodes = 2

    def signal(self, returns: list[float]) -> float:
        half = len(returns) // 2
        return abs(math.fsum(returns[-half:]) - math.fsum(returns[:half])) / half / (self.high - self.low)
