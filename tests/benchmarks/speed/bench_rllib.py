# SPDX-License-Identifier: Apache-2.0
"""T6: one DQN training step in RLlib and the buffer's part of it, with RLlib's own buffers and with ours.

Times are CPU time of the driver process, all threads together: other programs of the machine count little in them.
``--driver`` measures an environment step with 1, 2 and 4 EnvRunners instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
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
from timing import Burst, Table, Work

import rllib_ext

BATCH, DEFAULT_BATCH = 256, 32  # the second is RLlib's default
CAPACITY = 100_000
STEPS_PER_ENV_RUNNER = 8 * 4  # environments, and steps of each in one training step
BUFFERS: dict[str, dict[str, Any]] = {
    "rllib": {"type": "PrioritizedEpisodeReplayBuffer", "capacity": CAPACITY, "alpha": 0.6, "beta": 0.4},
    "rllib uniform": {"type": "EpisodeReplayBuffer", "capacity": CAPACITY},
    "configured": rllib_ext.replay_config(
        "prioritized", capacity=CAPACITY, priority_exponent=0.6, importance_exponent=0.4
    ),
    "configured uniform": rllib_ext.replay_config("uniform", capacity=CAPACITY),
}


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


def build(name: str, batch: int = BATCH, **env_runners: Any) -> Algorithm:
    """DQN on CartPole with the buffer of this name."""
    config = DQNConfig().environment("CartPole-v1").debugging(seed=0, log_level="ERROR").env_runners(**env_runners)
    config.training(
        replay_buffer_config=BUFFERS[name],
        train_batch_size_per_learner=batch,
        num_steps_sampled_before_learning_starts=0,
    )
    if name.startswith("configured"):
        rllib_ext.configure(config)
    return config.build_algo()


class Step:
    """An algorithm with a filled buffer, and the pieces of its training step one by one."""

    def __init__(self, name: str, stored: list[SingleAgentEpisode], batch: int = BATCH) -> None:
        self.algorithm = build(name, batch)
        self.batch = batch
        self.buffer = self.algorithm.local_replay_buffer
        for start in range(0, len(stored), 500):
            self.buffer.add(stored[start : start + 500])
        for _ in range(3):
            self.algorithm.training_step()
        self.drawn: list[SingleAgentEpisode] = []
        self.td_errors = np.abs(np.random.default_rng(0).normal(size=batch)).astype(np.float32)

    def sample(self) -> list[SingleAgentEpisode]:
        """What ``DQN.training_step`` calls to get a batch, metrics included."""
        drawn = self.buffer.sample(
            num_items=self.batch, n_step=1, gamma=0.99, beta=0.4, batch_length_T=0, sample_episodes=True
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


def cpu_of(work: Work) -> Burst:
    """Turns work into a function of its calls that returns the driver's CPU microseconds for one.

    All threads of the process count, Ray's among them.
    """

    def burst(calls: int) -> float:
        start = time.process_time()
        for _ in range(calls):
            work()
        return (time.process_time() - start) / calls * 1e6

    return burst


def burst_of_tens(work: Work) -> Burst:
    """Of ten calls together, per call: with ``configure`` every tenth computes metrics."""

    def ten() -> None:
        for _ in range(10):
            work()

    burst = cpu_of(ten)
    return lambda calls: burst(max(calls // 10, 3)) / 10


def measure_pieces(table: Table, rows: int, rounds: int) -> None:
    """Times the pieces of a training step and the whole, in turns."""
    stored = list(episodes(min(rows, CAPACITY)))
    steps = {name: Step(name, stored) for name in BUFFERS}
    table.measure("sample", {name: burst_of_tens(step.sample) for name, step in steps.items()}, rounds=rounds)
    for step in steps.values():
        step.drawn = step.sample()
    table.measure("connectors", {name: cpu_of(step.connect) for name, step in steps.items()}, rounds=rounds)
    both = {name: burst_of_tens(step.sample_and_update) for name, step in steps.items()}
    table.measure("sample and update", both, rounds=rounds)
    whole = {name: cpu_of(step.algorithm.training_step) for name, step in steps.items()}
    table.measure("training step", whole, rounds=rounds)
    work = {name: table.times["sample and update"][name] + table.times["connectors"][name] for name in steps}
    table.times["buffer work"] = work
    table.faster("T6", "buffer work", "configured", "rllib", 16)
    table.faster("T6", "training step", "configured", "rllib", 2.5)
    small = {name: Step(name, stored, DEFAULT_BATCH) for name in BUFFERS}
    whole = {name: cpu_of(step.algorithm.training_step) for name, step in small.items()}
    table.measure(f"training step, batch {DEFAULT_BATCH}", whole, rounds=rounds)
    for step in small.values():
        step.drawn = step.sample()
    parts = {name: cpu_of(step.connect) for name, step in small.items()}
    table.measure(f"connectors, batch {DEFAULT_BATCH}", parts, rounds=rounds)
    parts = {name: burst_of_tens(step.sample_and_update) for name, step in small.items()}
    table.measure(f"sample and update, batch {DEFAULT_BATCH}", parts, rounds=rounds)
    share = table.times[f"sample and update, batch {DEFAULT_BATCH}"]["configured"]
    share /= table.times[f"training step, batch {DEFAULT_BATCH}"]["configured"]
    table.at_most(f"sample and update over the training step, batch {DEFAULT_BATCH}", share, 0.05)
    for step in (*steps.values(), *small.values()):
        step.algorithm.stop()


def measure_driver(table: Table, num_env_runners: int, rounds: int) -> None:
    """Measures the driver's CPU time per training step and per environment step, in turns with RLlib's own buffer."""
    options = {"num_env_runners": num_env_runners, "num_envs_per_env_runner": 8, "rollout_fragment_length": 4}
    algorithms = {name: build(name, **options) for name in ("rllib", "configured")}
    for algorithm in algorithms.values():
        for _ in range(40):  # EnvRunners have started, and the buffer holds several batches
            algorithm.training_step()
    work = f"driver CPU of a training step, {num_env_runners} EnvRunners"
    bursts = {name: cpu_of(algorithm.training_step) for name, algorithm in algorithms.items()}
    table.measure(work, bursts, rounds=rounds, seconds=0.3)
    env_steps = num_env_runners * STEPS_PER_ENV_RUNNER
    per_step = {name: value / env_steps for name, value in table.times[work].items()}
    table.times[f"driver CPU of an environment step, {num_env_runners} EnvRunners"] = per_step
    print(f"  of an environment step: {', '.join(f'{name} {value:.0f} us' for name, value in per_step.items())}")
    for algorithm in algorithms.values():
        algorithm.stop()


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    options = arguments(__doc__, driver="measure the driver's CPU time with 1, 2 and 4 EnvRunners instead")
    table = Table(f"RLlib: DQN on CartPole, batch {BATCH}")
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        if options.driver:
            for num_env_runners in (1, 2, 4):
                measure_driver(table, num_env_runners, options.rounds)
        else:
            measure_pieces(table, options.rows, options.rounds)
    table.finish(save=options.save, name="rllib_driver" if options.driver else "rllib")
    ray.shutdown()


if __name__ == "__main__":
    main()
