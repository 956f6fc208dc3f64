# SPDX-License-Identifier: Apache-2.0
"""Work and turns of the end-to-end benchmark. Imports nothing of ours: it also runs in the peers' environments.

A contender trains in a process of its own. After every block of environment steps it writes the time of the block, and
waits until the benchmark gives it the next turn; only one contender runs at a time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

WARMUP_STEPS = 1_000
CAPACITY = 100_000
DISCOUNT = 0.99
TARGET_UPDATE_RATE = 0.005


@dataclass(frozen=True)
class Work:
    """One algorithm on one environment, with one update per environment step, or one per rollout.

    Attributes:
        hidden_sizes: of every network, with ReLU between.
        block: environment steps of a turn.
    """

    env: str
    hidden_sizes: tuple[int, int]
    batch_size: int
    learning_rate: float
    block: int
    num_envs: int = 1


WORKS = {
    "dqn": Work("CartPole-v1", (120, 84), 128, 2.5e-4, block=200),
    "td3": Work("HalfCheetah-v5", (256, 256), 256, 3e-4, block=64),
    "sac": Work("HalfCheetah-v5", (256, 256), 256, 3e-4, block=40),
    "ppo": Work("CartPole-v1", (64, 64), 256, 2.5e-4, block=1_024, num_envs=8),  # 128 steps of each environment
}
EPSILON = 0.1  # of DQN
EPOCHS, ROLLOUT_LENGTH = 4, 128  # of PPO
GAE_LAMBDA, CLIP_RANGE, ENTROPY_COEFFICIENT, GRADIENT_NORM = 0.95, 0.2, 0.01, 0.5  # of PPO


class Turns:
    """Times blocks of environment steps of the contender in this process.

    Args:
        block: environment steps.
        orders: a line for each turn.
        reports: takes a line of JSON after each turn.
    """

    def __init__(self, block: int, orders: TextIO, reports: TextIO) -> None:
        self._block, self._orders, self._reports = block, orders, reports
        self._steps = 0
        self._wall = self._cpu = 0.0

    def start(self) -> None:
        """Ends the set-up and the warm-up, and waits for the first turn."""
        self._report({"ready": True})

    def tick(self, steps: int = 1) -> None:
        """Counts environment steps whose updates are done."""
        self._steps += steps
        if self._steps >= self._block:
            wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
            self._report({"wall": wall / self._steps * 1e6, "cpu": cpu / self._steps * 1e6})

    def _report(self, content: dict[str, object]) -> None:
        self._reports.write(json.dumps(content) + "\n")
        self._reports.flush()
        if not self._orders.readline().strip():  # the benchmark has enough, or has ended
            os._exit(0)
        self._steps = 0
        self._wall, self._cpu = time.perf_counter(), time.process_time()


Run = Callable[[Work, Turns], None]


def main(runs: Mapping[str, Run]) -> None:
    """Trains the work that the command line names until there are no more turns."""
    name = sys.argv[1]
    # What the libraries print goes to the error stream; reports have the output to themselves.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runs[name](WORKS[name], Turns(WORKS[name].block, sys.stdin, reports))
