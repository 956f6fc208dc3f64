# SPDX-License-Identifier: Apache-2.0
"""Prioritized Level Replay with PPO in RLlib: two EnvRunners of two environments each share one level buffer.

    python examples/rllib_plr_ppo.py              # 40,000 steps in small mazes, a few minutes on two cores
    python examples/rllib_plr_ppo.py --fast       # 3,000 steps on one EnvRunner, to see it run
    python examples/rllib_plr_ppo.py --uniform    # mazes drawn uniformly, for comparison

A level is the seed of a maze, which determines walls, start and goal. The level buffer chooses one of 300 mazes for
every episode, and is updated by the Learner before every policy update. The table shows how many mazes have a score,
the share of episodes that replayed one, the staleness of the next one, and the returns of an evaluation on mazes never
trained on and on mazes that were.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig

import rllib_ext
from lightning_replay.levels import LevelBuffer, UniformLevels
from lightning_replay.levels.scores import L1ValueLoss

DISCOUNT, GAE_LAMBDA = 0.99, 0.95
TRAINING_LEVELS = range(300)
SIZE, VIEW, MAX_STEPS = 7, 2, 30
MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))


class Maze(gymnasium.Env):
    """Go to the goal, with a reward of 1 less 0.9 of the share of steps taken. Observes walls and the distance."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, ((2 * VIEW + 1) ** 2 + 2,), np.float32)
    action_space = gymnasium.spaces.Discrete(len(MOVES))

    def __init__(self, config: Any = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)  # self.np_random determines the whole maze
        self.steps, distances = 0, {}
        while len(distances) < 2:  # the start is walled in
            self.free = self.np_random.random((SIZE, SIZE)) > self.np_random.uniform(0.0, 0.4)
            self.place = tuple(int(cell) for cell in self.np_random.integers(SIZE, size=2))
            self.free[self.place] = True
            distances = self.walk(self.place)
        self.goal = list(distances)[int(self.np_random.integers(1, len(distances)))]
        return self.view(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        ahead = (self.place[0] + MOVES[action][0], self.place[1] + MOVES[action][1])
        self.place = ahead if self.is_free(ahead) else self.place
        reached = self.place == self.goal
        reward = 1.0 - 0.9 * self.steps / MAX_STEPS if reached else 0.0
        return self.view(), reward, reached, self.steps == MAX_STEPS and not reached, {}

    def walk(self, start: tuple[int, ...]) -> dict[tuple[int, ...], int]:
        """Returns the steps from the start to every cell that can be reached, the nearest first."""
        distances, edge = {start: 0}, [start]
        for x, y in edge:
            for cell in ((x + right, y + up) for right, up in MOVES):
                if self.is_free(cell) and cell not in distances:
                    distances[cell] = distances[x, y] + 1
                    edge.append(cell)
        return distances

    def is_free(self, cell: tuple[int, ...]) -> bool:
        return min(cell) >= 0 and max(cell) < SIZE and bool(self.free[cell])

    def view(self) -> np.ndarray:
        x, y = self.place
        walls = np.pad(~self.free, VIEW, constant_values=True)[x : x + 2 * VIEW + 1, y : y + 2 * VIEW + 1]
        return np.array([*walls.ravel(), (self.goal[0] - x) / SIZE, (self.goal[1] - y) / SIZE], np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uniform", action="store_true", help="without replay")
    parser.add_argument("--fast", action="store_true", help="a short run")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads slow networks this small down
    # Each remote EnvRunner requests one CPU; without enough of them Ray waits for ever.
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    train(options.uniform, *((3_000, 600, 2, 1, 20) if options.fast else (40_000, 2_000, 8, 2, 50)))
    ray.shutdown()


def train(uniform: bool, total_steps: int, batch_size: int, epochs: int, runners: int, evaluated: int) -> None:
    config = (
        PPOConfig()
        .environment(Maze)
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=4 // runners)
        .training(
            gamma=DISCOUNT,
            lambda_=GAE_LAMBDA,
            lr=1e-3,
            entropy_coeff=0.01,
            train_batch_size_per_learner=batch_size,
            minibatch_size=200,
            num_epochs=epochs,
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "fcnet_activation": "relu"})
        .evaluation(evaluation_interval=total_steps // batch_size // 5, evaluation_duration=evaluated)
        .fault_tolerance(restart_failed_env_runners=True)
        .debugging(seed=0, log_level="ERROR")
    )
    score = L1ValueLoss(DISCOUNT, GAE_LAMBDA)
    levels = LevelBuffer(TRAINING_LEVELS, score=score, score_temperature=0.5, staleness_weight=0.3, seed=0)
    chosen = UniformLevels(TRAINING_LEVELS, seed=0) if uniform else levels
    algorithm = rllib_ext.configure(config, levels=chosen, held_out_levels=500).build_algo()

    print("                                                          return on mazes")
    print("env_steps  mazes_scored  replayed  staleness     held_out  trained_on       gap")
    for _ in range(total_steps // batch_size):
        result = algorithm.train()
        if "levels" in result.get("evaluation", {}):  # in the iterations that evaluate
            print(line(result), flush=True)
    rows = rllib_ext.level_buffer(algorithm).probabilities()
    for row in rows["probability"].argsort(descending=True)[:3]:
        print("with probability {probability:.2f} maze {level_id} is replayed, score {score:.3f}".format(**rows[row]))
    path = algorithm.save_to_path(tempfile.mkdtemp())  # Algorithm.from_checkpoint(path) resumes with these levels
    print(f"checkpoint with the level buffer: {path}")
    algorithm.stop()


def line(result: dict[str, Any]) -> str:
    """Formats one row of the table; nan where there is no figure, as for levels that are drawn uniformly."""
    levels, returns = result["levels"], result["evaluation"]["levels"]
    replayed = levels.get("replayed", 0) / max(levels["episodes"], 1)
    return (
        f"{result['env_runners']['num_env_steps_sampled_lifetime']:9.0f}{levels['levels']:14d}{replayed:10.2f}"
        f"{levels.get('expected_staleness', float('nan')):11.1f}{returns['held_out_return_mean']:13.2f}"
        f"{returns['training_return_mean']:12.2f}{returns['generalization_gap']:10.2f}"
    )


if __name__ == "__main__":
    main()
