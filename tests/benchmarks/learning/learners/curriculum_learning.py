# SPDX-License-Identifier: Apache-2.0
"""Half-field soccer of several seeds at once: fields in lock-step, a buffer and a scheduler each, stacked MP-DQN."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.envs.half_field import GOAL_REWARD, HalfField
from lightning_replay.saving.spec import rebuildable
from lightning_replay.schedulers import (
    EasyToHard,
    Exp3,
    MeanReturn,
    OneTask,
    ReverseCurriculum,
    Scheduler,
    UniformTasks,
)
from tests.benchmarks.learning.experiment import Settings
from tests.benchmarks.learning.learners.checkpoints import load_agent_and_replays, save_agent_and_replays
from tests.benchmarks.learning.learners.stacked_mpdqn import StackedMPDQN
from tests.benchmarks.learning.learners.vector_half_field import (
    DRAWS,
    OBSERVATION_SIZE,
    PARAMETER_HIGH,
    PARAMETER_LOW,
    VectorHalfField,
)
from tests.benchmarks.learning.recorder import Recorder

TASKS = HalfField.TASKS
_NETWORK = (
    *("hidden_sizes", "value_learning_rate", "parameter_learning_rate"),
    *("discount", "target_update_rate", "gradient_clip"),
)
_LEARNED = ("observation", "action", "discount", *(("next", name) for name in ("observation", "reward", "terminated")))


def check_settings(settings: Settings) -> None:
    """Refuses intervals of updates that do not fit the updates of a draw.

    Raises:
        ValueError: neither of ``updates_per_draw`` and an interval divides the other.
    """
    for name in ("updates_per_round", "updates_per_signal", "updates_per_test"):
        larger, smaller = sorted((settings[name], settings["updates_per_draw"]), reverse=True)
        if larger % smaller:
            raise ValueError(
                f"{name} is {settings[name]} and updates_per_draw {settings['updates_per_draw']}; one must divide the "
                "other."
            )


@rebuildable
class Separate(Scheduler):
    """Draws batches by one scheduler and gives actors their tasks by another, each with every signal."""

    saved_parts = ("batches", "actors")

    def __init__(self, batches: Scheduler, actors: Scheduler) -> None:
        super().__init__()
        self.batches, self.actors = batches, actors

    def start(self, tasks: Sequence[str]) -> None:
        super().start(tasks)
        self.batches.start(tasks)
        self.actors.start(tasks)

    def probabilities(self, ready: np.ndarray) -> np.ndarray:
        return self.batches.probabilities(ready)

    def drawn(self, task: int, probability: float) -> None:
        self.batches.drawn(task, probability)

    def progress(self, task: int, value: float) -> None:
        self.batches.progress(task, value)
        self.actors.progress(task, value)

    def actor_tasks(self, num_actors: int) -> list[int]:
        return self.actors.actor_tasks(num_actors)


def scheduler_of(settings: Settings) -> Scheduler:
    """Returns the scheduler of an arm: of the library, or two of it where actors have another."""
    batches = _scheduler(settings["scheduler"], settings)
    return Separate(batches, _scheduler(settings["actors"], settings)) if "actors" in settings else batches


def _scheduler(name: str, settings: Settings) -> Scheduler:
    order = tuple(reversed(TASKS))
    if name == "exp3":
        return Exp3(exploration=settings["scheduler_exploration"])
    if name == "easy to hard":
        return EasyToHard(order, settings["advance_at"], settings["max_signals"])
    if name == "reverse curriculum":
        return ReverseCurriculum(order, settings["advance_at"], settings["max_signals"])
    return {"one task": OneTask(TASKS[0]), "uniform": UniformTasks()}[name]


class CurriculumRuns:
    """R runs, each with its own fields, buffer, scheduler and random numbers by its seed.

    A round is a step of every field; rows are stored ``rounds_per_extend`` rounds at a time, which costs less. A draw
    is dealt as the batches of ``updates_per_draw`` updates, all of one task, after the rounds that belong to them. The
    newest progress signals reach the scheduler every ``updates_per_signal`` updates, so that tasks with short episodes
    send no more of them. An episode that runs out of time terminates where ``time_outs_terminate``: otherwise
    no target lowers the values of a policy that walks in circles.

    Args:
        settings: of every run, those of the experiment ``half-field``.
        seeds: one for each run.

    Raises:
        ValueError: see :func:`check_settings`.
    """

    def __init__(self, settings: Settings, seeds: Sequence[int]) -> None:
        check_settings(settings)
        self.settings, self.seeds, self.updates = settings, seeds, 0
        self.agent = StackedMPDQN(
            OBSERVATION_SIZE,
            [2, 1, 2],
            PARAMETER_LOW,
            PARAMETER_HIGH,
            seeds,
            target_high=GOAL_REWARD,
            **{name: settings[name] for name in _NETWORK},
        )
        self.replays = [
            recipes.parallel_curriculum(
                tasks=list(TASKS),
                capacity_per_task=settings["capacity_per_task"],
                batch_size=settings["batch_size"] * settings["updates_per_draw"],
                scheduler=scheduler_of(settings),
                n_steps=settings["n_steps"],
                discount=settings["discount"],
                seed=seed,
            )
            for seed in seeds
        ]
        self._random = [np.random.default_rng(seed) for seed in seeds]
        self._progress = [MeanReturn(low=0.0, high=GOAL_REWARD, every=1) for _ in seeds]
        self._signals: list[dict[int, float]] = [{} for _ in seeds]
        self._field = VectorHalfField(len(seeds) * settings["fields"], settings["frame_skip"])
        self._trajectory = np.tile(np.arange(settings["fields"]), len(seeds))
        self._rounds: list[dict[str, np.ndarray]] = []
        self._rounds_played = 0
        self._restart()

    def play(self, updates: int) -> None:
        """Plays and learns until this many updates have been made."""
        settings = self.settings
        while self._rounds_played < settings["warmup_rounds"]:
            self._play_round()
        while self.updates < updates:
            self.updates += settings["updates_per_draw"]
            while self._rounds_played - settings["warmup_rounds"] < self.updates // settings["updates_per_round"]:
                self._play_round()
            done = self.updates / settings["updates"]
            self.agent.scale_learning_rates(1.0 + (settings["learning_rate_end"] - 1.0) * done)
            self._learn()
            if self.updates % settings["updates_per_signal"] == 0:
                self._send_signals()

    def success(self, episodes: int) -> np.ndarray:
        """Returns the share of goals of the greedy policies ``[R, tasks]``, from the same starts at every call."""
        task = np.tile(np.repeat(np.arange(len(TASKS)), episodes), len(self.seeds))
        draws = [np.random.default_rng([seed, 1]).random((len(TASKS) * episodes, DRAWS)) for seed in self.seeds]
        field = VectorHalfField(len(task), self.settings["frame_skip"])
        field.reset(np.arange(len(task)), task, np.concatenate(draws))
        scored = np.zeros(len(task), bool)
        while field.is_running.any():
            scored |= field.step(*self._greedy(field.observation))[0] > 0
        return scored.reshape(len(self.seeds), len(TASKS), episodes).mean(2)

    def probabilities(self) -> np.ndarray:
        """Returns the probability of each task at the next draw, ``[R, tasks]``."""
        return np.array([list(replay.probabilities().values()) for replay in self.replays])

    def save(self, folder: Path) -> None:
        """Writes agent, replays, environments, schedules and random generators."""
        save_agent_and_replays(folder, self.agent, self.replays)
        kept = {
            "updates": self.updates,
            "random": [random.bit_generator.state for random in self._random],
            "progress": [progress.state_dict() for progress in self._progress],
            "signals": self._signals,
            "field": self._field.state_dict(),
            "trajectory": self._trajectory,
            "rounds": self._rounds,
            "rounds_played": self._rounds_played,
        }
        torch.save(kept, folder / "runs.pt")

    def load(self, folder: Path) -> None:
        """Goes on from what :meth:`save` wrote."""
        self.replays = load_agent_and_replays(folder, self.agent, len(self.replays))
        kept = torch.load(folder / "runs.pt", weights_only=False)
        for random, state in zip(self._random, kept["random"], strict=True):
            random.bit_generator.state = state
        for progress, state in zip(self._progress, kept["progress"], strict=True):
            progress.load_state_dict(state)
        self._field.load_state_dict(kept["field"])
        self.updates, self._rounds_played = kept["updates"], kept["rounds_played"]
        self._signals, self._trajectory, self._rounds = kept["signals"], kept["trajectory"], kept["rounds"]

    def _play_round(self) -> None:
        observation, task, trajectory = self._field.observation.copy(), self._field.task.copy(), self._trajectory.copy()
        discrete, parameters = self._explored(*self._greedy(observation))
        reward, terminated, truncated = self._field.step(discrete, parameters)
        columns = {"observation": observation, "discrete": discrete, "parameters": parameters, "task": task}
        columns |= {"following": self._field.observation.copy(), "reward": reward, "trajectory": trajectory}
        self._rounds.append(columns | {"terminated": terminated, "truncated": truncated})
        for row in np.flatnonzero(~self._field.is_running).tolist():
            run, number = row // self.settings["fields"], int(task[row])
            self._signals[run][number] = self._progress[run].episode(number, float(reward[row])) or 0.0
        self._restart()
        self._rounds_played += 1
        if len(self._rounds) == self.settings["rounds_per_extend"]:
            self._store()

    def _restart(self) -> None:
        """Starts an episode in every field without one."""
        ended = np.flatnonzero(~self._field.is_running)
        if not len(ended):
            return
        run, actor = np.divmod(ended, self.settings["fields"])
        tasks = {number: self.replays[number].actor_tasks(self.settings["fields"]) for number in set(run.tolist())}
        task = np.array([tasks[number][place] for number, place in zip(run.tolist(), actor.tolist(), strict=True)])
        self._field.reset(ended, task, np.stack([self._random[number].random(DRAWS) for number in run.tolist()]))
        self._trajectory[ended] += self.settings["fields"]  # a number that no other episode of the run has

    def _greedy(self, observation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = torch.from_numpy(observation).view(len(self.seeds), -1, OBSERVATION_SIZE)
        discrete, parameters = self.agent.act(rows)
        return discrete.flatten().numpy(), parameters.flatten(0, 1).numpy()

    def _explored(self, discrete: np.ndarray, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds noise to the parameters, and replaces actions by random ones by chance."""
        settings, fields = self.settings, self.settings["fields"]
        annealed = min(1.0, self._rounds_played / settings["exploration_rounds"])
        share = 1.0 + (settings["exploration_end"] - 1.0) * annealed
        spread = settings["parameter_noise"] * (PARAMETER_HIGH - PARAMETER_LOW) / 2
        for run, random in enumerate(self._random):
            own = slice(run * fields, (run + 1) * fields)
            parameters[own] += spread * random.standard_normal((fields, len(spread)))
            chosen = np.flatnonzero(random.random(fields) < share) + own.start
            discrete[chosen] = random.integers(3, size=len(chosen))
            parameters[chosen] = random.uniform(PARAMETER_LOW, PARAMETER_HIGH, (len(chosen), len(spread)))
        return discrete, parameters.clip(PARAMETER_LOW, PARAMETER_HIGH)

    def _learn(self) -> None:
        """Makes the updates of one draw."""
        count = self.settings["updates_per_draw"]
        rows = torch.stack([replay.sample().select(*_LEARNED, strict=False) for replay in self.replays])
        for batch in rows.view(len(self.seeds), count, -1).unbind(1):
            self.agent.learn(batch)

    def _send_signals(self) -> None:
        """Sends the scheduler the newest signal of every task that has a new one."""
        for replay, signals in zip(self.replays, self._signals, strict=True):
            for task, signal in signals.items():
                replay.progress(TASKS[task], signal)
            signals.clear()

    def _store(self) -> None:
        """Stores the rounds, each run's in its replay, oldest first."""
        shape, fields = [len(self._rounds), len(self.seeds), self.settings["fields"]], self.settings["fields"]
        columns: dict[str, Any] = {
            key: torch.from_numpy(np.stack([each[key] for each in self._rounds])).unflatten(1, shape[1:])
            for key in self._rounds[0]
        }
        self._rounds.clear()
        flags = {name: columns.pop(name).unsqueeze(-1) for name in ("terminated", "truncated")}
        flags["done"] = flags["terminated"] | flags["truncated"]
        if self.settings["time_outs_terminate"]:
            flags |= {"terminated": flags["done"], "truncated": torch.zeros_like(flags["done"])}
        following = {"observation": columns.pop("following"), "reward": columns.pop("reward").unsqueeze(-1), **flags}
        action = {name: columns.pop(name) for name in ("discrete", "parameters")}
        rows = TensorDict({**columns, "action": action, "next": following}, shape)
        for replay, steps in zip(self.replays, rows.unbind(1), strict=True):
            replay.extend(steps.reshape(len(steps) * fields))


def learn(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Learns to the end; records the success on every task and the probability of each at the next draw."""
    runs = CurriculumRuns(settings, seeds)
    if out.resume_from is not None:
        runs.load(out.resume_from)
    while runs.updates < settings["updates"]:
        runs.play(runs.updates + settings["updates_per_test"])
        success, probabilities = runs.success(settings["test_episodes"]), runs.probabilities()
        columns = {task: success[:, number] for number, task in enumerate(TASKS)}
        columns |= {f"chance of {task}": probabilities[:, number] for number, task in enumerate(TASKS)}
        out.record(runs.updates, **columns)
        out.checkpoint(runs.save)
