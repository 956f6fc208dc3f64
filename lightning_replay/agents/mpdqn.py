# SPDX-License-Identifier: Apache-2.0
"""MP-DQN for discrete actions with continuous parameters."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.modules import MLP

from lightning_replay.agents.multi_pass import MultiPassLoss
from lightning_replay.agents.off_policy import ExploringAgent, weighted_mean
from lightning_replay.agents.perceptrons import layers_of, tensors_of
from lightning_replay.agents.spaces import SizeReader, parameterized_sizes


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
