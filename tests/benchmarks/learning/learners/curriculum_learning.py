# SPDX-License-Identifier: Apache-2.0
"""Learning of tasks from task tables: environments in lock-step, the buffer, progress signals and tests of success."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.schedulers import (
    EasyToHard,
    Exp3,
    MeanReturn,
    OneTask,
    ReverseCurriculum,
    Scheduler,
    UniformTasks,
)
from tests.benchmarks.learning.recorder import Recorder

FAST = {"updates": 40, "warmup_rounds": 30, "updates_per_test": 20, "way_episodes": 1, "test_episodes": 1}
ARMS = {
    "no curriculum": {"scheduler": "db"},
    "uniform schedule": {"scheduler": "us"},
    "EXP3": {"scheduler": "exp3"},
}

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class LearningSettings:
    """Of every run.

    A round is a step of every environment; rows are stored ``rounds_per_extend`` rounds at a time, which costs less.
    The newest progress signals reach the scheduler every ``updates_per_signal`` updates, so that tasks with short
    episodes send no more of them. ``test_episodes`` of each task measure the success at the end, ``way_episodes`` along
    the way. A task's episode that runs out of time ends for good where ``time_outs_terminate``: nothing else tells the
    values of a policy that walks in circles that they are too high.
    """

    updates: int = 20_000
    updates_per_round: int = 2
    environments: int = 12
    batch_size: int = 64
    capacity_per_task: int = 60_000
    n_steps: int = 1
    discount: float = 0.99
    time_outs_terminate: bool = False
    warmup_rounds: int = 200
    rounds_per_extend: int = 10
    scheduler_exploration: float = 0.2
    updates_per_signal: int = 500
    updates_per_test: int = 5_000
    way_episodes: int = 20
    test_episodes: int = 100


def scheduler_of(method: str, tasks: Sequence[str], settings: LearningSettings) -> Scheduler:
    """The scheduler of a method; tasks are given from hard to easy."""
    order = tuple(reversed(tasks))
    return {
        "us": UniformTasks(),
        "exp3": Exp3(exploration=settings.scheduler_exploration),
        "db": OneTask(tasks[0]),
        "dbc": EasyToHard(order=order),
        "drc": ReverseCurriculum(order=order),
    }[method]


class Field:
    """Environments in lock-step.

    Args:
        make: an environment from the name of its task.
        names: of the tasks.
        tasks: the task of each environment.
        seeds: of each.
    """

    def __init__(
        self, make: Callable[[str], Any], names: Sequence[str], tasks: Sequence[int], seeds: Sequence[int]
    ) -> None:
        self.names = names
        self.environments = [make(names[task]) for task in tasks]
        starts = [each.reset(seed=seed)[0] for each, seed in zip(self.environments, seeds, strict=True)]
        self.observations = np.stack(starts)
        self.task = np.array(tasks)
        self.trajectory = np.arange(len(tasks))
        self.running = np.ones(len(tasks), bool)
        self._next_trajectory = len(tasks)

    def step(self, actions: Sequence[Any]) -> Columns:
        """Steps those whose episode runs; the columns of all. Episodes that ended wait for :meth:`restart`."""
        count = len(self.environments)
        before, following = self.observations, self.observations.copy()
        reward = np.zeros((count, 1), np.float32)
        terminated, truncated = np.zeros((2, count, 1), bool)
        for number in np.flatnonzero(self.running).tolist():
            outcome = self.environments[number].step(actions[number])
            following[number], reward[number], terminated[number], truncated[number], _ = outcome
        self.observations = following.copy()
        self.running = self.running & ~(terminated | truncated).ravel()
        columns = {"observation": before, "following": following, "reward": reward}
        columns |= {"terminated": terminated, "truncated": truncated}
        return columns | {"task": self.task.copy(), "trajectory": self.trajectory.copy()}

    def restart(self, number: int, task: int) -> None:
        """Begins an episode of a task in one of the environments."""
        environment = self.environments[number]
        environment.task = self.names[task]
        self.observations[number], _ = environment.reset()
        self.task[number] = task
        self.trajectory[number] = self._next_trajectory
        self.running[number] = True
        self._next_trajectory += 1

    def close(self) -> None:
        """Closes the environments."""
        for environment in self.environments:
            environment.close()


class Run:
    """What a run has of its own: the buffer with its scheduler, the progress signals, the random numbers."""

    def __init__(self, method: str, seed: int, tasks: Sequence[str], greatest: float, settings: LearningSettings):
        self.method, self.seed, self.tasks = method, seed, tasks
        self.replay = recipes.parallel_curriculum(
            tasks=list(tasks),
            capacity_per_task=settings.capacity_per_task,
            batch_size=settings.batch_size,
            scheduler=scheduler_of(method, tasks, settings),
            n_steps=settings.n_steps,
            discount=settings.discount,
            seed=seed,
        )
        self.progress = MeanReturn(low=0.0, high=greatest, every=1)
        self.signals: dict[int, float] = {}
        self.random = np.random.default_rng(seed)

    def episode(self, task: int, paid: float) -> None:
        """Takes the return of an episode that ended."""
        self.signals[task] = self.progress.episode(task, paid) or 0.0

    def send_signals(self) -> None:
        """The actors' synchronisation: the newest signal of every task that has a new one."""
        for task, signal in self.signals.items():
            self.replay.progress(self.tasks[task], signal)
        self.signals.clear()


class Learner(ABC):
    """Runs that learn side by side in one process; rows are those of the first run, then of the next.

    Args:
        jobs: method and seed of each run.
        make: an environment from the name of its task; a goal ends its episodes and is all that they pay.
        tasks: their names, from hard to easy.
        greatest: what a goal pays.
        settings: of every run.
    """

    def __init__(
        self,
        jobs: Sequence[tuple[str, int]],
        make: Callable[[str], gymnasium.Env],
        tasks: Sequence[str],
        greatest: float,
        settings: LearningSettings,
    ) -> None:
        torch.set_num_threads(1)
        self.make, self.tasks, self.settings = make, tasks, settings
        self.runs = [Run(method, seed, tasks, greatest, settings) for method, seed in jobs]
        count = settings.environments
        played = [task for run in self.runs for task in run.replay.actor_tasks(count)]
        seeds = [1_000 * run.seed + actor for run in self.runs for actor in range(count)]
        self.field = Field(make, tasks, played, seeds)
        self.rounds: list[Columns] = []
        self.rounds_played = 0

    @abstractmethod
    def act(self, observations: np.ndarray, explore: bool) -> Columns:
        """The columns of the actions, those of the first run first."""

    @abstractmethod
    def actions(self, columns: Columns) -> Sequence[Any]:
        """What each environment is given."""

    @abstractmethod
    def action(self, column: dict[str, torch.Tensor]) -> Any:
        """Takes the columns of the actions out and returns what the buffer stores."""

    @abstractmethod
    def update(self) -> None:
        """One update of every run, each from a batch of the task that its scheduler chose."""

    def play_round(self) -> None:
        """One step of every environment."""
        count = self.settings.environments
        chosen = self.act(self.field.observations, explore=True)
        columns = self.field.step(self.actions(chosen)) | chosen
        self.rounds.append(columns)
        for number in np.flatnonzero(~self.field.running).tolist():
            run = self.runs[number // count]
            run.episode(int(self.field.task[number]), columns["reward"][number].item())
            self.field.restart(number, run.replay.actor_tasks(count)[number % count])
        self.rounds_played += 1
        if len(self.rounds) == self.settings.rounds_per_extend:
            for number, run in enumerate(self.runs):
                run.replay.extend(self._transitions(self.rows_of(number)))
            self.rounds.clear()

    def success(self, episodes: int) -> np.ndarray:
        """Share of goals of the greedy policies ``[R, tasks]``, from the same starts at every call."""
        tasks = [task for _ in self.runs for task in range(len(self.tasks)) for _ in range(episodes)]
        own = range(len(self.tasks) * episodes)
        seeds = [1_000_000 + 10_000 * run.seed + number for run in self.runs for number in own]
        field = Field(self.make, self.tasks, tasks, seeds)
        scored = np.zeros(len(tasks), bool)
        while field.running.any():
            scored |= field.step(self.actions(self.act(field.observations, explore=False)))["reward"].ravel() > 0
        field.close()
        return scored.reshape(len(self.runs), len(self.tasks), episodes).mean(axis=2)

    def rows_of(self, run: int) -> slice:
        """Those of a round."""
        return slice(run * self.settings.environments, (run + 1) * self.settings.environments)

    def play(self, out: Recorder) -> None:
        """Plays and learns to the end; records success on every task and the chance of its batches."""
        settings = self.settings
        for _ in range(settings.warmup_rounds):
            self.play_round()
        for update in range(1, settings.updates + 1):
            if update % settings.updates_per_round == 0:
                self.play_round()
            self.update()
            if update % settings.updates_per_signal == 0:
                for run in self.runs:
                    run.send_signals()
            if update % settings.updates_per_test == 0:
                is_end = update == settings.updates
                success = self.success(settings.test_episodes if is_end else settings.way_episodes)
                chances = [run.replay.probabilities() for run in self.runs]
                columns = {task: success[:, number] for number, task in enumerate(self.tasks)}
                columns |= {f"chance of {task}": [chance[task] for chance in chances] for task in self.tasks}
                out.record(update, **columns)
        self.field.close()

    def _transitions(self, part: slice) -> TensorDict:
        """Rows of some of the environments, oldest first."""
        column = {
            key: torch.from_numpy(np.concatenate([each[key][part] for each in self.rounds])) for key in self.rounds[0]
        }
        following = {"observation": column.pop("following"), "reward": column.pop("reward")}
        following |= {key: column.pop(key) for key in ("terminated", "truncated")}
        following["done"] = following["terminated"] | following["truncated"]
        if self.settings.time_outs_terminate:
            following |= {"terminated": following["done"], "truncated": torch.zeros_like(following["done"])}
        return TensorDict({"action": self.action(column), "next": following, **column}, [len(following["done"])])
