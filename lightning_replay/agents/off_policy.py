# SPDX-License-Identifier: Apache-2.0
"""Base classes of TD3, SAC, DQN, MP-DQN and Rainbow: one update per batch, priority feedback."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives import SoftUpdate

from lightning_replay.agents.feedback import UpdateBatches, UpdatePriorities
from lightning_replay.agents.foreign import training_data, uses_no_step_hooks
from lightning_replay.agents.perceptrons import Layers, TargetUpdate, layers_of, perceptron_layers, tensors_of
from lightning_replay.agents.sized_agent import SizedAgent
from lightning_replay.agents.spaces import SizeReader, continuous_sizes
from lightning_replay.training_replay import TrainingReplay

# cached properties of the agents
_OF_LOSS = {"target_update", "layers", "target_layers", "actor_layers", "target_actor_layers", "networks"}


# Columns of a batch by name, those under "next" in a dictionary of their own; or the batch itself.
Columns = Mapping[str, Any]


def plain_columns(batch: TensorDictBase) -> dict[str, Any]:
    """Returns the columns of a batch in dictionaries, from which nine are read in the time of one from a TensorDict."""
    return {key: dict(value.items()) if isinstance(value, TensorDictBase) else value for key, value in batch.items()}


def weighted_mean(rows: Tensor, batch: Columns | TensorDictBase) -> Tensor:
    """Returns the mean over the batch of each row's loss times its ``priority_weight``, where the batch has one.

    The sum is divided by B, not by the sum of the weights, which would undo their normalisation.
    """
    weight = batch.get("priority_weight", None)
    return rows.mean() if weight is None else (rows * weight.reshape(rows.shape)).mean()


def bootstrapped(batch: Columns | TensorDictBase, values: Tensor, discount: Tensor) -> Tensor:
    """Returns the targets ``reward + γ^n values``, or the reward alone where the episode terminated.

    n is the column ``steps_to_next_obs``, 1 without it; a truncated row keeps its bootstrap.

    Args:
        batch: of replayed transitions.
        values: of the next observations ``[B]``, without gradients; the targets are computed in their memory.
        discount: γ, a scalar.
    """
    following, steps = batch["next"], batch.get("steps_to_next_obs", None)
    ended = following.get("terminated", None)
    if ended is None:
        ended = following.get("done")
    factor = discount if steps is None else discount ** steps.view_as(values)
    return (
        values.mul_(factor)
        .masked_fill_(ended.view_as(values).bool(), 0.0)
        .add_(following.get("reward").view_as(values))
    )


class OffPolicyAgent(SizedAgent):
    """Learns from replayed batches by manual optimisation; ``global_step`` equals the updates.

    A subclass defines ``build`` (networks, loss), ``update`` (one gradient step on one batch), ``act`` and
    ``configure_optimizers`` (critic first); see :class:`~lightning_replay.agents.sized_agent.SizedAgent`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps_directly = False  # until a trainer is known

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Takes one gradient step; returns ``loss`` and ``td_error`` ``[B]``, both detached."""
        raise NotImplementedError

    def associate_targets(self) -> None:
        """Keeps TorchRL from warning of a loss whose targets no updater moves; for the end of ``build``."""
        SoftUpdate(self.loss, tau=self.hparams["target_update_rate"])

    @cached_property
    def target_update(self) -> TargetUpdate:
        """Moves the targets in ``loss`` by ``target_update_rate``."""
        return TargetUpdate(self.loss, self.hparams["target_update_rate"])

    def __setattr__(self, name: str, value: Any) -> None:
        """Discards what holds tensors of the former :attr:`loss` where that is replaced."""
        if name == "loss":
            for cached in _OF_LOSS:
                self.__dict__.pop(cached, None)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what holds tensors of :attr:`loss`, whose copies are other tensors."""
        return {name: value for name, value in super().__getstate__().items() if name not in _OF_LOSS}

    def configure_callbacks(self) -> Sequence[L.Callback]:
        """Returns the callback that passes TD errors to the replay."""
        return [UpdatePriorities()]

    def training_step(self, batch: TensorDictBase | UpdateBatches, batch_idx: int) -> dict[str, Tensor]:
        """Updates once, or once per batch where a step has several."""
        if not isinstance(batch, UpdateBatches):
            outputs = self.update(batch)
            self.step_schedulers("step")
            return outputs
        outputs = {}
        for drawn in batch:
            outputs = self.update(drawn)
            self.step_schedulers("step")
            batch.update_priority(drawn, **outputs)
        return outputs

    def on_fit_start(self) -> None:
        """Refuses a precision that scales gradients, and a replay whose n-step returns are discounted differently."""
        super().on_fit_start()
        data = training_data(self.trainer)
        replay = None if data is None else data.replay
        for n_steps, discount in replay.returns if isinstance(replay, TrainingReplay) else ():
            if discount != self.hparams["discount"]:
                raise ValueError(
                    f"the replay discounts its {n_steps}-step returns by {discount}, the agent by "
                    f"{self.hparams['discount']}; give both the same discount."
                )

        self._steps_directly = self.takes_plain_gradients and uses_no_step_hooks(self.trainer)

    def take_step(self, optimizer: torch.optim.Optimizer | LightningOptimizer) -> None:
        """Steps an optimizer and counts the step if it is wrapped, without Lightning's hooks where nothing uses them.

        These cost 40 µs and some more for each callback.
        """
        if not self._steps_directly or not isinstance(optimizer, LightningOptimizer):
            optimizer.step()
            return
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        optimizer.optimizer.step()
        progress.increment_completed()

    def critic_and_other_optimizers(self) -> tuple[LightningOptimizer, list[torch.optim.Optimizer]]:
        """Returns the critic's optimizer, which Lightning counts as the step, and the others unwrapped."""
        wrapped = self.optimizers()
        if not isinstance(wrapped, list):
            return wrapped, []
        plain: Any = self.optimizers(use_pl_optimizer=False)  # a list, as the wrapped ones
        return wrapped[0], plain[1:]


class ContinuousAgent(OffPolicyAgent):
    """Base of TD3 and SAC: continuous actions between bounds, two critics in ``loss.qvalue_network_params``."""

    size_names: ClassVar[tuple[str, ...]] = ("observation_size", "action_low", "action_high")
    read_sizes: ClassVar[SizeReader] = staticmethod(continuous_sizes)
    action_center: Tensor
    action_half_range: Tensor

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out TorchRL's functions over both critics, which cannot be pickled."""
        state = super().__getstate__()
        if "loss" in self._modules:
            loss = copy.copy(self.loss)
            for name in [name for name in vars(loss) if name.startswith("_vmap_") and callable(vars(loss)[name])]:
                delattr(loss, name)
            state["_modules"] = {**self._modules, "loss": loss}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Creates these functions again."""
        super().__setstate__(state)
        if "loss" in self._modules:
            self.loss.set_vmap_randomness(self.loss.vmap_randomness)

    def register_bounds(self) -> tuple[Tensor, Tensor]:
        """Returns the bounds of the actions, and keeps their centre and half range as buffers."""
        low, high = torch.tensor(self.hparams["action_low"]), torch.tensor(self.hparams["action_high"])
        self.register_buffer("action_center", (high + low) / 2, persistent=False)
        self.register_buffer("action_half_range", (high - low) / 2, persistent=False)
        return low, high

    def bounded(self, outputs: Tensor) -> Tensor:
        """Returns actions within the bounds, from real numbers ``[..., A]``."""
        return torch.tanh(outputs) * self.action_half_range + self.action_center

    @cached_property
    def actor_layers(self) -> Layers:
        """Of the policy."""
        return perceptron_layers(self.loss, "actor_network")

    @cached_property
    def layers(self) -> Layers:
        """Of both critics, stacked."""
        return perceptron_layers(self.loss, "qvalue_network")

    @cached_property
    def target_layers(self) -> Layers:
        """Of both target critics, stacked."""
        return layers_of(self.loss.target_qvalue_network_params)

    def critic_optimizer(self) -> torch.optim.Optimizer:
        """Returns Adam of both critics."""
        return self.adam(tensors_of(self.layers), "critic_learning_rate")

    def actor_optimizer(self) -> torch.optim.Optimizer:
        """Returns Adam of the policy."""
        return self.adam(tensors_of(self.actor_layers), "actor_learning_rate")


class ExploringAgent(OffPolicyAgent):
    """Takes random actions with a probability that falls linearly; a checkpoint holds the steps taken so far.

    A subclass has the hyperparameters ``exploration_start``, ``exploration_end`` and ``exploration_steps``.
    """

    explored_key: str  # in the checkpoint

    def __init__(self) -> None:
        super().__init__()
        self._explored_steps = 0
        self._num_processes = 1  # that act, each of which takes as many steps

    @property
    def exploration_rate(self) -> float:
        """Present probability of a random action."""
        options = self.hparams
        done = min(1.0, self._explored_steps / max(1, options["exploration_steps"]))
        start = options["exploration_start"]
        return start + (options["exploration_end"] - start) * done

    def _draw(self, greedy: Tensor) -> tuple[Tensor, float]:
        """Draws a number for each action ``[N]``, below the present rate where it is random; counts the steps."""
        drawn, rate = torch.rand(greedy.shape, device=greedy.device), self.exploration_rate
        self._explored_steps += len(greedy) * self._num_processes
        return drawn, rate

    def on_fit_start(self) -> None:
        """Reads how many processes act."""
        super().on_fit_start()
        self._num_processes = self.trainer.world_size

    def draw_random(self, greedy: Tensor) -> Tensor:
        """Draws which of the actions ``[N]`` are replaced by random ones, bool ``[N]``, and counts the steps."""
        drawn, rate = self._draw(greedy)
        return drawn < rate

    def with_random(self, greedy: Tensor) -> Tensor:
        """Returns the actions ``[N]``, each replaced by a random one with probability :attr:`exploration_rate`."""
        drawn, rate = self._draw(greedy)
        if min(drawn.tolist(), default=rate) >= rate:  # faster than torch for a few environments
            return greedy
        return torch.where(drawn < rate, torch.randint_like(greedy, self.hparams["num_actions"]), greedy)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the position in the exploration schedule."""
        checkpoint[self.explored_key] = self._explored_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the position in the exploration schedule."""
        self._explored_steps = checkpoint.get(self.explored_key, 0)
