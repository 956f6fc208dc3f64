# SPDX-License-Identifier: Apache-2.0
"""MP-DQN for discrete actions with continuous parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from torch import Tensor, nn
from torchrl.modules import MLP
from torchrl.objectives import LossModule

from lightning_replay.agents.agent import ExploringAgent, weighted_mean
from lightning_replay.agents.networks import layers_of, tensors_of
from lightning_replay.agents.spaces import SizeReader, parameterized_sizes


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


class MPDQN(ExploringAgent):
    """Multi-pass deep Q-network: ``Q target = r + γ max_k Q_k'(s', x'(s'))``, where x gives all actions' parameters.

    Acts in ``Tuple(Discrete(K), Box, ..., Box)``, or a Dict of these: :meth:`act` returns the discrete actions and the
    joint vector of all actions' parameters, which a replay stores as ``("action", "discrete")`` and
    ``("action", "parameters")``. Inverting gradients keep parameters within their bounds. With a sparse reward the
    targets must be clipped to the reachable returns (``target_low``, ``target_high``), or the values drift upwards.
    ``priority_weight`` multiplies each row of the values' loss; training steps return that loss and ``td_error``,
    float32 ``[B]``, magnitude. Without a trainer, step the optimizers of
    :meth:`configure_optimizers` on :meth:`losses` and then call :meth:`update_targets`.
    Bester et al. 2019, https://arxiv.org/abs/1905.04388; default networks, learning rates, τ, γ and gradient norm are
    those of the authors' soccer agent, which plays 20,000 episodes. Shorter runs may need larger rates. Exploration
    falls over environment steps instead of episodes; the mixing with Monte-Carlo returns is left out.

    Args:
        observation_size: length of a flat observation; like the next three it is read from the environment if absent.
        parameter_sizes: number of parameters of each discrete action, 0 or more.
        parameter_low: smallest value of each parameter, those of all actions one after the other.
        parameter_high: largest value of each.
        hidden_sizes: widths of the hidden layers of both networks, with leaky ReLU between them.
        value_learning_rate: Adam's, of Q.
        parameter_learning_rate: Adam's, of x.
        discount: γ.
        target_update_rate: τ of the target networks.
        target_low: smallest reachable return, a lower bound of the targets; ``None`` for no bound.
        target_high: largest reachable return, an upper bound.
        gradient_clip: largest norm of each network's gradient.
        exploration_start: share of random actions with random parameters at the first action taken.
        exploration_end: their share after ``exploration_steps``.
        exploration_steps: environment steps, random warm-up not counted, over which the share falls linearly.

    Raises:
        ValueError: no action has a parameter, sizes and bounds disagree, a bound is not finite or its lower one is
            above the upper, or ``target_low`` is above ``target_high``.

    Example:
        >>> low, high = [-1.0, -1.0, 0.0], [1.0, 1.0, 9.0]
        >>> agent = MPDQN(observation_size=4, parameter_sizes=[2, 1], parameter_low=low, parameter_high=high)
        >>> discrete, parameters = agent.act(torch.zeros(5, 4), explore=False)
        >>> discrete.shape, parameters.shape
        (torch.Size([5]), torch.Size([5, 3]))
    """

    takes_update_batches = True
    explored_key = "mpdqn_explored_steps"
    size_names: ClassVar[tuple[str, ...]] = ("observation_size", "parameter_sizes", "parameter_low", "parameter_high")
    read_sizes: ClassVar[SizeReader] = staticmethod(parameterized_sizes)

    def __init__(
        self,
        observation_size: int | None = None,
        parameter_sizes: list[int] | None = None,
        parameter_low: list[float] | None = None,
        parameter_high: list[float] | None = None,
        hidden_sizes: tuple[int, ...] = (256, 128, 64),
        value_learning_rate: float = 1e-3,
        parameter_learning_rate: float = 1e-5,
        discount: float = 0.99,
        target_update_rate: float = 0.001,
        target_low: float | None = None,
        target_high: float | None = None,
        gradient_clip: float = 1.0,
        exploration_start: float = 1.0,
        exploration_end: float = 0.1,
        exploration_steps: int = 20_000,
    ) -> None:
        super().__init__()
        self.set_up(locals())

    def build(self) -> None:
        """Creates both networks, their targets and the losses."""
        options = self.hparams
        sizes, low, high = options["parameter_sizes"], options["parameter_low"], options["parameter_high"]
        total = sum(sizes)
        if total == 0 or not total == len(low) == len(high):
            raise ValueError(
                f"parameter_sizes {list(sizes)} add up to {total}, with {len(low)} lower and {len(high)} upper bounds; "
                "there must be a bound per parameter and at least one parameter. Use DQN for actions without any."
            )
        if not all(-math.inf < least <= most < math.inf for least, most in zip(low, high, strict=True)):
            raise ValueError(
                f"parameter_low is {list(low)} and parameter_high {list(high)}; every parameter needs finite bounds, "
                "the lower one at most the upper."
            )
        value_network = _network(options["observation_size"] + total, options["hidden_sizes"], len(sizes))
        parameter_network = _network(options["observation_size"], options["hidden_sizes"], total)
        self.loss: Any = MultiPassLoss(
            value_network,
            parameter_network,
            parameter_sizes=sizes,
            parameter_low=low,
            parameter_high=high,
            discount=options["discount"],
            target_low=options["target_low"],
            target_high=options["target_high"],
        )
        self.associate_targets()

    @cached_property
    def networks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters of the values' and of the parameters' network."""
        loss = self.loss
        return tensors_of(layers_of(loss.value_network_params)), tensors_of(layers_of(loss.parameter_network_params))

    def act(self, observation: Tensor, explore: bool) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns discrete actions int64 ``[N]`` and all actions' parameters ``[N, P]`` in the environment's units.

        The most valuable, or with probability ``exploration_rate`` a random action with random parameters.
        """
        with torch.no_grad():
            discrete, parameters = self.loss.policy(observation)
            if explore:
                is_random = self.draw_random(discrete)
                any_action = torch.randint_like(discrete, len(self.hparams["parameter_sizes"]))
                discrete = torch.where(is_random, any_action, discrete)
                parameters = torch.where(is_random.unsqueeze(-1), 2 * torch.rand_like(parameters) - 1, parameters)
            return discrete, self.loss.unscaled(parameters)

    def losses(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the values' loss, the parameters' loss and the magnitudes of the TD errors ``[B]`` of one batch.

        Compute the gradients of both losses, in either order or of their sum, before any optimizer steps.
        """
        rows = self.loss(batch)
        return weighted_mean(rows.get("loss_value"), batch), rows.get("loss_parameters").mean(), rows.get("td_error")

    def clip_gradients_of_networks(self) -> None:
        """Clips the norm of each network's gradient; call it before the optimizers step."""
        for parameters in self.networks:
            nn.utils.clip_grad_norm_(parameters, self.hparams["gradient_clip"], foreach=True)

    def update_targets(self) -> None:
        """Moves the target networks towards the networks; call it after the optimizers step."""
        self.target_update.step()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps both networks and their targets."""
        value_optimizer, (parameter_optimizer,) = self.critic_and_other_optimizers()
        value_loss, parameter_loss, td_error = self.losses(batch)
        value_optimizer.zero_grad()
        parameter_optimizer.zero_grad()
        self.take_gradients(value_loss + parameter_loss)  # the losses share no weights: each gets its own gradient
        self.clip_gradients_of_networks()
        self.take_step(value_optimizer)
        parameter_optimizer.step()
        self.update_targets()
        return {"loss": value_loss.detach(), "td_error": td_error}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam for the values, then for the parameters."""
        values, parameters = self.networks
        return [self.adam(values, "value_learning_rate"), self.adam(parameters, "parameter_learning_rate")]


def _network(input_size: int, hidden_sizes: tuple[int, ...], output_size: int) -> MLP:
    """Returns a perceptron with Kaiming weights, zero biases and initial outputs near zero, as in the authors' code."""
    network = MLP(
        in_features=input_size,
        out_features=output_size,
        num_cells=list(hidden_sizes),
        activation_class=nn.LeakyReLU,
        activation_kwargs={"negative_slope": 0.01},
    )
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    for layer in linear:
        nn.init.kaiming_normal_(layer.weight, a=0.01, nonlinearity="leaky_relu")
        nn.init.zeros_(layer.bias)
    nn.init.normal_(linear[-1].weight, std=0.01)
    return network
