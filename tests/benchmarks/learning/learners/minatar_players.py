# SPDX-License-Identifier: Apache-2.0
"""Games of MinAtar for several seeds of double DQN at once: a game and a replay for each run.

Runs share nothing but the time they take: each has its own weights, random actions, game and replay, all by its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay import Replay
from lightning_replay.envs.atari import MinAtarGame
from tests.benchmarks.learning.learners.checkpoints import load_agent_and_replays, save_agent_and_replays
from tests.benchmarks.learning.learners.rows import Rows
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN

_EPISODES = 50  # over which a return is averaged


def exploration_at(step: int, settings: dict[str, Any]) -> float:
    """Returns the share of random actions: 1 during the warm-up, then falling linearly to ``last_exploration``."""
    fallen = min(1.0, max(0, step - settings["warmup_steps"]) / settings["exploration_steps"])
    return 1.0 + fallen * (settings["last_exploration"] - 1.0)


class StackedPlayers:
    """Games of R runs with a replay for each, and an agent for all.

    Args:
        agent: of all runs.
        game: builds a game.
        replays: one for each run.
        seeds: of games and random actions, one for each run.
        settings: ``warmup_steps``, ``steps_per_update``, ``check_every`` and those of :func:`exploration_at`.
        feed: returns TD errors to a replay: the run's number, the replay, the batch, TD errors ``[B]``, action values
            ``[B, A]``.
    """

    def __init__(
        self,
        agent: StackedDQN,
        game: Callable[[], MinAtarGame],
        replays: Sequence[Replay],
        seeds: Sequence[int],
        settings: dict[str, Any],
        feed: Callable[[int, Replay, TensorDictBase, Tensor, Tensor], None],
    ) -> None:
        self.agent, self.replays, self.env_steps = agent, list(replays), 0
        self._settings, self._feed = settings, feed
        self._games = [game() for _ in seeds]
        self._shape = self._games[0].observation_space.shape
        self._num_actions = int(self._games[0].action_space.n)
        self._observation = np.stack([env.reset(seed=seed)[0] for env, seed in zip(self._games, seeds, strict=True)])
        self._random = [random.Random(seed) for seed in seeds]
        self._returns: list[list[float]] = [[] for _ in seeds]
        self._totals = [0.0] * len(seeds)
        # One frame as a stack of one, which a buffer can store once.
        shape = (1, self._shape[0] * self._shape[1], self._shape[2])
        self.rows = [Rows(settings["check_every"], shape, torch.uint8, is_numbered=True) for _ in seeds]
        self._blocks = [rows.steps.split(settings["steps_per_update"]) for rows in self.rows]
        self._stack_shape = shape

    def play(self, env_steps: int) -> None:
        """Plays and learns until so many steps of each run's game have been taken."""
        every, check = self._settings["steps_per_update"], self._settings["check_every"]
        while self.env_steps < env_steps:
            self._step(self.env_steps % check)
            self.env_steps += 1
            if self.env_steps % every == 0:
                block = (self.env_steps - 1) % check // every
                for replay, blocks in zip(self.replays, self._blocks, strict=True):
                    replay.extend(blocks[block])
                if self.env_steps >= self._settings["warmup_steps"]:
                    self._learn()

    def episode_returns(self) -> list[float]:
        """Returns the mean returns ``[R]`` of the last 50 finished episodes; 0 before any."""
        return [float(np.mean(returns[-_EPISODES:])) if returns else 0.0 for returns in self._returns]

    def save(self, folder: Path) -> None:
        """Writes agent, replays, games and random generators, which resume the runs exactly."""
        save_agent_and_replays(folder, self.agent, self.replays)
        kept = {
            "env_steps": self.env_steps,
            "games": self._games,
            "observation": self._observation,
            "random": self._random,
            "returns": self._returns,
            "totals": self._totals,
        }
        torch.save(kept, folder / "runs.pt")

    def load(self, folder: Path, prepare: Callable[[int, Replay], None]) -> None:
        """Reads what :meth:`save` wrote; ``prepare`` sets again the attributes that a replay does not save."""
        self.replays = load_agent_and_replays(folder, self.agent, len(self.replays))
        for number, replay in enumerate(self.replays):
            prepare(number, replay)
        kept = torch.load(folder / "runs.pt", weights_only=False)
        self.env_steps, self._games, self._observation = kept["env_steps"], kept["games"], kept["observation"]
        self._random, self._returns, self._totals = kept["random"], kept["returns"], kept["totals"]

    def _step(self, row: int) -> None:
        number, exploration, best = self.env_steps, exploration_at(self.env_steps, self._settings), None
        if exploration < 1.0:
            best = self.agent.act(torch.from_numpy(self._observation).unsqueeze(1)).squeeze(1).tolist()
        for run, (env, rows) in enumerate(zip(self._games, self.rows, strict=True)):
            is_random = self._random[run].random() < exploration
            action = self._random[run].randrange(self._num_actions) if is_random else best[run]
            before = self._observation[run].reshape(self._stack_shape)
            after, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            stack = after.reshape(self._stack_shape)
            rows.write(row, before, action, number, stack, reward, terminated, truncated, done)
            self._totals[run] += reward
            if done:
                self._returns[run].append(self._totals[run])
                self._totals[run] = 0.0
                after, _ = env.reset()
            self._observation[run] = after

    def _learn(self) -> None:
        batches = [replay.sample() for replay in self.replays]
        td_error, values = self.agent.learn(batches)
        for run, batch in enumerate(batches):
            self._feed(run, self.replays[run], batch, td_error[run], values[run])
