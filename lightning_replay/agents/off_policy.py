# SPDX-License-Identifier: Apache-2.0
"""What TD3, SAC, DQN and MP-DQN have in common: sizes from the environment, one update per batch, priority feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import gymnasium
import lightning as L
import torch
from gymnasium.spaces import Space
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.agents.spaces import spaces_of
from lightning_replay.lit.callbacks.priorities import UpdatePriorities
from lightning_replay.lit.stream import UpdateBatches

__all__ = ["OffPolicyAgent", "weighted_mean"]


def weighted_mean(rows: Tensor, batch: TensorDictBase) -> Tensor:
    """Mean over the batch of each row's loss times its ``priority_weight``, where the batch has one.

    The sum is divided by B, not by the sum of the weights, which would undo their normalisation.
    """
    weight = batch.get("priority_weight", None)
    return rows.mean() if weight is None else (rows * weight.reshape(rows.shape)).mean()


class OffPolicyAgent(L.LightningModule):
    """Learns from replayed batches by manual optimisation; ``global_step`` equals the updates.

    A subclass gives ``build`` (networks, loss), ``update`` (one gradient step on one batch), ``act`` and
    ``configure_optimizers`` (critic first), and names in ``size_names`` the arguments that the spaces determine.
    With those arguments it is built at once, otherwise when a trainer attaches a data module that knows its spaces.
    """

    size_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_built = False

    @classmethod
    def sizes_from(cls, observation_space: Space, action_space: Space) -> dict[str, Any]:
        """The arguments named by ``size_names``, or an error where the agent cannot act in such spaces."""
        raise NotImplementedError

    @classmethod
    def for_env(cls, env: str | gymnasium.Env | gymnasium.vector.VectorEnv, **hyperparameters: Any) -> Self:
        """An agent for this environment, given as an id, an environment or a vector of them.

        Raises:
            ValueError: where the agent cannot act in the environment's spaces.
        """
        return cls(**cls.sizes_from(*spaces_of(env)), **hyperparameters)

    def build(self) -> None:
        """Creates networks, loss and target update from ``self.hparams``."""
        raise NotImplementedError

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """One gradient step; returns ``loss`` and ``td_error`` ``[B]``, both detached."""
        raise NotImplementedError

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Actions for a batch of observations."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Builds the networks once, with the sizes of the attached data module's spaces if none were given."""
        if self.is_built:
            return
        missing = [name for name in self.size_names if self.hparams.get(name) is None]
        if missing:
            datamodule: Any = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
            if not hasattr(datamodule, "observation_space"):
                raise ValueError(
                    f"{type(self).__name__} was built without {', '.join(missing)}; give them, use "
                    f"{type(self).__name__}.for_env(env), or fit it with a ReplayDataModule, which knows its spaces."
                )
            self.hparams.update(self.sizes_from(datamodule.observation_space, datamodule.action_space))
        self.build()
        self.is_built = True

    def build_if_sized(self) -> None:
        """Called at the end of a subclass's ``__init__``."""
        if all(self.hparams.get(name) is not None for name in self.size_names):
            self.configure_model()

    def configure_callbacks(self) -> Sequence[L.Callback]:
        """Feeds the TD errors back to the replay, so that nobody forgets it."""
        return [UpdatePriorities()]

    def training_step(self, batch: TensorDictBase | UpdateBatches, batch_idx: int) -> dict[str, Tensor]:
        """One update, or one per drawn batch where the stream hands out several per step."""
        if not isinstance(batch, UpdateBatches):
            return self.update(batch)
        outputs: dict[str, Tensor] = {}
        for drawn in batch:
            outputs = self.update(drawn)
            batch.update_priority(drawn, **outputs)
        return outputs

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Records the return of one evaluation episode."""
        self.log("eval/return", batch["return"], batch_size=1, on_step=False, on_epoch=True)

    def on_fit_start(self) -> None:
        """Refuses a replay whose n-step returns are discounted differently."""
        replay: Any = getattr(getattr(self.trainer, "datamodule", None), "replay", None)
        transforms = getattr(getattr(replay, "_transform", None), "transforms", ())
        for part in (replay, *transforms):  # returns are formed when rows are drawn, or before they are stored
            built_with = getattr(part, "init_arguments", {})
            n_steps, discount = built_with.get("n_steps", 1), built_with.get("discount")
            if n_steps > 1 and discount != self.hparams["discount"]:
                raise ValueError(
                    f"the replay discounts its {n_steps}-step returns by {discount}, the agent by "
                    f"{self.hparams['discount']}; give both the same discount."
                )

    def take_gradients(self, loss: Tensor) -> None:
        """``manual_backward``, without its 20 to 50 µs where it does nothing: one device, 32-bit precision."""
        if self.takes_plain_gradients:
            loss.backward()
        else:
            self.manual_backward(loss)

    @property
    def takes_plain_gradients(self) -> bool:
        """Whether the trainer neither scales gradients nor exchanges them between devices."""
        trainer = self.trainer
        return type(trainer.precision_plugin) is Precision and isinstance(trainer.strategy, SingleDeviceStrategy)

    def critic_and_other_optimizers(self) -> tuple[LightningOptimizer, list[torch.optim.Optimizer]]:
        """The critic's, which Lightning counts as the step, and the others raw, so that it does not count them."""
        wrapped = self.optimizers()
        if not isinstance(wrapped, list):
            return wrapped, []
        return wrapped[0], list(self.optimizers(use_pl_optimizer=False)[1:])
