# SPDX-License-Identifier: Apache-2.0
"""A recurrent world model of Pendulum without its velocity, learned from sequences of four interleaved environments.

python examples/world_model_sequences.py [--fast]
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from lightning_replay import Replay, recipes


class WorldModel(nn.Module):
    """Predicts the next observation and the reward from all steps of a sequence so far."""

    def __init__(self, observation: int, action: int, hidden: int = 64) -> None:
        super().__init__()
        self.memory = nn.GRU(observation + action, hidden, batch_first=True)
        self.head = nn.Linear(hidden, observation + 1)

    def errors(self, batch) -> torch.Tensor:
        """Mean squared error of each step, [B, T]; the memory begins anew with each sequence."""
        memory, _ = self.memory(torch.cat((batch["observation"], batch["action"]), -1))
        change = batch["next", "observation"] - batch["observation"]
        wanted = torch.cat((10 * change, batch["next", "reward"] / 10), -1)
        return (self.head(memory) - wanted).square().mean(-1)


def collect(replay: Replay, env_steps: int) -> None:
    """Random steps of four environments in turn, as a vector of environments gives them."""
    envs = [gym.make("Pendulum-v1") for _ in range(4)]
    observations = [env.reset(seed=number)[0] for number, env in enumerate(envs)]
    for env in envs:
        env.action_space.seed(0)
    for _ in range(env_steps // len(envs)):
        for number, env in enumerate(envs):
            action = env.action_space.sample()
            following, reward, terminated, truncated, _ = env.step(action)
            row = {"observation": observations[number][:2], "action": action, "trajectory": np.int64(number)}
            row |= {("next", "observation"): following[:2], ("next", "reward"): np.float32([reward])}
            row |= {("next", "terminated"): np.array([terminated]), ("next", "truncated"): np.array([truncated])}
            replay.extend_columns({key: value[None] for key, value in row.items()})
            observations[number] = env.reset()[0] if terminated or truncated else following


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a few hundred steps only")
    options = parser.parse_args()
    torch.manual_seed(0)
    env_steps, updates = (1_000, 60) if options.fast else (8_000, 1_500)

    # Whole sequences of 16 steps, one from every step on.
    replay = recipes.sequences(capacity=20_000, batch_size=16, length=16, overlap=15, min_steps=16, seed=0)
    collect(replay, env_steps)
    model = WorldModel(observation=2, action=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    print("updates  error of the first step  of the last")
    for update in range(1, updates + 1):
        errors = model.errors(replay.sample())
        optimizer.zero_grad()
        errors.mean().backward()
        optimizer.step()
        if update % (updates // 5) == 0:  # the first step does not show the velocity, the memory of the others does
            print(f"{update:7d}  {errors[:, 0].mean():23.4f}  {errors[:, -1].mean():11.4f}")


if __name__ == "__main__":
    main()
