# SPDX-License-Identifier: Apache-2.0
"""MP-DQN for discrete actions with continuous parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.func import functional_call

from lightning_replay.agents.agent import ExploringAgent, TargetUpdate, bootstrapped, target_of, weighted_mean
from lightning_replay.agents.spaces import SizeReader, parameterized_sizes


class InvertedGradients(torch.autograd.Function):
    """The identity, whose gradient shrinks towards the bound it points to and is inverted beyond it.

    For parameters p within [-1, 1], a descent that increases p is scaled by ``(1 - p) / 2``, one that decreases p by
    ``(p + 1) / 2``. Hausknecht & Stone 2016, equation 11, https://arxiv.org/abs/1511.04143.
    """

    @staticmethod
    def forward(ctx: Any, parameters: Tensor) -> Tensor:
        """Returns the parameters."""
        ctx.save_for_backward(parameters)
        return parameters.view_as(parameters)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Returns the scaled gradient."""
        (parameters,) = ctx.saved_tensors
        (gradient,) = grad_outputs
        # A negative gradient would increase the parameter: its factor is 1 - p, and otherwise 1 + p.
        return gradient * (1 + torch.where(gradient < 0, -parameters, parameters)) / 2


class MPDQN(ExploringAgent):
    """Multi-pass deep Q-network: ``Q target = r + γ max_k Q_k'(s', x'(s'))``, and x gives all actions' parameters.

    Acts in ``Tuple(Discrete(K), Box, ..., Box)``, or a Dict of these: :meth:`act` returns the discrete actions and the
    joint vector of all actions' parameters, which a replay stores as ``("action", "discrete")`` and
    ``("action", "parameters")``. Inverting gradients keep parameters within their bounds. With a sparse reward the
    targets must be clipped to the reachable returns (``target_low``, ``target_high``), or the values drift upwards.
    ``priority_weight`` multiplies each row of the values' loss. Training steps return that loss and ``td_error``,
    float32 ``[B]``, magnitude. Without a trainer, step the optimizers of
    :meth:`configure_optimizers` on :meth:`losses` and then call :meth:`update_targets`.
    Bester et al. 2019, https://arxiv.org/abs/1905.04388. Default networks, learning rates, τ, γ, and gradient norm come
    from the authors' soccer agent, which plays 20,000 episodes. Shorter runs may need larger rates. Exploration falls
    over environment steps instead of episodes. The mixing with Monte-Carlo returns is left out.

    Args:
        observation_size: Size as in :class:`~lightning_replay.agents.DQN`. Like the next three, it is read from the
            environment.
        parameter_sizes: Number of parameters of each discrete action, 0 or more.
        parameter_low: Smallest value of each parameter, all actions one after the other.
        parameter_high: Largest value of each parameter.
        hidden_sizes: Widths of the hidden layers of both networks, with leaky ReLU between them.
        value_learning_rate: Adam's, of Q.
        parameter_learning_rate: Adam's, of x.
        discount: γ.
        target_update_rate: τ of the target networks.
        target_low: Smallest reachable return, a lower bound of the targets, or ``None`` for no bound.
        target_high: Largest reachable return, an upper bound.
        gradient_clip: Largest norm of each network's gradient, for Q together with its encoder's.
        exploration_start: Share of random actions with random parameters at the first action taken.
        exploration_end: Their share after ``exploration_steps``.
        exploration_steps: Environment steps, random warm-up not counted, over which the share falls linearly.
        exploration_noise: Standard deviation of normal noise on the parameters of actions that are not random, in
            halves of their ranges.

    Raises:
        ValueError: No action has a parameter, sizes and bounds disagree, a bound is not finite or its lower one is
            above the upper, or ``target_low`` is above ``target_high``.

    Example:
        >>> low, high = [-1.0, -1.0, 0.0], [1.0, 1.0, 9.0]
        >>> agent = MPDQN(observation_size=4, parameter_sizes=[2, 1], parameter_low=low, parameter_high=high)
        >>> discrete, parameters = agent.act(torch.zeros(5, 4), explore=False)
        >>> discrete.shape, parameters.shape
        (torch.Size([5]), torch.Size([5, 3]))
    """

    takes_update_batches = True
    clip_option = "gradient_clip"
    counters: ClassVar[dict[str, str]] = {"mpdqn_explored_steps": "_explored_steps"}
    size_names: ClassVar[tuple[str, ...]] = ("observation_size", "parameter_sizes", "parameter_low", "parameter_high")
    read_sizes: ClassVar[SizeReader] = staticmethod(parameterized_sizes)
    masks: Tensor
    low: Tensor
    high: Tensor
    center: Tensor
    half_range: Tensor

    def __init__(
        self,
        observation_size: int | dict[str, Any] | None = None,
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
        exploration_noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.set_up(locals())

    def build(self) -> None:
        """Creates both networks and their targets. Raises ``ValueError`` if sizes and bounds disagree."""
        hidden_sizes = self.hparams["hidden_sizes"]
        sizes, low, high = (self.hparams[name] for name in ("parameter_sizes", "parameter_low", "parameter_high"))
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
        owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        least = torch.tensor(low)
        most = torch.tensor(high)
        buffers = {
            "masks": torch.nn.functional.one_hot(owner, len(sizes)).T.float(),
            **{"low": least, "high": most, "center": (least + most) / 2, "half_range": (most - least) / 2},
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)
        features = self.build_encoder()
        self.value_network: nn.Sequential = _network(features + total, hidden_sizes, len(sizes))
        self.parameter_network: nn.Sequential = _network(features, hidden_sizes, total)
        self.target_value_network: nn.Sequential = target_of(self.value_network)
        self.target_parameter_network: nn.Sequential = target_of(self.parameter_network)
        self.target_update: TargetUpdate = self.target_update_of(
            (self.value_network, self.target_value_network), (self.parameter_network, self.target_parameter_network)
        )

    def scaled(self, parameters: Tensor) -> Tensor:
        """Returns the environment's parameters scaled to [-1, 1]. A parameter that cannot vary is 0."""
        return torch.where(self.half_range > 0, (parameters - self.center) / self.half_range, 0.0)

    def action_values(self, network: Callable[[Tensor], Tensor], observation: Tensor, parameters: Tensor) -> Tensor:
        """Returns ``Q_k`` of every action ``[B, K]`` by K passes, for scaled parameters.

        ``Q_k`` is the k-th output of a pass in which the parameters of all other actions are zero. It therefore depends
        only on its own parameters. The K passes are stacked into one.
        """
        passes = len(self.masks)
        one_at_a_time = parameters.unsqueeze(1) * self.masks
        stacked = torch.cat([observation.unsqueeze(1).expand(-1, passes, -1), one_at_a_time], dim=-1)
        return network(stacked.flatten(0, 1)).reshape(len(observation), passes, passes).diagonal(dim1=1, dim2=2)

    def act(self, observation: Tensor | TensorDictBase, explore: bool) -> tuple[Tensor, Tensor]:
        """Returns discrete actions int64 ``[N]`` and all actions' parameters ``[N, P]`` in the environment's units.

        The action is the most valuable, with noise on its parameters if ``explore``. With probability
        ``exploration_rate``, it is a random action with random parameters.
        """
        with torch.no_grad():
            features = self.features_of(observation)
            parameters = self.parameter_network(features).clamp(-1.0, 1.0)
            discrete = self.action_values(self.value_network, features, parameters).argmax(dim=-1)
            if explore:
                drawn, rate = self.draw_random(len(discrete))
                is_random = drawn < rate
                any_action = torch.randint_like(discrete, len(self.hparams["parameter_sizes"]))
                discrete = torch.where(is_random, any_action, discrete)
                if noise := self.hparams["exploration_noise"]:
                    parameters = parameters + noise * torch.randn_like(parameters)
                parameters = torch.where(is_random.unsqueeze(-1), 2 * torch.rand_like(parameters) - 1, parameters)
            return discrete, torch.clamp(self.center + self.half_range * parameters, self.low, self.high)

    @torch.no_grad()
    def targets(self, batch: TensorDictBase) -> Tensor:
        """Returns the targets of the taken actions' values ``[B]``. A truncated row keeps its bootstrap."""
        options = self.hparams
        features = self.features_of(batch.get("next").get("observation"), target=True)
        # Inverted gradients lead outputs back to the bounds, but do not keep them within.
        parameters = self.target_parameter_network(features).clamp(-1.0, 1.0)
        bootstrap = self.action_values(self.target_value_network, features, parameters).amax(dim=-1)
        target = bootstrapped(batch, bootstrap, options["discount"])
        if options["target_low"] is None and options["target_high"] is None:
            return target
        return target.clamp(options["target_low"], options["target_high"])

    def losses(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the values' loss, the parameters' loss and the magnitudes of the TD errors ``[B]`` of one batch.

        These are ``(y - Q_a(s, p))² / 2`` and ``-Σ_k Q_k(s, x(s))``. Compute the gradients of both losses, in either
        order or of their sum, before any optimizer steps.
        """
        features = self.features_of(batch.get("observation"))
        action = batch.get(("action", "discrete"))
        taken = self.scaled(batch.get(("action", "parameters"))) * self.masks[action]
        target = self.targets(batch)
        values = self.value_network(torch.cat([features, taken], dim=-1))
        difference = target - values.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        features = features.detach()
        parameters = InvertedGradients.apply(self.parameter_network(features))
        # The parameters' loss moves only the parameters, not the values that judge them, and not an encoder.
        weights = {name: weight.detach() for name, weight in self.value_network.named_parameters()}
        frozen = partial(functional_call, self.value_network, weights)
        parameter_rows = -self.action_values(frozen, features, parameters).sum(dim=-1)
        return weighted_mean(0.5 * difference.square(), batch), parameter_rows.mean(), difference.detach().abs()

    def clip_gradients_of_networks(self) -> None:
        """Clips the norm of each network's gradient. Call it before the optimizers step. :meta private:"""
        self.clip(self._value_parameters())
        self.clip(self.parameter_network.parameters())

    def update_targets(self) -> None:
        """Moves the target networks towards the networks. Call it after the optimizers step. :meta private:"""
        self.target_update.step()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps both networks, then their targets."""
        value_optimizer, (parameter_optimizer,) = self.critic_and_other_optimizers()
        value_loss, parameter_loss, td_error = self.losses(batch)
        value_optimizer.zero_grad()
        parameter_optimizer.zero_grad()
        self.take_gradients(value_loss + parameter_loss)  # The losses share no weights, so the gradients do not mix.
        self.take_step(value_optimizer)
        self.take_step(parameter_optimizer)
        self.update_targets()
        return {"loss": value_loss.detach(), "td_error": td_error}

    def _value_parameters(self) -> list[Tensor]:
        return [*self.value_network.parameters(), *self.observation_encoder.parameters()]

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam of the values, then of the parameters."""
        return [
            self.adam(self._value_parameters(), "value_learning_rate"),
            self.adam(self.parameter_network.parameters(), "parameter_learning_rate"),
        ]


def _network(input_size: int, hidden_sizes: tuple[int, ...], output_size: int) -> nn.Sequential:
    # Kaiming weights, zero biases and initial outputs near zero, as in the authors' code.
    linear = [nn.Linear(*sizes) for sizes in itertools.pairwise([input_size, *hidden_sizes, output_size])]
    for layer in linear:
        nn.init.kaiming_normal_(layer.weight, a=0.01, nonlinearity="leaky_relu")
        nn.init.zeros_(layer.bias)
    nn.init.normal_(linear[-1].weight, std=0.01)
    return nn.Sequential(*(part for layer in linear[:-1] for part in (layer, nn.LeakyReLU())), linear[-1])
