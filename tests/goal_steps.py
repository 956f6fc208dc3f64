# SPDX-License-Identifier: Apache-2.0
"""Steps of goal environments whose goals are numbers, and what relabelling may make of them, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

OWN_GOAL = -1.0  # which no step achieves


def reached(achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any]) -> np.ndarray:
    """Whether the two numbers of the goals are equal: flags, or rewards of 0 and 1."""
    return (achieved == desired).all(-1)


def costly(achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any]) -> np.ndarray:
    """1 where the goals are equal, less the sums of all stored columns ``[N, ...]`` that the function gets."""
    return 1.0 * reached(achieved, desired, info) - sum(column.sum(-1) for column in info.values())


def distance(achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any]) -> np.ndarray:
    return -np.abs(achieved - desired).sum(-1)


def goal_rows(numbers: Sequence[int], trajectory: int | None = None, done: bool = False, flat: bool = False) -> Any:
    """Rows that go from each number to the next one, the last one terminated if ``done``; rewards are 100."""
    count = len(numbers)
    before = torch.tensor(numbers, dtype=torch.float32).unsqueeze(1).repeat(1, 2)
    ends = torch.zeros(count, 1, dtype=torch.bool)
    ends[-1] = done
    both = [
        {"observation": 2 * goal, "achieved_goal": goal, "desired_goal": torch.full((count, 2), OWN_GOAL)}
        for goal in (before, before + 1)
    ]
    now, following = both if flat else ({"observation": both[0]}, {"observation": both[1]})
    following |= {"reward": torch.full((count, 1), 100.0), "terminated": ends}
    following |= {"truncated": torch.zeros_like(ends), "done": ends.clone()}
    rows = TensorDict({**now, "action": torch.zeros(count, 1), "next": following}, [count])
    return rows if trajectory is None else rows.set("trajectory", torch.full((count,), trajectory))


@dataclass
class GoalOracle:
    """The rows of :func:`goal_rows` by number: those of one episode are consecutive, and no two rows are alike."""

    strategy: str
    n_steps: int
    discount: float
    cost: float = 0.0  # of each step, times its number
    done: set[int] = field(default_factory=set)  # the last rows of episodes
    truncated: set[int] = field(default_factory=set)  # those of them that were broken off

    def run(self, number: int, held: set[int]) -> list[int]:
        """The stored rows that the links lead to from this one, and those that lead to it, oldest first."""
        run = [number]
        while run[0] - 1 in held and run[0] - 1 not in self.done:
            run.insert(0, run[0] - 1)
        while run[-1] not in self.done and run[-1] + 1 in held:
            run.append(run[-1] + 1)
        return run

    def goals(self, number: int, held: set[int]) -> set[int]:
        """The numbers that the new goal of a row may be."""
        run = self.run(number, held)
        steps = {"future": run[run.index(number) :], "final": run[-1:], "episode": run}[self.strategy]
        return {step + 1 for step in steps}

    def row(self, number: int, goal: float, held: set[int]) -> dict[str, float]:
        """What a row becomes with this goal, :data:`OWN_GOAL` where it is not relabelled."""
        run = self.run(number, held)
        steps = run[run.index(number) :][: self.n_steps]
        is_own = goal == OWN_GOAL
        rewards = []
        for step in steps:
            rewards.append(100.0 if is_own else float(step + 1 == goal) - self.cost * step)
            if not is_own and step + 1 == goal:
                break
        last = steps[len(rewards) - 1]
        terminated = last in self.done - self.truncated if is_own else last + 1 == goal
        done = last in self.done or terminated
        return {
            "next": last + 1,
            "reward": sum(self.discount**power * reward for power, reward in enumerate(rewards)),
            "terminated": terminated,
            "done": done,
            "truncated": last in self.truncated or (done and not terminated),
            "steps": len(rewards),
            "remaining": 0.0 if terminated else self.discount ** len(rewards),
        }
