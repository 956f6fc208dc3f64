# SPDX-License-Identifier: Apache-2.0
"""Measures how much the contact forces of Ant-v5 and Humanoid-v5 decide which rows are neighbours.

python -m tests.benchmarks.contact_distances
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor

from lightning_replay.neighbors import NeighborLists

FILE = Path(__file__).parent / "results" / "contact-distances.json"
ROWS, COMPARED, NEIGHBORS = 10_000, 1_000, 25
SEEDS = (0, 1, 2)
ENVIRONMENTS = ("Ant-v5", "Humanoid-v5")
CONTACT_FORCES = 78  # the last columns of the observation, of both


def random_rows(name: str, seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns observations and actions, ``[rows, ...]`` each, of uniformly random actions."""
    env = gymnasium.make(name)
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    observations, actions = [], []
    for _ in range(rows):
        observations.append(torch.as_tensor(observation, dtype=torch.float32))
        actions.append(torch.as_tensor(env.action_space.sample(), dtype=torch.float32))
        observation, _, terminated, truncated, _ = env.step(actions[-1].numpy())
        if terminated or truncated:
            observation, _ = env.reset()
    env.close()
    return torch.stack(observations), torch.stack(actions)


def neighbors_of(features: Tensor, compared: Tensor, num_neighbors: int) -> Tensor:
    """Returns the nearest rows ``[compared, num_neighbors]`` in standardised features ``[rows, width]``."""
    lists = NeighborLists(len(features), num_neighbors)
    lists.write(torch.arange(len(features)), features)
    return lists.neighbors(compared)


def measure(
    name: str, seed: int, rows: int = ROWS, compared: int = COMPARED, num_neighbors: int = NEIGHBORS
) -> dict[str, Any]:
    """Returns the numbers of varying columns and the share of neighbours that are others without contact forces.

    Every varying column has the same mean squared distance once standardised, so the share of the columns is that of
    the distance.
    """
    observations, actions = random_rows(name, seed, rows)
    every, fewer = (torch.cat([part, actions], 1) for part in (observations, observations[:, :-CONTACT_FORCES]))
    varying, contacts = (int((part.std(0) > 0).sum()) for part in (every, observations[:, -CONTACT_FORCES:]))
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:compared]
    found, others = (neighbors_of(features, chosen, num_neighbors) for features in (every, fewer))
    common = (found[:, :, None] == others[:, None, :]).any(-1).float().mean()
    return {
        "env": name,
        "seed": seed,
        "varying columns": varying,
        "of contact forces": contacts,
        "share of neighbours that differ": round(1 - float(common), 4),
    }


def main() -> None:
    """Measures every seed, prints and writes ``results/contact-distances.json``."""
    torch.set_num_threads(1)
    settings = {"rows": ROWS, "compared rows": COMPARED, "neighbours": NEIGHBORS}
    runs = [measure(name, seed) for name in ENVIRONMENTS for seed in SEEDS]
    content = {"command": "python -m tests.benchmarks.contact_distances", **settings, "runs": runs}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    print(FILE.read_text(), end="")


if __name__ == "__main__":
    main()
