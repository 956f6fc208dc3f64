# SPDX-License-Identifier: Apache-2.0
"""Ages of the rows that a loop learns from: uniform draws, priorities, and both with recent rows.

python examples/recent_rows.py          # 40,000 steps of 16 environments for each: ten seconds of one core
python examples/recent_rows.py --fast   # 8,000 steps

A row is half as likely to be drawn after 6,931 rows, and a tenth as likely from 23,024 rows on. Nothing is learned:
actions and errors are random, and the table shows only the draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import gymnasium
import numpy as np
import torch

from lightning_replay import Age, Replay, recipes
from lightning_replay.collecting import VectorSteps

ENVS = 16
BATCH = 256
CAPACITY = 30_000
AGE = Age(half_life=6_931, floor=0.1)
ADJUSTED = {"priority_exponent": 0.4, "min_priority": 1.0, "importance_exponent": 0.0}
REPLAYS: dict[str, Callable[[], Replay]] = {
    "uniform": lambda: recipes.uniform(CAPACITY, BATCH, seed=0),
    "truncated geometric": lambda: recipes.uniform(CAPACITY, BATCH, age=AGE, seed=0),
    "prioritized": lambda: recipes.prioritized(CAPACITY, BATCH, **ADJUSTED, seed=0),
    "faded prioritized": lambda: recipes.prioritized(CAPACITY, BATCH, **ADJUSTED, age=AGE, seed=0),
}


def play(replay: Replay, steps: int) -> np.ndarray:
    """Plays random steps with one draw for each step of all environments, and returns ages drawn near the end."""
    envs = VectorSteps(gymnasium.make_vec("CartPole-v1", num_envs=ENVS))
    generator = np.random.default_rng(0)
    errors = torch.Generator().manual_seed(0)
    ages = []
    envs.reset(seed=0)
    for step in range(steps // ENVS):
        envs.step(generator.integers(2, size=ENVS))
        envs.store(replay, born=np.full(ENVS, step * ENVS))
        batch = replay.sample()
        replay.update_priority(batch, 3 * torch.rand(BATCH, generator=errors))
        if step >= 0.9 * steps // ENVS:
            ages.append(step * ENVS - batch["born"].numpy())
    envs.close()
    return np.concatenate(ages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="fewer steps")
    steps = 8_000 if parser.parse_args().fast else 40_000
    torch.set_num_threads(1)
    print(f"{'replay':20} {'mean age':>9} {'newest 6,931 rows':>18} {'effective rows':>15}")
    for name, make in REPLAYS.items():
        replay = make()
        ages = play(replay, steps)
        effective = replay.stats().get("effective_sample_size", len(replay))  # Uniform draws do not report it.
        print(f"{name:20} {ages.mean():9,.0f} {(ages < 6_931).mean():18.0%} {effective:15,.0f}")


if __name__ == "__main__":
    main()
