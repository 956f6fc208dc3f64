# SPDX-License-Identifier: Apache-2.0
"""From the steps of an episode to its level's score, by any rule."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import torch

from lightning_replay.levels import score_functions, scores
from lightning_replay.levels.best_returns import BestReturns
from lightning_replay.levels.key_names import key_names
from lightning_replay.levels.running_levels import RunningLevel
from lightning_replay.levels.scores import Score, ValueScore
from lightning_replay.levels.segment import Segment

__all__ = ["EpisodeScore", "Scoring"]


@runtime_checkable
class EpisodeScore(Protocol):
    """A score of whole episodes, as :class:`~lightning_replay.levels.LearningProgress`; all levels begin with one."""

    initial_score: float

    def of_episode(self, level_id: int, episode: int, episode_return: float) -> float:
        """The level's new score, of an episode's number and undiscounted return."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""


class Scoring:
    """Scores episodes piece by piece, with what some rules remember of each level.

    Args:
        score: of a segment, or of whole episodes.

    Raises:
        TypeError: neither.
        ValueError: an initial score that is not finite.
    """

    def __init__(self, score: Score | EpisodeScore) -> None:
        if isinstance(score, type) or not (callable(score) or isinstance(score, EpisodeScore)):
            raise TypeError(
                f"score is {score!r}; give a function from a segment TensorDict [T] to a number, or an object such as "
                "L1ValueLoss(discount=0.999, gae_lambda=0.95)"
            )
        if getattr(score, "__module__", None) == score_functions.__name__:
            raise TypeError(
                f"score is {score!r}, a function of tensors; give the object of lightning_replay.levels.scores "
                "that takes a segment, such as L1ValueLoss()"
            )
        self._of_episodes: EpisodeScore | None = score if isinstance(score, EpisodeScore) else None
        if self._of_episodes is not None and not math.isfinite(self._of_episodes.initial_score):
            raise ValueError(f"initial_score is {self._of_episodes.initial_score}; it must be finite")
        self._of_segments: Any = score
        # whoever calls it otherwise, in a subclass, is called
        self._takes_columns = isinstance(score, ValueScore) and type(score).__call__ is ValueScore.__call__
        self._needs_best_return = bool(getattr(score, "needs_best_return", False))
        self._best_returns = BestReturns()

    @property
    def initial_score(self) -> float | None:
        """That of every level before it is played; ``None`` where levels have none."""
        return None if self._of_episodes is None else self._of_episodes.initial_score

    def learn(self, episode: RunningLevel, segment: Segment, is_done: bool) -> float | None:
        """Takes up more steps of an episode.

        Returns:
            Its score, if it is done.

        Raises:
            KeyError: a key that a score of this library needs; nothing is changed.
            ValueError: the score is not finite, or the user's function fails; nothing is changed.
        """
        episode_return = episode.episode_return + segment.reward_sum
        if self._of_episodes is not None:
            score = None
            if is_done:
                given = self._of_episodes.of_episode(episode.level_id, episode.started, episode_return)
                score = _finite(given, episode.level_id)
            episode.episode_return = episode_return
            return score
        mean = self._mean(episode, segment, episode_return, is_done)
        episode.episode_return = episode_return
        episode.merge(mean, segment.length)
        if is_done and self._needs_best_return:
            self._best_returns.add(episode.level_id, episode_return)
        return episode.mean if is_done else None

    def _mean(self, episode: RunningLevel, segment: Segment, episode_return: float, is_done: bool) -> float:
        steps = segment.steps
        if self._needs_best_return:
            best = self._best_returns.of(episode.level_id, episode_return, is_done)
            steps = steps.copy().set("best_return", torch.full((segment.length,), best, dtype=torch.float64))
        if self._takes_columns and segment.columns is not None:
            return _finite(self._of_segments.of_columns(segment.columns), episode.level_id)
        try:
            mean = self._of_segments(steps)
        except Exception as error:
            if type(self._of_segments).__module__ == scores.__name__:  # what these say is clear
                raise
            raise ValueError(
                f"the score function {self._of_segments!r} failed on the steps of level {episode.level_id}: {error!r}. "
                f"They have the keys {key_names(steps)}"
            ) from error
        return _finite(mean, episode.level_id)

    def forget(self, level_id: int) -> None:
        """Forgets what is remembered of a level that is neither kept nor played."""
        self._best_returns.forget(level_id)

    def state_dict(self) -> dict[str, Any]:
        """What is remembered of levels."""
        of_episodes = None if self._of_episodes is None else self._of_episodes.state_dict()
        return {"best_returns": self._best_returns.state_dict(), "of_episodes": of_episodes}

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuses a state that does not fit.

        Raises:
            ValueError: the saved scores were of another kind.
        """
        if (self._of_episodes is None) != (state["of_episodes"] is None):
            raise ValueError("the saved levels were scored by segments and these by episodes, or the other way round")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, which was checked."""
        self._best_returns.load_state_dict(state["best_returns"])
        if self._of_episodes is not None:
            self._of_episodes.load_state_dict(state["of_episodes"])


def _finite(given: Any, level_id: int) -> float:
    """What a score gave, as a number."""
    if isinstance(given, torch.Tensor) and given.numel() != 1:
        raise ValueError(f"the score function gave a tensor of shape {list(given.shape)}; it must give one number")
    try:
        score = float(given)
    except (TypeError, ValueError):
        raise ValueError(f"the score function gave {given!r}; it must give one number") from None
    if not math.isfinite(score):
        raise ValueError(f"the score of level {level_id} is {score}; the score function must give a finite number")
    return score
