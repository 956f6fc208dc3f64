# SPDX-License-Identifier: Apache-2.0
"""The interfaces between agents and data modules: methods and attributes that one declares for the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from gymnasium.spaces import Space
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.replay import Replay


class ActingAgent(Protocol):
    """A LightningModule that collects transitions and is evaluated."""

    device: torch.device

    def act(self, observation: Tensor, explore: bool) -> Any:
        """Actions for observations ``[N, ...]``, see :class:`~lightning_replay.lit.policy.ActionReader`."""


class RolloutAgent(ActingAgent, Protocol):
    """A LightningModule that learns from rollouts of its own policy, such as :class:`~lightning_replay.agents.PPO`."""

    def act_with_value(self, observation: Tensor) -> TensorDictBase | dict[str, Any]:
        """Columns ``[N, ...]`` to record for observations: ``action``, ``state_value`` and what the loss needs."""

    def value(self, observation: Tensor) -> Tensor:
        """Values of observations, float ``[N, 1]``."""


class SurpriseAgent(Protocol):
    """A LightningModule that measures the surprise of transitions that it has not learned from yet."""

    def initial_surprise(self, transitions: TensorDictBase) -> Tensor:
        """Surprise of transitions ``[M]``, float32 ``[M]``, at least 0."""


class TrainingData:
    """The source that an agent's training steps get their batches from: attributes that agents read.

    The data modules of :mod:`lightning_replay.lit` subclass it; a user's own is read by
    :func:`~lightning_replay.agents.foreign.training_data`.

    Attributes:
        observation_space: of one environment; ``None`` before ``setup``.
        action_space: of one environment; ``None`` before ``setup``.
        replay: the buffer that batches are drawn from; ``None`` where there is none.
        rollout_rows: rows of one rollout; 0 where batches are drawn from a replay, ``None`` if unknown.
        steps_environments: whether it plays with the agent, whose networks then have to fit these spaces.
        takes_td_errors: whether :meth:`update_priority` is called after each training step.
    """

    observation_space: Space | None = None
    action_space: Space | None = None
    replay: Replay | None = None
    rollout_rows: int | None = None
    steps_environments: bool = False
    takes_td_errors: bool = False

    @property
    def discounting_parts(self) -> Mapping[str, Any]:
        """Parts that sum rewards with a ``discount`` or ``gae_lambda`` of their own, by the name of their option."""
        return {}

    def draw(self) -> TensorDictBase:
        """Collects what is due before the next update, then returns what it learns from, on the agent's device."""
        raise NotImplementedError

    def update_priority(self, batch: TensorDictBase, td_error: Tensor, **signals: Tensor) -> None:
        """Passes the TD errors of a batch and other signals to the replay, which ignores what it does not use."""
        raise NotImplementedError
