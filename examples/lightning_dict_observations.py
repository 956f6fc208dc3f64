# SPDX-License-Identifier: Apache-2.0
"""DQN under a Lightning trainer with a camera, a position and the weather as observations.

python examples/lightning_dict_observations.py [--fast]

The camera shows the goal and the position is the agent's, so that neither alone is enough; the agent encodes
each entry. About a minute on one core.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
import lightning as L
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

from lightning_replay import recipes
from lightning_replay.agents import DQN
from lightning_replay.lit import Evaluate, ReplayDataModule, ReplayProgressBar

SIZE = 5
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


class Meadow(gymnasium.Env[dict[str, Any], int]):
    """Walk to the goal that the camera shows; the reward is 1 there, and the time is short."""

    def __init__(self) -> None:
        spaces = {"camera": Box(0, 255, (SIZE, SIZE, 1), np.uint8), "position": Box(0.0, 1.0, (2,), np.float64)}
        self.observation_space = Dict({**spaces, "weather": Discrete(3)})
        self.action_space = Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.goal, self.place = self.np_random.integers(SIZE, size=(2, 2))
        self.weather, self.steps = int(self.np_random.integers(3)), 0
        return self._seen(), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        self.place = (self.place + MOVES[action]).clip(0, SIZE - 1)
        is_there = bool((self.place == self.goal).all())
        return self._seen(), float(is_there), is_there, self.steps >= 2 * SIZE, {}

    def _seen(self) -> dict[str, Any]:
        camera = np.zeros((SIZE, SIZE, 1), np.uint8)
        camera[tuple(self.goal)] = 255
        return {"camera": camera, "position": self.place / (SIZE - 1), "weather": self.weather}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="four hundred steps only")
    options = parser.parse_args()
    env_steps, warmup_steps = (400, 300) if options.fast else (8_000, 1_000)

    L.seed_everything(0)
    replay = recipes.prioritized(capacity=20_000, batch_size=64, n_steps=2, discount=0.95, seed=0)
    data = ReplayDataModule(Meadow, replay, env_steps, warmup_steps, num_envs=2, seed=0)
    agent = DQN.for_env(Meadow, discount=0.95, learning_rate=1e-3, exploration_steps=4_000)
    for name, description in agent.hparams["observation_size"].items():
        print(f"{name}: {description}")
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[ReplayProgressBar(), Evaluate(every_n_env_steps=2_000, episodes=100)],
    )
    trainer.fit(agent, datamodule=data)

    batch = replay.sample()
    shapes = {name: list(entry.shape) for name, entry in batch["observation"].items()}
    print(f"a batch has the entries {shapes}")
    print(f"reached the goal in {trainer.callback_metrics['eval/return']:.0%} of 100 episodes")


if __name__ == "__main__":
    main()
