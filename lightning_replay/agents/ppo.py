# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization for discrete actions, one training step per rollout, with generalized advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay.agents.agent import SizedAgent
from lightning_replay.agents.interfaces import training_data
from lightning_replay.agents.networks import ActorCritic
from lightning_replay.agents.spaces import SizeReader, flat_or_image_sizes
from lightning_replay.levels.scores import discounts_of
from lightning_replay.losses import invariance_loss
from lightning_replay.torchrl_compat import assemble_unchecked
from lightning_replay.transforms.augmentation import MixMinibatch, UCBAugmentation

_NUMBERS = (
    "loss",
    "policy_loss",
    "value_loss",
    "entropy_loss",
    "entropy",
    "clip_fraction",
    "kl_divergence",
    "invariance_loss",
)
_COLUMNS = ("observation", "action", "action_log_prob", "state_value", "advantage", "value_target")


def _drawn(log_probs: Tensor) -> Tensor:
    # Torch's multinomial draws one action per row in the same way, and takes three times as long.
    chances = log_probs.exp()
    if not chances.min() >= 0.0:
        return torch.multinomial(chances, 1).squeeze(-1)  # It raises an error.
    return chances.div_(torch.empty_like(chances).exponential_()).argmax(-1)


class PPO(SizedAgent):
    """Maximizes ``E[min(r A, clip(r, 1 ± clip_range) A)]``, r the ratio of new to old action probability.

    Each ``training_step`` learns from one rollout, a TensorDict ``[N, T]`` as collected by
    :class:`~lightning_replay.lit.LevelDataModule`. It computes generalized advantages with the values recorded during
    collection, normalized over the rollout. A time limit bootstraps from the episode's last observation, and a
    termination does not. Then it makes ``epochs`` passes over ``minibatches``, with the losses of TorchRL's
    ``ClipPPOLoss``. Rows whose ``is_trained`` is False are left out of both. Lightning counts the last gradient step of
    a rollout: ``global_step`` is the number of rollouts.

    Policy and value share a trunk, which is a perceptron over flat float observations. For images ``uint8 [H, W, C]``,
    it consists of convolutions over pixels divided by the largest value. With ``categories``, they are over one plane
    per category. Schulman et al. 2017, https://arxiv.org/abs/1707.06347. The defaults come from Jiang et al. 2021 on
    MiniGrid (https://arxiv.org/abs/2010.03934, appendix).

    Args:
        observation_shape: ``(size,)`` or ``(height, width, channels)``. If absent, it is read from the environment.
        observation_high: Largest value of an image. It is read from the environment with the shape, and is 255
            otherwise.
        num_actions: Number of actions. If absent, it is read from the environment.
        hidden_sizes: Widths of the fully connected layers.
        channels: Output channels of the convolutions over images, one number each.
        kernel_sizes: Kernel sizes of the convolutions, unused with ``residual``.
        strides: Strides of the convolutions, unused with ``residual``.
        categories: Number of categories in each channel of images that encode objects, (11, 6, 4) for MiniGrid's. It is
            ``None`` for pixels.
        learning_rate: Adam's.
        adam_epsilon: Adam's.
        discount: γ.
        gae_lambda: λ.
        clip_range: Largest deviation of the ratio r from 1 that still increases the objective.
        value_clip: Largest deviation of a value from the recorded one. ``None`` does not clip.
        entropy_coefficient: Weight of the entropy, which is maximized.
        value_coefficient: Weight of the mean squared error of the values.
        gradient_norm: Largest norm of the gradient. ``None`` does not clip.
        epochs: Passes over a rollout.
        minibatches: Parts of a rollout in each pass. If rows are left out, there are fewer parts of the same size.
        mixup_concentration: α of mixreg, :class:`~lightning_replay.transforms.MixMinibatch`, 0.2 in its paper. It is
            refused with ``categories``. Advantages are normalized before they are mixed, and not in each mixed
            minibatch as in the released code.
        augmentations: Augmentations of images, out of which UCB-DrAC chooses one for each rollout, see
            :class:`~lightning_replay.transforms.UCBAugmentation`. A single one is DrAC, and ``None`` augments nothing.
            They are refused with ``categories`` and with flat observations.
        augmentation_weight: Weight of the loss that makes policy and value invariant to it.
        residual: Whether to use IMPALA's network in place of plain convolutions. For each of ``channels``, it consists
            of a 3 x 3 convolution, a maximum over 3 x 3 with stride 2, and two residual blocks. Level replay has it on
            Procgen, with ``hidden_sizes`` of 256.

    Returned by each training step, means over its gradient steps, 0 if no row was trained on:
        loss, policy_loss, value_loss, entropy_loss, entropy, clip_fraction, kl_divergence, invariance_loss: scalars.

    Example:
        >>> agent = PPO(observation_shape=(4,), num_actions=2)
        >>> agent.act(torch.zeros(5, 4), explore=True).shape
        torch.Size([5])
    """

    size_names: ClassVar[tuple[str, ...]] = ("observation_shape", "num_actions")
    read_sizes: ClassVar[SizeReader] = staticmethod(flat_or_image_sizes)

    def __init__(
        self,
        observation_shape: tuple[int, ...] | None = None,
        observation_high: float | None = None,
        num_actions: int | None = None,
        hidden_sizes: tuple[int, ...] = (64,),
        channels: tuple[int, ...] = (16, 32, 32),
        kernel_sizes: tuple[int, ...] = (2, 2, 2),
        strides: tuple[int, ...] = (1, 1, 1),
        categories: tuple[int, ...] | None = None,
        learning_rate: float = 7e-4,
        adam_epsilon: float = 1e-5,
        discount: float = 0.999,
        gae_lambda: float = 0.95,
        clip_range: float = 0.2,
        value_clip: float | None = 0.2,
        entropy_coefficient: float = 0.01,
        value_coefficient: float = 0.5,
        gradient_norm: float | None = 0.5,
        epochs: int = 4,
        minibatches: int = 8,
        mixup_concentration: float | None = None,
        augmentations: tuple[str, ...] | None = None,
        augmentation_weight: float = 0.1,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.set_up(locals())

    def build(self) -> None:
        """Creates the network, and the augmentations if there are any."""
        options = self.hparams
        names = options["augmentations"]
        mixup = options["mixup_concentration"]
        if (names and len(options["observation_shape"]) != 3) or (
            (names or mixup) and options["categories"] is not None
        ):
            raise ValueError(
                f"augmentations is {names}, mixup_concentration {mixup} and categories {options['categories']}; "
                "images of pixels can be augmented, and what has categories cannot be mixed. Leave the options out."
            )
        self.mixture: MixMinibatch | None = MixMinibatch(mixup) if mixup else None
        self.augmentation: UCBAugmentation | None = UCBAugmentation(names) if names else None
        self.network: ActorCritic = ActorCritic(
            options["observation_shape"],
            255.0 if options["observation_high"] is None else options["observation_high"],
            options["num_actions"],
            **{name: options[name] for name in ("hidden_sizes", "channels", "kernel_sizes", "strides", "categories")},
            residual=options["residual"],
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *given: Any) -> None:
        for name, part in self.named_children():  # The checkpoint of an agent without these parts has no state of them.
            if isinstance(part, MixMinibatch | UCBAugmentation):
                state_dict.setdefault(f"{prefix}{name}._extra_state", part.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *given)

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions, int64 ``[N]``: drawn from the policy, or the most probable."""
        logits = self.network.policy(self.network.trunk(observation))
        return _drawn(logits.log_softmax(-1)) if explore else logits.argmax(dim=-1)

    def act_with_value(self, observation: Tensor) -> TensorDict:
        """Returns the columns of a rollout for observations ``[N, ...]``.

        action int64 ``[N]``, and as float32: action_log_prob ``[N]``, logits ``[N, A]``, state_value ``[N, 1]``.
        """
        logits, value = self.network(observation)
        log_probs = logits.log_softmax(-1)
        action = _drawn(log_probs)
        log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        columns = {"action": action, "action_log_prob": log_prob, "logits": logits, "state_value": value}
        return assemble_unchecked(columns, batch_size=action.shape, device=None)

    def value(self, observation: Tensor) -> Tensor:
        """Returns values of observations, float32 ``[N, 1]``."""
        return self.network(observation)[1]

    def training_step(self, batch: TensorDictBase, batch_idx: int) -> dict[str, Tensor]:
        """Takes all gradient steps on one rollout ``[N, T]``."""
        rows = self.trained_rows(batch)
        if len(rows) == 0:
            return dict.fromkeys(_NUMBERS, torch.zeros(()))
        if self.augmentation is not None:  # All processes choose the same. The policy collected this rollout with it.
            self.augmentation.choose(self.trainer.strategy.reduce(rows["value_target"].mean()).item())
        raw: Any = self.optimizers(use_pl_optimizer=False)
        counted: Any = self.optimizers()
        # The size counts all rows. If some are left out, there are fewer minibatches of this size.
        size = -(-batch.numel() // self.hparams["minibatches"])
        parts = -(-len(rows) // size)
        columns = {name: rows.get(name) for name in _COLUMNS}
        steps = self.hparams["epochs"] * parts
        numbers: list[Tensor] = []
        for _ in range(self.hparams["epochs"]):
            order = torch.randperm(len(rows), device=columns["advantage"].device)
            shuffled = [column[order].tensor_split(parts) for column in columns.values()]
            for minibatch in zip(*shuffled, strict=True):
                # Lightning counts the steps of the optimizer that it wraps, here one for each rollout.
                optimizer = counted if len(numbers) == steps - 1 else raw
                drawn: Any = dict(zip(columns, minibatch, strict=True))
                if self.mixture is not None:
                    drawn = self.mixture(TensorDict(drawn, minibatch[0].shape[:1]))
                loss, measured = self.losses(drawn)
                self.descend(optimizer, loss)
                numbers.append(measured)
        self.step_schedulers("step")
        return dict(zip(_NUMBERS, torch.stack(numbers).mean(0).unbind(0), strict=True))

    def trained_rows(self, rollout: TensorDictBase) -> TensorDictBase:
        """Returns the rows ``[M]`` to learn from, with normalized ``advantage`` and ``value_target``. :meta private:"""
        value = rollout.get("state_value")
        following = rollout.get("next")
        discount = self.hparams["discount"]
        # A = δ + γ λ (1 - done) A', δ = r + γ (1 - terminated) V' - V: Schulman et al. 2016, arXiv 1506.02438
        expected = discount * following.get("terminated").logical_not() * following.get("state_value")
        advantages = [*(following.get("reward") + expected - value).unbind(1)]
        decays = (discount * self.hparams["gae_lambda"] * following.get("done").logical_not()).unbind(1)
        for step in reversed(range(len(advantages) - 1)):
            advantages[step] = torch.addcmul(advantages[step], decays[step], advantages[step + 1])
        advantage = torch.stack(advantages, dim=1)
        rows = rollout.exclude("next").update({"advantage": advantage, "value_target": advantage + value}).reshape(-1)
        is_trained = rows.get("is_trained", None)
        if is_trained is not None and not is_trained.all():
            rows = rows[is_trained.reshape(-1)]
        advantage = rows["advantage"]
        spread = advantage.std() if len(rows) > 1 else advantage.new_ones(())
        rows["advantage"] = (advantage - advantage.mean()) / (spread + 1e-5) if len(rows) > 0 else advantage
        return rows

    def losses(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the loss of a minibatch. Returns also its parts and the measures of the policy's change, detached."""
        options = self.hparams
        logits, value = self.network(rows["observation"])
        log_probs = logits.log_softmax(-1)
        log_ratio = log_probs.gather(-1, rows["action"].unsqueeze(-1)) - rows["action_log_prob"].unsqueeze(-1)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - options["clip_range"], 1.0 + options["clip_range"])
        policy_loss = -torch.minimum(ratio * rows["advantage"], clipped * rows["advantage"]).mean()
        squares = (value - rows["value_target"]).square()
        if options["value_clip"] is not None:
            change = (value - rows["state_value"]).clamp(-options["value_clip"], options["value_clip"])
            squares = torch.maximum(squares, (rows["state_value"] + change - rows["value_target"]).square())
        value_loss = options["value_coefficient"] * squares.mean()
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        entropy_loss = -options["entropy_coefficient"] * entropy
        invariance = entropy.new_zeros(())
        if self.augmentation is not None:
            trunk = self.network.trunk
            hidden = trunk[1:](self.augmentation.augment(trunk[0](rows["observation"])))  # The planes are augmented.
            augmented = self.network.policy(hidden).log_softmax(-1), self.network.value(hidden)
            invariance = options["augmentation_weight"] * invariance_loss(log_probs, value, *augmented)
        total = policy_loss + value_loss + entropy_loss + invariance
        with torch.no_grad():
            measures = entropy, (clipped != ratio).to(value.dtype).mean(), -log_ratio.mean()
            return total, torch.stack([total, policy_loss, value_loss, entropy_loss, *measures, invariance])

    def on_fit_start(self) -> None:
        """Refuses data without rollouts, rollouts that are too short, and parts with another γ or λ.

        :meta private:
        """
        super().on_fit_start()
        data = training_data(self.trainer)
        if data is None:
            return
        if data.rollout_rows == 0:
            raise TypeError(
                f"PPO learns from rollouts of its own policy, and {type(data).__name__} replays transitions; give PPO "
                "a LevelDataModule (LevelDataModule(..., levels=UniformLevels(None)) for levels without end)."
            )
        if data.rollout_rows is not None and data.rollout_rows < self.hparams["minibatches"]:
            raise ValueError(
                f"minibatches is {self.hparams['minibatches']}, and a rollout of the data module has "
                f"{data.rollout_rows} rows (num_envs times rollout_length); give as many rows at least."
            )
        found: list[str] = []
        options: list[str] = []  # One error names all options to give.
        for owner, part in data.discounting_parts.items():
            option = f"--data.init_args.{owner.replace('.', '.init_args.')}"
            wrong = {name: value for name, value in discounts_of(part).items() if value != self.hparams[name]}
            if wrong and owner == "levels.score":  # A file may have no score.
                options.append(f"{option}={type(part).__module__}.{type(part).__name__}")
            for name, value in wrong.items():
                found.append(f"{owner} of the data module has {name} {value}, the agent {self.hparams[name]}")
                options.append(f"{option}.init_args.{name}={self.hparams[name]}")
        if found:
            raise ValueError(f"{'; '.join(found)}. Give the same, on the command line by {' '.join(options)}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam of all parameters."""
        return self.adam(self.parameters())
