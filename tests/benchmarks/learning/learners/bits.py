# SPDX-License-Identifier: Apache-2.0
"""Bit flipping for stacked DQN: many episodes of every run at once, in one array, and their goals relabelled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import Replay, recipes
from lightning_replay.envs.bit_flipping import BitFlipping
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN

KEYS = {"achieved_key": "achieved_goal", "desired_key": "desired_goal"}


def replay_of(settings: dict[str, object], seed: int) -> Replay:
    """Returns the replay of an arm; a draw holds the rows of all updates of a round."""
    rows = settings["batch_size"] * settings["updates_per_round"]
    if settings["share"] == 0.0:
        return recipes.uniform(settings["capacity"], rows, seed=seed)
    env, given = BitFlipping(settings["bits"]), {name: settings[name] for name in ("strategy", "share")}
    return recipes.hindsight(settings["capacity"], rows, env=env, **given, **KEYS, seed=seed)


class Bits:
    """Episodes of ``BitFlipping`` with the greedy policy of each run, some actions random.

    Args:
        agent: of R runs.
        bits: their number, and the most steps of an episode.
        seeds: of first states, goals and random actions, one for each run.
    """

    def __init__(self, agent: StackedDQN, bits: int, seeds: Sequence[int]) -> None:
        self._agent, self._bits = agent, bits
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        self._next_trajectory = 0

    def play(self, episodes: int, exploration: float) -> tuple[list[TensorDict], np.ndarray]:
        """Plays episodes of every run; returns the rows of each run and its share of episodes that reached the goal."""
        shape = (episodes, self._bits)
        state, goal = (
            np.stack([one.integers(2, size=shape) for one in self._generators]).astype(np.float32) for _ in range(2)
        )
        # Where both are alike another goal is drawn: one with another first bit.
        goal[..., 0] = np.where((state == goal).all(-1), 1 - goal[..., 0], goal[..., 0])
        trajectory = self._next_trajectory + np.arange(episodes)
        self._next_trajectory += episodes
        playing, rows = np.ones(state.shape[:2], dtype=bool), []
        for step in range(self._bits):
            action = self._agent.act(torch.from_numpy(np.concatenate((state, goal), -1))).numpy()
            drawn = [(one.random(episodes), one.integers(self._bits, size=episodes)) for one in self._generators]
            is_random, random = (np.stack(part) for part in zip(*drawn, strict=True))
            action = np.where(is_random < exploration, random, action)
            following = state.copy()
            np.put_along_axis(following, action[..., None], 1 - np.take_along_axis(state, action[..., None], -1), -1)
            reached = (following == goal).all(-1)
            rows.append((playing, state, action, following, reached, np.full_like(reached, step + 1 == self._bits)))
            state, playing = following, playing & ~reached
        return [self._rows(run, rows, goal[run], trajectory) for run in range(len(state))], 1 - playing.mean(1)

    def _rows(self, run: int, steps: Sequence[tuple], goal: np.ndarray, trajectory: np.ndarray) -> TensorDict:
        played, *columns = (np.stack([step[place][run] for step in steps]) for place in range(6))
        # The steps of one episode after another, those after its goal left out.
        state, action, following, reached, is_last = (np.swapaxes(column, 0, 1)[played.T] for column in columns)
        goals = torch.from_numpy(np.repeat(goal, played.sum(0), 0))
        flags = {"terminated": reached, "truncated": is_last & ~reached, "done": reached | is_last}
        after = {name: torch.from_numpy(flag).unsqueeze(1) for name, flag in flags.items()}
        after |= {"reward": torch.from_numpy(reached).float().unsqueeze(1) - 1, "desired_goal": goals}
        return TensorDict(
            {
                "achieved_goal": torch.from_numpy(state),
                "desired_goal": goals,
                "action": torch.from_numpy(action),
                "trajectory": torch.from_numpy(np.repeat(trajectory, played.sum(0))),
                "next": {"achieved_goal": torch.from_numpy(following), **after},
            },
            [len(state)],
        )


def with_goal(batch: TensorDict) -> TensorDict:
    """Returns a batch whose observations are bits and goal side by side, as the network takes them."""
    for rows in (batch, batch["next"]):
        rows["observation"] = torch.cat((rows["achieved_goal"], rows["desired_goal"]), -1)
    return batch


def centred(observation: Tensor) -> Tensor:
    """Returns the bits as -1 and 1."""
    return 2 * observation - 1
