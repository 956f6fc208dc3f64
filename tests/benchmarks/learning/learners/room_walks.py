# SPDX-License-Identifier: Apache-2.0
"""Walks of several seeds of double DQN at once in three rooms: a table for an environment, a replay for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import Replay
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN
from tests.benchmarks.learning.learners.three_rooms import INPUTS, NUM_ACTIONS, ONE_HOT, Table


class RoomsDQN(StackedDQN):
    """The agent :class:`lightning_replay.agents.DQN` of R runs: a target network moved with every update.

    TD errors are summed in another order than in :class:`StackedDQN`: where rewards are shaped, a step has a reward and
    a next state, and the two orders round differently. The kept results of both could not be repeated with one of them.
    """

    @staticmethod
    def _sum(reward: Tensor, later: Tensor, taken: Tensor) -> Tensor:
        return reward - taken + later


class StackedWalks:
    """The agent's runs after their first goals, each in its own three rooms with its own replay.

    Args:
        agent: of all runs.
        table: of the environment.
        replays: one for each run.
        seeds: of the random actions, one for each run.
        settings: ``episode_steps``, ``exploration``, ``steps_per_draw``, ``updates_per_draw``, ``rows_in_turn``.
    """

    def __init__(
        self, agent: StackedDQN, table: Table, replays: Sequence[Replay], seeds: Sequence[int], settings: dict[str, Any]
    ) -> None:
        self._agent, self._table, self._replays, self._settings = agent, table, list(replays), settings
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        self._state = np.full(len(seeds), table.start)
        self._episode_step = np.zeros(len(seeds), dtype=np.int64)

    def advance(self) -> None:
        """Plays the steps of one draw, stores them, draws and learns."""
        for replay, steps in zip(self._replays, self._play().unbind(0), strict=True):
            replay.extend(steps)
        batches = [replay.sample() for replay in self._replays]
        updates, in_turn = self._settings["updates_per_draw"], self._settings.get("rows_in_turn", False)
        td_errors, _ = self._agent.learn(batches, updates, in_turn)
        for replay, batch, td_error in zip(self._replays, batches, td_errors, strict=True):
            if replay.is_prioritized:
                replay.update_priority(batch["index"], td_error, generation=batch["generation"])

    def _play(self) -> TensorDict:
        """Plays the steps of one draw; returns them, ``[R, N]``."""
        count, limit = self._settings["steps_per_draw"], self._settings["episode_steps"]
        chance = np.stack([generator.random(count) for generator in self._generators])
        drawn = np.stack([generator.integers(NUM_ACTIONS, size=count) for generator in self._generators])
        columns = []
        for step in range(count):
            greedy = self._agent.act(ONE_HOT[self._state].unsqueeze(1)).squeeze(1).numpy()
            action = np.where(chance[:, step] < self._settings["exploration"], drawn[:, step], greedy)
            self._episode_step += 1
            truncated = self._episode_step == limit
            columns.append((self._state, action, truncated))
            done = truncated | self._table.is_goal[self._state, action]
            self._state = np.where(done, self._table.start, self._table.following[self._state, action])
            self._episode_step[done] = 0
        return self._table.steps_of(*(np.stack(column, 1) for column in zip(*columns, strict=True)))


def agent_of(settings: dict[str, Any], seeds: Sequence[int]) -> RoomsDQN:
    """Returns the agent with the settings of an experiment."""
    size, inputs = INPUTS[settings["inputs"]]
    names = ("learning_rate", "discount", "target_update_rate")
    options = {name: settings[name] for name in names} | {"inputs": inputs}
    return RoomsDQN((size, *settings["hidden_sizes"], NUM_ACTIONS), seeds, **options)
