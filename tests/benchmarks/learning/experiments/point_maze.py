# SPDX-License-Identifier: Apache-2.0
"""Distributed Parallel Curriculum Experience Replay in a point maze: curricula against none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.agents import TD3
from lightning_replay.envs.point_maze import PointMazeTasks
from tests.benchmarks.learning import experiment
from tests.benchmarks.learning.experiment import Experiment, Panel, last_of, mean_of
from tests.benchmarks.learning.learners.curriculum_learning import ARMS, FAST, Columns, Learner, LearningSettings
from tests.benchmarks.learning.recorder import Recorder


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


def run(settings: experiment.Settings, seeds: Sequence[int], out: Recorder) -> None:
    """The runs of one scheduler, one after another."""
    own = {name: value for name, value in settings.items() if name != "scheduler"}
    MazeLearner([(settings["scheduler"], seed) for seed in seeds], Settings(**own)).play(out)


EXPERIMENTS = (
    Experiment(
        name="point-maze",
        title="Point maze, U-shaped: curricula",
        claim="none of the paper's; as in half-field soccer, batches from several tasks should teach the target.",
        task="TD3 with a reward of 1 at the goal and none else; twelve environments in lock-step, two updates for each "
        "of their steps.",
        arms=ARMS,
        settings=asdict(Settings()),
        fast=FAST,
        seeds=range(3),
        pilot_seeds=(),
        measure=last_of("target", 1, "success on the target at the end", digits=2),
        also=(
            mean_of("target", "over the run", skip=0, digits=2),
            *(last_of(task, 1, f"{task} at the end", digits=2) for task in PointMazeTasks.TASKS[1:]),
        ),
        panels=[Panel(task, "greedy success", title=f"task {task}") for task in PointMazeTasks.TASKS],
        xlabel="updates",
        run=run,
    ),
)
