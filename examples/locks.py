# SPDX-License-Identifier: Apache-2.0
"""Combination locks, the levels of levels_*.py: an environment, networks, scores of rollouts, and held-out locks.

A level is a lock of 1 to 16 stages. The right action opens a stage, a wrong one ends the episode, and the last stage is
worth 1. A stage opens to the same action in every lock: short locks teach the first stages of long ones, which chance
almost never opens. Nothing is printed here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import register
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_replay.levels import LevelBuffer, LevelSelector, LevelSet, UniformLevels, scores, update_rollout

STAGES, VARIANTS, ACTIONS = 16, 3, 4
DISCOUNT, GAE_LAMBDA = 0.99, 0.95
OPENS = np.random.default_rng(0).integers(0, ACTIONS, STAGES * VARIANTS)  # the action each stage opens to
ENVS, ROLLOUT, STEPS, FAST_STEPS = 32, 32, 40_000, 1_024


def make_lock(level_id: int) -> dict[str, Any]:
    generator = np.random.default_rng(level_id)
    count = 1 + level_id % STAGES
    return {"stages": (generator.integers(0, VARIANTS, count) + np.arange(count) * VARIANTS).tolist()}


LOCKS = LevelSet([make_lock(level_id) for level_id in range(400)])
HELD_OUT = [make_lock(level_id) for level_id in range(10_000, 10_200)]


class Lock(gymnasium.Env):
    """Takes its level by ``reset(options={"level": {"stages": [...]}})``; sees its stage and how many are left."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (STAGES * VARIANTS + STAGES,), np.float32)
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.stages, self.opened = (options or {})["level"]["stages"], 0
        return see(self.stages, 0), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        is_right = action == OPENS[self.stages[self.opened]]
        is_open = is_right and self.opened + 1 == len(self.stages)
        done = is_open or not is_right
        self.opened += not done
        return see(self.stages, self.opened), float(is_open), bool(done), False, {}


def see(stages: list[int], opened: int) -> np.ndarray:
    observation = np.zeros(Lock.observation_space.shape, np.float32)
    observation[[stages[opened], STAGES * VARIANTS + len(stages) - opened - 1]] = 1.0
    return observation


register("Lock-v0", entry_point=Lock)


def make_levels(replay: bool, seed: int = 0) -> LevelSelector:
    """By scores, or uniform. 32 episodes run at once: levels in flight are left out, and the temperature is 1."""
    if not replay:
        return UniformLevels(LOCKS, seed=seed)
    score = scores.L1ValueLoss(DISCOUNT, GAE_LAMBDA)
    spread = {"score_temperature": 1.0, "staleness_weight": 0.1, "replay_in_flight": False}
    return LevelBuffer(LOCKS, score=score, **spread, seed=seed)


def update_levels(levels: LevelSelector, rewards: Any, values: Any, last_value: Any, dones: Any, level_id: Any) -> None:
    """Scores a rollout as most PPO loops hold it: ``[T, N]``, the value after the last step ``[N]``."""
    rewards, values, dones = (torch.as_tensor(one).float() for one in (rewards, values, dones))
    following = torch.cat([values[1:], torch.as_tensor(last_value).float().reshape(1, -1)])
    ends = {name: dones.bool() for name in ("terminated", "done")}  # locks have no time limit
    steps = {"state_value": values, "next": {"reward": rewards, "state_value": following, **ends}}
    update_rollout(levels, TensorDict(steps, values.shape).transpose(0, 1), torch.as_tensor(level_id).T)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seen = Lock.observation_space.shape[0]
        self.actor = nn.Sequential(nn.Linear(seen, 64), nn.Tanh(), nn.Linear(64, ACTIONS))
        self.critic = nn.Sequential(nn.Linear(seen, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(observation), self.critic(observation).squeeze(-1)


@torch.no_grad()
def held_out_return(probabilities: Callable[[Tensor], Tensor]) -> float:
    """Mean chance to open a lock that was never played, from the policy's probabilities ``[n, actions]``."""
    chances = []
    for lock in HELD_OUT:
        seen = torch.from_numpy(np.stack([see(lock["stages"], place) for place in range(len(lock["stages"]))]))
        right = torch.from_numpy(OPENS[lock["stages"]])
        chances.append(float(probabilities(seen).gather(1, right[:, None]).prod()))
    return float(np.mean(chances))


def compare(train: Callable[[LevelSelector, int], float], description: str | None, steps: int = STEPS) -> None:
    """Trains twice and prints both held-out returns."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a few seconds, in which little is learned")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("uniform levels", "level replay"):
        torch.manual_seed(options.seed)
        np.random.seed(options.seed)
        levels = make_levels(name == "level replay", options.seed)
        found = train(levels, FAST_STEPS if options.fast else options.steps)
        print(f"{name}: held-out return {found:.3f}, {levels.episodes:,} episodes", flush=True)
