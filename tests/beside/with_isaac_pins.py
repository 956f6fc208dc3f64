# SPDX-License-Identifier: Apache-2.0
"""A simulator in torch fills a replay in its own loop, and in Lightning, beside the pins of Isaac Lab."""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning as L
import numpy as np
import torch

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.agents import TD3
from lightning_replay.collecting import VectorSteps
from lightning_replay.envs.pendulums import Pendulums
from lightning_replay.lit import ReplayDataModule

NUM_ENVS = 64


def own_loop() -> None:
    envs = VectorSteps(Pendulums(num_envs=NUM_ENVS, staggered=True))
    replay = recipes.prioritized(capacity=NUM_ENVS * 64, batch_size=256, n_steps=3, discount=0.97, seed=0)
    envs.reset(seed=0)
    for _ in range(20):
        envs.step(torch.rand(NUM_ENVS, 1) * 4 - 2)
        envs.store(replay)
    replay.update_priority(replay.sample(), torch.randn(256))
    with tempfile.TemporaryDirectory() as folder:
        save_replay(replay, Path(folder) / "replay")
        loaded = load_replay(Path(folder) / "replay")
    assert (loaded.sample() == replay.sample()).all()


def lightning() -> None:
    envs = Pendulums(num_envs=NUM_ENVS, staggered=True)
    replay = recipes.prioritized(capacity=NUM_ENVS * 64, batch_size=64, seed=0)
    module = ReplayDataModule(
        envs, replay, env_steps=NUM_ENVS * 8, warmup_steps=NUM_ENVS * 4, updates_per_env_step=1 / 8, seed=0
    )
    agent = TD3(hidden_sizes=(32, 32))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(max_epochs=-1, accelerator="cpu", **quiet).fit(agent, datamodule=module)
    assert module.updates_done > 0


if __name__ == "__main__":
    assert torch.__version__.startswith("2.7.0") and np.__version__.startswith("1.")
    own_loop()
    lightning()
