# SPDX-License-Identifier: Apache-2.0
"""Contents of two full buffers after one stream of MinAtar steps, first in first out and by retention.

python examples/inspect_retention.py [--fast]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

import lightning_replay.envs  # noqa: F401  registers MinAtar-v0
from lightning_replay import Replay, recipes
from lightning_replay.inspection.compare import Inspection, draw_inspection, inspect_buffers

N_STEPS, DISCOUNT = 5, 0.99


def make_buffers(capacity: int) -> dict[str, Replay]:
    """Builds two buffers with returns over five steps; an agent that expects no reward measures the surprise."""
    fifo = recipes.uniform(capacity, 32, n_steps=N_STEPS, discount=DISCOUNT, seed=0)
    retention = recipes.surprise_retention(
        capacity,
        32,
        initial_surprise=lambda rows: rows["next", "reward"].flatten() ** 2,
        n_steps=N_STEPS,
        discount=DISCOUNT,
        seed=0,
    )
    return {"first in, first out": fifo, "retention": retention}


def fill(buffers: dict[str, Replay], game: str, env_steps: int, per_write: int = 100) -> None:
    """Stores the steps of random play in all buffers."""
    env = gymnasium.make("MinAtar-v0", game=game)
    generator = np.random.default_rng(0)
    observation, _ = env.reset(seed=0)
    steps: list[TensorDict] = []
    for step in range(env_steps):
        action = int(generator.integers(env.action_space.n))
        following, reward, terminated, truncated, _ = env.step(action)
        outcome = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
        steps.append(
            TensorDict(
                {
                    "observation": torch.from_numpy(observation),
                    "action": torch.tensor(action),
                    "next": {
                        "observation": torch.from_numpy(following),
                        "reward": torch.tensor([reward], dtype=torch.float32),
                    }
                    | {name: torch.tensor([flag]) for name, flag in outcome.items()},
                }
            )
        )
        observation = env.reset()[0] if outcome["done"] else following
        if len(steps) == per_write or step == env_steps - 1:
            for replay in buffers.values():
                replay.extend(torch.stack(steps))
            steps.clear()
    env.close()


def print_table(inspections: dict[str, Inspection]) -> None:
    print(f"{'':>20}{'rows':>8}{'mean age':>10}{'oldest':>8}{'mean return':>13}{'with reward':>13}")
    for name, found in inspections.items():
        share = float((found.returns != 0).float().mean())
        print(
            f"{name:>20}{len(found.ages):>8}{float(found.ages.float().mean()):>10.0f}{int(found.ages.max()):>8}"
            f"{float(found.returns.mean()):>13.3f}{share:>13.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a tenth of the steps")
    parser.add_argument("--game", default="breakout")
    parser.add_argument("--directory", type=Path, default=Path("runs/inspect_retention"))
    options = parser.parse_args()

    env_steps, capacity = (1_000, 100) if options.fast else (10_000, 500)
    buffers = make_buffers(capacity)
    fill(buffers, options.game, env_steps)
    inspections = inspect_buffers(buffers)
    print_table(inspections)
    picture = options.directory / "retention.png"
    draw_inspection(inspections, picture, f"MinAtar {options.game}: what stays of {env_steps:,} random steps")
    print(f"written: {picture}")


if __name__ == "__main__":
    main()
