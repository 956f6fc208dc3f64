# SPDX-License-Identifier: Apache-2.0
"""Double DQN of several seeds at once on combination locks: levels for its episodes, a replay for its updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import Replay
from lightning_replay.levels import LevelSelector
from tests.benchmarks.learning.learners.combination_lock import (
    DIFFICULTIES,
    LEVELS,
    NUM_ACTIONS,
    VARIANTS,
    CombinationLocks,
    Episodes,
)
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN

STAGES = DIFFICULTIES * VARIANTS
OBSERVATION = STAGES + DIFFICULTIES  # the stage, and how many are to go, as one-hot vectors side by side
_ONE_HOT = torch.cat([torch.eye(OBSERVATION)[:STAGES], torch.zeros(1, OBSERVATION)])
_TO_GO = torch.cat([torch.zeros(1, OBSERVATION), torch.eye(OBSERVATION)[STAGES:]])


def observations(stage: np.ndarray, remaining: np.ndarray) -> Tensor:
    """Returns inputs of the network, float32 ``[..., O]``; zeros where no stage is to go."""
    to_go = torch.as_tensor(remaining.copy())
    return _ONE_HOT[torch.as_tensor(stage).where(to_go > 0, STAGES)] + _TO_GO[to_go]


class LockRuns:
    """R runs of an agent that plays levels chosen by ``levels`` and learns from ``replays``, one of each for a run.

    Args:
        agent: of all runs.
        levels: chooses the locks of each run's episodes, and takes their steps.
        replays: one for each run.
        seeds: of the locks and of the random actions.
        settings: ``episodes_per_round``, ``updates_per_round``, ``exploration``.
    """

    def __init__(
        self,
        agent: StackedDQN,
        levels: Sequence[LevelSelector],
        replays: Sequence[Replay],
        seeds: Sequence[int],
        settings: dict[str, Any],
    ) -> None:
        self._agent, self._levels, self._replays, self._settings = agent, levels, replays, settings
        self.locks = [CombinationLocks(seed) for seed in seeds]
        self._generators = [np.random.default_rng(seed + 1_000_000) for seed in seeds]

    def play_and_learn(self) -> None:
        """Plays a round of episodes of every run, scores their levels, stores their steps and learns."""
        actors = range(self._settings["episodes_per_round"])
        chosen = np.array([[levels.next_level(actor) for actor in actors] for levels in self._levels])
        for run, episodes in enumerate(self.play(chosen)):
            for actor, segment in enumerate(episodes.segments()):
                self._levels[run].update(actor, int(chosen[run, actor]), segment, True)
            self._replays[run].extend(steps_of(episodes))
        for _ in range(self._settings["updates_per_round"]):
            self._learn()

    def play(self, level: np.ndarray) -> list[Episodes]:
        """Plays levels ``[R, B]``, each once, with exploration; returns the episodes of each run."""
        shape = (level.shape[1], DIFFICULTIES)
        chance = np.stack([generator.random(shape) for generator in self._generators])
        drawn = np.stack([generator.integers(NUM_ACTIONS, size=shape) for generator in self._generators])
        greedy, value = self._greedy(level)
        action = np.where(chance < self._settings["exploration"], drawn, greedy)
        return self._episodes(level, action, value)

    def success(self) -> np.ndarray:
        """Returns the share of the locks ``[R]`` that the greedy actions open."""
        level = np.broadcast_to(np.arange(LEVELS), (len(self.locks), LEVELS))
        return np.array([episodes.reward.sum(1).mean() for episodes in self._episodes(level, *self._greedy(level))])

    def _greedy(self, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns greedy actions and their values at every stage of levels ``[R, B]``, both ``[R, B, T]``."""
        pairs = list(zip(self.locks, level, strict=True))
        stage = np.stack([locks.stage[own] for locks, own in pairs])
        remaining = np.stack([locks.remaining(own) for locks, own in pairs])
        rows = observations(stage, remaining).view(len(pairs), -1, OBSERVATION)
        best, action = self._agent.values(rows).view(*stage.shape, NUM_ACTIONS).max(-1)
        return action.numpy(), best.double().numpy()

    def _episodes(self, level: np.ndarray, action: np.ndarray, state_value: np.ndarray) -> list[Episodes]:
        """Returns the episodes of each run by actions and values ``[R, B, T]``."""
        return [
            locks.episodes(*columns) for locks, *columns in zip(self.locks, level, action, state_value, strict=True)
        ]

    def _learn(self) -> None:
        batches = [replay.sample() for replay in self._replays]
        td_errors, _ = self._agent.learn(batches)
        for replay, batch, td_error in zip(self._replays, batches, td_errors, strict=True):
            if replay.awaits_priorities:
                replay.update_priority(batch, td_error)


def steps_of(episodes: Episodes) -> TensorDict:
    """Returns rows of a replay ``[N]``, the steps of one episode after those of another."""
    played = episodes.played
    seen = observations(episodes.stage, episodes.remaining)
    following = torch.cat([seen[:, 1:], torch.zeros(len(seen), 1, OBSERVATION)], 1)
    done = torch.from_numpy(np.arange(DIFFICULTIES) == episodes.length[:, None] - 1)
    mask = torch.from_numpy(played)
    after = {
        "observation": following[mask],
        "reward": torch.from_numpy(episodes.reward[played]).float().unsqueeze(-1),
        "terminated": done[mask].unsqueeze(-1),
        "truncated": torch.zeros(int(played.sum()), 1, dtype=torch.bool),
        "done": done[mask].unsqueeze(-1),
    }
    action = torch.from_numpy(episodes.action[played])
    return TensorDict({"observation": seen[mask], "action": action, "next": after}, [len(action)])
