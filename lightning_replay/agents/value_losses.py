# SPDX-License-Identifier: Apache-2.0
"""TorchRL's DQN losses with the signals of a replay: signed TD errors, surprise and action values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from torchrl.modules import DistributionalQValueActor, QValueActor, reset_noise
from torchrl.objectives import DistributionalDQNLoss, DQNLoss

from lightning_replay.retention.surprise import categorical_projection, cross_entropy, kl_divergence, squared_td_error

__all__ = ["CategoricalValueLoss", "RowErrors", "ScalarValueLoss", "categorical_projection"]


class RowErrors(NamedTuple):
    """Results of one forward pass for each transition of a batch.

    Attributes:
        loss: float32 ``[B]``, with its graph; not weighted.
        td_error: float32 ``[B]``, target minus current value of the action taken; of distributions, of their means.
        surprise: float32 ``[B]``, at least 0.
        action_values: float32 ``[B, A]``, current values of all actions; of distributions, their means.
    """

    loss: Tensor
    td_error: Tensor
    surprise: Tensor
    action_values: Tensor


_Errors = tuple[Tensor, Tensor, Tensor]  # loss, TD error and surprise of each row


class _FeedbackLoss:
    """Adds :meth:`rows` to a loss of TorchRL, which leaves weighting and averaging to the caller."""

    value_network: nn.Module
    value_network_params: Any
    target_value_network_params: Any
    double: bool
    discount: float

    def outputs(self, observation: Tensor, *, of_target: bool = False) -> Tensor:
        """Returns values ``[B, A]``, or log probabilities ``[B, N, A]``, of the network or the target network."""
        parameters = self.target_value_network_params if of_target else self.value_network_params
        batch = TensorDict({"observation": observation}, [len(observation)])
        with parameters.to_module(self.value_network):
            return self.value_network(batch).get("action_value")

    def means(self, outputs: Tensor) -> Tensor:
        """Returns the action values ``[B, A]`` of the network's outputs."""
        raise NotImplementedError

    def compare(self, current: Tensor, following: Tensor, reward: Tensor, discount: Tensor) -> _Errors:
        """Returns loss, TD error and surprise ``[B]`` from the outputs of the action taken and of the best next one."""
        raise NotImplementedError

    def redraw_noise(self, *, of_target: bool = False) -> None:
        """Draws new noise for the noisy layers of the network, or of the target network."""
        parameters = self.target_value_network_params if of_target else self.value_network_params
        with parameters.to_module(self.value_network):
            self.value_network.apply(reset_noise)

    def rows(self, batch: TensorDictBase) -> RowErrors:
        """Returns loss and feedback of each row, from one forward pass of the network and one of the target network.

        The factor of the bootstrap is the column ``discount`` (γ to the power of the steps in the reward, 0 where they
        terminated); without it, γ, or 0 after termination.
        """
        observation, following = batch.get("observation"), batch.get(("next", "observation"))
        in_one_pass = self.double and not torch.is_grad_enabled()
        outputs = self.outputs(torch.cat([observation, following]) if in_one_pass else observation)
        if in_one_pass:
            outputs, following_outputs = outputs.chunk(2)
        with torch.no_grad():
            target_outputs = self.outputs(following, of_target=True)
            if not in_one_pass:
                following_outputs = self.outputs(following) if self.double else target_outputs
            best = self.means(following_outputs).argmax(-1)
            reward = batch.get(("next", "reward")).reshape(-1)
        current = _of_action(outputs, batch.get("action").reshape(-1))
        errors = self.compare(current, _of_action(target_outputs, best), reward, self._discount_of(batch))
        return RowErrors(*errors, self.means(outputs.detach()))

    def _discount_of(self, batch: TensorDictBase) -> Tensor:
        stored = batch.get("discount", None)
        if stored is not None:
            return stored.reshape(-1)
        terminated = batch.get(("next", "terminated")).reshape(-1)
        return self.discount * (~terminated).to(batch.get(("next", "reward")).dtype)


class ScalarValueLoss(_FeedbackLoss, DQNLoss):
    """Huber loss of expected values; the surprise is the squared TD error.

    Args:
        network: observations to values ``[B, A]``.
        discount: γ of batches without a column ``discount``.
        double: the network chooses the best next action and the target network values it (arXiv:1509.06461); else
            the target network does both.
    """

    def __init__(self, network: nn.Module, *, discount: float, double: bool = True) -> None:
        super().__init__(
            QValueActor(network, in_keys=["observation"], action_space="categorical"),
            loss_function="smooth_l1",
            delay_value=True,
            double_dqn=double,
            action_space="categorical",
            reduction="none",
            use_prioritized_weights=False,
        )
        self.make_value_estimator(gamma=discount)
        self.discount = discount
        self.double = double

    def means(self, outputs: Tensor) -> Tensor:
        """Returns the values themselves."""
        return outputs

    def compare(self, current: Tensor, following: Tensor, reward: Tensor, discount: Tensor) -> _Errors:
        """Returns Huber loss, TD error and its square."""
        target = reward + discount * following
        td_error = (target - current).detach()
        return smooth_l1_loss(current, target, reduction="none"), td_error, squared_td_error(td_error)


class CategoricalValueLoss(_FeedbackLoss, DistributionalDQNLoss):
    """Cross-entropy between the projected target distribution and the current one (C51).

    TorchRL's inherited forward pass gives the same loss, but always is double, computes the target on the CPU and does
    not return the target distribution, which surprise and TD error are computed from.

    Args:
        network: observations to logits ``[B, N, A]``.
        support: ``[N]``, the atoms.
        discount: γ of batches without a column ``discount``.
        double: as in :class:`ScalarValueLoss`.
        measure: from the target distribution and the logarithm of the current one, both ``[B, N]``, to the surprise
            ``[B]``.
    """

    def __init__(
        self,
        network: nn.Module,
        support: Tensor,
        *,
        discount: float,
        double: bool = True,
        measure: Callable[[Tensor, Tensor], Tensor] = kl_divergence,
    ) -> None:
        super().__init__(
            DistributionalQValueActor(network, support, in_keys=["observation"], action_space="categorical"),
            gamma=discount,
            delay_value=True,
            reduction="none",
            use_prioritized_weights=False,
        )
        self.discount = discount
        self.double = double
        self.measure = measure

    @property
    def support(self) -> Tensor:
        """The atoms ``[N]``."""
        return self.value_network_params.get("support")

    def means(self, outputs: Tensor) -> Tensor:
        """Returns the mean of each action's distribution."""
        return torch.einsum("bna,n->ba", outputs.exp(), self.support)

    def compare(self, current: Tensor, following: Tensor, reward: Tensor, discount: Tensor) -> _Errors:
        """Returns the cross-entropy, the difference of the means, and the measured surprise."""
        target = categorical_projection(following.exp(), reward, discount, self.support)
        log_current = current.detach()
        td_error = ((target - log_current.exp()) * self.support).sum(-1)
        return cross_entropy(target, current), td_error, self.measure(target, log_current)


def _of_action(outputs: Tensor, action: Tensor) -> Tensor:
    """Selects the outputs of one action per row, ``[B]`` or ``[B, N]``."""
    index = action.reshape(-1, *[1] * (outputs.ndim - 1)).expand(*outputs.shape[:-1], 1)
    return outputs.gather(-1, index).squeeze(-1)
