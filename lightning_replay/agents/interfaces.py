# SPDX-License-Identifier: Apache-2.0
"""Interfaces between agents and data modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from gymnasium.spaces import Space
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.training_replay import TrainingReplay


class ActingAgent(Protocol):
    """A LightningModule that collects transitions and is evaluated."""

    device: torch.device

    def act(self, observation: Tensor, explore: bool) -> Any:
        """Returns actions for observations ``[N, ...]``, see :class:`~lightning_replay.lit.policy.ActionReader`."""


class RolloutAgent(ActingAgent, Protocol):
    """A LightningModule that learns from rollouts of its own policy, such as :class:`~lightning_replay.agents.PPO`."""

    def act_with_value(self, observation: Tensor) -> TensorDictBase | dict[str, Any]:
        """Returns columns ``[N, ...]`` to record: ``action``, ``state_value`` and others that the loss needs."""

    def value(self, observation: Tensor) -> Tensor:
        """Returns values of observations, float ``[N, 1]``."""


class SurpriseAgent(Protocol):
    """A LightningModule that computes the surprise of new transitions."""

    def initial_surprise(self, transitions: TensorDictBase) -> Tensor:
        """Returns the surprise of transitions ``[M]``, float32 ``[M]``, at least 0."""


class TrainingData:
    """Source of the batches of an agent's training steps.

    The data modules of :mod:`lightning_replay.lit` subclass it; :func:`~lightning_replay.agents.foreign.training_data`
    adapts a user's own.

    Attributes:
        observation_space: of one environment; ``None`` before ``setup``.
        action_space: of one environment; ``None`` before ``setup``.
        replay: the buffer that batches are drawn from, or ``None``.
        rollout_rows: rows of one rollout; 0 if batches are drawn from a replay, ``None`` if unknown.
        steps_environments: whether it steps environments with the agent, whose networks must fit the spaces.
        takes_td_errors: whether :meth:`update_priority` is called after each training step.
    """

    observation_space: Space[Any] | None = None
    action_space: Space[Any] | None = None
    replay: TrainingReplay | None = None
    rollout_rows: int | None = None
    steps_environments: bool = False
    takes_td_errors: bool = False

    @property
    def discounting_parts(self) -> Mapping[str, Any]:
        """Parts with a ``discount`` or ``gae_lambda`` of their own, by the name of their option."""
        return {}

    def draw(self) -> TensorDictBase:
        """Collects the steps due before the next update, and returns its batch on the agent's device."""
        raise NotImplementedError

    def update_priority(self, batch: TensorDictBase, td_error: Tensor, **signals: Tensor) -> None:
        """Passes TD errors and other signals of a batch to the replay, which ignores those it does not use."""
        raise NotImplementedError
