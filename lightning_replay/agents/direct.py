# SPDX-License-Identifier: Apache-2.0
"""Gradients of a DQN's loss by hand: the gradients of autograd, bit for bit, in two thirds of the time."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import linear

from lightning_replay.agents.agent import OffPolicyAgent, double_q_target, weighted_mean
from lightning_replay.agents.networks import Layers, Perceptron, perceive
from lightning_replay.fast_path import has_fast_path

# A user may replace these methods of an agent by attributes.
_REPLACED = ("losses", "distances", "descend", "descend_rows", "take_gradients")


def set_gradients(
    agent: OffPolicyAgent, network: Perceptron, target_network: Perceptron, batch: TensorDictBase
) -> tuple[Tensor, Tensor] | None:
    """Sets the gradients of a DQN's network. Returns the loss and the magnitudes of the TD errors, float32 ``[B]``.

    Returns ``None`` and sets nothing if the agent's class does not declare that this is exact. The same holds if the
    network normalizes its layers, or if hooks, modes, or options change the gradients.
    """
    if not has_fast_path(agent) or batch.ndim != 1 or network.has_norms:
        return None
    if not _are_plain(agent, layers := network.layers()):
        return None
    with torch.set_grad_enabled(False):
        # Nine columns are read from a dictionary in the time of one from a TensorDict.
        columns = dict(batch.items())
        columns["next"] = dict(columns["next"].items())
        following = columns["next"]["observation"]
        # Layers are read once, and modules are not called: they have no hooks.
        target_values = perceive(target_network.layers(), following)
        target = double_q_target(columns, perceive(layers, following), target_values, agent.hparams["discount"])
        inputs = [columns["observation"]]
        for weights, biases in layers[:-1]:
            inputs.append(torch.relu_(linear(inputs[-1], weights, biases)))
        values = linear(inputs[-1], *layers[-1])
        taken = columns["action"].reshape(-1, 1)
        current = values.gather(-1, taken).squeeze(-1)
        difference = current - target
        slope = difference.clamp(-1.0, 1.0)
        loss = weighted_mean(slope * (difference - 0.5 * slope), columns)  # This is smooth L1.
        weight = columns.get("priority_weight")
        share = 1.0 / len(values)
        slope.mul_(share if weight is None else weight.reshape(-1) * share)
        gradient = torch.zeros_like(values).scatter_(-1, taken, slope.unsqueeze(-1))
        for place in reversed(range(len(layers))):
            weights, biases = layers[place]
            weights.grad = gradient.t().mm(inputs[place])
            biases.grad = gradient.sum(0)
            if place:
                gradient = torch.ops.aten.threshold_backward(gradient.mm(weights), inputs[place], 0)
        return loss, difference.abs_()


def _are_plain(agent: OffPolicyAgent, layers: Layers) -> bool:
    # Whether backward would set the gradients of all layers and do nothing else.
    for layer in layers:
        for tensor in layer:
            if not tensor.requires_grad or tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return False
    return (
        agent.conflict_averse_step is None
        and type(agent.observation_encoder) is nn.Identity
        and vars(agent).keys().isdisjoint(_REPLACED)
        and not (torch.is_anomaly_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled())
        and agent.takes_plain_gradients
    )
