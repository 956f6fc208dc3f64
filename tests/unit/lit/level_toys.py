# SPDX-License-Identifier: Apache-2.0
"""Environments whose observations say which level is played, and the smallest agent that collects rollouts."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import lightning as L
import numpy as np
import torch
from tensordict import TensorDict

from lightning_replay.agents import PPO
from lightning_replay.levels import LevelBuffer
from lightning_replay.lit import LevelDataModule
from tests.unit.lit.toys import make_trainer


class Stairs(gymnasium.Env):
    """Observation ``[level, step]``, reward ``level + step / 10``; level l lasts ``1 + l % 4`` steps.

    Even levels end by termination, odd ones by truncation. Difficulty is ``l % 3``.
    """

    def __init__(self, reward: float = 1.0) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, np.inf, (2,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.reward = reward
        self.level = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.level = seed
        self.count = 0
        return np.array([self.level, 0.0]), {"difficulty": self.level % 3}

    def step(self, action):
        self.count += 1
        ends, by_time = self.count > self.level % 4, self.level % 2 == 1
        observation = np.array([float(self.level), float(self.count)])
        reward = self.reward * (self.level + self.count / 10)
        return observation, reward, ends and not by_time, ends and by_time, {}


class Doors(gymnasium.Env):
    """Three doors, of which level l pays 1 for number ``l % 3``, four times; it has no level before ``set_level``."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 4.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)

    def set_level(self, level_id: int) -> None:
        self.level = level_id

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        return self._observe(), float(action == self.level % 3), self.count == 4, False, {}

    def _observe(self) -> np.ndarray:
        observation = np.zeros(4, np.float32)
        observation[self.level % 3], observation[3] = 1.0, self.count / 4
        return observation


class Deaf(Stairs):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=7)


def value_of(observation: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
    """Values that :class:`Valuer` returns for observations ``[..., 2]``: ``weight * (level + step / 100)``."""
    return weight * (observation[..., :1] + observation[..., 1:] / 100)


class Valuer(L.LightningModule):
    """Acts at random; its values are those of :func:`value_of`, and each training step changes the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.rollouts: list[TensorDict] = []
        self.weights: list[float] = []
        self.modes: list[tuple[bool, bool]] = []

    def act(self, observation, explore):
        return torch.randint(3, (len(observation),)) if explore else torch.zeros(len(observation), dtype=torch.long)

    def act_with_value(self, observation):
        self.modes.append((self.training, torch.is_grad_enabled()))
        count = len(observation)
        logits = torch.zeros(count, 3)
        columns = {"action": self.act(observation, True), "logits": logits, "state_value": self.value(observation)}
        return TensorDict(columns | {"action_log_prob": logits[:, 0]}, [count])

    def value(self, observation):
        return value_of(observation, self.weight)

    def training_step(self, batch, batch_idx):
        self.rollouts.append(batch)
        self.weights.append(self.weight.item())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.weight)
        optimizer.step()
        return {"loss": self.weight.detach().clone()}

    def validation_step(self, batch, batch_idx):
        self.log("eval/return", batch["return"], batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recording(LevelBuffer):
    """Keeps what it gave to whom: actor, level, whether it had a score, whether it is trained on."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.given: list[tuple[int, int, bool, bool]] = []

    def next_level(self, actor):
        known = set(self.probabilities()["level_id"].tolist())
        level_id = super().next_level(actor)
        self.given.append((actor, level_id, level_id in known, self.trains_on(actor, level_id)))
        return level_id


def make_levels(**options) -> Recording:
    return Recording(**({"levels": 12, "staleness_weight": 0.3, "seed": 0} | options))


def make_data(levels=None, env=Stairs, **options) -> LevelDataModule:
    defaults = {"env_steps": 60, "num_envs": 3, "rollout_length": 5, "held_out_levels": [100, 101, 102], "seed": 0}
    return LevelDataModule(env, make_levels() if levels is None else levels, **(defaults | options))


def make_rollouts(env=Stairs) -> LevelDataModule:
    """Six rollouts in three epochs."""
    return make_data(env=env, env_steps=90, rollouts_per_epoch=2)


def make_agent() -> PPO:
    torch.manual_seed(0)
    return PPO(hidden_sizes=(8,), epochs=1, minibatches=2)


def fit(directory: Path, data: LevelDataModule, agent=None, callbacks=(), **options):
    agent = agent or Valuer()
    trainer = make_trainer(directory, callbacks, **options)
    trainer.fit(agent, datamodule=data)
    return trainer, agent
