# SPDX-License-Identifier: Apache-2.0
"""Asks an agent for actions outside its training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import numpy as np
import torch

__all__ = ["Action", "act_on", "acting"]

# one array, or for actions with parameters the discrete actions [N] and the parameters of all actions [N, P]
Action = np.ndarray | tuple[np.ndarray, np.ndarray]


@contextmanager
def acting(agent: L.LightningModule) -> Iterator[None]:
    """Evaluation mode without gradients; Lightning's training loop has both the other way round."""
    if not callable(getattr(agent, "act", None)):
        raise TypeError(
            f"{type(agent).__name__} has no method act(observation, explore) -> action, which collection and "
            "evaluation call with a batch of observations; add it, or use an agent of lightning_replay.agents."
        )
    was_training = agent.training
    agent.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        agent.train(was_training)


def act_on(agent: L.LightningModule, observation: np.ndarray, explore: bool) -> Action:
    """Actions ``[N, ...]`` for observations ``[N, ...]``; floats reach the agent as float32."""
    tensor = torch.as_tensor(observation)
    if tensor.is_floating_point():
        tensor = tensor.float()
    action = agent.act(tensor.to(agent.device), explore=explore)
    if isinstance(action, tuple):
        discrete, parameters = action
        return discrete.cpu().numpy(), parameters.cpu().numpy()
    return action.cpu().numpy()
