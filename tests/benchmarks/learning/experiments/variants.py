# SPDX-License-Identifier: Apache-2.0
"""Variants of the choice of rows beside uniform and prioritized draws: double DQN on CartPole and LunarLander."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_replay import PackedStorage, Replay
from lightning_replay.samplers import (
    CombinedSampler,
    PrioritizedSampler,
    ReliabilityAdjustedSampler,
    ReshuffledSampler,
    UniformSampler,
)
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN
from tests.benchmarks.learning.recorder import Recorder

_EPISODES = 20  # over which a return is averaged

# The exponents are those of the papers, of reliability the authors' code; prioritized replay has the library's.
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda capacity: UniformSampler(),
    "prioritized": PrioritizedSampler,
    "lap": partial(
        PrioritizedSampler,
        priority_exponent=0.4,
        importance_exponent=0.0,
        priority_offset=0.0,
        min_priority=1.0,
    ),
    "reliability": ReliabilityAdjustedSampler,
    "combined": lambda capacity: CombinedSampler(),
    "reshuffled": lambda capacity: ReshuffledSampler(),
}


class PalDQN(StackedDQN):
    """A double DQN with the prioritized approximation loss in place of the Huber loss."""

    @staticmethod
    def _slope(td_error: Tensor) -> Tensor:
        # The derivative of lightning_replay.losses.pal_loss with α = 0.4 and threshold 1, over the mean of each run.
        priority = td_error.abs().clamp(min=1.0) ** 0.4
        return td_error.clamp(-1.0, 1.0) * priority / priority.mean(1, keepdim=True)


class Players:
    """A task of R runs, each with a replay of its own; CartPole if the settings name no other."""

    def __init__(self, settings: Settings, seeds: Sequence[int]) -> None:
        self._settings = settings
        self._games = [gymnasium.make(settings.get("env", "CartPole-v1")) for _ in seeds]
        spaces = self._games[0].observation_space, self._games[0].action_space
        self._actions = int(spaces[1].n)
        sizes = (spaces[0].shape[0], *settings["hidden_sizes"], self._actions)
        kind = PalDQN if settings["pal"] else StackedDQN
        names = ("learning_rate", "discount", "target_update_rate")
        self._agent = kind(sizes, seeds, **{name: settings[name] for name in names})
        capacity, sampler = settings["capacity"], SAMPLERS[settings["sampler"]]
        self.replays = [
            Replay(
                storage=PackedStorage(capacity),
                sampler=sampler(capacity),
                batch_size=settings["batch_size"],
                seed=seed,
            )
            for seed in seeds
        ]
        self._observation = np.stack([env.reset(seed=seed)[0] for env, seed in zip(self._games, seeds, strict=True)])
        self._random = [random.Random(seed) for seed in seeds]
        self._returns: list[list[float]] = [[] for _ in seeds]
        self._totals = [0.0] * len(seeds)
        self.env_steps = 0

    def step(self) -> None:
        """Plays a step of every run, and learns from a batch of each after the warm-up."""
        settings = self._settings
        fallen = max(0, self.env_steps - settings["warmup_steps"]) / settings["exploration_steps"]
        exploration = max(settings["last_exploration"], 1.0 - fallen)
        best = self._agent.act(torch.from_numpy(self._observation).unsqueeze(1)).squeeze(1).tolist()
        for run, env in enumerate(self._games):
            is_random = self._random[run].random() < exploration
            self._play(run, env, self._random[run].randrange(self._actions) if is_random else best[run])
        self.env_steps += 1
        if self.env_steps >= settings["warmup_steps"]:
            batches = [replay.sample() for replay in self.replays]
            td_error, _ = self._agent.learn(batches)
            for run, batch in enumerate(batches):
                self.replays[run].update_priority(batch, td_error[run])

    def _play(self, run: int, env: gymnasium.Env, action: int) -> None:
        before = self._observation[run].copy()
        after, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        self.replays[run].extend_columns(
            {
                "observation": before[None],
                "action": np.array([action]),
                ("next", "observation"): after[None],
                ("next", "reward"): np.array([[reward]], dtype=np.float32),
                ("next", "terminated"): np.array([[terminated]]),
                ("next", "truncated"): np.array([[truncated]]),
                ("next", "done"): np.array([[done]]),
            }
        )
        self._totals[run] += float(reward)
        if done:
            self._returns[run].append(self._totals[run])
            self._totals[run] = 0.0
            after, _ = env.reset()
        self._observation[run] = after

    def episode_returns(self) -> list[float]:
        """Returns the mean returns ``[R]`` of the last 20 finished episodes; 0 before any."""
        return [float(np.mean(returns[-_EPISODES:])) if returns else 0.0 for returns in self._returns]


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records returns during the run."""
    players = Players(settings, seeds)
    while players.env_steps < settings["env_steps"]:
        players.step()
        if players.env_steps % settings["check_every"] == 0:
            out.record(players.env_steps, episode_return=players.episode_returns())
    out.final(nbytes=[replay.nbytes for replay in players.replays])


CARTPOLE = Experiment(
    name="variants",
    title="CartPole, double DQN: variants of the choice of rows",
    claim="of the papers, on other tasks: LAP and PAL better than uniform and prioritized draws with TD3 "
    "(https://arxiv.org/abs/2007.06049); reliability reaches a threshold of CartPole in 33 % fewer steps than "
    "prioritized draws (https://arxiv.org/abs/2506.18482); the newest step in every batch mends large replays "
    "(https://arxiv.org/abs/1712.01275); reshuffling is better than uniform draws in most Atari games "
    "(https://arxiv.org/abs/2503.02269)",
    task="Networks of 64 and 64 units, one update of 64 rows per step, Huber loss but for PAL. Nothing was tuned: "
    "each variant has the exponents of its paper, reliability those of its authors' code.",
    length="{env_steps:,} steps",
    arms={
        "uniform": {},
        "prioritized": {"sampler": "prioritized"},
        "LAP": {"sampler": "lap"},
        "PAL": {"pal": True},
        "reliability": {"sampler": "reliability"},
        "combined": {"sampler": "combined"},
        "reshuffled": {"sampler": "reshuffled"},
    },
    settings={
        "env_steps": 30_000,
        "warmup_steps": 1_000,
        "hidden_sizes": (64, 64),
        "capacity": 10_000,
        "batch_size": 64,
        "sampler": "uniform",
        "pal": False,
        "learning_rate": 5e-4,
        "discount": 0.99,
        "target_update_rate": 0.005,
        "exploration_steps": 5_000,
        "last_exploration": 0.05,
        "check_every": 500,
    },
    fast={"env_steps": 1_500, "warmup_steps": 1_200},
    seeds=range(2_900, 2_905),
    pilot_seeds=(0,),
    measure=mean_of("episode_return", "return over the run, means of the last 20 episodes", skip=0, digits=1),
    also=(last_of("episode_return", 8, "return in the last 4,000 steps", digits=1),),
    comparisons=(
        *((arm, "uniform") for arm in ("prioritized", "LAP", "PAL", "combined", "reshuffled")),
        ("reliability", "prioritized"),
        ("LAP", "PAL"),
    ),
    headline=(
        ("LAP", "uniform"),
        ("reliability", "prioritized"),
        ("combined", "uniform"),
        ("reshuffled", "uniform"),
    ),
    panels=(Panel("episode_return", "mean return of the last 20 episodes"),),
    run=run,
    seeds_together=5,
)
LANDER = replace(
    CARTPOLE,
    name="variants-lander",
    title="LunarLander-v3, double DQN, a buffer of all rows: variants of the choice of rows",
    claim="of the papers: reliability reaches the thresholds of CartPole, Acrobot, and LunarLander in fewer steps than "
    "prioritized draws (https://arxiv.org/abs/2506.18482); the newest step in every batch mends large replays, on "
    "LunarLander too (https://arxiv.org/abs/1712.01275); PAL and reshuffling are better than uniform draws "
    "(https://arxiv.org/abs/2007.06049, https://arxiv.org/abs/2503.02269).",
    task=f"{CARTPOLE.task} The buffer holds all rows of the run, as the large buffers of combined experience replay.",
    arms={name: arm for name, arm in CARTPOLE.arms.items() if name != "LAP"},
    settings={
        **CARTPOLE.settings,
        "env": "LunarLander-v3",
        "env_steps": 80_000,
        "capacity": 80_000,
        "exploration_steps": 20_000,
        "check_every": 1_000,
    },
    seeds=range(2_910, 2_915),
    also=(last_of("episode_return", 10, "return in the last 10,000 steps", digits=1),),
    comparisons=(
        *((arm, "uniform") for arm in ("prioritized", "PAL", "combined", "reshuffled")),
        ("reliability", "prioritized"),
    ),
    headline=(
        ("reliability", "prioritized"),
        ("combined", "uniform"),
        ("reshuffled", "uniform"),
        ("PAL", "uniform"),
    ),
)
EXPERIMENTS = (CARTPOLE, LANDER)
