# SPDX-License-Identifier: Apache-2.0
"""TD3 of several seeds at once under one Lightning trainer: stacked networks, an environment and a replay for each run.

Runs share nothing but the time they take: each has its own weights, noise, environment and replay, all by its seed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import lightning as L
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stacked_networks import StackedNetwork, uniform_fan_in
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from lightning_replay import Replay

_LEARNED = ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "terminated"))


class StackedTD3(L.LightningModule):
    """TD3 (Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477) of R runs; actions are in [-1, 1].

    Args:
        observation_size: length of a flat observation.
        action_size: dimensions of an action.
        seeds: of weights and noise, one for each run.
        hidden_sizes: widths of the hidden layers of policy and critics.
        learning_rate: Adam's, of the policy and the critics.
        discount: γ.
        target_update_rate: τ of the target networks, applied with each policy update.
        policy_delay: critic updates per policy update.
        target_noise: standard deviation of the noise on the target policy's actions.
        target_noise_clip: its largest magnitude.
        exploration_noise: standard deviation of the noise on the actions taken.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        seeds: Sequence[int],
        hidden_sizes: tuple[int, ...] = (64, 64),
        learning_rate: float = 1e-3,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        policy_delay: int = 2,
        target_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        exploration_noise: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        options = (nn.ReLU, uniform_fan_in)
        self.policy = StackedNetwork([observation_size, *hidden_sizes, action_size], seeds, *options)
        # The first R networks are the first critics of the runs, the others the second ones.
        both = [1_000_000 * critic + seed for critic in (1, 2) for seed in seeds]
        self.critics = StackedNetwork([observation_size + action_size, *hidden_sizes, 1], both, *options)
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self._noise = [Generator().manual_seed(seed) for seed in seeds]
        self._runs = len(seeds)
        self._updates = 0

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions ``[R, N, A]`` for observations ``[R, N, O]``."""
        with torch.no_grad():
            action = torch.tanh(self.policy(observation))
            if explore:
                action = (action + self.hparams["exploration_noise"] * self._draw(action.shape[1:])).clamp_(-1.0, 1.0)
        return action

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Makes one update of every run from each of the batches ``[R, updates, B]``."""
        clip = self.hparams["target_noise_clip"]
        noise = self.hparams["target_noise"] * self._draw(batch["action"].shape[1:])
        for rows, target_noise in zip(batch.unbind(1), noise.clamp_(-clip, clip).unbind(1), strict=True):
            self._update(rows, target_noise)

    def _update(self, rows: TensorDict, target_noise: Tensor) -> None:
        critic_optimizer = self.optimizers()[0]
        policy_optimizer = self.optimizers(use_pl_optimizer=False)[1]  # Lightning counts the critics' steps only
        observation = rows["observation"]
        loss = (self._values(self.critics, observation, rows["action"]) - self._targets(rows, target_noise)).square()
        critic_optimizer.zero_grad()
        loss.mean(-1).sum().backward()  # a sum over runs, so that none changes the gradient of another
        critic_optimizer.step()
        self._updates += 1
        if self._updates % self.hparams["policy_delay"] == 0:
            value = self._first_values(observation, torch.tanh(self.policy(observation)))
            policy_optimizer.zero_grad()
            (-value.mean((1, 2)).sum()).backward()
            policy_optimizer.step()
            targets = [*self.target_policy.parameters(), *self.target_critics.parameters()]
            sources = [*self.policy.parameters(), *self.critics.parameters()]
            with torch.no_grad():
                torch._foreach_lerp_(targets, sources, self.hparams["target_update_rate"])

    @torch.no_grad()
    def _targets(self, rows: TensorDict, noise: Tensor) -> Tensor:
        """Returns ``r + γ min(Q1', Q2')(s', π'(s') + noise)`` for both critics, ``[2, R, B]``."""
        following = rows["next"]
        action = (torch.tanh(self.target_policy(following["observation"])) + noise).clamp_(-1.0, 1.0)
        value = self._values(self.target_critics, following["observation"], action).amin(0)
        ongoing = 1.0 - following["terminated"].squeeze(-1).float()
        return (following["reward"].squeeze(-1) + self.hparams["discount"] * ongoing * value).expand(2, -1, -1)

    def _values(self, critics: StackedNetwork, observation: Tensor, action: Tensor) -> Tensor:
        """Returns the values of both critics, ``[2, R, B]``."""
        pairs = torch.cat([observation, action], -1)
        return critics(torch.cat([pairs, pairs])).view(2, self._runs, -1)

    def _first_values(self, observation: Tensor, action: Tensor) -> Tensor:
        """Returns the values of the first critics, ``[R, B, 1]``, which are constant in the policy's loss."""
        rows = torch.cat([observation, action], -1)
        parameters = [parameter.detach()[: self._runs] for parameter in self.critics.parameters()]
        pairs = list(zip(parameters[::2], parameters[1::2], strict=True))
        for weight, bias in pairs[:-1]:
            rows = torch.relu(torch.baddbmm(bias, rows, weight))
        weight, bias = pairs[-1]
        return torch.baddbmm(bias, rows, weight)

    def _draw(self, shape: Sequence[int]) -> Tensor:
        return torch.stack([torch.randn(*shape, generator=generator) for generator in self._noise])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam for the critics and for the policy."""
        rate = self.hparams["learning_rate"]
        return [torch.optim.Adam(module.parameters(), lr=rate, fused=True) for module in (self.critics, self.policy)]


class StackedReplays(L.LightningDataModule):
    """One environment and one replay for each run; a batch holds the updates of one environment step of all runs.

    Args:
        env: Gymnasium id of an environment with a bounded action space.
        replays: one for each run.
        seeds: of the environments and the random actions, one for each run. Runs of one seed start with equal rows.
        env_steps: environment steps of a run.
        warmup_steps: steps with random actions before the first update.
        updates_per_env_step: replay ratio; the replays' batch size is a multiple of it.
        env_kwargs: further arguments of the environment.
    """

    def __init__(
        self,
        env: str,
        replays: Sequence[Replay],
        seeds: Sequence[int],
        env_steps: int,
        warmup_steps: int,
        updates_per_env_step: int,
        env_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.replays = list(replays)
        self._seeds = list(seeds)
        self._env_steps = env_steps
        self._warmup_steps = warmup_steps
        self._updates = updates_per_env_step
        self._make: Callable[[], gymnasium.Env] = lambda: gymnasium.make(env, **(env_kwargs or {}))
        self.env_steps_done = 0

    def train_dataloader(self) -> StackedReplays:
        """Returns itself: an iterable with a length, so that Lightning draws no batch ahead."""
        return self

    def __len__(self) -> int:
        return self._env_steps - self._warmup_steps

    def __iter__(self) -> Iterator[TensorDict]:
        environments = self.environments(1)
        space = environments.single_action_space
        center, half_range = (space.high + space.low) / 2, (space.high - space.low) / 2
        generators = [np.random.default_rng(seed) for seed in self._seeds]
        observation, _ = environments.reset(seed=self._seeds)
        trajectory = np.zeros(len(self._seeds), dtype=np.int64)
        for step in range(self._env_steps):
            if step < self._warmup_steps:
                action = np.stack([generator.uniform(-1.0, 1.0, space.shape) for generator in generators])
            else:
                agent = self.trainer.lightning_module
                action = agent.act(_floats(observation).unsqueeze(1), explore=True).squeeze(1).numpy()
            taken = (center + half_range * action).astype(space.dtype)
            following, reward, terminated, truncated, infos = environments.step(taken)
            done = terminated | truncated
            last = following.copy()
            if done.any():
                last[done] = np.stack(list(infos["final_obs"][done]))
            self._store(observation, action, last, reward, terminated, truncated, trajectory)
            trajectory += done
            observation = following
            self.env_steps_done = step + 1
            if step >= self._warmup_steps:
                batches = [replay.sample().select(*_LEARNED) for replay in self.replays]
                yield torch.stack([batch.view(self._updates, -1) for batch in batches])
        environments.close()

    def environments(self, count: int) -> SyncVectorEnv:
        """Returns ``count`` environments for each run, those of one run in succession."""
        return SyncVectorEnv([self._make] * (count * len(self._seeds)), autoreset_mode=AutoresetMode.SAME_STEP)

    def transfer_batch_to_device(self, batch: TensorDict, device: torch.device, dataloader_idx: int) -> TensorDict:
        """Returns the batch, which is where it is needed."""
        return batch

    def _store(self, *columns: np.ndarray) -> None:
        observation, action, following, reward, terminated, truncated, trajectory = columns
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        rows = TensorDict(
            {
                "observation": _floats(observation),
                "action": _floats(action),
                "next": {
                    "observation": _floats(following),
                    "reward": _floats(reward).unsqueeze(-1),
                    **{name: torch.from_numpy(flag).unsqueeze(-1) for name, flag in flags.items()},
                },
                "trajectory": torch.from_numpy(trajectory.copy()),
            },
            [len(self.replays)],
        )
        for replay, row in zip(self.replays, rows.split(1), strict=True):
            replay.extend(row)


class EvaluateRuns(L.Callback):
    """Plays episodes of every run without exploration; ``history`` has ``(env_steps, returns [R])``.

    Args:
        every_n_env_steps: training steps between two evaluations; one at the start and one at the end as well.
        episodes: of each run; their first states are the same for every run and evaluation.
        seed: of the first episode.
        report: called with the environment steps done after every training step.
    """

    def __init__(
        self, every_n_env_steps: int, episodes: int, seed: int, report: Callable[[int], None] = lambda env_steps: None
    ) -> None:
        self.history: list[tuple[int, np.ndarray]] = []
        self._every = every_n_env_steps
        self._episodes = episodes
        self._seed = seed
        self._report = report

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        """Evaluates the untrained agent."""
        if not self.history:
            self._evaluate(trainer.datamodule, pl_module, trainer.datamodule.env_steps_done - 1)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *step: Any) -> None:
        """Evaluates when due."""
        env_steps = trainer.datamodule.env_steps_done
        if env_steps % self._every == 0:
            self._evaluate(trainer.datamodule, pl_module, env_steps)
        self._report(env_steps)

    def _evaluate(self, source: StackedReplays, agent: StackedTD3, env_steps: int) -> None:
        environments = source.environments(self._episodes)
        space = environments.single_action_space
        center, half_range = (space.high + space.low) / 2, (space.high - space.low) / 2
        count = environments.num_envs
        seeds = [self._seed + number % self._episodes for number in range(count)]
        observation, _ = environments.reset(seed=seeds)
        returns, is_playing = np.zeros(count), np.ones(count, dtype=bool)
        while is_playing.any():
            rows = _floats(observation).view(-1, self._episodes, observation.shape[-1])
            action = agent.act(rows, explore=False).flatten(0, 1).numpy()
            taken = (center + half_range * action).astype(space.dtype)
            observation, reward, terminated, truncated, _ = environments.step(taken)
            returns += reward * is_playing
            is_playing &= ~(terminated | truncated)
        environments.close()
        self.history.append((env_steps, returns.reshape(-1, self._episodes).mean(1)))


def _floats(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))
