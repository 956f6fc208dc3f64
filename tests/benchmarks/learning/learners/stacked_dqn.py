# SPDX-License-Identifier: Apache-2.0
"""Double DQN of several seeds at once: stacked networks, with gradients worked out by hand as in stacked_networks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.retention.surprise import squared_td_error
from tests.benchmarks.learning.learners.stacked_networks import (
    StackedAgent,
    backward,
    forward,
    soft_update,
    stacked_parameters,
)


def flat(observation: Tensor) -> Tensor:
    """Returns observations ``[R, N, ...]`` as inputs of a network, float32 ``[R, N, I]``."""
    return observation.flatten(2).float()


class StackedDQN(StackedAgent):
    """Double DQN (van Hasselt et al. 2016, https://arxiv.org/abs/1509.06461) of R runs, with the Huber loss.

    Args:
        sizes: of the network's input, the hidden layers and the actions.
        seeds: of the weights, one for each run.
        learning_rate: Adam's.
        discount: γ, of rows without a column ``discount``.
        target_update_rate: τ of a step of the target network towards the network; 1 copies it.
        updates_per_target: updates between two such steps.
        inputs: of the network, ``[R, N, I]``, from observations ``[R, N, ...]``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seeds: Sequence[int],
        learning_rate: float,
        discount: float,
        target_update_rate: float = 1.0,
        updates_per_target: int = 1,
        inputs: Callable[[Tensor], Tensor] = flat,
    ) -> None:
        super().__init__()
        self.online = stacked_parameters(sizes, seeds)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        # Lists, which are faster to read in an update than torch's ParameterList.
        self._online, self._target = list(self.online), list(self.target)
        self._optimizers = [torch.optim.Adam(self._online, lr=learning_rate, fused=True)]
        self._discount, self._inputs = discount, inputs
        self._target_update_rate, self._updates_per_target = target_update_rate, updates_per_target
        # Of each run alone, for surprise of its new rows.
        self._alone = [
            [[parameter.detach()[run : run + 1] for parameter in net] for net in (self._online, self._target)]
            for run in range(len(seeds))
        ]

    def act(self, observation: Tensor) -> Tensor:
        """Returns the actions of the highest values, int64 ``[R, N]``, for observations ``[R, N, ...]``."""
        return self.values(observation).argmax(-1)

    @torch.no_grad()
    def values(self, observation: Tensor) -> Tensor:
        """Returns the values of all actions, ``[R, N, A]``, for observations ``[R, N, ...]``."""
        return forward(self._online, self._inputs(observation))[-1]

    @torch.no_grad()
    def learn(
        self, batches: Sequence[TensorDictBase], updates: int = 1, in_turn: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Makes updates of every run from its batch ``[B]``, in which ``priority_weight`` weights the rows.

        Args:
            batches: one of each run, with the rows of all updates; a draw from tables is ordered by table.
            updates: how many, which divides B.
            in_turn: an update takes every ``updates``-th row instead of consecutive ones.

        Returns:
            TD errors ``[R, B]``, target less value, and action values ``[R, B, A]``, of before the update of each row.
        """
        shape, among = ((-1, updates), 2) if in_turn else ((updates, -1), 1)
        columns = [torch.stack(column) for column in zip(*map(self._columns, batches), strict=True)]
        dealt = [column.unflatten(1, shape).movedim(among, 0).contiguous() for column in columns]
        pairs = [self._update(*rows) for rows in zip(*dealt, strict=True)]
        td_error, values = (torch.stack(column, among).flatten(1, 2) for column in zip(*pairs, strict=True))
        return td_error, values

    @torch.no_grad()
    def td_error(self, run: int, rows: TensorDictBase) -> Tensor:
        """Returns TD errors ``[M]`` of rows ``[M]`` of one run, target less value."""
        *columns, _ = (column.unsqueeze(0) for column in self._columns(rows))
        return self._errors(*self._alone[run], *columns)[0].squeeze(0)

    def surprise(self, run: int, rows: TensorDictBase) -> Tensor:
        """Returns the surprise of retention, squared TD errors ``[M]``, of rows ``[M]`` of one run."""
        return squared_td_error(self.td_error(run, rows))

    def _columns(self, rows: TensorDictBase) -> list[Tensor]:
        following, discount = rows["next"], rows.get("discount", None)
        going_on = (~following["terminated"]).float().flatten()
        return [
            rows["observation"],
            rows["action"],
            following["observation"],
            following["reward"].flatten(),
            going_on.mul_(self._discount if discount is None else discount.flatten()),
            rows.get("priority_weight", torch.ones(len(going_on))),
        ]

    def _update(
        self, observation: Tensor, action: Tensor, following: Tensor, reward: Tensor, discount: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns TD errors ``[R, B]`` and action values ``[R, B, A]``; all arguments are ``[R, B, ...]``."""
        rows = (observation, action, following, reward, discount)
        td_error, outputs = self._errors(self._online, self._target, *rows)
        # The derivative of the Huber loss of each row by its TD error.
        slope = td_error.clamp(-1.0, 1.0).mul_(weight).div_(-weight.shape[1]).unsqueeze(-1)
        backward(self._online, outputs, torch.zeros_like(outputs[-1]).scatter_(-1, action.unsqueeze(-1), slope))
        (optimizer,) = self._optimizers
        optimizer.step()
        self._updates += 1
        if self._updates % self._updates_per_target == 0:
            soft_update(self._target, self._online, self._target_update_rate)
        return td_error, outputs[-1]

    def _errors(
        self,
        online: Sequence[Tensor],
        target: Sequence[Tensor],
        observation: Tensor,
        action: Tensor,
        following: Tensor,
        reward: Tensor,
        discount: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns TD errors ``[R, B]``, and the outputs of the layers."""
        inputs = self._inputs(following)
        best = forward(online, inputs)[-1].argmax(-1, keepdim=True)
        later = forward(target, inputs)[-1].gather(-1, best).squeeze(-1).mul_(discount)
        outputs = forward(online, self._inputs(observation))
        return self._sum(reward, later, outputs[-1].gather(-1, action.unsqueeze(-1)).squeeze(-1)), outputs

    @staticmethod
    def _sum(reward: Tensor, later: Tensor, taken: Tensor) -> Tensor:
        """Returns reward plus discounted value of the next state less value of the action taken."""
        return later.add_(reward).sub_(taken)
