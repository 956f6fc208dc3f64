# SPDX-License-Identifier: Apache-2.0
"""An environment whose every observation says where it comes from, and the smallest agents that can be fitted."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import lightning as L
import numpy as np
import torch

from lightning_replay.lit import ReplayCheckpoint, ReplayDataModule, UpdatePriorities
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.storage.packed import PackedStorage


class Counting(gymnasium.Env):
    """Observation ``[episode, step]``, reward = step; ends after ``length`` steps, by termination or truncation."""

    def __init__(self, length: int = 5, truncates: bool = False, num_actions: int = 0) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
        if num_actions:
            self.action_space = gymnasium.spaces.Discrete(num_actions)
        else:
            self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.length = length
        self.truncates = truncates
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.count = 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action):
        self.count += 1
        ends = self.count >= self.length
        observation = np.array([float(self.episode), float(self.count)])
        return observation, float(self.count), ends and not self.truncates, ends and self.truncates, {}


class Tiny(L.LightningModule):
    """One parameter; its action is that parameter plus noise, its TD error the batch's observations times it."""

    def __init__(self, gives_td_error: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.tensor([0.5]))
        self.gives_td_error = gives_td_error
        self.seen: list[list[int]] = []
        self.modes: list[tuple[bool, bool]] = []

    def act(self, observation, explore):
        self.modes.append((self.training, torch.is_grad_enabled()))
        action = self.weight.expand(len(observation), 1)
        return action + 0.1 * torch.randn_like(action) if explore else action

    def update(self, batch):
        self.seen.append(batch["index"].flatten().tolist())
        optimizer = self.optimizers()
        td_error = self.weight * batch["observation"].sum(-1)
        optimizer.zero_grad()
        self.manual_backward(td_error.square().mean())
        optimizer.step()
        return {"loss": td_error.square().mean().detach(), "td_error": td_error.detach()}

    def training_step(self, batch, batch_idx):
        if hasattr(batch, "update_priority"):
            for drawn in batch:
                outputs = self.update(drawn)
                batch.update_priority(drawn, outputs["td_error"])
            return outputs
        outputs = self.update(batch)
        return outputs if self.gives_td_error else {"loss": outputs["loss"]}

    def validation_step(self, batch, batch_idx):
        self.log("eval/return", batch["return"], batch_size=1)

    def configure_callbacks(self):
        return [UpdatePriorities()] if self.gives_td_error else []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class WatchedCheckpoint(ReplayCheckpoint):
    """Notes after how many updates it wrote which file."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.written: list[tuple[int, str]] = []

    def _save_checkpoint(self, trainer, filepath) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.written.append((trainer.datamodule.updates_done, Path(filepath).name))


def make_replay(prioritized: bool = False, capacity: int = 500, batch_size: int = 4) -> Replay:
    sampler = PrioritizedSampler(capacity=capacity, seed=0) if prioritized else None
    return Replay(storage=PackedStorage(capacity), sampler=sampler, batch_size=batch_size, seed=0)


def make_data(replay: Replay | None = None, env=Counting, **options) -> ReplayDataModule:
    """Forty updates in four epochs."""
    defaults = {"env_steps": 60, "warmup_steps": 20, "seed": 0, "updates_per_epoch": 10}
    return ReplayDataModule(env, make_replay() if replay is None else replay, **(defaults | options))


def make_trainer(directory, callbacks=(), **options) -> L.Trainer:
    defaults = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    defaults |= {"max_epochs": -1, "accelerator": "cpu", "default_root_dir": directory}
    defaults["enable_checkpointing"] = any("Checkpoint" in type(callback).__name__ for callback in callbacks)
    return L.Trainer(callbacks=list(callbacks), **(defaults | options))
