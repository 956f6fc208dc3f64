# SPDX-License-Identifier: Apache-2.0
"""The five games of MinAtar: Atari's dynamics on 10 x 10 cells, for machines without a GPU."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_replay.extras import missing_extra
from lightning_replay.validation import checked_choice, checked_count, checked_flag, checked_share

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")


class MinAtarGame(gymnasium.Env[Any, Any]):
    """A game of MinAtar, ``gymnasium.make("lightning_replay.envs:MinAtar-v0", game="breakout")``.

    Young and Tian 2019, https://arxiv.org/abs/1903.03176. Unlike MinAtar's own Gymnasium class it has the channels
    first, truncates, and draws the seed of an unseeded first episode from ``np_random``.

    Args:
        game: one of :data:`GAMES`.
        sticky_action_probability: chance that a step repeats the last step's action.
        difficulty_ramping: whether asterix, seaquest and space_invaders become harder during an episode.
        minimal_actions: only the actions that have an effect in this game; else all six.
        max_steps: steps after which an episode is truncated.

    Raises:
        ValueError: an unknown game; ``max_steps`` that is not positive.
        MissingExtraError: without the extra ``minatar``.

    Action: ``Discrete(6)``: nothing, left, up, right, down, fire; fewer with ``minimal_actions``.

    Observation: uint8 ``[channels, 10, 10]`` of 0 and 1: one channel for each kind of object, and of moving ones also
    their last position, so no frames need stacking.
    """

    def __init__(
        self,
        game: str,
        *,
        sticky_action_probability: float = 0.1,
        difficulty_ramping: bool = True,
        minimal_actions: bool = True,
        max_steps: int = 10_000,
    ) -> None:
        checked_choice("game", game, GAMES)
        checked_share("sticky_action_probability", sticky_action_probability)
        checked_flag("difficulty_ramping", difficulty_ramping)
        checked_flag("minimal_actions", minimal_actions)
        checked_count("max_steps", max_steps)
        try:
            from minatar import Environment  # imports matplotlib too, for drawing
        except ModuleNotFoundError as error:
            raise missing_extra("a MinAtar game", "MinAtar", "minatar") from error
        self._game = Environment(game, sticky_action_probability, difficulty_ramping)
        self._actions = self._game.minimal_action_set() if minimal_actions else list(range(self._game.num_actions()))
        self._max_steps = max_steps
        self._steps = 0
        self._is_seeded = False
        height, width, channels = self._game.state_shape()
        self.action_space: spaces.Discrete[Any] = spaces.Discrete(len(self._actions))
        self.observation_space: spaces.Box = spaces.Box(0, 1, (channels, height, width), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode; the same seed gives the same episode."""
        super().reset(seed=seed)
        if seed is not None or not self._is_seeded:
            self._game.seed(int(self.np_random.integers(2**31)))
            self._is_seeded = True
        self._game.reset()
        self._game.last_action = 0  # or the first step could repeat the last episode's action
        self._steps = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, terminated = self._game.act(self._actions[action])
        self._steps += 1
        truncated = self._steps >= self._max_steps and not terminated
        return self._observation(), float(reward), bool(terminated), truncated, {}

    def _observation(self) -> np.ndarray:
        return np.ascontiguousarray(self._game.state().transpose(2, 0, 1), dtype=np.uint8)
