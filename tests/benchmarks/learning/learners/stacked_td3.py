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
from gymnasium.wrappers import RescaleAction
from tensordict import TensorDict
from torch import Generator, Tensor

from lightning_replay import Replay
from tests.benchmarks.learning.learners.stacked_networks import backward, forward, input_gradient, stacked_parameters

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
        self.policy = stacked_parameters([observation_size, *hidden_sizes, action_size], seeds)
        # The first R networks are the first critics of the runs, the others the second ones.
        both = [1_000_000 * critic + seed for critic in (1, 2) for seed in seeds]
        self.critics = stacked_parameters([observation_size + action_size, *hidden_sizes, 1], both)
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        # Lists, which are faster to read in an update than torch's ParameterList.
        networks = (self.policy, self.critics, self.target_policy, self.target_critics)
        self._policy, self._critics, self._target_policy, self._target_critics = map(list, networks)
        self._sources, self._targets = self._policy + self._critics, self._target_policy + self._target_critics
        self._noise = [Generator().manual_seed(seed) for seed in seeds]
        self._runs = len(seeds)
        self._updates = 0

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions ``[R, N, A]`` for observations ``[R, N, O]``."""
        with torch.no_grad():
            action = torch.tanh(forward(self._policy, observation)[-1])
            if explore:
                action = (action + self.hparams["exploration_noise"] * self._draw(action.shape[1:])).clamp_(-1.0, 1.0)
        return action

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Makes one update of every run from each of the batches ``[R, updates, B]``."""
        clip = self.hparams["target_noise_clip"]
        noise = self.hparams["target_noise"] * self._draw(batch["action"].shape[1:])
        columns = [batch["observation"], batch["action"], batch["next", "observation"]]
        columns += [batch["next", key].float() for key in ("reward", "terminated")]
        optimizers = self.optimizers(use_pl_optimizer=False)
        for rows in zip(*(column.unbind(1) for column in (*columns, noise.clamp_(-clip, clip))), strict=True):
            self._update(*optimizers, *rows)

    @torch.no_grad()
    def _update(
        self,
        critic_optimizer: torch.optim.Optimizer,
        policy_optimizer: torch.optim.Optimizer,
        observation: Tensor,
        action: Tensor,
        following: Tensor,
        reward: Tensor,
        terminated: Tensor,
        noise: Tensor,
    ) -> None:
        next_action = (torch.tanh(forward(self._target_policy, following)[-1]) + noise).clamp_(-1.0, 1.0)
        first, second = forward(self._target_critics, _twice(following, next_action))[-1].chunk(2)
        target = reward + self.hparams["discount"] * (1.0 - terminated) * torch.minimum(first, second)
        outputs = forward(self._critics, _twice(observation, action))
        error = outputs[-1] - torch.cat([target, target])
        backward(self._critics, outputs, error.mul_(2.0 / error.shape[1]))
        critic_optimizer.step()
        self._updates += 1
        if self._updates % self.hparams["policy_delay"] == 0:
            policy_outputs = forward(self._policy, observation)
            taken = torch.tanh(policy_outputs[-1])
            first_critics = [parameter[: self._runs] for parameter in self._critics]
            outputs = forward(first_critics, torch.cat([observation, taken], -1))
            gradient = torch.full_like(outputs[-1], -1.0 / outputs[-1].shape[1])
            gradient = input_gradient(first_critics, outputs, gradient)[..., observation.shape[-1] :]
            backward(self._policy, policy_outputs, gradient * (1.0 - taken.square()))
            policy_optimizer.step()
            torch._foreach_lerp_(self._targets, self._sources, self.hparams["target_update_rate"])

    def _draw(self, shape: Sequence[int]) -> Tensor:
        return torch.stack([torch.randn(*shape, generator=generator) for generator in self._noise])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam for the critics and for the policy."""
        rate = self.hparams["learning_rate"]
        return [torch.optim.Adam(module.parameters(), lr=rate, fused=True) for module in (self.critics, self.policy)]


def _twice(observation: Tensor, action: Tensor) -> Tensor:
    """Returns the input of the first critics of all runs, and of the second ones."""
    pairs = torch.cat([observation, action], -1)
    return torch.cat([pairs, pairs])


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
        self._make: Callable[[], gymnasium.Env] = lambda: RescaleAction(gymnasium.make(env, **env_kwargs or {}), -1, 1)
        self.env_steps_done = 0

    def train_dataloader(self) -> StackedReplays:
        """Returns itself: an iterable with a length, so that Lightning draws no batch ahead."""
        return self

    def __len__(self) -> int:
        return self._env_steps - self._warmup_steps

    def __iter__(self) -> Iterator[TensorDict]:
        environments = self.environments(1)
        shape = environments.single_action_space.shape
        generators = [np.random.default_rng(seed) for seed in self._seeds]
        observation, _ = environments.reset(seed=self._seeds)
        trajectory = np.zeros(len(self._seeds), dtype=np.int64)
        waiting: list[tuple[np.ndarray, ...]] = []
        for step in range(self._env_steps):
            if step < self._warmup_steps:
                drawn = [generator.uniform(-1.0, 1.0, shape) for generator in generators]
                action = np.stack(drawn, dtype=np.float32, casting="same_kind")
            else:
                agent = self.trainer.lightning_module
                action = agent.act(_floats(observation).unsqueeze(1), explore=True).squeeze(1).numpy()
            following, reward, terminated, truncated, infos = environments.step(action)
            done = terminated | truncated
            last = following.copy()
            if done.any():
                last[done] = np.stack(list(infos["final_obs"][done]))
            waiting.append((observation, action, last, reward, terminated, truncated, trajectory.copy()))
            if step + 1 >= self._warmup_steps:
                self._store([np.stack(column, 1) for column in zip(*waiting, strict=True)])
                waiting.clear()
            trajectory += done
            observation = following
            self.env_steps_done = step + 1
            if step >= self._warmup_steps:
                batches = [replay.sample().select(*_LEARNED) for replay in self.replays]
                yield torch.stack([batch.view(self._updates, -1) for batch in batches])
        environments.close()

    def environments(self, count: int) -> SyncVectorEnv:
        """Returns ``count`` environments for each run, those of one run in succession; actions are in [-1, 1]."""
        return SyncVectorEnv([self._make] * (count * len(self._seeds)), autoreset_mode=AutoresetMode.SAME_STEP)

    def transfer_batch_to_device(self, batch: TensorDict, device: torch.device, dataloader_idx: int) -> TensorDict:
        """Returns the batch, which is where it is needed."""
        return batch

    def _store(self, columns: Sequence[np.ndarray]) -> None:
        """Stores steps ``[R, N]`` of all runs, each in its replay."""
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
                "trajectory": torch.from_numpy(trajectory),
            },
            reward.shape,
        )
        for replay, steps in zip(self.replays, rows.unbind(0), strict=True):
            replay.extend(steps)


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
        count = environments.num_envs
        seeds = [self._seed + number % self._episodes for number in range(count)]
        observation, _ = environments.reset(seed=seeds)
        returns, is_playing = np.zeros(count), np.ones(count, dtype=bool)
        while is_playing.any():
            rows = _floats(observation).view(-1, self._episodes, observation.shape[-1])
            action = agent.act(rows, explore=False).flatten(0, 1).numpy()
            observation, reward, terminated, truncated, _ = environments.step(action)
            returns += reward * is_playing
            is_playing &= ~(terminated | truncated)
        environments.close()
        self.history.append((env_steps, returns.reshape(-1, self._episodes).mean(1)))


def _floats(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))
