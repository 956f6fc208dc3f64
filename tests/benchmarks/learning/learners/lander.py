# SPDX-License-Identifier: Apache-2.0
"""Lunar lander for stacked SAC: its events, a loop with few large draws, and a fast evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from lightning_replay import Replay, recipes
from lightning_replay.events import EventTable, key_in_region
from tests.benchmarks.learning.learners.stacked_runs import DealtRuns
from tests.benchmarks.learning.learners.stacked_sac import StackedSAC

ENV = "LunarLanderContinuous-v3"
OBSERVATION_SIZE, ACTION_SIZE = 8, 2
# Observed are x and y, 0 at the centre of the pad with the flags at x = ±0.2, four numbers of motion, two legs.
_FREE = [None] * 4
CONDITIONS = {
    "both legs down": key_in_region(
        ("next", "observation"), low=[-0.2, None, *_FREE, 1, 1], high=[0.2, None, *_FREE, 1, 1]
    ),
    "near the centre": key_in_region(
        ("next", "observation"), low=[-0.1, -0.1, *_FREE, None, None], high=[0.1, 0.1, *_FREE, None, None]
    ),
}


def replay_of(settings: dict[str, Any], seed: int) -> Replay:
    """Returns the replay of an arm; a draw holds the rows of ``steps_per_draw`` updates."""
    capacity, rows = settings["capacity"], settings["batch_size"] * settings["steps_per_draw"]
    if settings["replay"] == "uniform":
        return recipes.uniform(capacity, rows, seed=seed)
    if settings["replay"] == "prioritized":
        exponents = {name: settings[name] for name in ("priority_exponent", "importance_exponent")}
        return recipes.prioritized(capacity, rows, **exponents, seed=seed)
    assert settings["replay"] == "event tables", settings["replay"]
    history, room, least = settings["history_length"], settings["table_capacity"], settings["batch_size"]
    tables = [EventTable(name, CONDITIONS[name], history, capacity=room, min_size=least) for name in settings["events"]]
    return recipes.event_tables(capacity, rows, tables=tables, default_share=settings["default_share"], seed=seed)


class LanderRuns(DealtRuns):
    """Plays some steps, stores them, draws once and makes as many updates; one for each step.

    Args:
        agent: of all runs.
        replays: one for each run; a batch holds the rows of ``steps_per_draw`` updates.
        seeds: of the environments and the random actions, one for each run.
        warmup_steps: steps with random actions before the first update, a multiple of ``steps_per_draw``.
        steps_per_draw: steps between draws, and updates for each.
    """

    def __init__(
        self,
        agent: StackedSAC,
        replays: Sequence[Replay],
        seeds: Sequence[int],
        warmup_steps: int,
        steps_per_draw: int,
    ) -> None:
        super().__init__(agent, ENV, replays, seeds, warmup_steps, steps_per_draw, steps_per_draw)

    def play(self, env_steps: int) -> None:
        """Plays and learns until so many steps of each run's environment have been taken, a multiple of a draw's."""
        while self.env_steps < env_steps:
            steps = []
            for _ in range(self._updates_per_draw):
                steps.append(self._step())
                self.env_steps += 1
            self._store([np.stack(column, 1) for column in zip(*steps, strict=True)])
            if self.env_steps > self._warmup_steps:
                self._learn()

    def evaluate(self, episodes: int, seed: int) -> np.ndarray:
        """Returns the mean return ``[R]`` of episodes without exploration, from the same first states for every run."""
        runs = len(self.replays)
        environments = [gymnasium.make(ENV) for _ in range(runs * episodes)]
        first = [env.reset(seed=seed + number % episodes)[0] for number, env in enumerate(environments)]
        observation, returns, playing = np.stack(first), np.zeros(len(environments)), list(range(len(environments)))
        while playing:
            rows = torch.from_numpy(observation).view(runs, episodes, -1)
            action = self.agent.act(rows, explore=False).flatten(0, 1).numpy()
            going_on = []
            for number in playing:
                observation[number], reward, terminated, truncated, _ = environments[number].step(action[number])
                returns[number] += reward
                if not (terminated or truncated):
                    going_on.append(number)
            playing = going_on
        return returns.reshape(runs, episodes).mean(1)
