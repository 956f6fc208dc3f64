# SPDX-License-Identifier: Apache-2.0
"""Obstacle courses for several seeds of double DQN at once: a course and a replay for each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import Replay, recipes
from lightning_replay.envs.obstacle_course import ObstacleCourse
from lightning_replay.events import EventTable, info_key
from tests.benchmarks.learning.learners import three_rooms
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN

EVENTS = ("spikes", "gap", "lava", "door", "key", "goal")  # flags of the course's infos
RANDOM_ACTIONS = (0.15, 0.15, 0.4, 0.1, 0.05, 0.15)  # probabilities: left, right, forward, pick up, drop, toggle


def course_of(settings: dict[str, Any], **options: Any) -> ObstacleCourse:
    """Returns the course of an experiment; ``options`` take precedence."""
    names = ("sections", "random_section", "max_steps")
    return ObstacleCourse(**{name: settings[name] for name in names} | options)


def replay_of(settings: dict[str, Any], seed: int) -> Replay:
    """Returns the replay of an arm; ``batch_size`` rows are one draw."""
    if settings["replay"] != "event tables":
        return three_rooms.replay_of(settings, seed)
    capacity, batch_size = settings["capacity"], settings["batch_size"]
    history, most, least = (settings[name] for name in ("history_length", "table_capacity", "table_min_size"))
    return recipes.event_tables(
        capacity - most * len(settings["events"]),
        batch_size,
        tables=[
            EventTable(event, info_key(event), history, capacity=most, min_size=least) for event in settings["events"]
        ],
        default_share=0.5,
        min_size=least,
        max_trajectories=1,
        seed=seed,
    )


class OneHot:
    """Observations ``[R, N, 81]`` of a course as its one-hot vectors, ``[R, N, I]``."""

    def __init__(self, course: ObstacleCourse) -> None:
        space = course.observation_space
        sizes = space.high - space.low + 1.0
        self.size = int(sizes.sum())
        self._first = torch.from_numpy(np.cumsum(sizes) - sizes - space.low).long()

    def __call__(self, observation: Tensor) -> Tensor:
        """Returns the vectors side by side, float32."""
        where = observation.long() + self._first
        return torch.zeros(*where.shape[:-1], self.size).scatter_(-1, where, 1.0)


def agent_of(settings: dict[str, Any], seeds: Sequence[int]) -> StackedDQN:
    """Returns the agent with the settings of an experiment."""
    inputs = OneHot(course_of(settings))
    names = ("learning_rate", "discount", "target_update_rate")
    return StackedDQN(
        (inputs.size, *settings["hidden_sizes"], 6), seeds, **{name: settings[name] for name in names}, inputs=inputs
    )


class CourseRuns:
    """Courses of R runs with a replay for each, and an agent for all.

    Args:
        settings: of the experiment and the arm.
        seeds: of weights, courses, random actions and draws, one for each run.
    """

    def __init__(self, settings: dict[str, Any], seeds: Sequence[int]) -> None:
        self.agent, self.env_steps = agent_of(settings, seeds), 0
        self._settings, self._seeds = settings, list(seeds)
        self.replays = [replay_of(settings, seed) for seed in seeds]
        self._random = [np.random.default_rng(seed) for seed in seeds]
        self.courses = [course_of(settings) for _ in seeds]
        self._observation = np.stack([env.reset(seed=seed)[0] for env, seed in zip(self.courses, seeds, strict=True)])

    def walk_to_goal(self, most: int) -> np.ndarray:
        """Plays random actions until each run has reached its goal, at most so many; returns how many ``[R]``."""
        walked = np.zeros(len(self._seeds), dtype=np.int64)
        for run, (generator, replay) in enumerate(zip(self._random, self.replays, strict=True)):
            is_there = False
            while not is_there and walked[run] < most:
                rows = []
                for action in generator.choice(6, 512, p=RANDOM_ACTIONS).tolist():
                    rows.append(self._step(run, action))
                    if is_there := bool(rows[-1][-1][EVENTS.index("goal")]):
                        break
                replay.extend(rows_of(rows))
                walked[run] += len(rows)
        return walked

    def play(self, env_steps: int) -> None:
        """Plays and learns until so many steps of each run's course have been taken."""
        count, updates = self._settings["steps_per_draw"], self._settings["updates_per_draw"]
        while self.env_steps < env_steps:
            exploration = self._exploration()
            chance = np.stack([generator.random(count) for generator in self._random])
            drawn = np.stack([generator.choice(6, count, p=RANDOM_ACTIONS) for generator in self._random])
            rows: list[list[tuple[Any, ...]]] = [[] for _ in self._seeds]
            for step in range(count):
                best = self.agent.act(torch.from_numpy(self._observation).unsqueeze(1)).squeeze(1).numpy()
                action = np.where(chance[:, step] < exploration, drawn[:, step], best)
                for run in range(len(rows)):
                    rows[run].append(self._step(run, int(action[run])))
            self.env_steps += count
            for replay, steps in zip(self.replays, rows, strict=True):
                replay.extend(rows_of(steps))
            batches = [replay.sample() for replay in self.replays]
            td_errors, _ = self.agent.learn(batches, updates, in_turn=True)
            for replay, batch, td_error in zip(self.replays, batches, td_errors, strict=True):
                if replay.is_prioritized:
                    replay.update_priority(batch["index"], td_error, generation=batch["generation"])

    def _exploration(self) -> float:
        """Returns the share of random actions, which falls linearly."""
        first, last, steps = (self._settings[name] for name in ("first_exploration", "last_exploration", "falls_for"))
        return first + min(1.0, self.env_steps / steps) * (last - first)

    def _step(self, run: int, action: int) -> tuple[Any, ...]:
        course, before = self.courses[run], self._observation[run].copy()
        after, reward, terminated, truncated, info = course.step(action)
        self._observation[run] = course.reset()[0] if terminated or truncated else after
        return before, action, after, reward, terminated, truncated, [info[event] for event in EVENTS]


def rows_of(steps: Sequence[tuple[Any, ...]]) -> TensorDict:
    """Returns rows ``[N]`` of a replay, with the flags of events."""
    observation, action, following, reward, terminated, truncated, events = (
        torch.from_numpy(np.array(column)) for column in zip(*steps, strict=True)
    )
    ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    after = {"observation": following, "reward": reward.float().unsqueeze(-1)}
    after |= {name: flag.unsqueeze(-1) for name, flag in ends.items()}
    after |= {event: events[:, [number]] for number, event in enumerate(EVENTS)}
    rows = {"observation": observation, "action": action, "next": after}
    rows["trajectory"] = torch.zeros(len(steps), dtype=torch.int64)
    return TensorDict(rows, [len(steps)])


class Checks:
    """Courses of R runs on which their policies are tested.

    Args:
        settings: of the experiment.
        runs: R.
        options: of the courses, such as another start.
    """

    def __init__(self, settings: dict[str, Any], runs: int, **options: Any) -> None:
        self._episodes, self._limit = settings["check_episodes"], settings["check_steps"]
        self.courses = [course_of(settings, **options) for _ in range(runs * self._episodes)]

    def play(self, agent: StackedDQN) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Plays the levels 0, 1, 2, ...; returns goals and returns ``[R, E]``, and difficulties ``[E]``.

        5 % of the actions are random, as policies without chance end in loops.
        """
        generator = np.random.default_rng(0)
        first = [env.reset(seed=number % self._episodes) for number, env in enumerate(self.courses)]
        seen, difficulty = np.stack([pair[0] for pair in first]), np.array([pair[1]["difficulty"] for pair in first])
        is_playing, is_there, returns = np.ones(len(seen), bool), np.zeros(len(seen), bool), np.zeros(len(seen))
        for _ in range(self._limit):
            best = agent.act(torch.from_numpy(seen).unflatten(0, (-1, self._episodes))).flatten().numpy()
            drawn = generator.choice(6, self._episodes, p=RANDOM_ACTIONS)
            is_random = generator.random(self._episodes) < 0.05
            repeat = len(seen) // self._episodes
            action = np.where(np.tile(is_random, repeat), np.tile(drawn, repeat), best)
            for row in np.flatnonzero(is_playing):
                seen[row], reward, terminated, _, info = self.courses[row].step(int(action[row]))
                returns[row] += reward
                is_there[row] |= info["goal"]
                is_playing[row] = not terminated
        shape = (-1, self._episodes)
        return is_there.reshape(shape), returns.reshape(shape), difficulty[: self._episodes]
