# SPDX-License-Identifier: Apache-2.0
"""Conditions over the course of an episode: the first time, for a while, again after a failure."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.episodes.links import trajectory_of
from lightning_replay.events.conditions.condition import (
    Condition,
    ConditionLike,
    holds,
    load_state_of,
    one_number,
    own,
    state_of,
)
from lightning_replay.saving.spec import recorded
from lightning_replay.validation import checked_count


class EpisodeCondition(Condition):
    """A condition that keeps one integer for each running episode.

    Must get every step exactly once, in order of time; the steps of several environments may be interleaved in one
    call, and an episode may continue in the next call. ``trajectory`` (or ``("collector", "traj_ids")``) identifies the
    episode; steps without it are one environment in order. A done step ends its episode, which is then forgotten. A
    subclass defines :meth:`follow` and, where an episode does not begin with 0, ``start``.

    Args:
        condition: evaluated at each step; its own memory is copied, not shared.
    """

    start: int = 0

    def __init__(self, condition: ConditionLike) -> None:
        self.condition: ConditionLike = own(condition)
        self._running: dict[int | None, int] = {}

    @abstractmethod
    def follow(self, remembered: int, held: bool) -> tuple[bool, int]:
        """Returns whether the event happens at one step of an episode, and the integer to remember.

        Args:
            remembered: integer of the step before, ``start`` at the first step of an episode.
            held: whether ``condition`` is true at this step.
        """

    def __call__(self, steps: TensorDictBase) -> Tensor:
        done = one_number(steps, ("next", "done"))
        trajectory = trajectory_of(steps)
        names = [None] * len(steps) if trajectory is None else trajectory.reshape(-1).tolist()
        held = holds(self.condition, steps)
        happened = []
        for name, holding, ends in zip(names, held.tolist(), done.tolist(), strict=True):
            happens, remembered = self.follow(self._running.get(name, self.start), holding)
            happened.append(happens)
            if ends or remembered == self.start:
                self._running.pop(name, None)
            else:
                self._running[name] = remembered
        return torch.tensor(happened, dtype=torch.bool, device=held.device)

    def fresh(self) -> Condition:
        again = copy.copy(self)
        again.condition, again._running = own(self.condition), {}
        return again

    def end_episodes(self, trajectories: Sequence[int | None]) -> None:
        """Discards these episodes; ``None`` is the episode of steps without ``trajectory``."""
        for trajectory in trajectories:
            self._running.pop(trajectory, None)
        if isinstance(self.condition, Condition):
            self.condition.end_episodes(trajectories)

    def state_dict(self) -> dict[str, Any]:
        """Returns the memory of the running episodes, and the state of the condition inside."""
        named = [trajectory for trajectory in self._running if trajectory is not None]
        return {
            "trajectory": torch.tensor(named, dtype=torch.int64, device="cpu"),
            "remembered": torch.tensor([self._running[name] for name in named], dtype=torch.int64, device="cpu"),
            "unnamed": self._running.get(None),
            "condition": state_of(self.condition),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running = dict(zip(state["trajectory"].tolist(), state["remembered"].tolist(), strict=True))
        if state["unnamed"] is not None:
            self._running[None] = int(state["unnamed"])
        load_state_of(self.condition, state["condition"])


@recorded
class FirstInEpisode(EpisodeCondition):
    """True where ``condition`` is for the first time in the episode.

    ::

        condition   . . T T . T     T = true, . = false
        this        . . T . . .
    """

    def follow(self, remembered: int, held: bool) -> tuple[bool, int]:
        """Keeps 1 once the condition has held."""
        return held and remembered == 0, int(held or remembered == 1)

    def __repr__(self) -> str:
        return f"first_in_episode({self.condition!r})"


@recorded
class Sustained(EpisodeCondition):
    """True where ``condition`` has held for exactly ``steps`` consecutive steps of an episode: once in each run.

    ::

        condition   T T . T T T T . T T T     T = true, . = false
        steps=3     . . . . . T . . . . T

    Args:
        condition: evaluated at each step.
        steps: length of the run, the step of the event included.

    Raises:
        ValueError: ``steps`` is below 1.
    """

    def __init__(self, condition: ConditionLike, steps: int) -> None:
        super().__init__(condition)
        self.steps: int = checked_count("steps", steps, of="consecutive steps")

    def follow(self, remembered: int, held: bool) -> tuple[bool, int]:
        """Keeps the length of the run, at most one above ``steps``."""
        length = min(remembered, self.steps) + 1 if held else 0
        return length == self.steps, length

    def __repr__(self) -> str:
        return f"sustained({self.condition!r}, steps={self.steps})"


@recorded
class Reestablished(EpisodeCondition):
    """True where ``condition`` has held for ``steps`` consecutive steps after it had failed: once for each failure.

    A failure is a step, or several in a row, at which it is false, also the first of an episode. An episode without
    failure has no such event. Stratified Sampling from Event Tables, history events.

    ::

        condition   T T T . T . . T T T T . T T     T = true, . = false
        steps=2     . . . . . . . . T . . . . T

    Args:
        condition: evaluated at each step.
        steps: length of the run after the failure, the step of the event included.

    Raises:
        ValueError: ``steps`` is below 1.
    """

    start = -1

    def __init__(self, condition: ConditionLike, steps: int) -> None:
        super().__init__(condition)
        self.steps: int = checked_count("steps", steps, of="consecutive steps")

    def follow(self, remembered: int, held: bool) -> tuple[bool, int]:
        """Keeps how long the condition has held since it failed, -1 before a failure and after the event."""
        if not held:
            return False, 0
        length = remembered + 1 if remembered >= 0 else -1
        return (True, -1) if length == self.steps else (False, length)

    def __repr__(self) -> str:
        return f"reestablished({self.condition!r}, steps={self.steps})"
