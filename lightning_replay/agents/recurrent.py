# SPDX-License-Identifier: Apache-2.0
"""Recurrent double DQN, which learns from sequences."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from lightning_replay.agents.agent import ExploringAgent, TargetUpdate, double_q_target, target_of
from lightning_replay.agents.networks import RecurrentNetwork
from lightning_replay.agents.spaces import SizeReader, discrete_sizes


class RecurrentDQN(ExploringAgent):
    """Double, dueling Q-learning with an LSTM, on sequences ``[B, T]`` of :func:`~lightning_replay.recipes.sequences`.

    For environments whose observations do not say all that matters (Hausknecht & Stone 2015). See
    https://arxiv.org/abs/1507.06527. The LSTM is unrolled from the state that was stored with each sequence's first
    step, or from zeros without one. The first ``burn_in`` steps bring it up to date and are not learned from. See R2D2,
    Kapturowski et al. 2019, section 3, https://openreview.net/forum?id=r1lyTjAqYX. Targets are of one step. No sequence
    goes over the end of an episode: each observation is the one that followed the step before.

    The loss is smooth L1 times ``priority_weight``, averaged over the steps that exist (``mask``) and follow the
    burn-in. Training steps return it and ``td_error``, float32 ``[B, T]``, magnitude, 0 at all other steps.

    Args:
        hidden_sizes: Widths of the layers before the LSTM.
        state_size: Units H of the LSTM. A stored state has ``2 H`` floats, 512 bytes for 64 units.
        burn_in: Steps at the start of each sequence, as many as in the replay.
        gradient_norm: Largest norm of the gradient. ``None`` does not clip.

    The other arguments are the arguments of :class:`DQN`.

    Raises:
        ValueError: In ``fit`` another burn-in than that of the replay.

    Example:
        >>> agent = RecurrentDQN(observation_size=4, num_actions=2)
        >>> action, state = agent.act_with_state(torch.zeros(5, 4), agent.initial_state(5), explore=False)
        >>> action.shape, state.shape
        (torch.Size([5]), torch.Size([5, 2, 64]))
    """

    takes_update_batches = True
    is_recurrent = True
    counters: ClassVar[dict[str, str]] = {"recurrent_dqn_explored_steps": "_explored_steps"}
    size_names: ClassVar[tuple[str, ...]] = ("observation_size", "num_actions")
    read_sizes: ClassVar[SizeReader] = staticmethod(discrete_sizes)

    def __init__(
        self,
        observation_size: int | dict[str, Any] | None = None,
        num_actions: int | None = None,
        hidden_sizes: tuple[int, ...] = (64,),
        state_size: int = 64,
        burn_in: int = 0,
        learning_rate: float = 1e-3,
        discount: float = 0.99,
        gradient_norm: float | None = 10.0,
        target_update_rate: float = 0.005,
        exploration_start: float = 1.0,
        exploration_end: float = 0.05,
        exploration_steps: int = 5_000,
    ) -> None:
        super().__init__()
        self.set_up(locals())

    def build(self) -> None:
        """Creates the network and its target."""
        self.network: RecurrentNetwork = RecurrentNetwork(
            self.build_encoder(), *(self.hparams[name] for name in ("num_actions", "hidden_sizes", "state_size"))
        )
        self.target_network: RecurrentNetwork = target_of(self.network)
        self.target_update: TargetUpdate = self.target_update_of((self.network, self.target_network))

    def act(self, observation: Any, explore: bool) -> NoReturn:
        """Raises ``TypeError``: without its state a recurrent agent would forget all that it has seen."""
        raise TypeError(f"{type(self).__name__} acts with a state: call act_with_state(observation, state, explore).")

    def initial_state(self, num_envs: int) -> Tensor:
        """Returns zeros, float32 ``[N, 2, H]``: output and cell of the LSTM."""
        return torch.zeros(num_envs, 2, self.hparams["state_size"], device=self.device)

    def act_with_state(self, observation: Any, state: Tensor, explore: bool) -> tuple[Tensor, Tensor]:
        """Returns actions, int64 ``[N]``, as :meth:`DQN.act`, and the states after the observations."""
        values, state = self.network(self.features_of(observation).unsqueeze(1), state)
        greedy = values.squeeze(1).argmax(dim=-1)
        return (self.with_random(greedy) if explore else greedy), state

    def unroll(self, batch: TensorDictBase, target: bool = False) -> tuple[Tensor, Tensor]:
        """Returns the values of observations and of next observations after the burn-in, ``[B, T - b, A]``.

        :meta private:
        """
        # Each observation is encoded once: a next observation is the observation of the next step.
        seen = batch["observation"][:, :1], batch["next", "observation"]
        features = torch.cat([self.features_of(observation, target) for observation in seen], 1)
        network = self.target_network if target else self.network
        burn_in = self.hparams["burn_in"]
        stored = batch.get("recurrent_state", None)
        state = self.initial_state(len(batch)) if stored is None else stored[:, 0]
        if burn_in:
            with torch.no_grad():
                state = network(features[:, :burn_in], state)[1]
        values = network(features[:, burn_in:], state)[0]
        return values[:, :-1], values[:, 1:]

    def losses(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the loss and the magnitude of the TD error of each step after the burn-in, and its ``mask``."""
        with torch.no_grad():
            _, target_values = self.unroll(batch, target=True)
        values, following_values = self.unroll(batch)
        batch = batch[:, self.hparams["burn_in"] :]
        target = double_q_target(batch, following_values, target_values, self.hparams["discount"])
        current = values.gather(-1, batch["action"].reshape(*target.shape, 1)).squeeze(-1)
        return smooth_l1_loss(current, target, reduction="none"), (target - current.detach()).abs(), batch["mask"]

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the network, then its target."""
        optimizer, _ = self.critic_and_other_optimizers()
        rows, errors, exists = self.losses(batch)
        learned = slice(self.hparams["burn_in"], None)
        weight = batch.get("priority_weight", None)
        if weight is not None:
            rows = rows * weight[:, learned]
        loss = (rows * exists).sum() / exists.sum().clamp(min=1)
        self.descend(optimizer, loss)
        self.target_update.step()
        td_error = torch.zeros(batch.shape, device=errors.device)
        td_error[:, learned] = errors * exists
        return {"loss": loss.detach(), "td_error": td_error}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam of the network and of its encoder."""
        return self.adam([*self.network.parameters(), *self.observation_encoder.parameters()])
