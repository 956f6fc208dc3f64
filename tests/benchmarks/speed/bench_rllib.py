# SPDX-License-Identifier: Apache-2.0
"""T6: the buffer's part of one DQN training step in RLlib: RLlib's own, ours by config only, and ours configured."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import gymnasium as gym
import numpy as np
import ray
import torch
from peers import arguments
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from timing import Table, burst_of

import rllib_ext

BATCH = 256
CAPACITY = 100_000
BUFFERS: dict[str, dict[str, Any]] = {
    "rllib": {"type": "PrioritizedEpisodeReplayBuffer", "capacity": CAPACITY, "alpha": 0.6, "beta": 0.4},
    "rllib uniform": {"type": "EpisodeReplayBuffer", "capacity": CAPACITY},
    "ours": rllib_ext.replay_config("prioritized", capacity=CAPACITY, priority_exponent=0.6, importance_exponent=0.4),
    "ours uniform": rllib_ext.replay_config("uniform", capacity=CAPACITY),
}
BUFFERS["configured"], BUFFERS["configured uniform"] = BUFFERS["ours"], BUFFERS["ours uniform"]


def episodes(steps: int) -> Iterator[SingleAgentEpisode]:
    """Whole CartPole episodes of random actions."""
    env = gym.make("CartPole-v1")
    env.action_space.seed(0)
    done = 0
    while done < steps:
        episode = SingleAgentEpisode()
        episode.add_env_reset(env.reset(seed=done)[0])
        while not episode.is_done:
            action = env.action_space.sample()
            observation, reward, terminated, truncated, _ = env.step(action)
            episode.add_env_step(observation, action, reward, terminated=terminated, truncated=truncated)
        done += len(episode)
        yield episode.to_numpy()


class Step:
    """An algorithm with a filled buffer, and the pieces of its training step one by one."""

    def __init__(self, name: str, stored: list[SingleAgentEpisode]) -> None:
        config = DQNConfig().environment("CartPole-v1").debugging(seed=0, log_level="ERROR")
        config.training(
            replay_buffer_config=BUFFERS[name],
            train_batch_size_per_learner=BATCH,
            num_steps_sampled_before_learning_starts=0,
        )
        if name.startswith("configured"):
            rllib_ext.configure(config)
        self.algorithm: Algorithm = config.build_algo()
        self.buffer = self.algorithm.local_replay_buffer
        for start in range(0, len(stored), 500):
            self.buffer.add(stored[start : start + 500])
        for _ in range(3):
            self.algorithm.training_step()
        self.drawn: list[SingleAgentEpisode] = []
        self.td_errors = np.abs(np.random.default_rng(0).normal(size=BATCH)).astype(np.float32)

    def sample(self) -> list[SingleAgentEpisode]:
        """What ``DQN.training_step`` calls to get a batch, metrics included."""
        drawn = self.buffer.sample(
            num_items=BATCH, n_step=1, gamma=0.99, beta=0.4, batch_length_T=0, sample_episodes=True
        )
        self.buffer.get_metrics()
        return drawn

    def connect(self) -> None:
        """The learner's connectors, on the last batch."""
        learner = self.algorithm.learner_group._learner
        learner._learner_connector(
            rl_module=learner.module, batch={}, episodes=list(self.drawn), shared_data={}, metrics=learner.metrics
        )

    def sample_and_update(self) -> None:
        """A draw and the TD errors of its rows."""
        self.sample()
        if hasattr(self.buffer, "update_priorities"):
            self.buffer.update_priorities(self.td_errors)


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    options = arguments(__doc__)
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        stored = list(episodes(min(options.rows, CAPACITY)))
        steps = {name: Step(name, stored) for name in BUFFERS}
    table = Table("RLlib: DQN on CartPole, batch 256")
    table.measure("sample", {name: burst_of(step.sample) for name, step in steps.items()}, rounds=options.rounds)
    for step in steps.values():
        step.drawn = step.sample()
    table.measure("connectors", {name: burst_of(step.connect) for name, step in steps.items()}, rounds=options.rounds)
    both = {name: burst_of(step.sample_and_update) for name, step in steps.items()}
    table.measure("sample and update", both, rounds=options.rounds)
    whole = {name: burst_of(step.algorithm.training_step) for name, step in steps.items()}
    table.measure("training step", whole, rounds=options.rounds)
    work = {name: table.times["sample and update"][name] + table.times["connectors"][name] for name in steps}
    table.times["buffer work"] = work
    table.faster("T6", "buffer work", "ours", "rllib", 10)
    table.faster("T6", "training step", "ours", "rllib", 2.2)
    table.faster("T6", "buffer work", "configured", "rllib", 16)
    table.faster("T6", "training step", "configured", "rllib", 2.5)
    table.finish(save=options.save, name="rllib")
    for step in steps.values():
        step.algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
