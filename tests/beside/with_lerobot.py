# SPDX-License-Identifier: Apache-2.0
"""A data set that LeRobot has written becomes rows of a replay, and one training step learns from them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from lightning_replay import recipes
from lightning_replay.datasets import fill, from_lerobot

EPISODES = 3
FRAMES = 20
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["force", "torque"]},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
}


def write(folder: Path) -> None:
    recorded = LeRobotDataset.create("local/steps", fps=10, features=FEATURES, root=folder, use_videos=False)
    for episode in range(EPISODES):
        for frame in range(FRAMES):
            recorded.add_frame(
                {
                    "observation.state": np.array([episode, frame, 0.5], np.float32),
                    "action": np.array([frame, -frame], np.float32),
                    "next.reward": np.array([frame / FRAMES], np.float32),
                    "next.done": np.array([frame == FRAMES - 1]),
                    "task": "reach",
                }
            )
        recorded.save_episode()
    recorded.finalize()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "steps")
        rows = from_lerobot(Path(folder) / "steps")
    assert len(rows) == EPISODES * FRAMES
    assert rows["next", "observation"][0].tolist() == [0.0, 1.0, 0.5]
    assert rows["next", "terminated"].sum() == EPISODES

    replay = fill(recipes.prioritized(capacity=100, batch_size=32, seed=0), rows)
    critic = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-4)
    batch = replay.sample()
    value = critic(torch.cat((batch["observation"], batch["action"]), -1))
    td_error = batch["next", "reward"] - value
    optimizer.zero_grad()
    (batch["priority_weight"] * td_error.flatten().square()).mean().backward()
    optimizer.step()
    replay.update_priority(batch, td_error.detach().flatten())


if __name__ == "__main__":
    main()
