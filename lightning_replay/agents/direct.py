# SPDX-License-Identifier: Apache-2.0
"""Gradients of a DQN's loss by hand: those of autograd, bit for bit, in two thirds of the time."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import linear, smooth_l1_loss

from lightning_replay.agents.agent import OffPolicyAgent, double_q_target, plain_columns, weighted_mean
from lightning_replay.agents.networks import Layers, Perceptron, perceive

_REPLACED = ("losses", "distances", "descend", "descend_rows", "take_gradients")


def set_gradients(
    agent: OffPolicyAgent, network: Perceptron, target_network: Perceptron, batch: TensorDictBase
) -> tuple[Tensor, Tensor] | None:
    """Sets the gradients of a double DQN's network; returns the loss and the magnitudes of the TD errors ``[B]``.

    Returns ``None`` and sets nothing if anything but the loss of a flat batch acts on the gradients.
    """
    layers = network.layers()
    if batch.ndim != 1 or not _are_plain(agent, layers):
        return None
    with torch.set_grad_enabled(False):
        columns = plain_columns(batch)
        following = columns["next"]["observation"]
        # Layers are read once, and modules are not called: they have no hooks.
        target_values = perceive(target_network.layers(), following)
        target = double_q_target(columns, perceive(layers, following), target_values, agent.hparams["discount"])
        *inputs, values = _activations_of(layers, columns["observation"])
        taken = columns["action"].reshape(-1, 1)
        current = values.gather(-1, taken).squeeze(-1)
        loss = weighted_mean(smooth_l1_loss(current, target, reduction="none"), columns)
        difference = current - target
        weight = columns.get("priority_weight")
        share = 1.0 / len(values)
        slope = difference.clamp(-1.0, 1.0).mul_(share if weight is None else weight.reshape(-1) * share)
        gradient = torch.zeros_like(values).scatter_(-1, taken, slope.unsqueeze(-1))
        for place in reversed(range(len(layers))):
            weights, biases = layers[place]
            weights.grad = gradient.t().mm(inputs[place])
            biases.grad = gradient.sum(0)
            if place:
                gradient = torch.ops.aten.threshold_backward(gradient.mm(weights), inputs[place], 0)
        return loss, difference.abs_()


def _are_plain(agent: OffPolicyAgent, layers: Layers) -> bool:
    # Backward would set the gradients of all layers and do nothing else.
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


def _activations_of(layers: Layers, inputs: Tensor) -> list[Tensor]:
    """Returns the inputs ``[B, I]`` of each layer, and last the outputs."""
    *hidden, (last_weight, last_bias) = layers
    activations = [inputs]
    for weight, bias in hidden:
        activations.append(torch.relu_(linear(activations[-1], weight, bias)))
    return [*activations, linear(activations[-1], last_weight, last_bias)]
