# SPDX-License-Identifier: Apache-2.0
"""Double DQN for discrete actions, Rainbow for images, and their losses with the signals of a replay."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from torchrl.modules import DistributionalQValueActor, QValueActor, reset_noise
from torchrl.objectives import DistributionalDQNLoss, DQNLoss, HardUpdate

from lightning_replay.agents.agent import Columns, ExploringAgent, bootstrapped, plain_columns, weighted_mean
from lightning_replay.agents.cagrad import ConflictAverseStep
from lightning_replay.agents.networks import (
    ImageNetwork,
    Layers,
    QNetwork,
    activations_of,
    can_set_gradients,
    layers_of,
    perceive,
    perceptron_layers,
    set_gradients,
    tensors_of,
    with_noise,
)
from lightning_replay.agents.spaces import SizeReader, discrete_sizes, image_sizes
from lightning_replay.retention.surprise import categorical_projection, cross_entropy, kl_divergence, squared_td_error
from lightning_replay.schedules import Constant, Linear, Schedule

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


# Checkpoints hold the hyperparameters, and torch.load reads only classes that are registered as safe.
torch.serialization.add_safe_globals([Constant, Linear])


class DQN(ExploringAgent):
    """Double deep Q-learning: ``Q target = r + γ Q'(s', argmax Q(s', ·))``, epsilon-greedy exploration.

    ``priority_weight`` multiplies each row of the loss, which is smooth L1; training steps return the loss and
    ``td_error``, float32 ``[B]``, magnitude. Van Hasselt et al. 2016,
    https://arxiv.org/abs/1509.06461, but the target network moves with every update, as in Lillicrap et al. 2016,
    https://arxiv.org/abs/1509.02971.

    Args:
        observation_size: length of a flat observation; read from the environment if absent.
        num_actions: number of actions; read from the environment if absent.
        hidden_sizes: widths of the hidden layers.
        learning_rate: Adam's.
        discount: γ.
        target_update_rate: τ, ``target += τ * (network - target)`` with every update.
        exploration_start: share of random actions at the first action taken.
        exploration_end: share of random actions after ``exploration_steps``.
        exploration_steps: environment steps, random warm-up not counted, over which the share falls linearly.
        conflict_aversion: c of :class:`~lightning_replay.agents.cagrad.ConflictAverseStep` between the tables of a
            batch (its column ``table``), a number or a schedule of updates; the number 0 uses the plain gradient.

    Example:
        >>> agent = DQN(observation_size=4, num_actions=2)
        >>> agent.act(torch.zeros(5, 4), explore=False).shape
        torch.Size([5])
    """

    takes_update_batches = True
    explored_key = "dqn_explored_steps"
    size_names: ClassVar[tuple[str, ...]] = ("observation_size", "num_actions")
    read_sizes: ClassVar[SizeReader] = staticmethod(discrete_sizes)

    def __init__(
        self,
        observation_size: int | None = None,
        num_actions: int | None = None,
        hidden_sizes: tuple[int, ...] = (128, 128),
        learning_rate: float = 5e-4,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        exploration_start: float = 1.0,
        exploration_end: float = 0.05,
        exploration_steps: int = 5_000,
        conflict_aversion: float | Schedule = 0.0,
    ) -> None:
        super().__init__()
        self._averse_step: ConflictAverseStep | None = None
        self._conflict_aversion = conflict_aversion  # with a command line, hparams hold its class path instead
        self.set_up(locals())

    def build(self) -> None:
        """Creates the network, its target and the loss."""
        options = self.hparams
        network = QNetwork(options["observation_size"], options["num_actions"], options["hidden_sizes"])
        self.loss: Any = ScalarValueLoss(network, discount=options["discount"])
        self.associate_targets()
        if self._conflict_aversion != 0:
            self._averse_step = ConflictAverseStep(tensors_of(self.layers), self._conflict_aversion)

    @cached_property
    def layers(self) -> Layers:
        """Of the network."""
        return perceptron_layers(self.loss, "value_network")

    @cached_property
    def target_layers(self) -> Layers:
        """Of the target network."""
        return layers_of(self.loss.target_value_network_params)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Gives a copy's conflict-averse step the copy's parameters."""
        super().__setstate__(state)
        if self._averse_step is not None:
            position = self._averse_step.state_dict()
            self._averse_step = ConflictAverseStep(tensors_of(self.layers), self._conflict_aversion)
            self._averse_step.load_state_dict(position)

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions, int64 ``[N]``: the most valuable, or random with probability ``exploration_rate``."""
        greedy = perceive(self.layers, observation).argmax(dim=-1)
        return self.with_random(greedy) if explore else greedy

    def losses(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns the loss and the magnitude of the TD error of each row, ``[B]``."""
        columns = plain_columns(batch)
        taken, target = self._taken_and_target(columns)
        current = perceive(self.layers, columns["observation"]).gather(-1, taken).squeeze(-1)
        return smooth_l1_loss(current, target, reduction="none"), (target - current.detach()).abs()

    @torch.no_grad()
    def _taken_and_target(self, batch: Columns) -> tuple[Tensor, Tensor]:
        following = batch["next"]["observation"]
        best = perceive(self.layers, following).argmax(dim=-1, keepdim=True)
        values = perceive(self.target_layers, following).gather(-1, best).squeeze(-1)
        target = bootstrapped(batch, values, self.loss.value_estimator.gamma)
        return batch["action"].reshape(best.shape), target

    @torch.no_grad()
    def _differentiate(self, batch: Columns) -> tuple[Tensor, Tensor]:
        """Sets the gradients of the weighted mean of :meth:`losses`, in two thirds of the time of autograd's graph.

        Returns:
            The loss, and the magnitude of the TD error of each row ``[B]``.
        """
        taken, target = self._taken_and_target(batch)
        *inputs, values = activations_of(self.layers, batch["observation"])
        current = values.gather(-1, taken).squeeze(-1)
        loss = weighted_mean(smooth_l1_loss(current, target, reduction="none"), batch)
        difference, weight = current - target, batch.get("priority_weight", None)
        share = 1.0 / len(values)
        slope = difference.clamp(-1.0, 1.0).mul_(share if weight is None else weight.reshape(-1) * share)
        set_gradients(self.layers, inputs, torch.zeros_like(values).scatter_(-1, taken, slope.unsqueeze(-1)))
        return loss, difference.abs_()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the network and its target."""
        optimizer, _ = self.critic_and_other_optimizers()
        if self._sets_gradients(batch):
            loss, td_error = self._differentiate(plain_columns(batch))
            self.take_step(optimizer)
        else:
            rows, td_error = self.losses(batch)
            if self._averse_step is None:
                loss = weighted_mean(rows, batch)
                self.descend(optimizer, loss)
            else:
                loss = self._averse_step.backward(*_weighted_parts(rows, batch))
                self.take_step(optimizer)
        self.target_update.step()
        return {"loss": loss.detach(), "td_error": td_error}

    def _sets_gradients(self, batch: TensorDictBase) -> bool:
        """Returns whether :meth:`losses` and ``descend`` are those of this class, and nothing acts on gradients."""
        kind = type(self)
        return (
            self._averse_step is None
            and batch.ndim == 1
            and kind.losses is DQN.losses
            and kind.descend is DQN.descend
            and kind.take_gradients is DQN.take_gradients
            and vars(self).keys().isdisjoint(("losses", "descend", "take_gradients"))
            and self.takes_plain_gradients
            and can_set_gradients(self.layers)
        )

    def on_fit_start(self) -> None:
        """Refuses conflict aversion where the trainer scales gradients or syncs them between devices."""
        super().on_fit_start()
        if self._averse_step is not None and not self.takes_plain_gradients:
            raise ValueError(
                f"conflict_aversion is {self.hparams['conflict_aversion']!r}, which needs one device and 32-bit "
                "precision. Use Trainer(devices=1, precision=32), or conflict_aversion=0.0."
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam."""
        return self.adam(tensors_of(self.layers))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the positions in the schedules of exploration and conflict aversion."""
        super().on_save_checkpoint(checkpoint)
        if self._averse_step is not None:
            checkpoint["dqn_conflict_aversion"] = self._averse_step.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores both positions."""
        super().on_load_checkpoint(checkpoint)
        if self._averse_step is not None and "dqn_conflict_aversion" in checkpoint:
            self._averse_step.load_state_dict(checkpoint["dqn_conflict_aversion"])


def _weighted_parts(rows: Tensor, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Returns the weighted loss of each row, and the table it was drawn from."""
    table, weight = batch.get("table", None), batch.get("priority_weight", None)
    if table is None:
        raise ValueError(
            'the batch has no column "table", which conflict_aversion splits it by; draw from event tables '
            "(recipes.event_tables), or set conflict_aversion=0.0."
        )
    return rows if weight is None else rows * weight.reshape(rows.shape), table


_ROWS_PER_PASS = 256  # of initial_surprise; the warm-up stores 1,024 rows at once, later steps a few


class Rainbow(ExploringAgent):
    """Double, dueling, distributional Q-learning with noisy layers on prioritized n-step transitions.

    The replay provides the last two: ``priority_weight`` multiplies each row of the loss, and the column ``discount``,
    where the batch has one, is the factor of the bootstrap. The environment clips rewards
    (:func:`~lightning_replay.envs.atari.atari`), so that n-step returns sum clipped ones. Hessel et al. 2018,
    https://arxiv.org/abs/1710.02298; the defaults are those of the retention paper's experiments, one update of 32
    rows per step on a replay with ``n_steps=5``.

    Args:
        observation_shape: channels, height and width of an image; read from the environment if absent.
        observation_high: largest pixel value; read from the environment if absent.
        num_actions: number of actions; read from the environment if absent.
        channels: of the convolutions, one number each.
        kernel_sizes: of the convolutions.
        strides: of the convolutions.
        hidden_size: units of each stream's hidden layer.
        learning_rate: Adam's.
        adam_epsilon: Adam's.
        discount: γ of batches without a column ``discount``; a replay's returns must have the same.
        gradient_norm: largest norm of the gradient; ``None`` does not clip.
        target_update_every: updates between two copies of the network to the target network.
        double: the network chooses the next action and the target network values it; else the latter does both.
        dueling: separate streams for a state's value and the actions' advantages.
        distributional: distributions of returns on fixed atoms (C51); else expected values with a Huber loss.
        noisy: exploration by factorised noise in the fully connected layers, drawn for every action and update; else
            by random actions.
        noise_deviation: σ₀ of that noise.
        atoms: number of atoms of a distribution.
        value_low: smallest return, the first atom.
        value_high: largest return, the last atom.
        cross_entropy: ``surprise`` is the cross-entropy of target and current distribution, not KL(target ‖ current).
        samples_by_surprise: ``td_error`` is the surprise, so that a prioritized sampler draws by it, as Rainbow does;
            else it is the signed TD error of the means.
        exploration_start: share of random actions at first, without ``noisy``.
        exploration_end: share of random actions after ``exploration_steps``, without ``noisy``.
        exploration_steps: environment steps, random warm-up not counted, over which the share falls linearly.

    Returned by each training step, all from the forward pass before the network changed:
        loss: the weighted loss.
        td_error: float32 ``[B]``, signed.
        surprise: float32 ``[B]``; the squared TD error without ``distributional``.
        action_values: float32 ``[B, A]``, means of the distributions under the pass's noise.
        action: int64 ``[B]``, of the batch.

    Example:
        >>> agent = Rainbow(observation_shape=(4, 84, 84), observation_high=255.0, num_actions=6)
        >>> agent.act(torch.zeros(5, 4, 84, 84, dtype=torch.uint8), explore=True).shape
        torch.Size([5])
    """

    takes_update_batches = True
    explored_key = "rainbow_explored_steps"
    size_names: ClassVar[tuple[str, ...]] = ("observation_shape", "observation_high", "num_actions")
    read_sizes: ClassVar[SizeReader] = staticmethod(image_sizes)

    def __init__(
        self,
        observation_shape: tuple[int, int, int] | None = None,
        observation_high: float | None = None,
        num_actions: int | None = None,
        channels: tuple[int, ...] = (32, 64, 64),
        kernel_sizes: tuple[int, ...] = (8, 4, 3),
        strides: tuple[int, ...] = (4, 2, 1),
        hidden_size: int = 512,
        learning_rate: float = 1e-4,
        adam_epsilon: float = 1.5e-4,
        discount: float = 0.99,
        gradient_norm: float | None = 10.0,
        target_update_every: int = 2_000,
        double: bool = True,
        dueling: bool = True,
        distributional: bool = True,
        noisy: bool = True,
        noise_deviation: float = 0.5,
        atoms: int = 51,
        value_low: float = -10.0,
        value_high: float = 10.0,
        cross_entropy: bool = False,
        samples_by_surprise: bool = False,
        exploration_start: float = 1.0,
        exploration_end: float = 0.01,
        exploration_steps: int = 250_000,
    ) -> None:
        super().__init__()
        self.set_up(locals())

    def build(self) -> None:
        """Creates the network, its target and the loss."""
        options = self.hparams
        actions = options["num_actions"]
        network = ImageNetwork(
            options["observation_shape"],
            options["observation_high"],
            (options["atoms"], actions) if options["distributional"] else (actions,),
            channels=options["channels"],
            kernel_sizes=options["kernel_sizes"],
            strides=options["strides"],
            hidden_size=options["hidden_size"],
            dueling=options["dueling"],
            noise_deviation=options["noise_deviation"] if options["noisy"] else None,
        )
        both = {"discount": options["discount"], "double": options["double"]}
        if options["distributional"]:
            support = torch.linspace(options["value_low"], options["value_high"], options["atoms"])
            measure = cross_entropy if options["cross_entropy"] else kl_divergence
            self.loss: Any = CategoricalValueLoss(network, support, measure=measure, **both)
        else:
            self.loss = ScalarValueLoss(network, **both)
        # TorchRL's counter goes from the interval back to 0, which takes one step more
        self._target_update = HardUpdate(self.loss, value_network_update_interval=options["target_update_every"] - 1)

    @property
    def exploration_rate(self) -> float:
        """Present probability of a random action; 0 with ``noisy``."""
        return 0.0 if self.hparams["noisy"] else super().exploration_rate

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions, int64 ``[N]``: the most valuable; with ``explore`` under new noise, or partly random."""
        if explore and self.hparams["noisy"]:
            self.loss.redraw_noise()
            with with_noise():
                return self._greedy(observation)
        greedy = self._greedy(observation)
        return self.with_random(greedy) if explore else greedy

    def _greedy(self, observation: Tensor) -> Tensor:
        with torch.no_grad():
            return self.loss.means(self.loss.outputs(observation)).argmax(dim=-1)

    def initial_surprise(self, transitions: TensorDictBase) -> Tensor:
        """Returns the surprise of new transitions ``[M]``, float32 ``[M]``, on their device.

        A replay that keeps transitions by surprise calls it at insertion; the data module passes it to the replay.
        Costs one forward pass of the network, over observations and next observations, and one of the target network
        for every 256 rows, under the noise of the last action or update.
        """
        columns = transitions.select("observation", "action", "next", "discount", strict=False)
        with torch.no_grad(), with_noise():
            parts = [self.loss.rows(rows.to(self.device)).surprise for rows in columns.split(_ROWS_PER_PASS)]
        return torch.cat(parts).to(transitions.get("action").device)

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the network and, when due, copies it to its target."""
        optimizer, _ = self.critic_and_other_optimizers()
        if self.hparams["noisy"]:
            self.loss.redraw_noise()
            self.loss.redraw_noise(of_target=True)
        with with_noise():
            rows = self.loss.rows(batch)
        loss = weighted_mean(rows.loss, batch)
        optimizer.zero_grad()
        self.take_gradients(loss)
        if self.hparams["gradient_norm"] is not None:
            # not by Lightning, which in mixed precision refuses fused optimizers
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], self.hparams["gradient_norm"])
        self.take_step(optimizer)
        self._target_update.step()
        return {
            "loss": loss.detach(),
            "td_error": rows.surprise if self.hparams["samples_by_surprise"] else rows.td_error,
            "surprise": rows.surprise,
            "action_values": rows.action_values,
            "action": batch.get("action"),
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam."""
        return self.adam(self.loss.value_network_params.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the positions in the schedules of exploration and target updates."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["rainbow_target_update"] = self._target_update.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores both positions."""
        super().on_load_checkpoint(checkpoint)
        self.configure_model()
        self._target_update.load_state_dict(checkpoint["rainbow_target_update"])
