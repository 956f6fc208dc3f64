# SPDX-License-Identifier: Apache-2.0
"""PPO on grids of one or two rooms under a Lightning trainer; the next grid is chosen by its score.

python examples/lightning_plr.py [--fast] [--uniform]
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import gymnasium
import lightning as L

from lightning_replay.agents import PPO
from lightning_replay.levels import LevelBuffer, LevelSelector, UniformLevels
from lightning_replay.lit import (
    GeneralizationGap,
    LearningCurve,
    LevelCurriculum,
    LevelDataModule,
    ReplayCheckpoint,
    ReplayProgressBar,
    ReturnNormalization,
    ScoreAgainstStaleness,
    level_returns,
    stochastic_policy,
)

LEVELS = 500  # of training; a level is the seed of the environment's reset
ROOMS = {"max_rooms": 2}
SETTINGS = {"score_temperature": 0.5, "staleness_weight": 0.3}  # broad enough for 16 environments


def make_data(levels: LevelSelector, env_steps: int) -> LevelDataModule:
    return LevelDataModule(
        "MultiRoom-N4-Random-v0",
        levels,
        env_steps=env_steps,
        num_envs=16,
        rollout_length=128,
        env_kwargs=ROOMS,
        held_out_levels=50,
        return_normalization=ReturnNormalization(discount=0.999),
    )


def make_levels(uniform: bool) -> LevelSelector:
    return UniformLevels(LEVELS, seed=0) if uniform else LevelBuffer(LEVELS, **SETTINGS, seed=0)


def make_trainer(directory: Path, every_n_env_steps: int) -> L.Trainer:
    callbacks = [
        ReplayProgressBar(),
        GeneralizationGap(every_n_env_steps),
        LevelCurriculum(every_n_rollouts=2, path=str(directory / "level_curriculum.png")),
        ScoreAgainstStaleness(str(directory / "score_against_staleness.png")),
        LearningCurve(str(directory / "learning_curve.png")),
        ReplayCheckpoint(directory),
    ]
    options = {"max_epochs": -1, "accelerator": "cpu", "log_every_n_steps": 1, "default_root_dir": directory}
    return L.Trainer(callbacks=callbacks, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="two thousand steps only")
    parser.add_argument("--uniform", action="store_true", help="the baseline: levels drawn uniformly")
    parser.add_argument("--directory", default="runs/lightning_plr", type=Path)
    options = parser.parse_args()
    env_steps = 2_048 if options.fast else 200_000
    every_n_env_steps = env_steps // (1 if options.fast else 8)

    L.seed_everything(0)
    agent = PPO(categories=(11, 6, 4))  # MiniGrid's numbers of objects, colours and states in each cell
    trainer = make_trainer(options.directory, every_n_env_steps)
    trainer.fit(agent, datamodule=make_data(make_levels(options.uniform), env_steps))
    metrics = trainer.callback_metrics
    print(f"{metrics['eval/return']:.2f} on held-out levels, {metrics['eval/train_return']:.2f} on those trained on")

    # A longer run resumes from the last checkpoint, which holds the levels, their scores and all counters.
    trainer = make_trainer(options.directory, every_n_env_steps)
    data = make_data(make_levels(options.uniform), env_steps + 2_048)
    trainer.fit(agent, datamodule=data, ckpt_path="last")
    print(f"{data.env_steps_done} steps, {data.levels.episodes} episodes, {len(data.levels)} of {LEVELS} levels scored")

    if not options.uniform:
        levels = data.levels.probabilities()
        for row in levels[levels["probability"].argsort(descending=True)[:3]]:
            probability, score = row["probability"].item(), row["score"].item()
            print(f"level {row['level_id'].item()}: probability {probability:.2f}, score {score:.2f}")

    # the test protocol by hand: one episode per level, with the policy as it acts in training
    with stochastic_policy(agent, seed=1) as policy:
        env = partial(gymnasium.make, "MultiRoom-N4-Random-v0", **ROOMS)
        returns = level_returns(policy, env, range(10_000, 10_020))
    print(f"{returns.mean():.2f} on twenty other levels; pictures in {options.directory}")


if __name__ == "__main__":
    main()
