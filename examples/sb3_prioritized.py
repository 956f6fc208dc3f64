# SPDX-License-Identifier: Apache-2.0
"""Stable-Baselines3's DQN on CartPole with its own buffer, with prioritized replay and with an event table.

python examples/sb3_prioritized.py          # 20,000 steps with each: about two minutes
python examples/sb3_prioritized.py --fast   # a few hundred, to see it run

Needs `pip install 'lightning-replay[sb3]'`. Prints the mean return of the last episodes, which for one seed is no
evidence, and the processor time of an environment step with its share of the updates.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env

from lightning_replay.events import EventTable, terminal_with_reward
from lightning_replay.sb3 import RecipeBuffer
from lightning_replay.schedules import Linear

ENVS, BATCH = 4, 64


def buffers(steps: int) -> dict[str, dict[str, Any]]:
    """What changes in a call of ``DQN``."""
    falls = EventTable(
        "falls", condition=terminal_with_reward(at_least=1.0), history_length=10, capacity=2_000, share=0.25
    )
    weights = Linear(0.4, 1.0, steps, clock="env_steps")  # β reaches 1 at the end
    return {
        "Stable-Baselines3's own": {},
        "prioritized": {
            "replay_buffer_class": RecipeBuffer,
            "replay_buffer_kwargs": {"recipe": "prioritized", "importance_exponent": weights},
        },
        "steps before a fall": {
            "replay_buffer_class": RecipeBuffer,
            "replay_buffer_kwargs": {
                "recipe": "event_tables",
                "tables": [falls],
                "default_share": 0.75,
                "batch_size": BATCH,
            },
        },
    }


def train(buffer: dict[str, Any], steps: int) -> tuple[float, float]:
    """Returns the mean return of the last hundred episodes, and microseconds of processor time of a step."""
    envs = make_vec_env("CartPole-v1", ENVS, seed=0)
    model = DQN(
        "MlpPolicy",
        envs,
        learning_rate=1e-3,
        buffer_size=10_000,
        learning_starts=200,
        batch_size=BATCH,
        train_freq=1,
        gradient_steps=2,
        target_update_interval=200,
        exploration_fraction=0.3,
        seed=0,
        device="cpu",
        **buffer,
    )
    began = time.process_time()
    model.learn(steps)
    taken = time.process_time() - began
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer or []])), taken / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a few hundred steps")
    steps = 600 if parser.parse_args().fast else 20_000
    torch.set_num_threads(1)
    print(f"{'replay':24} {'return':>7} {'µs a step':>10}")
    for name, buffer in buffers(steps).items():
        score, cost = train(buffer, steps)
        print(f"{name:24} {score:7.1f} {cost:10.0f}")


if __name__ == "__main__":
    main()
