# SPDX-License-Identifier: Apache-2.0
"""Double DQN of several seeds at once in three rooms: stacked networks, a table for an environment, a replay each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_replay import Replay
from tests.benchmarks.learning.learners.stacked_networks import backward, forward, stacked_parameters
from tests.benchmarks.learning.learners.three_rooms import INPUTS, NUM_ACTIONS, STATE_OF_ONE_HOT, Table

_LEARNED = ("observation", "action", "next", "priority_weight")


class StackedDQN(nn.Module):
    """The agent :class:`lightning_replay.agents.DQN` of R runs: smooth L1, Adam, a target moved with every update.

    Args:
        inputs: of the network, for each state, ``[S, I]``.
        seeds: of the weights, one for each run.
        hidden_sizes: widths of the hidden layers.
        learning_rate: Adam's.
        discount: γ.
        target_update_rate: τ.
    """

    def __init__(
        self,
        inputs: Tensor,
        seeds: Sequence[int],
        hidden_sizes: Sequence[int],
        learning_rate: float,
        discount: float,
        target_update_rate: float,
    ) -> None:
        super().__init__()
        self._inputs, self._discount, self._target_update_rate = inputs, discount, target_update_rate
        self.network = stacked_parameters([inputs.shape[1], *hidden_sizes, NUM_ACTIONS], seeds)
        self._network = list(self.network)
        self._target = [parameter.detach().clone() for parameter in self._network]
        self._optimizer = torch.optim.Adam(self._network, lr=learning_rate, fused=True)

    @torch.no_grad()
    def greedy(self, states: Tensor) -> Tensor:
        """Returns the most valuable actions ``[R, N]`` in states ``[R, N]``."""
        return forward(self._network, self._inputs[states])[-1].argmax(-1)

    @torch.no_grad()
    def values(self, batch: TensorDict) -> Tensor:
        """Returns the values of all actions ``[R, B, A]`` in the states of rows ``[R, B]``."""
        return forward(self._network, self._inputs[_states(batch["observation"])])[-1]

    @torch.no_grad()
    def td_error(self, run: int, rows: TensorDict) -> Tensor:
        """Returns TD errors ``[N]`` of rows ``[N]`` of one run, magnitudes, as they are at present."""
        columns = [column.unsqueeze(0) for column in self._columns(rows)]
        network, target = ([parameter[run : run + 1] for parameter in net] for net in (self._network, self._target))
        return self._error(network, target, *columns[:-1])[0].abs().squeeze(0)

    @torch.no_grad()
    def learn(self, batch: TensorDict, updates: int, in_turn: bool = False) -> Tensor:
        """Deals rows ``[R, B]`` to updates; returns their TD errors ``[R, B]``, magnitudes.

        Args:
            batch: of a draw of each run; one from tables is ordered by table.
            updates: how many.
            in_turn: an update takes every ``updates``-th row instead of consecutive ones.
        """
        shape, among = ((-1, updates), -1) if in_turn else ((updates, -1), 1)
        dealt = [column.unflatten(1, shape).unbind(among) for column in self._columns(batch)]
        return torch.stack([self._update(*rows) for rows in zip(*dealt, strict=True)], among).flatten(1)

    def _columns(self, batch: TensorDict) -> list[Tensor]:
        states, following = (_states(each) for each in (batch["observation"], batch["next", "observation"]))
        weight = batch.get("priority_weight", torch.ones(states.shape))
        going_on = self._discount * (~batch["next", "terminated"].squeeze(-1))
        return [states, batch["action"].long(), following, batch["next", "reward"].squeeze(-1), going_on, weight]

    def _update(
        self, states: Tensor, action: Tensor, following: Tensor, reward: Tensor, discount: Tensor, weight: Tensor
    ) -> Tensor:
        error, outputs = self._error(self._network, self._target, states, action, following, reward, discount)
        slope = (weight * error.clamp(-1.0, 1.0) / error.shape[1]).unsqueeze(-1)
        gradient = torch.zeros_like(outputs[-1]).scatter_(-1, action.unsqueeze(-1), slope)
        backward(self._network, outputs, gradient)
        self._optimizer.step()
        torch._foreach_lerp_(self._target, self._network, self._target_update_rate)
        return error.abs()

    def _error(
        self,
        network: Sequence[Tensor],
        target: Sequence[Tensor],
        states: Tensor,
        action: Tensor,
        following: Tensor,
        reward: Tensor,
        discount: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the value less its target ``[R, B]``, and the outputs of the layers."""
        best = forward(network, self._inputs[following])[-1].argmax(-1, keepdim=True)
        value = forward(target, self._inputs[following])[-1].gather(-1, best).squeeze(-1)
        outputs = forward(network, self._inputs[states])
        taken = outputs[-1].gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return taken - reward - discount * value, outputs


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
        rows = torch.stack([batch.select(*_LEARNED, strict=False) for batch in batches])
        errors = self._agent.learn(rows, self._settings["updates_per_draw"], self._settings.get("rows_in_turn", False))
        for replay, batch, error in zip(self._replays, batches, errors, strict=True):
            if replay.is_prioritized:
                replay.update_priority(batch["index"], error, generation=batch["generation"])

    def _play(self) -> TensorDict:
        """Steps ``[R, N]``."""
        count, limit = self._settings["steps_per_draw"], self._settings["episode_steps"]
        chance = np.stack([generator.random(count) for generator in self._generators])
        drawn = np.stack([generator.integers(NUM_ACTIONS, size=count) for generator in self._generators])
        columns = []
        for step in range(count):
            greedy = self._agent.greedy(torch.from_numpy(self._state).unsqueeze(1)).squeeze(1).numpy()
            action = np.where(chance[:, step] < self._settings["exploration"], drawn[:, step], greedy)
            self._episode_step += 1
            truncated = self._episode_step == limit
            columns.append((self._state, action, truncated))
            done = truncated | self._table.is_goal[self._state, action]
            self._state = np.where(done, self._table.start, self._table.following[self._state, action])
            self._episode_step[done] = 0
        return self._table.steps_of(*(np.stack(column, 1) for column in zip(*columns, strict=True)))


def _states(observation: Tensor) -> Tensor:
    return (observation @ STATE_OF_ONE_HOT).long()


def agent_of(settings: dict[str, Any], seeds: Sequence[int]) -> StackedDQN:
    """The agent with the settings of an experiment."""
    names = ("hidden_sizes", "learning_rate", "discount", "target_update_rate")
    return StackedDQN(INPUTS[settings["inputs"]], seeds, **{name: settings[name] for name in names})
