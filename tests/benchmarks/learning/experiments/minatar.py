# SPDX-License-Identifier: Apache-2.0
"""Retention by surprise and on-policyness with room for 200 transitions: MinAtar's Breakout, double DQN."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from lightning_replay import recipes
from lightning_replay.envs.atari import MinAtarGame
from lightning_replay.replay import Replay
from lightning_replay.retention.surprise import squared_td_error
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, final, last_of, mean_of
from tests.benchmarks.learning.learners.minatar_players import exploration_at
from tests.benchmarks.learning.learners.rows import Rows
from tests.benchmarks.learning.recorder import Recorder


class Learner:
    """Double DQN with MinAtar's network: 16 filters of 3 x 3, then 128 units (https://arxiv.org/abs/1903.03176)."""

    def __init__(self, settings: Settings, seed: int, image_shape: tuple[int, ...], num_actions: int) -> None:
        torch.manual_seed(seed)
        channels, height, width = image_shape
        self._settings, self._num_actions = settings, num_actions
        self._online = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * (height - 2) * (width - 2), 128),
            nn.ReLU(),
            nn.Linear(128, num_actions),
        )
        self._target = copy.deepcopy(self._online).requires_grad_(False)
        self._optimizer = torch.optim.Adam(self._online.parameters(), lr=self._settings["learning_rate"], fused=True)
        self._generator = random.Random(seed)
        self._updates = 0

    def explore(self, image: np.ndarray, exploration: float) -> int:
        """Returns a random action with the probability ``exploration``, else the greedy one."""
        if self._generator.random() < exploration:
            return self._generator.randrange(self._num_actions)
        return self.act(image)

    @torch.no_grad()
    def act(self, image: np.ndarray) -> int:
        """Returns the action of the highest value."""
        return int(self._online(torch.from_numpy(image).unsqueeze(0).float()).argmax())

    def td_error(self, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns TD errors ``[B]``, target less value, and action values ``[B, A]`` of transitions."""
        values = self._online(rows["observation"].float())
        following = rows["next"]
        with torch.no_grad():
            images = following["observation"].float()
            best = self._online(images).argmax(1, keepdim=True)
            target = (
                self._target(images)
                .gather(1, best)
                .mul_(self._settings["discount"])
                .masked_fill_(following["terminated"], 0.0)
            )
            target += following["reward"]
        return (target - values.gather(1, rows["action"].unsqueeze(1))).squeeze(1), values

    @torch.no_grad()
    def surprise(self, rows: TensorDictBase) -> Tensor:
        """Returns squared TD errors ``[M]`` of new transitions."""
        return squared_td_error(self.td_error(rows)[0])

    def learn(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Makes one update; returns TD errors and action values of before it."""
        td_error, values = self.td_error(batch)
        self._optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(td_error, torch.zeros_like(td_error), reduction="none")
        (loss * batch["priority_weight"]).mean().backward()
        self._optimizer.step()
        self._updates += 1
        if self._updates % self._settings["updates_per_target"] == 0:
            self._target.load_state_dict(self._online.state_dict())
        return td_error.detach(), values.detach()


def replay_of(settings: Settings, learner: Learner, seed: int) -> Replay:
    """Builds the replay of an arm: prioritized draws, and the oldest row or that of the lowest priority is evicted."""
    exponents = {name: settings[name] for name in ("priority_exponent", "importance_exponent")}
    capacity, batch_size = settings["capacity"], settings["batch_size"]
    if settings["is_retained"]:
        surprise = learner.surprise
        return recipes.surprise_retention(capacity, batch_size, initial_surprise=surprise, **exponents, seed=seed)
    return recipes.prioritized(capacity, batch_size, **exponents, seed=seed)


def greedy_return(learner: Learner, settings: Settings, seed: int) -> float:
    """Returns the mean return of greedy episodes; a tenth of their actions stick, as in training."""
    env = MinAtarGame("breakout", max_steps=settings["max_steps"])
    image, _ = env.reset(seed=seed)
    returns, total = [], 0.0
    while len(returns) < settings["greedy_episodes"]:
        image, reward, terminated, truncated, _ = env.step(learner.act(image))
        total += reward
        if terminated or truncated:
            returns.append(total)
            total, (image, _) = 0.0, env.reset()
    return float(np.mean(returns))


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records returns during the run, and at its end greedy returns and figures of the buffer."""
    (seed,) = seeds
    env = MinAtarGame("breakout", max_steps=settings["max_steps"])
    shape = env.observation_space.shape
    learner = Learner(settings, seed, shape, int(env.action_space.n))
    every = settings["steps_per_update"]
    replay, rows = replay_of(settings, learner, seed), Rows(every, shape, torch.uint8)
    returns: list[float] = []
    total, (image, _) = 0.0, env.reset(seed=seed)
    for step in range(1, settings["env_steps"] + 1):
        action = learner.explore(image, exploration_at(step - 1, settings))
        following, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        rows.write((step - 1) % every, image, action, following, reward, terminated, truncated, done)
        total, image = total + reward, following
        if done:
            returns.append(total)
            total, (image, _) = 0.0, env.reset()
        if step % every == 0:
            replay.extend(rows.steps)
            if step >= settings["warmup_steps"]:
                batch = replay.sample()
                td_error, values = learner.learn(batch)
                options = {"generation": batch["generation"], "action_values": values, "action": batch["action"]}
                replay.update_priority(batch["index"], td_error, **options)
        if step % settings["check_every"] == 0:
            out.record(step, episode_return=[np.mean(returns[-settings["last_episodes"] :])])
    out.final(greedy_return=[greedy_return(learner, settings, seed + 1_000_000)])
    out.final(nbytes=[replay.nbytes], refused_share=[replay.stats().get("refused", 0) / settings["env_steps"]])
    out.final(age_mean=[replay.writer.age_of(torch.arange(len(replay))).float().mean()])


EXPERIMENTS = (
    Experiment(
        name="minatar-200",
        title="MinAtar's Breakout, double DQN: retention with room for 200 transitions",
        claim="a small buffer that keeps by surprise and on-policyness is better than one of the same size that drops "
        'the oldest ("Memory-efficient reinforcement learning with priority based on surprise and on-policyness", '
        "2022, https://openreview.net/forum?id=SPRHpBKzJE). The mechanism, not the headline: Atari with 10,000 "
        "transitions.",
        task="Who leaves the full buffer is all that differs: the oldest of 200, the least worth keeping of 200 or, "
        "with room for 100,000, nobody. Prioritized draws as in the paper, returns of one step, MinAtar's network, "
        "sticky actions and minimal actions. Surprise of candidates comes from one forward pass of the online and the "
        "target network. Of the settings one was changed after pilots with seed 100: with uniform draws retention "
        "hoarded what surprised and ended below the buffer of the same size, with prioritized ones above it. A pilot "
        "with seed 101 did not confirm it.",
        length="{env_steps:,} steps",
        arms={
            "FIFO, 200": {"is_retained": False, "capacity": 200},
            "retention, 200": {"is_retained": True, "capacity": 200},
            "FIFO, 100,000": {"is_retained": False, "capacity": 100_000},
        },
        settings={
            "env_steps": 60_000,
            "max_steps": 1_000,
            "batch_size": 32,
            "warmup_steps": 1_000,
            "steps_per_update": 2,
            "updates_per_target": 500,
            "discount": 0.99,
            "learning_rate": 5e-4,
            "priority_exponent": 0.5,
            "importance_exponent": 0.4,
            "last_exploration": 0.1,
            "exploration_steps": 30_000,
            "check_every": 1_000,
            "last_episodes": 50,
            "greedy_episodes": 100,
        },
        fast={"env_steps": 2_000, "greedy_episodes": 2},
        seeds=range(200, 205),
        pilot_seeds=(100, 101),
        measure=last_of("episode_return", 1, "mean return of the last 50 episodes", digits=2),
        also=(
            final("greedy_return", "greedy return", digits=2),
            mean_of("episode_return", "return over the run", digits=2),
            final("nbytes", "bytes", higher_is_better=False, digits=0),
            final("age_mean", "mean age of kept rows, steps", digits=0),
            final("refused_share", "share refused", digits=2),
        ),
        comparisons=(("retention, 200", "FIFO, 200"), ("FIFO, 100,000", "retention, 200")),
        panels=(Panel("episode_return", "mean return of the last 50 episodes"),),
        run=run,
    ),
)
