# SPDX-License-Identifier: Apache-2.0
"""Agents for continuous actions: TD3 with a deterministic policy, SAC with a stochastic one."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import softplus

from lightning_replay.agents.agent import OffPolicyAgent, TargetUpdate, bootstrapped, reward_and_factor, target_of
from lightning_replay.agents.encoders import Encoder, RunningNormalization
from lightning_replay.agents.interfaces import training_data
from lightning_replay.agents.networks import Perceptron, TwoCritics, project
from lightning_replay.agents.spaces import SizeReader, continuous_sizes, observation_size
from lightning_replay.lightning_compat import attached_trainer
from lightning_replay.retention.surprise import cross_entropy
from lightning_replay.schedules import Schedule

_LOG_DENSITY = math.log(2 * math.pi) / 2 + 2 * math.log(2)
_RAW_SHIFT = math.log(math.expm1(0.99))


def _deviation(raw: Tensor) -> Tensor:
    # The deviation is above 0.01. It is 1 for an output 0 of the network, as in TorchRL's NormalParamExtractor.
    return softplus(raw + _RAW_SHIFT) + 0.01


class ContinuousAgent(OffPolicyAgent):
    """Base of agents with continuous actions: bounds, ``actor``, two ``critics`` and their targets.

    If observations have images, policy and critics share their encoder. Only the critics' loss trains it: the policy
    gets its features without gradients. The targets get the features of a target encoder, which moves as the target
    critics do. See Yarats et al. 2021, https://arxiv.org/abs/1910.01741, section 5. DrQ does the same,
    https://arxiv.org/abs/2004.13649. With ``critic_observation``, the critics have an encoder of their column, and the
    policy's loss trains the policy's encoder.
    """

    size_names: ClassVar[tuple[str, ...]] = ("observation_size", "action_low", "action_high")
    read_sizes: ClassVar[SizeReader] = staticmethod(continuous_sizes)
    outputs_per_action = 1  #: Outputs of the policy's network for each action dimension.
    action_low: Tensor
    action_high: Tensor
    action_center: Tensor
    action_half_range: Tensor

    def build(self) -> None:
        """Creates bounds, policy, critics, and target critics."""
        options = self.hparams
        low = torch.tensor(options["action_low"])
        high = torch.tensor(options["action_high"])
        bounds = {"low": low, "high": high, "center": (high + low) / 2, "half_range": (high - low) / 2}
        for name, bound in bounds.items():
            self.register_buffer(f"action_{name}", bound, persistent=False)
        self.normalizes_observations: bool = options.get("normalize_observations", False)
        self.num_features: int = self.build_encoder()
        outputs = self.outputs_per_action * len(low)
        self.actor: Perceptron = Perceptron(self.num_features, options["hidden_sizes"], outputs)
        self._is_distributional: bool = options.get("distributional", False)
        support = (
            torch.linspace(options["value_low"], options["value_high"], options["atoms"])
            if self._is_distributional
            else None
        )
        self.critics: TwoCritics = TwoCritics(
            self._build_critic_encoder(),
            len(low),
            options["hidden_sizes"],
            has_norms=options.get("layer_norm", False),
            support=support,
        )
        self.target_critics: TwoCritics = target_of(self.critics)
        self.watches_steps: bool = self.normalizes_observations
        self.avert_conflicts(self._critic_parameters())

    def _build_critic_encoder(self) -> int:
        # Returns the number of the critics' features.
        options = self.hparams
        self._critic_column: str | None = options.get("critic_observation")
        if self._critic_column is None:
            return self.num_features
        if options["critic_observation_size"] is None:
            data = training_data(attached_trainer(self))
            if data is None or self._critic_column not in data.column_spaces:
                raise ValueError(
                    f"critic_observation is {self._critic_column!r} without critic_observation_size, and no data "
                    "module has a space of this column; give critic_observation_size, the length of its vectors."
                )
            options["critic_observation_size"] = observation_size(data.column_spaces[self._critic_column])
        self.critic_encoder: Encoder = Encoder(options["critic_observation_size"], self.normalizes_observations)
        self.target_critic_encoder: Encoder = self.critic_encoder.target()
        return self.critic_encoder.size

    def critic_features(self, columns: TensorDictBase, of_policy: Tensor | None = None, target: bool = False) -> Any:
        """Returns the critics' inputs from columns of a batch, or from those under ``"next"``.

        These are the policy's features, unless ``critic_observation`` names another column. :meta private:
        """
        if self._critic_column is None:
            return self.features_of(columns.get("observation"), target) if of_policy is None else of_policy
        return (self.target_critic_encoder if target else self.critic_encoder)(self._critic_observation(columns))

    def _critic_observation(self, columns: TensorDictBase) -> Any:
        observation = columns.get(self._critic_column, None)
        if observation is None:
            raise ValueError(
                f"rows have the columns {sorted(map(str, columns.keys()))}, at the root or under 'next', and "
                f"critic_observation is {self._critic_column!r}; store this column in both places, or set "
                "critic_observation=None."
            )
        return observation

    def policy_features(self, batch: TensorDictBase) -> Any:
        """Returns the inputs of the policy for its loss, which trains no encoder that the critics train.

        :meta private:
        """
        features = self.features_of(batch.get("observation"))
        return features.detach() if self._critic_column is None else features

    def observe(self, observation: Any) -> None:
        """Adds observations ``[N, ...]`` to the statistics of ``normalize_observations``.

        :meth:`act` does this if it explores, and so does a data module in its random warm-up. For rows that neither
        has seen, call it yourself. Statistics of ``critic_observation`` come from the batches of the updates.
        """
        if self.normalizes_observations:
            encoder: Any = self.observation_encoder
            encoder.observe(observation)

    def end_episodes(self, done: Tensor) -> None:
        """Learns which environments' episodes have ended, bool ``[N]``. :meta private:"""

    def freeze_normalization(self, is_frozen: bool = True) -> None:
        """Keeps the statistics of ``normalize_observations`` as they are, or lets them move again.

        A checkpoint holds whether they are frozen.
        """
        for module in self.modules():
            if isinstance(module, RunningNormalization):
                module.is_frozen.fill_(is_frozen)

    def bounded(self, outputs: Tensor) -> Tensor:
        """Returns actions within the bounds, from real numbers ``[..., A]``."""
        return torch.tanh(outputs) * self.action_half_range + self.action_center

    def following(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the target critics' inputs, the next actions, and what is added to their values, ``[B]``.

        :meta private:
        """
        raise NotImplementedError

    @torch.no_grad()
    def target(self, batch: TensorDictBase) -> Tensor:
        """Returns the critics' target: values ``[B]``, or probabilities of the atoms ``[B, N]``.

        The target is made of the smaller of both target critics' values. Of distributions, it is made of the
        distribution with the smaller mean.
        """
        features, action, addend = self.following(batch)
        discount = self.hparams["discount"]
        if not self._is_distributional:
            # The larger of two estimates is more often too large.
            values = self.target_critics.values(features, action).amin(0)
            if addend is not None:
                values += addend
            return bootstrapped(batch, values, discount)
        first, second = both = self.target_critics.log_probabilities(features, action).exp()
        first_mean, second_mean = self.critics.means(both).unsqueeze(-1)
        smaller = torch.where(first_mean <= second_mean, first, second)
        reward, factor, ended = reward_and_factor(batch, smaller[:, 0], discount)
        factor = torch.where(ended, 0.0, factor)
        if addend is not None:
            reward = reward + factor * addend
        return project(smaller, reward, factor, self.critics.support)

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns both critics' values less their target, ``[2, B]``. Of distributions, these are means."""
        target = self.target(batch)
        if self._is_distributional:
            target = self.critics.means(target)
        return self.critics.values(self.critic_features(batch), batch.get("action")) - target

    def critic_rows(self, distances: Tensor, batch: TensorDictBase) -> Tensor:
        """Returns the loss of each row and critic, ``[2, B]``."""
        return distances.square()

    def critic_losses(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns the loss of each row, ``[B]``, and the detached :meth:`distances`, ``[2, B]``.

        The loss of distributions is the cross-entropy of their target. :meta private:
        """
        if not self._is_distributional:
            distances = self.distances(batch)
            return self.critic_rows(distances, batch).sum(0), distances.detach()
        target = self.target(batch)
        predicted = self.critics.log_probabilities(self.critic_features(batch), batch.get("action"))
        return cross_entropy(target, predicted).sum(0), self.critics.means(predicted.detach().exp() - target)

    def update_critics(self, optimizer: Any, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the critics. Returns ``loss`` and ``td_error`` ``[B]``, both detached.

        The TD error is the larger magnitude of both critics' :meth:`distances`.
        """
        if self.normalizes_observations and self._critic_column is not None:
            self.critic_encoder.observe(self._critic_observation(batch))
        rows, distances = self.critic_losses(batch)
        loss = self.descend_rows(optimizer, rows, batch)
        return {"loss": loss, "td_error": distances.abs().amax(dim=0)}

    def _critic_parameters(self) -> list[Tensor]:
        encoder = self.observation_encoder if self._critic_column is None else self.critic_encoder
        return [*self.critics.parameters(), *encoder.parameters()]

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam of the critics, then of the policy."""
        encoder = [] if self._critic_column is None else [*self.observation_encoder.parameters()]
        return [
            self.adam(self._critic_parameters(), "critic_learning_rate"),
            self.adam([*self.actor.parameters(), *encoder], "actor_learning_rate"),
        ]

    def target_update_of(self, *pairs: tuple[nn.Module, nn.Module]) -> TargetUpdate:
        """Returns also the update of the target of the critics' own encoder. :meta private:"""
        if self._critic_column is not None:
            pairs = (*pairs, (self.critic_encoder, self.target_critic_encoder))
        return super().target_update_of(*pairs)


class SAC(ContinuousAgent):
    """Soft actor-critic: the policy maximizes ``Q(s, a) - α log π(a|s)``, α keeps the entropy at its target.

    ``priority_weight`` multiplies each row of the critics' loss. Training steps return that loss and ``td_error``,
    float32 ``[B]``, the larger magnitude of the two critics'. Every update steps critics, policy, α, and target
    critics. π is the density of actions scaled to [-1, 1]. See Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905,
    Algorithm 1 and appendix D. Images: see :class:`~lightning_replay.agents.continuous.ContinuousAgent`.

    Args:
        observation_size: Size as in :class:`~lightning_replay.agents.DQN`. It and the two bounds are read from the
            environment.
        action_low: Smallest value of each action dimension.
        action_high: Largest value of each action dimension.
        hidden_sizes: Widths of the hidden layers of policy and critics.
        actor_learning_rate: Adam's, of the policy.
        critic_learning_rate: Adam's, of the critics.
        entropy_learning_rate: Adam's, of the entropy coefficient.
        initial_entropy_coefficient: Coefficient α at the start.
        target_entropy: Target entropy of the policy, in nats. If absent, it is minus the number of action dimensions.
        discount: γ.
        target_update_rate: τ of the target critics, ``target += τ * (critic - target)``.
        actor_regularization: Factor c of the term ``c / 2 * Σ w²`` in the policy's loss, over the weights of its layers
            without biases. SAC as published has none. Neighborhood Mixup Experience Replay (Sander et al. 2022) uses
            1e-4 to 2e-2 by environment, 1e-3 on HalfCheetah and 2e-3 on Ant (rmsander/interreplay, ``SAC_L2_REG``).
        gradient_norm: Largest norm of the gradient of each optimizer, 40 on Hopper there. ``None`` does not clip.
        conflict_aversion: Conflict aversion of the critics' loss between the tables of a batch, as in
            :class:`~lightning_replay.agents.DQN`.
        layer_norm: Whether layer normalization precedes each ReLU of the critics.
        distributional: Whether the critics predict distributions of returns on fixed atoms. This is C51 of Bellemare et
            al. 2017, https://arxiv.org/abs/1707.06887. Their loss is then the cross-entropy, and ``td_error`` is the
            difference of the means. The target is the target critic's distribution with the smaller mean (FastTD3's
            ``use_cdq=True``). The policy of SAC maximizes the smaller mean, and TD3's the first critic's mean. On a
            GPU, the last digits may differ between runs.
        atoms: Number of atoms of a distribution.
        value_low: Smallest return, the first atom. It is discounted, and for SAC includes the entropy.
        value_high: Largest return, the last atom. Returns beyond the atoms are clamped.
        normalize_observations: Whether vectors are normalized by the running mean and deviation of all observations
            acted on, ``(x - mean) / (deviation + 0.01)``. The statistics cover the warm-up and steps with exploration,
            without vectors that are not finite. The replay stores vectors unchanged, and evaluation leaves the
            statistics as they are.
            :meth:`~lightning_replay.agents.continuous.ContinuousAgent.freeze_normalization` keeps them for good. A
            checkpoint holds the statistics of the first process.
        critic_observation: Name of the column that the critics read in place of ``observation``, also under
            ``"next"``. The policy reads ``observation`` (asymmetric critics, Pinto et al. 2017,
            https://arxiv.org/abs/1710.06542).
        critic_observation_size: Description of that column, as ``observation_size``. It is read from a data module that
            offers the column's space.

    Example:
        >>> agent = SAC(observation_size=3, action_low=[-2.0], action_high=[2.0])
        >>> agent.act(torch.zeros(5, 3), explore=False).shape
        torch.Size([5, 1])
    """

    takes_update_batches = True
    outputs_per_action = 2
    backs_up_entropy: ClassVar[bool] = True  # The critics' targets count the entropy of the next action.

    def __init__(
        self,
        observation_size: int | dict[str, Any] | None = None,
        action_low: list[float] | None = None,
        action_high: list[float] | None = None,
        hidden_sizes: tuple[int, ...] = (256, 256),
        actor_learning_rate: float = 3e-4,
        critic_learning_rate: float = 3e-4,
        entropy_learning_rate: float = 3e-4,
        initial_entropy_coefficient: float = 1.0,
        target_entropy: float | None = None,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        actor_regularization: float = 0.0,
        gradient_norm: float | None = None,
        conflict_aversion: float | Schedule = 0.0,
        layer_norm: bool = False,
        distributional: bool = False,
        atoms: int = 101,
        value_low: float = -10.0,
        value_high: float = 10.0,
        normalize_observations: bool = False,
        critic_observation: str | None = None,
        critic_observation_size: int | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.set_up(locals())

    def build(self) -> None:
        """Creates also the entropy coefficient and the update of the target critics."""
        super().build()
        coefficient = torch.tensor(self.hparams["initial_entropy_coefficient"])
        self.log_alpha: nn.Parameter = nn.Parameter(coefficient.log())
        given = self.hparams["target_entropy"]
        self.target_entropy: float = -float(len(self.action_low)) if given is None else given
        self.target_update: TargetUpdate = self.target_update_of((self.critics, self.target_critics))

    def act(self, observation: Tensor | TensorDictBase, explore: bool) -> Tensor:
        """Returns actions in the environment's units, ``[N, A]``: drawn from the policy, or its mode."""
        if explore and self.normalizes_observations:
            self.observe(observation)
        mean, raw = self.actor(self.features_of(observation)).chunk(2, dim=-1)
        return self.bounded(mean + _deviation(raw) * torch.randn_like(mean) if explore else mean)

    def draw(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions ``[B, A]`` of the policy and the logarithm of their density among scaled ones, ``[B]``."""
        mean, raw = self.actor(features).chunk(2, dim=-1)
        deviation = _deviation(raw)
        noise = torch.randn_like(mean)
        unbounded = mean + deviation * noise
        # The logarithm of the normal density, less the logarithm of tanh's slope 4 / (exp(x) + exp(-x))²
        density = -noise.square() / 2 - deviation.log() + 2 * (unbounded + softplus(-2 * unbounded)) - _LOG_DENSITY
        return self.bounded(unbounded), density.sum(-1)

    def following(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the target critics' inputs, actions of the policy, and what their entropy adds. :meta private:"""
        columns = batch.get("next")
        action, log_density = self.draw(self.features_of(columns.get("observation")))
        addend = -self.log_alpha.exp() * log_density if self.backs_up_entropy else None
        return self.critic_features(columns, target=True), action, addend

    def actor_loss(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns the policy's loss and the logarithms of the densities of its actions, ``[B]``. :meta private:"""
        features = self.policy_features(batch)
        action, log_density = self.draw(features)
        values = self.critics.values(self.critic_features(batch, features).detach(), action, frozen=True).min(0).values
        loss = (self.log_alpha.detach().exp() * log_density - values).mean()
        if self.hparams["actor_regularization"] > 0:
            squares = torch.stack([weight.square().sum() for weight in self.actor.parameters() if weight.ndim == 2])
            loss = loss + self.hparams["actor_regularization"] / 2 * squares.sum()
        return loss, log_density.detach()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the critics, the policy, the entropy coefficient, and the target critics."""
        critic_optimizer, (actor_optimizer, entropy_optimizer) = self.critic_and_other_optimizers()
        outputs = self.update_critics(critic_optimizer, batch)
        actor_loss, log_density = self.actor_loss(batch)
        self.descend(actor_optimizer, actor_loss)
        self.descend(entropy_optimizer, -self.log_alpha * (log_density + self.target_entropy).mean())
        self.target_update.step()
        return outputs

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam of the critics, of the policy, and of the entropy coefficient."""
        return [*super().configure_optimizers(), self.adam([self.log_alpha], "entropy_learning_rate")]


class TD3(ContinuousAgent):
    """Twin delayed deterministic policy gradient: ``Q target = r + γ min(Q1', Q2')(s', π'(s') + clipped noise)``.

    Noise is measured in half action ranges. Weights, images and what training steps return are as of :class:`SAC`.
    Algorithm 1 of Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477: every update steps the critics, every
    ``policy_delay``-th also the policy and then all targets. RLlib's former TD3, with which Neighborhood Mixup
    Experience Replay was published, updates the targets every time. ``target_update_rate=0.01`` with
    ``policy_delay=2`` moves them as far over two updates.

    Args:
        target_update_rate: τ, ``target += τ * (network - target)`` with each policy update.
        policy_delay: Critic updates per policy update.
        target_noise: Standard deviation of the noise on the target policy's actions.
        target_noise_clip: Largest magnitude of this noise.
        exploration_noise: Standard deviation of the noise on the actions taken.
        exploration_noise_high: Largest standard deviation. If it is given, each environment draws its own between
            ``exploration_noise`` and this number, and draws again when its episode ends, as in FastTD3 (Seo et al.
            2025, https://arxiv.org/abs/2505.22642).

    The other arguments are the arguments of :class:`SAC`.

    Example:
        >>> agent = TD3(observation_size=3, action_low=[-2.0], action_high=[2.0])
        >>> agent.act(torch.zeros(5, 3), explore=True).shape
        torch.Size([5, 1])
    """

    takes_update_batches = True
    counters: ClassVar[dict[str, str]] = {"td3_updates": "_updates"}  #: The policy delay counts updates.
    _deviations: Tensor | None = None  # Deviations of the noise in each environment, [N, 1]

    def __init__(
        self,
        observation_size: int | dict[str, Any] | None = None,
        action_low: list[float] | None = None,
        action_high: list[float] | None = None,
        hidden_sizes: tuple[int, ...] = (256, 256),
        actor_learning_rate: float = 3e-4,
        critic_learning_rate: float = 3e-4,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        policy_delay: int = 2,
        target_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        exploration_noise: float = 0.1,
        gradient_norm: float | None = None,
        conflict_aversion: float | Schedule = 0.0,
        exploration_noise_high: float | None = None,
        layer_norm: bool = False,
        distributional: bool = False,
        atoms: int = 101,
        value_low: float = -10.0,
        value_high: float = 10.0,
        normalize_observations: bool = False,
        critic_observation: str | None = None,
        critic_observation_size: int | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._updates = 0
        self.set_up(locals())

    def build(self) -> None:
        """Creates also the target policy and the update of all targets."""
        super().build()
        self.watches_steps: bool = self.watches_steps or self.hparams.get("exploration_noise_high") is not None
        self.target_actor: Perceptron = target_of(self.actor)
        pairs = (self.actor, self.target_actor), (self.critics, self.target_critics)
        self.target_update: TargetUpdate = self.target_update_of(*pairs)

    def act(self, observation: Tensor | TensorDictBase, explore: bool) -> Tensor:
        """Returns actions in the environment's units, ``[N, A]``, with noise if ``explore``."""
        if explore and self.normalizes_observations:
            self.observe(observation)
        action = torch.tanh(self.actor(self.features_of(observation)))
        if explore:
            noise = self._noise_deviations(action) * torch.randn_like(action)
            action = torch.clamp(action + noise, -1.0, 1.0)
        return self.action_center + self.action_half_range * action

    def _noise_deviations(self, action: Tensor) -> Any:
        # One number, or a number for each of the environments, [N, 1]
        if self.hparams.get("exploration_noise_high") is None:
            return self.hparams["exploration_noise"]
        known = self._deviations
        if known is None or len(known) != len(action) or known.device != action.device:
            self._deviations = self._drawn_deviations(action[:, :1])
        return self._deviations

    def _drawn_deviations(self, like: Tensor) -> Tensor:
        return torch.empty_like(like).uniform_(
            self.hparams["exploration_noise"], self.hparams["exploration_noise_high"]
        )

    @torch.no_grad()
    def end_episodes(self, done: Tensor) -> None:
        """Draws new deviations of ``exploration_noise_high`` for environments whose episode ended, bool ``[N]``.

        A data module calls it after each step. In your own loop, call it yourself.
        """
        if self._deviations is not None:
            ended = torch.as_tensor(done, device=self._deviations.device).reshape(-1, 1)
            self._deviations = torch.where(ended, self._drawn_deviations(self._deviations), self._deviations)

    def following(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the target critics' inputs, the target policy's noisy actions, and ``None``. :meta private:"""
        columns = batch.get("next")
        action = batch.get("action")
        features = self.features_of(columns.get("observation"), target=True)
        clip = self.hparams["target_noise_clip"] * self.action_half_range
        noise = torch.randn_like(action) * (self.hparams["target_noise"] * self.action_half_range)
        chosen = self.bounded(self.target_actor(features)) + torch.clamp(noise, -clip, clip)
        chosen = torch.clamp(chosen, self.action_low, self.action_high)
        return self.critic_features(columns, features, target=True), chosen, None

    def actor_loss(self, batch: TensorDictBase) -> Tensor:
        """Returns minus the first critic's mean value of the policy's actions. :meta private:"""
        features = self.policy_features(batch)
        critic_features = self.critic_features(batch, features).detach()
        return -self.critics.first(critic_features, self.bounded(self.actor(features))).mean()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the critics, and with every ``policy_delay``-th update also the policy and all targets."""
        critic_optimizer, (actor_optimizer,) = self.critic_and_other_optimizers()
        outputs = self.update_critics(critic_optimizer, batch)
        self._updates += 1
        if self._updates % self.hparams["policy_delay"] == 0:
            self.descend(actor_optimizer, self.actor_loss(batch))
            self.target_update.step()
        return outputs
