# SPDX-License-Identifier: Apache-2.0
"""The losses of MP-DQN as a TorchRL loss module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from torch import Tensor, nn
from torchrl.objectives import LossModule


class InvertedGradients(torch.autograd.Function):
    """The identity, whose gradient shrinks towards the bound it points to and is inverted beyond it.

    For parameters p within [-1, 1], a descent that increases p is scaled by ``(1 - p) / 2``, one that decreases p by
    ``(p + 1) / 2``. Hausknecht & Stone 2016, equation 11, https://arxiv.org/abs/1511.04143.

    Example:
        >>> p = torch.tensor([0.5, 0.5, 1.5], requires_grad=True)
        >>> InvertedGradients.apply(p).backward(torch.tensor([-1.0, 1.0, -1.0]))
        >>> p.grad
        tensor([-0.2500,  0.7500,  0.2500])
    """

    @staticmethod
    def forward(ctx: Any, parameters: Tensor) -> Tensor:
        """Returns the parameters."""
        ctx.save_for_backward(parameters)
        return parameters.view_as(parameters)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Scales the gradient of a loss; a negative one increases its parameter."""
        (parameters,), (gradient,) = ctx.saved_tensors, grad_outputs
        # 1 - p where the gradient is negative, 1 + p elsewhere
        return gradient * (1 + torch.where(gradient < 0, -parameters, parameters)) / 2


class MultiPassLoss(LossModule):
    """``(y - Q_a(s, p))² / 2`` with ``y = r + γ max_k Q_k(s', x(s'))``, and ``-Σ_k Q_k(s, x(s))`` for x.

    ``Q_k`` is the k-th output of a pass in which the parameters of all other actions are zero, so that it depends on
    its own alone: the K passes are stacked into one. Both networks work on parameters scaled to [-1, 1].
    Bester et al. 2019, https://arxiv.org/abs/1905.04388.

    Args:
        value_network: from an observation joined with all parameters ``[B, S + P]`` to the values ``[B, K]``.
        parameter_network: from observations ``[B, S]`` to parameters ``[B, P]``, not bounded.

    The other arguments are those of :class:`~lightning_replay.agents.MPDQN`.

    Returned keys:
        loss_value: float32 ``[B]``.
        loss_parameters: float32 ``[B]``.
        td_error: float32 ``[B]``, magnitude.
    """

    in_keys: ClassVar[list[NestedKey]] = [
        *("observation", ("action", "discrete"), ("action", "parameters")),
        *(("next", "observation"), ("next", "reward"), ("next", "terminated")),
    ]
    out_keys: ClassVar[list[NestedKey]] = ["loss_value", "loss_parameters", "td_error"]

    value_network: nn.Module
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams
    parameter_network: nn.Module
    parameter_network_params: TensorDictParams
    target_parameter_network_params: TensorDictParams
    masks: Tensor
    low: Tensor
    high: Tensor
    center: Tensor
    half_range: Tensor

    def __init__(
        self,
        value_network: nn.Module,
        parameter_network: nn.Module,
        *,
        parameter_sizes: Sequence[int],
        parameter_low: Sequence[float],
        parameter_high: Sequence[float],
        discount: float,
        target_low: float | None = None,
        target_high: float | None = None,
    ) -> None:
        super().__init__()
        self.convert_to_functional(value_network, "value_network", create_target_params=True)
        self.convert_to_functional(parameter_network, "parameter_network", create_target_params=True)
        owner = torch.arange(len(parameter_sizes)).repeat_interleave(torch.tensor(parameter_sizes))
        masks = torch.nn.functional.one_hot(owner, len(parameter_sizes)).T.float()
        low, high = torch.tensor(parameter_low), torch.tensor(parameter_high)
        buffers = {"masks": masks, "low": low, "high": high, "center": (low + high) / 2, "half_range": (high - low) / 2}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)
        self.discount = discount
        self.target_low: float | None = target_low
        self.target_high: float | None = target_high

    def scaled(self, parameters: Tensor) -> Tensor:
        """Returns the environment's parameters scaled to [-1, 1]; one that cannot vary is 0."""
        return torch.where(self.half_range > 0, (parameters - self.center) / self.half_range, 0.0)

    def unscaled(self, parameters: Tensor) -> Tensor:
        """Returns parameters in the environment's units, within its bounds."""
        return torch.clamp(self.center + self.half_range * parameters, self.low, self.high)

    def action_values(self, observation: Tensor, parameters: Tensor) -> Tensor:
        """Returns ``Q_k`` of every action ``[B, K]`` by K passes, for scaled parameters and the weights in place."""
        size, passes = len(observation), len(self.masks)
        one_at_a_time = parameters.unsqueeze(1) * self.masks
        stacked = torch.cat([observation.unsqueeze(1).expand(-1, passes, -1), one_at_a_time], dim=-1)
        return self.value_network(stacked.flatten(0, 1)).reshape(size, passes, passes).diagonal(dim1=1, dim2=2)

    def policy(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the most valuable action ``[B]`` and scaled parameters of all actions ``[B, P]``."""
        with self.parameter_network_params.to_module(self.parameter_network):
            parameters = self.parameter_network(observation).clamp(-1.0, 1.0)
        with self.value_network_params.to_module(self.value_network):
            return self.action_values(observation, parameters).argmax(dim=-1), parameters

    @torch.no_grad()
    def targets(self, batch: TensorDictBase) -> Tensor:
        """Returns the targets of the taken actions' values ``[B]``; a truncated row keeps its bootstrap."""
        following = batch.get("next")
        observation = following.get("observation")
        with self.target_parameter_network_params.to_module(self.parameter_network):
            parameters = self.parameter_network(observation).clamp(-1.0, 1.0)
        with self.target_value_network_params.to_module(self.value_network):
            bootstrap = self.action_values(observation, parameters).amax(dim=-1)
        alive = ~following.get("terminated").flatten()
        target = following.get("reward").flatten() + self._discounts(batch) * alive * bootstrap
        if self.target_low is None and self.target_high is None:
            return target
        return target.clamp(self.target_low, self.target_high)

    def _discounts(self, batch: TensorDictBase) -> Tensor | float:
        """Returns γ to the power of each return's steps: the column ``discount``, or from the number of steps."""
        given, steps = batch.get("discount", None), batch.get("steps_to_next_obs", None)
        if given is not None:
            return given.flatten()
        return self.discount if steps is None else self.discount ** steps.flatten()

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Returns both losses and the TD error of each row."""
        observation, action = tensordict.get("observation"), tensordict.get(("action", "discrete"))
        taken = self.scaled(tensordict.get(("action", "parameters"))) * self.masks[action]
        target = self.targets(tensordict)
        with self.value_network_params.to_module(self.value_network):
            values = self.value_network(torch.cat([observation, taken], dim=-1))
        difference = target - values.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        with self.parameter_network_params.to_module(self.parameter_network):
            parameters = InvertedGradients.apply(self.parameter_network(observation))
        with self.value_network_params.detach().to_module(self.value_network):
            parameter_rows = -self.action_values(observation, parameters).sum(dim=-1)
        losses = {
            "loss_value": 0.5 * difference.square(),
            "loss_parameters": parameter_rows,
            "td_error": difference.detach().abs(),
        }
        return TensorDict(losses, tensordict.batch_size)
