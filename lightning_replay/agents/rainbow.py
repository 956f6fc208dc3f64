# SPDX-License-Identifier: Apache-2.0
"""Rainbow for images and discrete actions, each of its parts optional."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives import HardUpdate

from lightning_replay.agents.networks import ImageNetwork, with_noise
from lightning_replay.agents.off_policy import ExploringAgent, weighted_mean
from lightning_replay.agents.spaces import SizeReader, image_sizes
from lightning_replay.agents.value_losses import CategoricalValueLoss, ScalarValueLoss
from lightning_replay.retention.surprise import cross_entropy, kl_divergence

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
