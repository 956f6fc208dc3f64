# SPDX-License-Identifier: Apache-2.0
"""Double DQN for discrete actions, Rainbow for images, and their losses with the signals of a replay."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from torchrl.modules import reset_noise

from lightning_replay.agents.agent import ExploringAgent, TargetUpdate, double_q_target, target_of
from lightning_replay.agents.direct import set_gradients
from lightning_replay.agents.networks import ImageNetwork, Perceptron, with_noise
from lightning_replay.agents.spaces import SizeReader, discrete_sizes, image_sizes
from lightning_replay.retention.surprise import categorical_projection, cross_entropy, kl_divergence, squared_td_error
from lightning_replay.schedules import Constant, Linear, Schedule

# Checkpoints hold the hyperparameters, and torch.load reads only classes that are registered as safe.
torch.serialization.add_safe_globals([Constant, Linear])


class DQN(ExploringAgent):
    """Double deep Q-learning: ``Q target = r + γ Q'(s', argmax Q(s', ·))``, epsilon-greedy exploration.

    ``priority_weight`` multiplies each row of the loss, which is smooth L1. Training steps return the loss and
    ``td_error``, float32 ``[B]``, magnitude. Van Hasselt et al. 2016, https://arxiv.org/abs/1509.06461, but the target
    network moves with every update, as in Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971.

    Args:
        observation_size: Length of a flat observation, or a mapping that describes other observations. If absent, it is
            read from the environment. A mapping lists the description of each entry of a Dict or, by its place ("0"),
            of a Tuple. A mapping with the name of an ``encoder`` is an entry that is no flat vector of floats. ``flat``
            takes ``shape``, and ``high`` by which it is divided. ``one_hot`` of integers takes ``low`` and ``high``.
            ``convolutions`` of images takes ``shape``, ``high``, and ``channels_first``. Its ``channels``,
            ``kernel_sizes``, ``strides``, and ``features`` are chosen by the size of the image if they are absent.
            :class:`~lightning_replay.agents.encoders.Encoder` joins them.
        num_actions: Number of actions. If absent, it is read from the environment.
        hidden_sizes: Widths of the hidden layers.
        learning_rate: Adam's.
        discount: γ.
        target_update_rate: τ, ``target += τ * (network - target)`` with every update.
        exploration_start: Share of random actions at the first action taken.
        exploration_end: Share of random actions after ``exploration_steps``.
        exploration_steps: Environment steps, random warm-up not counted, over which the share falls linearly.
        conflict_aversion: Number c of :class:`~lightning_replay.agents.cagrad.ConflictAverseStep` between the tables of
            a batch (its column ``table``), a number or a schedule of updates. The number 0 uses the plain gradient.
        gradient_norm: Largest norm of the gradient. ``None`` does not clip.
        layer_norm: Whether layer normalization precedes each ReLU of the network.

    Example:
        >>> agent = DQN(observation_size=4, num_actions=2)
        >>> agent.act(torch.zeros(5, 4), explore=False).shape
        torch.Size([5])
        >>> DQN.for_env("FrozenLake-v1").hparams["observation_size"]
        {'encoder': 'one_hot', 'low': 0, 'high': 15}
    """

    takes_update_batches = True
    exact: bool = True
    counters: ClassVar[dict[str, str]] = {"dqn_explored_steps": "_explored_steps"}
    size_names: ClassVar[tuple[str, ...]] = ("observation_size", "num_actions")
    read_sizes: ClassVar[SizeReader] = staticmethod(discrete_sizes)

    def __init__(
        self,
        observation_size: int | dict[str, Any] | None = None,
        num_actions: int | None = None,
        hidden_sizes: tuple[int, ...] = (128, 128),
        learning_rate: float = 5e-4,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        exploration_start: float = 1.0,
        exploration_end: float = 0.05,
        exploration_steps: int = 5_000,
        conflict_aversion: float | Schedule = 0.0,
        gradient_norm: float | None = None,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.set_up(locals())

    def build(self) -> None:
        """Creates the network and its target."""
        features = self.build_encoder()
        self.network: Perceptron = Perceptron(
            features,
            self.hparams["hidden_sizes"],
            self.hparams["num_actions"],
            has_norms=self.hparams["layer_norm"],
        )
        self.target_network: Perceptron = target_of(self.network)
        self.target_update: TargetUpdate = self.target_update_of((self.network, self.target_network))
        self.avert_conflicts(self._learned_parameters())

    def _learned_parameters(self) -> list[Tensor]:
        return [*self.network.parameters(), *self.observation_encoder.parameters()]

    def act(self, observation: Tensor | TensorDictBase, explore: bool) -> Tensor:
        """Returns actions, int64 ``[N]``: the most valuable, or random with probability ``exploration_rate``."""
        greedy = self.network(self.features_of(observation)).argmax(dim=-1)
        return self.with_random(greedy) if explore else greedy

    def losses(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns the loss and the magnitude of the TD error of each row, ``[B]``."""
        distances = self.distances(batch)
        rows = smooth_l1_loss(distances, torch.zeros_like(distances), reduction="none")
        return rows, distances.detach().abs()

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns the values of the actions taken less their targets, ``[B]``, for other losses."""
        with torch.no_grad():
            following = batch["next", "observation"]
            following_values = self.network(self.features_of(following))
            target_values = self.target_network(self.features_of(following, target=True))
            target = double_q_target(batch, following_values, target_values, self.hparams["discount"])
        values = self.network(self.features_of(batch["observation"]))
        return values.gather(-1, batch["action"].reshape(*target.shape, 1)).squeeze(-1) - target

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the network, then its target."""
        optimizer, _ = self.critic_and_other_optimizers()
        direct = set_gradients(self, self.network, self.target_network, batch)
        if direct is not None:
            loss, td_error = direct
            self.take_step(optimizer)
        else:
            rows, td_error = self.losses(batch)
            loss = self.descend_rows(optimizer, rows, batch)
        self.target_update.step()
        return {"loss": loss.detach(), "td_error": td_error}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam of the network and of its encoder."""
        return self.adam(self._learned_parameters())


_ROWS_PER_PASS = 256  # initial_surprise needs little memory, though the warm-up stores 1,024 rows at once.


class RowErrors(NamedTuple):
    """Results of one forward pass for each transition of a batch, float32. Values of distributions are their means."""

    loss: Tensor  # [B], not weighted, with its graph
    td_error: Tensor  # [B], target minus current value of the action taken
    surprise: Tensor  # [B], 0 or more
    action_values: Tensor  # [B, A]


class Rainbow(ExploringAgent):
    """Double, dueling, distributional Q-learning with noisy layers on prioritized n-step transitions.

    The replay provides the last two: ``priority_weight`` multiplies each row of the loss, and the column ``discount``,
    if the batch has one, is the factor of the bootstrap. The environment clips rewards
    (:func:`~lightning_replay.envs.atari.atari`), so that n-step returns sum clipped ones. Hessel et al. 2018,
    https://arxiv.org/abs/1710.02298. The defaults come from the retention paper's experiments: one update of 32 rows
    per step on a replay with ``n_steps=5``.

    Args:
        observation_shape: Channels, height and width of an image. If absent, it is read from the environment.
        observation_high: Largest pixel value. If absent, it is read from the environment.
        num_actions: Number of actions. If absent, it is read from the environment.
        channels: Output channels of the convolutions, one number each.
        kernel_sizes: Kernel sizes of the convolutions.
        strides: Strides of the convolutions.
        hidden_size: Units of each stream's hidden layer.
        learning_rate: Adam's.
        adam_epsilon: Adam's.
        discount: Discount γ of batches without a column ``discount``. A replay's returns must have the same.
        gradient_norm: Largest norm of the gradient. ``None`` does not clip.
        target_update_every: Updates between two copies of the network to the target network.
        double: Whether the network chooses the next action and the target network values it. Otherwise, the target
            network does both.
        dueling: Whether there are separate streams for a state's value and the actions' advantages.
        distributional: Whether the network predicts distributions of returns on fixed atoms (C51). Otherwise, it
            predicts expected values with a Huber loss.
        noisy: Whether to explore by factorized noise in the fully connected layers, drawn for every action and update.
            Otherwise, the agent explores by random actions.
        noise_deviation: Deviation σ₀ of that noise.
        evaluation_noise: Whether actions without exploration are also noisy, as in PFRL's Rainbow, which the retention
            paper uses.
        atoms: Number of atoms of a distribution.
        value_low: Smallest return, the first atom.
        value_high: Largest return, the last atom.
        cross_entropy: Whether ``surprise`` is the cross-entropy of target and current distribution, not KL(target ‖
            current).
        samples_by_surprise: Whether ``td_error`` is the surprise, so that a prioritized sampler draws by it, as Rainbow
            does. Otherwise, it is the signed TD error of the means.
        exploration_start: Share of random actions at first, without ``noisy``.
        exploration_end: Share of random actions after ``exploration_steps``, without ``noisy``.
        exploration_steps: Environment steps, random warm-up not counted, over which the share falls linearly.
        conflict_aversion: Conflict aversion between the tables of a batch, as in :class:`~lightning_replay.agents.DQN`.

    Returned by each training step, all from the forward pass before the network changed:
        loss: The weighted loss.
        td_error: float32 ``[B]``, signed.
        surprise: float32 ``[B]``. Without ``distributional``, it is the squared TD error.
        action_values: float32 ``[B, A]``, means of the distributions under the pass's noise.
        action: int64 ``[B]``, of the batch.

    Example:
        >>> agent = Rainbow(observation_shape=(4, 84, 84), observation_high=255.0, num_actions=6)
        >>> agent.act(torch.zeros(5, 4, 84, 84, dtype=torch.uint8), explore=True).shape
        torch.Size([5])
    """

    takes_update_batches = True
    counters: ClassVar[dict[str, str]] = {"rainbow_explored_steps": "_explored_steps", "rainbow_updates": "_updates"}
    size_names: ClassVar[tuple[str, ...]] = ("observation_shape", "observation_high", "num_actions")
    read_sizes: ClassVar[SizeReader] = staticmethod(image_sizes)
    support: Tensor

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
        evaluation_noise: bool = False,
        atoms: int = 51,
        value_low: float = -10.0,
        value_high: float = 10.0,
        cross_entropy: bool = False,
        samples_by_surprise: bool = False,
        exploration_start: float = 1.0,
        exploration_end: float = 0.01,
        exploration_steps: int = 250_000,
        conflict_aversion: float | Schedule = 0.0,
    ) -> None:
        super().__init__()
        self._updates = 0
        self.set_up(locals())

    def build(self) -> None:
        """Creates the network, its target, and the atoms."""
        options = self.hparams
        actions = options["num_actions"]
        self.network: ImageNetwork = ImageNetwork(
            options["observation_shape"],
            options["observation_high"],
            (options["atoms"], actions) if options["distributional"] else (actions,),
            noise_deviation=options["noise_deviation"] if options["noisy"] else None,
            **{name: options[name] for name in ("channels", "kernel_sizes", "strides", "hidden_size", "dueling")},
        )
        self.target_network: ImageNetwork = target_of(self.network)
        self.avert_conflicts(self.network.parameters())
        support = torch.linspace(options["value_low"], options["value_high"], options["atoms"])
        self.register_buffer("support", support, persistent=False)

    @property
    def exploration_rate(self) -> float:
        """Probability of a random action now. It is 0 with ``noisy``. :meta private:"""
        return 0.0 if self.hparams["noisy"] else super().exploration_rate

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions, int64 ``[N]``: the most valuable, or with ``explore`` under new noise or partly random."""
        if self.hparams["noisy"] and (explore or self.hparams["evaluation_noise"]):
            self.network.apply(reset_noise)
            with with_noise():
                return self._greedy(observation)
        greedy = self._greedy(observation)
        return self.with_random(greedy) if explore else greedy

    def _greedy(self, observation: Tensor) -> Tensor:
        with torch.no_grad():
            return self.means(self.outputs(self.network, observation)).argmax(dim=-1)

    def outputs(self, network: ImageNetwork, observation: Tensor) -> Tensor:
        """Returns values ``[B, A]``, or logarithms of probabilities ``[B, N, A]``. :meta private:"""
        outputs = network(observation)
        return outputs.log_softmax(-2) if self.hparams["distributional"] else outputs

    def means(self, outputs: Tensor) -> Tensor:
        """Returns the values of :meth:`outputs`, ``[B, A]``. :meta private:"""
        return torch.einsum("bna,n->ba", outputs.exp(), self.support) if self.hparams["distributional"] else outputs

    def rows(self, batch: TensorDictBase) -> RowErrors:
        """Returns loss and feedback of each row under the noise that was drawn last.

        The loss is Huber's, of distributions the cross-entropy between the projected target and the current one. The
        factor of the bootstrap is the column ``discount`` (γ to the power of the steps in the reward, 0 if they
        terminated). Without it, the factor is γ, or 0 after termination.
        """
        following = batch.get(("next", "observation"))
        outputs = self.outputs(self.network, batch.get("observation"))
        with torch.no_grad():
            target_outputs = self.outputs(self.target_network, following)
            following_outputs = self.outputs(self.network, following) if self.hparams["double"] else target_outputs
            best = self.means(following_outputs).argmax(-1)
            reward = batch["next", "reward"].reshape(-1)
            discount = batch.get("discount", None)
            if discount is None:
                discount = self.hparams["discount"] * (~batch["next", "terminated"]).to(reward.dtype)
            bootstrap = _of_action(target_outputs, best)
        current = _of_action(outputs, batch.get("action").reshape(-1))
        return RowErrors(*self._compare(current, bootstrap, reward, discount.reshape(-1)), self.means(outputs.detach()))

    def _compare(
        self, current: Tensor, following: Tensor, reward: Tensor, discount: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Loss, TD error, and surprise. Compared are the outputs of the taken action and of the best next action.
        if not self.hparams["distributional"]:
            target = reward + discount * following
            td_error = (target - current).detach()
            return smooth_l1_loss(current, target, reduction="none"), td_error, squared_td_error(td_error)
        target = categorical_projection(following.exp(), reward, discount, self.support)
        log_current = current.detach()
        td_error = ((target - log_current.exp()) * self.support).sum(-1)
        measure = cross_entropy if self.hparams["cross_entropy"] else kl_divergence
        return cross_entropy(target, current), td_error, measure(target, log_current)

    def initial_surprise(self, transitions: TensorDictBase) -> Tensor:
        """Returns the surprise of new transitions ``[M]``, float32 ``[M]``, on their device.

        A replay that keeps transitions by surprise calls it at insertion. The data module passes it to the replay.
        Costs two forward passes of the network and one of the target network for every 256 rows, under the noise of the
        last action or update.
        """
        columns = transitions.select("observation", "action", "next", "discount", strict=False)
        with torch.no_grad(), with_noise():
            parts = [self.rows(rows.to(self.device)).surprise for rows in columns.split(_ROWS_PER_PASS)]
        return torch.cat(parts).to(transitions.get("action").device)

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the network under new noise, and copies it to its target when this is due."""
        optimizer, _ = self.critic_and_other_optimizers()
        if self.hparams["noisy"]:
            self.network.apply(reset_noise)
            self.target_network.apply(reset_noise)
        with with_noise():
            rows = self.rows(batch)
        loss = self.descend_rows(optimizer, rows.loss, batch)
        self._updates += 1
        if self._updates % self.hparams["target_update_every"] == 0:
            for target, parameter in zip(self.target_network.parameters(), self.network.parameters(), strict=True):
                target.data.copy_(parameter.data)
        return {
            "loss": loss,
            "td_error": rows.surprise if self.hparams["samples_by_surprise"] else rows.td_error,
            "surprise": rows.surprise,
            "action_values": rows.action_values,
            "action": batch.get("action"),
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam of the network."""
        return self.adam(self.network.parameters())


def _of_action(outputs: Tensor, action: Tensor) -> Tensor:
    index = action.reshape(-1, *[1] * (outputs.ndim - 1)).expand(*outputs.shape[:-1], 1)
    return outputs.gather(-1, index).squeeze(-1)
