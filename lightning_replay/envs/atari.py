# SPDX-License-Identifier: Apache-2.0
"""Atari 2600 games with the usual preprocessing of deep Q-learning, by Gymnasium's wrappers."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, ClipReward, FrameStackObservation

from lightning_replay.extras import missing_extra
from lightning_replay.validation import check_kind, checked_count, checked_flag, checked_share


class LifeEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends an episode with each life lost; the game continues, and is reset only after its last life.

    An episode that begins with a further life begins with one step of the action 0, which in Atari does nothing.
    ``reset(seed=...)`` and ``reset(options=...)`` always reset the game.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._lives = 0
        self._goes_on = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        goes_on = self._goes_on and seed is None and not options
        if goes_on:
            observation, _, terminated, truncated, info = self.env.step(0)
            goes_on = not (terminated or truncated)
        if not goes_on:
            observation, info = self.env.reset(seed=seed, options=options)
        self._lives = info["lives"]
        self._goes_on = False
        return observation, info

    def step(self, action: int) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
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

    Up to 30 idle frames at the start, each action for four frames, the brighter of the last two in gray at 84 x 84,
    the last four of these as one observation. For training, an episode ends with a life and rewards are clipped to
    [-1, 1]; for evaluation, pass ``ends_with_life=False, clips_rewards=False``.
    Mnih et al. 2015, https://doi.org/10.1038/nature14236; the steps are those of the retention paper's code.

    Args:
        game: name of the game in ale-py, such as ``"Breakout"`` of ``"ALE/Breakout-v5"``.
        ends_with_life: see :class:`LifeEpisodes`.
        clips_rewards: to [-1, 1].
        frame_stack: images in one observation; the first of an episode is repeated.
        frame_skip: frames per action.
        screen_size: height and width of an image.
        noops: most idle frames at the start of a game, at least 1 of them; 0 for none.
        max_frames: frames after which a game is truncated.
        sticky_action_probability: chance that a frame repeats the last frame's action.
        render_mode: ``None``, ``"rgb_array"`` or ``"human"``.

    Action: ``Discrete``: the buttons that the game uses.

    Observation: uint8 ``[frame_stack, screen_size, screen_size]``, oldest first.

    Raises:
        ValueError: a game that ale-py does not have.
        MissingExtraError: without the extra ``atari``.
    """
    check_kind("game", game, str, "the name of a game in ale-py, such as 'Breakout'")
    checked_flag("ends_with_life", ends_with_life)
    checked_flag("clips_rewards", clips_rewards)
    checked_count("frame_stack", frame_stack)
    checked_count("frame_skip", frame_skip)
    checked_count("screen_size", screen_size)
    checked_count("noops", noops, 0)
    checked_count("max_frames", max_frames)
    checked_share("sticky_action_probability", sticky_action_probability)
    for module, package in (("ale_py", "ale-py"), ("cv2", "opencv-python-headless")):
        try:
            importlib.import_module(module)  # ale_py registers its games with Gymnasium
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
    if ends_with_life:
        made = LifeEpisodes(made)
    if clips_rewards:
        made = ClipReward(made, -1.0, 1.0)
    return FrameStackObservation(made, frame_stack)
