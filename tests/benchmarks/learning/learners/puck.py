# SPDX-License-Identifier: Apache-2.0
"""A puck pushed to a goal from several distances, and TD3 of several seeds at once with a replay for each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from lightning_replay import Replay
from lightning_replay.table_replay import CurriculumReplay
from tests.benchmarks.learning.learners.stacked_td3 import StackedTD3

TASKS = ("target", "far", "near", "nearest")
DISTANCES = np.array([0.9, 0.6, 0.4, 0.2])  # of the starts from the goal, in the order of the tasks
FORCE, DRAG, GOAL_RADIUS, LIMIT = 0.01, 0.1, 0.1, 40
OBSERVATION, ACTION = 4, 2
_STARTS = 16  # of each task, in a test


class Pucks:
    """Pucks on a table of ±1 by ±1: a force ``[..., 2]`` in ±1 accelerates, drag and the edges slow down.

    Reward 1 where the puck is within the goal's radius of the middle, which ends an episode; else none, and the episode
    is truncated after 40 steps. Random forces push it 0.36 far in that time, root mean square.

    Args:
        task: of each puck, int64 of any shape.
        angle: of each start, seen from the goal, in turns.
    """

    def __init__(self, task: np.ndarray, angle: np.ndarray) -> None:
        self.position, self.velocity = np.zeros((2, *task.shape, 2))
        self.steps = np.zeros(task.shape, dtype=np.int64)
        self.place(np.ones(task.shape, dtype=bool), task, angle)

    def place(self, which: np.ndarray, task: np.ndarray, angle: np.ndarray) -> None:
        """Starts an episode of the pucks in the mask ``which``."""
        turned = 2.0 * np.pi * angle[..., None] - np.array([0.0, np.pi / 2])
        self.position[which] = (DISTANCES[task][..., None] * np.cos(turned))[which]
        self.velocity[which] = 0.0
        self.steps[which] = 0

    @property
    def observation(self) -> torch.Tensor:
        """Position and velocity in units of its limit, float32 ``[..., 4]``."""
        return torch.from_numpy(np.concatenate([self.position, self.velocity * DRAG / FORCE], -1)).float()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pushes all; returns terminated, at the goal, and truncated, out of time elsewhere."""
        self.velocity = (1.0 - DRAG) * self.velocity + FORCE * action
        moved = self.position + self.velocity
        self.position = moved.clip(-1.0, 1.0)
        self.velocity[moved != self.position] = 0.0
        self.steps += 1
        is_there = np.linalg.norm(self.position, axis=-1) < GOAL_RADIUS
        return is_there, (self.steps >= LIMIT) & ~is_there


class PuckRuns:
    """Runs of an agent with ``actors`` pucks and a replay each.

    Args:
        agent: of all runs.
        replays: one for each run. Those of a curriculum choose the task of each episode, the others play ``tasks``.
        seeds: of the starts and the random actions, one for each run.
        settings: ``actors``, ``tasks`` (a task for each actor), ``warmup_rounds``, ``draws_per_round`` and
            ``updates_per_draw``.
    """

    def __init__(
        self, agent: StackedTD3, replays: Sequence[Replay], seeds: Sequence[int], settings: dict[str, Any]
    ) -> None:
        self._agent, self._replays, self._settings = agent, replays, settings
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        self._task = np.array([self._tasks(replay) for replay in replays])
        self._pucks = Pucks(self._task, self._drawn()[..., 0])
        self._trajectory = np.tile(np.arange(settings["actors"]), (len(seeds), 1))
        self.rounds = 0

    def play_round(self) -> None:
        """Plays one step of every puck and makes the updates that follow."""
        before, drawn = self._pucks.observation, self._drawn()
        is_warmup = self.rounds < self._settings["warmup_rounds"]
        action = 2.0 * drawn[..., 1:] - 1.0 if is_warmup else self._agent.act(before, explore=True).numpy()
        terminated, truncated = self._pucks.step(action)
        self._store(before, action.astype(np.float32), terminated, truncated)
        self._restart(terminated | truncated, drawn[..., 0])
        self.rounds += 1
        if not is_warmup:
            for _ in range(self._settings["draws_per_round"]):
                self._learn()

    def success(self) -> dict[str, np.ndarray]:
        """Returns by task the share ``[R]`` of starts around the goal from which it is reached without exploration."""
        task = np.repeat(np.arange(len(TASKS)), _STARTS)
        angle = np.tile((np.arange(_STARTS) + 0.5) / _STARTS, len(TASKS))
        shape = (len(self._replays), len(task))
        pucks = Pucks(np.broadcast_to(task, shape), np.broadcast_to(angle, shape))
        reached = np.zeros(shape, dtype=bool)
        for _ in range(LIMIT):
            reached |= pucks.step(self._agent.act(pucks.observation, explore=False).numpy())[0]
        share = reached.reshape(len(reached), len(TASKS), _STARTS).mean(-1)
        return {name: share[:, number] for number, name in enumerate(TASKS)}

    def _tasks(self, replay: Replay) -> list[int]:
        """Returns the next task of each actor."""
        if isinstance(replay, CurriculumReplay):
            return replay.actor_tasks(self._settings["actors"])
        return [TASKS.index(name) for name in self._settings["tasks"]]

    def _drawn(self) -> np.ndarray:
        """Draws a start and an action of each actor ``[R, E, 3]``, uniform in [0, 1): equal for all arms of a seed."""
        return np.stack([generator.random((self._settings["actors"], 3)) for generator in self._generators])

    def _restart(self, ended: np.ndarray, angle: np.ndarray) -> None:
        for run in np.flatnonzero(ended.any(1)).tolist():
            self._task[run] = np.where(ended[run], self._tasks(self._replays[run]), self._task[run])
        self._pucks.place(ended, self._task, angle)
        self._trajectory += ended * self._settings["actors"]

    def _store(self, before: torch.Tensor, action: np.ndarray, terminated: np.ndarray, truncated: np.ndarray) -> None:
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        after = {name: torch.from_numpy(flag.copy()).unsqueeze(-1) for name, flag in ends.items()}
        after |= {"observation": self._pucks.observation, "reward": after["terminated"].float()}
        columns = {"task": torch.from_numpy(self._task.copy()), "trajectory": torch.from_numpy(self._trajectory.copy())}
        rows = {"observation": before, "action": torch.from_numpy(action), "next": after, **columns}
        steps = TensorDict(rows, terminated.shape)
        for replay, own in zip(self._replays, steps.unbind(0), strict=True):
            replay.extend(own)

    def _learn(self) -> None:
        """Makes the updates of one draw, to which the rows of a table are dealt in turn."""
        updates = self._settings["updates_per_draw"]
        batches = [replay.sample().select("observation", "action", "next") for replay in self._replays]
        self._agent.learn(torch.stack([batch.view(-1, updates).transpose(0, 1) for batch in batches]))
