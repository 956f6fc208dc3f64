# SPDX-License-Identifier: Apache-2.0
"""Atari 2600 games with the usual preprocessing of deep Q-learning, and the five games of MinAtar."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, ClipReward, FrameStackObservation

from lightning_replay.options import (
    check_kind,
    checked_choice,
    checked_count,
    checked_flag,
    checked_share,
    missing_extra,
)


class LifeEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends an episode with each life lost. The game continues, and is reset only after its last life.

    If the game continues, the next episode begins with one step of the action 0, which does nothing in Atari.
    ``reset(seed=...)`` and ``reset(options=...)`` always reset the game.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._lives = 0
        self._goes_on = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode with the next life of the game, or resets the game."""
        goes_on = self._goes_on and seed is None and not options
        if goes_on:
            observation, _, terminated, truncated, info = self.env.step(0)
            goes_on = not (terminated or truncated)  # This step may end the game.
        if not goes_on:
            observation, info = self.env.reset(seed=seed, options=options)
        self._lives = info["lives"]
        self._goes_on = False
        return observation, info

    def step(self, action: int) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Takes one step. A lost life terminates the episode."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        lost_life = info["lives"] < self._lives
        self._lives = info["lives"]
        self._goes_on = lost_life and not terminated and not truncated
        return observation, reward, terminated or lost_life, truncated, info


def atari(
    game: str,
    *,
    ends_with_life: bool = True,
    clips_rewards: bool = True,
    frame_stack: int = 4,
    frame_skip: int = 4,
    screen_size: int = 84,
    noops: int = 30,
    max_frames: int = 108_000,
    sticky_action_probability: float = 0.0,
    render_mode: str | None = None,
) -> gymnasium.Env[Any, Any]:
    """Returns an Atari game, ``gymnasium.make("lightning_replay.envs:Atari-v0", game="Breakout")``.

    A game starts with up to 30 idle frames, and each action lasts four frames. An image is the brighter of the last two
    frames, in gray at 84 x 84, and an observation is the last four images. For training, an episode ends with a life,
    and rewards are clipped to [-1, 1]. For evaluation, pass ``ends_with_life=False, clips_rewards=False``.
    Mnih et al. 2015, https://doi.org/10.1038/nature14236. The code of the retention paper takes the same steps.

    Args:
        game: Name of the game in ale-py, such as ``"Breakout"`` of ``"ALE/Breakout-v5"``.
        ends_with_life: Whether a lost life ends an episode, see :class:`LifeEpisodes`.
        clips_rewards: Whether rewards are clipped to [-1, 1].
        frame_stack: Images in one observation. The first image of an episode is repeated.
        frame_skip: Frames per action.
        screen_size: Height and width of an image.
        noops: Most idle frames at the start of a game. At least 1 frame is idle, or none with 0.
        max_frames: Frames after which a game is truncated.
        sticky_action_probability: Chance that a frame repeats the action of the last frame.
        render_mode: ``None``, ``"rgb_array"`` or ``"human"``.

    Action: ``Discrete``: the buttons that the game uses.

    Observation: uint8 ``[frame_stack, screen_size, screen_size]``, oldest first.

    Raises:
        ValueError: A game that ale-py does not have.
        MissingExtraError: The extra ``atari`` is not installed.
    """
    check_kind("game", game, str, "the name of a game in ale-py, such as 'Breakout'")
    checked_flag("ends_with_life", ends_with_life)
    checked_flag("clips_rewards", clips_rewards)
    counts = {"frame_stack": frame_stack, "frame_skip": frame_skip, "screen_size": screen_size}
    for name, count in (counts | {"max_frames": max_frames}).items():
        checked_count(name, count)
    checked_count("noops", noops, 0)
    checked_share("sticky_action_probability", sticky_action_probability)
    for module, package in (("ale_py", "ale-py"), ("cv2", "opencv-python-headless")):
        try:
            importlib.import_module(module)  # ale_py registers its games with Gymnasium.
        except ModuleNotFoundError as error:
            raise missing_extra("an Atari game", package, "atari") from error
    try:
        made = gymnasium.make(
            f"ALE/{game}-v5",
            frameskip=1,
            repeat_action_probability=sticky_action_probability,
            max_num_frames_per_episode=max_frames,
            render_mode=render_mode,
            disable_env_checker=True,
        )
    except gymnasium.error.UnregisteredEnv as error:
        raise ValueError(
            f"game is {game!r}, which ale-py does not have: {error} Give NAME of 'ALE/NAME-v5'."
        ) from error
    made = AtariPreprocessing(made, noop_max=noops, frame_skip=frame_skip, screen_size=screen_size)
    if ends_with_life:  # The idle frames of the preprocessing come only at the start of a game.
        made = LifeEpisodes(made)
    if clips_rewards:
        made = ClipReward(made, -1.0, 1.0)
    return FrameStackObservation(made, frame_stack)


GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")


class MinAtarGame(gymnasium.Env[Any, Any]):
    """A game of MinAtar, ``gymnasium.make("lightning_replay.envs:MinAtar-v0", game="breakout")``.

    Young and Tian 2019, https://arxiv.org/abs/1903.03176. The Gymnasium class of MinAtar has the channels last, does
    not truncate, and leaves the first episode unseeded. This class draws the seed of that episode from ``np_random``.

    Args:
        game: One of :data:`GAMES`.
        sticky_action_probability: Chance that a step repeats the action of the last step.
        difficulty_ramping: Whether asterix, seaquest and space_invaders become harder during an episode.
        minimal_actions: Whether only actions that have an effect in this game are offered. Otherwise, all six are.
        max_steps: Steps after which an episode is truncated.

    Raises:
        ValueError: The game is unknown, or ``max_steps`` is not positive.
        MissingExtraError: The extra ``minatar`` is not installed.

    Action: ``Discrete(6)``: nothing, left, up, right, down, fire. There are fewer with ``minimal_actions``.

    Observation: uint8 ``[channels, 10, 10]`` of 0 and 1: one channel for each kind of object. Moving objects also have
    a channel of their last position, so that no frames need to be stacked.
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
            from minatar import Environment  # MinAtar also imports matplotlib.
        except ModuleNotFoundError as error:
            raise missing_extra("a MinAtar game", "MinAtar", "minatar") from error
        self._game = Environment(game, sticky_action_probability, difficulty_ramping)
        self._actions = range(self._game.num_actions())
        if minimal_actions:
            self._actions = self._game.minimal_action_set()
        self._max_steps = max_steps
        self._steps = 0
        self._is_seeded = False
        height, width, channels = self._game.state_shape()
        self.action_space: spaces.Discrete[Any] = spaces.Discrete(len(self._actions))
        self.observation_space: spaces.Box = spaces.Box(0, 1, (channels, height, width), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode. The same seed gives the same episode."""
        super().reset(seed=seed)
        if seed is not None or not self._is_seeded:  # The game has a generator.
            self._game.seed(int(self.np_random.integers(2**31)))
            self._is_seeded = True
        self._game.reset()
        self._game.last_action = 0  # Otherwise, the first step could repeat the action of the last episode.
        self._steps = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Takes one step with an index into the offered actions."""
        reward, terminated = self._game.act(self._actions[action])
        self._steps += 1
        truncated = self._steps >= self._max_steps and not terminated
        return self._observation(), float(reward), bool(terminated), truncated, {}

    def _observation(self) -> np.ndarray:
        return np.ascontiguousarray(self._game.state().transpose(2, 0, 1), dtype=np.uint8)
