# SPDX-License-Identifier: Apache-2.0
"""Progress signals of a curriculum from the fragments of episodes that arrive in the buffer."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from lightning_replay.schedulers.progress import ReturnProgress
    from lightning_replay.table_replay import CurriculumReplay


class EpisodeSlice(NamedTuple):
    """New rows of one trajectory; ``ended`` is whether the last one ended the episode, ``task`` that of the last."""

    trajectory: int
    first_step: int
    rewards: np.ndarray
    ended: bool
    task: int


class TaskProgress:
    """Sums the rewards of each episode, and sends the scheduler a progress signal when one ends.

    The buffer gets every row and every end, so nothing is lost with an EnvRunner. Episodes whose beginning or middle
    is missing do not count. Without ``progress``, which makes the signals, episodes are only counted. Of more than
    ``remembered`` running episodes the one continued longest ago is removed.
    """

    def __init__(self, replay: CurriculumReplay, progress: ReturnProgress | None, remembered: int = 4096) -> None:
        self.replay: CurriculumReplay = replay
        self._progress = progress
        self._remembered = remembered
        self._running: OrderedDict[int, float] = OrderedDict()
        self.episodes: Counter[str] = Counter()
        self._new: list[tuple[str, float]] = []
        self.signals: dict[str, float] = {}

    def update(self, slices: list[EpisodeSlice]) -> None:
        for one in slices:
            before = 0.0 if one.first_step == 0 else self._running.pop(one.trajectory, None)
            if before is None:
                continue
            total = before + float(np.sum(one.rewards, dtype=np.float64))
            if not one.ended:
                self._running[one.trajectory] = total
                continue
            name = self.replay.tasks[one.task]
            self.episodes[name] += 1
            signal = None if self._progress is None else self._progress.episode(one.task, total)
            if signal is not None:
                self.replay.progress(name, signal)
                self.signals[name] = signal
                self._new.append((name, signal))
        del self._new[: -self._remembered]
        while len(self._running) > self._remembered:  # their EnvRunner was lost
            self._running.popitem(last=False)

    def new_signals(self) -> list[tuple[str, float]]:
        """Returns the signals since the last call, each with its task, for a scheduler elsewhere."""
        signals, self._new = self._new, []
        return signals

    def forget_running(self) -> None:
        self._running.clear()

    def state(self) -> dict[str, Any]:
        return {
            "running": [[trajectory, total] for trajectory, total in self._running.items()],
            "episodes": dict(self.episodes),
            "signals": dict(self.signals),
            "progress": None if self._progress is None else self._progress.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._running = OrderedDict((trajectory, total) for trajectory, total in state["running"])
        self.episodes, self.signals = Counter(state["episodes"]), dict(state["signals"])
        if self._progress is not None and state["progress"] is not None:
            self._progress.load_state_dict(state["progress"])
