# SPDX-License-Identifier: Apache-2.0
"""PPO on ten painted grids under Lightning: plain, with mixreg, with UCB-DrAC, and with level replay besides.

python examples/lightning_augmentation.py [--fast]
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import gymnasium
import lightning as L
import numpy as np

from lightning_replay.agents import PPO
from lightning_replay.levels import LevelBuffer, LevelSelector, UniformLevels
from lightning_replay.levels.scores import L1ValueLoss
from lightning_replay.lit import GeneralizationGap, LevelDataModule

SIZE, MOVES = 5, ((-1, 0), (1, 0), (0, -1), (0, 1))
DISCOUNT = 0.95


class PaintedGrid(gymnasium.Env[np.ndarray, int]):
    """The white cell is moved from the middle to the black one within 8 steps, reward 1; a level is the others' paint.

    The paint does not matter. From few levels a policy learns what those look like, and not to look past them.
    """

    observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(len(MOVES))

    def set_level(self, level_id: int) -> None:
        self.paint = np.random.default_rng(level_id).integers(30, 226, (SIZE, SIZE, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.cell, self.steps = np.array([SIZE // 2, SIZE // 2]), 0
        self.goal = (self.cell + 1 + self.np_random.integers(SIZE - 1, size=2)) % SIZE  # in no line with the cell
        return self.image(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.cell = (self.cell + MOVES[action]).clip(0, SIZE - 1)
        self.steps += 1
        is_there = bool((self.cell == self.goal).all())
        return self.image(), float(is_there), is_there, self.steps == 8, {}

    def image(self) -> np.ndarray:
        image = self.paint.copy()
        image[tuple(self.goal)], image[tuple(self.cell)] = 0, 255
        return image


DRAC = {"augmentations": ("crop", "cutout_color", "flip", "grayscale", "random_conv")}
ARMS: dict[str, tuple[bool, dict[str, Any]]] = {  # whether levels are replayed, and options of PPO
    "PPO": (False, {}),
    "mixreg": (False, {"mixup_concentration": 0.2}),
    "UCB-DrAC": (False, DRAC),
    "level replay and UCB-DrAC": (True, DRAC),
}


def make_levels(count: int, replay: bool, seed: int) -> LevelSelector:
    if not replay:
        return UniformLevels(count, seed=seed)
    return LevelBuffer(count, score=L1ValueLoss(DISCOUNT), score_temperature=1.0, staleness_weight=0.3, seed=seed)


def train(
    options: dict[str, Any], levels: LevelSelector, env_steps: int, every: int, seed: int = 0
) -> tuple[PPO, GeneralizationGap]:
    """Returns the agent, and the evaluations: one before the first update, and one after every so many steps."""
    L.seed_everything(seed, verbose=False)
    convolutions = {"channels": (16, 32), "kernel_sizes": (3, 3), "strides": (1, 1)}
    agent = PPO(**convolutions, hidden_sizes=(64,), learning_rate=2.5e-3, discount=DISCOUNT, **options)
    # unchecked, because the black cell differs between the episodes of a level
    settings: dict[str, Any] = {"rollout_length": 64, "held_out_levels": 100, "check": False}
    data = LevelDataModule(PaintedGrid, levels, env_steps, **settings, seed=seed)
    gap = GeneralizationGap(every)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    L.Trainer(max_epochs=-1, accelerator="cpu", callbacks=[gap], **quiet).fit(agent, datamodule=data)
    return agent, gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="two rollouts each")
    env_steps = 2_048 if parser.parse_args().fast else 81_920
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for arm, (replays, options) in ARMS.items():
        agent, gap = train(options, make_levels(10, replays, seed=0), env_steps, every=env_steps)
        held_out, trained_on = gap.history[-1][1], gap.training_history[-1][1]
        print(f"{arm}: return {held_out:.2f} on held-out levels, {trained_on:.2f} on the ten of training", end="")
        print("" if agent.augmentation is None else f"; the last augmentation is {agent.augmentation.chosen}")


if __name__ == "__main__":
    main()
