# SPDX-License-Identifier: Apache-2.0
"""Distributed Parallel Curriculum Experience Replay in a point maze: curricula against none.

    python tests/benchmarks/experiment_point_maze.py --save                    # three seeds of three methods
    python tests/benchmarks/experiment_point_maze.py --fast

TD3 with a reward of 1 at the goal of the U-shaped maze and none else; twelve environments in lock-step, two updates for
each of their steps. The measure was fixed before the runs: greedy success on every task at the end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes on two cores

import numpy as np
import torch
from curriculum_learning import FAST, Columns, Learner, LearningSettings
from curriculum_runs import Job, Runs, options
from torch import Tensor

from lightning_replay.agents import TD3
from lightning_replay.envs.point_maze import PointMazeTasks


@dataclass(frozen=True)
class Settings(LearningSettings):
    """Of every run."""

    updates: int = 10_000
    updates_per_test: int = 2_000
    test_episodes: int = 50
    n_steps: int = 5
    hidden_sizes: tuple[int, ...] = (128, 64)
    learning_rate: float = 1e-3
    exploration_noise: float = 0.3
    warmup_rounds: int = 500
    random_share: float = 0.1


class WithoutTrainer(TD3):
    """TD3 that steps its own optimizers."""

    def build(self) -> None:
        """Creates the optimizers too."""
        super().build()
        self._stepped: Any = tuple(self.configure_optimizers())  # a tuple: no part of the module

    def critic_and_other_optimizers(self) -> tuple[Any, list[torch.optim.Optimizer]]:
        """The critics' and the policy's."""
        return self._stepped[0], list(self._stepped[1:])

    def take_gradients(self, loss: Tensor) -> None:
        """Plain ``backward``."""
        loss.backward()


class MazeLearner(Learner):
    """TD3, an agent for each run; actions stay one and the same for a few random steps at a time."""

    def __init__(self, jobs: Sequence[tuple[str, int]], settings: Settings) -> None:
        super().__init__(jobs, PointMazeTasks, PointMazeTasks.TASKS, 1.0, settings)
        self.settings: Settings = settings
        one = self.field.environments[0]
        self.agents = []
        for run in self.runs:
            torch.manual_seed(run.seed)
            agent = WithoutTrainer(
                **TD3.sizes_from(one.observation_space, one.action_space),
                hidden_sizes=settings.hidden_sizes,
                actor_learning_rate=settings.learning_rate,
                critic_learning_rate=settings.learning_rate,
                discount=settings.discount,
            )
            self.agents.append(agent)

    def act(self, observations: np.ndarray, explore: bool) -> Columns:
        """The policy's action; exploring, with noise, or a random one, which is all there is during the warm-up."""
        settings, parts = self.settings, np.split(observations, len(self.runs))
        with torch.no_grad():
            chosen = [
                agent.act(torch.from_numpy(part), explore=False).numpy()
                for agent, part in zip(self.agents, parts, strict=True)
            ]
        if explore:
            share = 1.0 if self.rounds_played < settings.warmup_rounds else settings.random_share
            for run, actions in zip(self.runs, chosen, strict=True):
                actions += settings.exploration_noise * run.random.standard_normal(actions.shape)
                own = run.random.random(len(actions)) < share
                actions[own] = run.random.uniform(-1.0, 1.0, (int(own.sum()), actions.shape[1]))
        return {"force": np.concatenate(chosen).clip(-1.0, 1.0).astype(np.float32)}

    def actions(self, columns: Columns) -> Sequence[Any]:
        """The force."""
        return columns["force"]

    def action(self, column: dict[str, Tensor]) -> Tensor:
        """The force."""
        return column.pop("force")

    def update(self) -> None:
        """One update of every run."""
        for run, agent in zip(self.runs, self.agents, strict=True):
            agent.update(run.replay.sample())


def play(job: Job) -> list[dict[str, Any]]:
    """Some runs, side by side."""
    return MazeLearner(job.runs, Settings(**job.settings)).play()


def main() -> None:
    """Plays the runs that are missing and prints the table."""
    chosen = options(str(__doc__).splitlines()[0], ["us", "exp3", "db"], seeds=3, together=1)
    settings = Settings(**FAST) if chosen.fast else Settings()
    runs = Runs("Point maze, U-shaped", "point_maze", PointMazeTasks.TASKS, asdict(settings))
    runs.carry_out(play, chosen)
    print(runs.report())


if __name__ == "__main__":
    main()
