# SPDX-License-Identifier: Apache-2.0
"""Active episodes: the level each actor plays, and the scores of their steps, which may come in several pieces."""

from __future__ import annotations

import inspect
import math
from dataclasses import astuple, dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from lightning_replay.levels import scores
from lightning_replay.levels import segment as segments
from lightning_replay.levels.level_ids import Actor
from lightning_replay.levels.scores import Score, SegmentScore, ValueScore
from lightning_replay.levels.segment import Segment, key_names

__all__ = ["ActiveEpisode", "ActiveEpisodes", "EpisodeScore", "Scoring"]


@dataclass
class ActiveEpisode:
    """An episode that has begun and has no score yet.

    Attributes:
        level_id: of the level being played.
        started: number of the episode, among those of all actors.
        replayed: whether the level had a score when the episode began.
        trains: whether the learner learns from the episode, instead of only scoring it.
        mean: partial score, over the steps scored so far.
        steps: number of steps scored so far.
        episode_return: sum of the rewards so far.
    """

    level_id: int
    started: int
    replayed: bool
    trains: bool
    mean: float = 0.0
    steps: int = 0
    episode_return: float = 0.0


class ActiveEpisodes:
    """Active episodes of every actor, oldest first; an actor may have several, even on one level."""

    def __init__(self) -> None:
        self._of: dict[Actor, list[ActiveEpisode]] = {}
        self._times: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of active episodes."""
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Any:
        """Iterates over all of them, actor by actor."""
        return (episode for episodes in self._of.values() for episode in episodes)

    def plays(self, level_id: int) -> bool:
        """Returns whether any actor plays a level."""
        return level_id in self._times

    def of(self, actor: Actor) -> list[ActiveEpisode]:
        """Returns the episodes of an actor, oldest first."""
        return self._of.get(actor, [])

    def begin(self, actor: Actor, episode: ActiveEpisode) -> None:
        """Adds an episode of an actor."""
        self._of.setdefault(actor, []).append(episode)
        self._times[episode.level_id] = self._times.get(episode.level_id, 0) + 1

    def oldest(self, actor: Actor, level_id: int) -> ActiveEpisode:
        """Returns the oldest episode of an actor on a level.

        Raises:
            ValueError: there is none.
        """
        episodes = self._of.get(actor)
        for episode in episodes or ():
            if episode.level_id == level_id:
                return episode
        if episodes is None:
            raise ValueError(
                f"actor {actor!r} plays no level; those that do are {_some(self._of)}. Call next_level(actor) when an "
                "episode starts"
            )
        raise ValueError(
            f"actor {actor!r} does not play level {level_id!r}; it plays {[one.level_id for one in episodes]}. Name "
            "the level under which the steps were made, and give each episode's end once"
        )

    def end(self, actor: Actor, episode: ActiveEpisode) -> None:
        """Removes an episode that was scored or abandoned."""
        episodes = self._of[actor]
        del episodes[next(place for place, one in enumerate(episodes) if one is episode)]
        if not episodes:
            del self._of[actor]
        self._times[episode.level_id] -= 1
        if not self._times[episode.level_id]:
            del self._times[episode.level_id]

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "actors": list(self._of),
            "episodes": [[list(astuple(episode)) for episode in episodes] for episodes in self._of.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self._of, self._times = {}, {}
        for actor, episodes in zip(state["actors"], state["episodes"], strict=True):
            for episode in episodes:
                self.begin(actor, ActiveEpisode(*episode))


@runtime_checkable
class EpisodeScore(Protocol):
    """A score of whole episodes, such as :class:`~lightning_replay.levels.LearningProgress`.

    Attributes:
        initial_score: of every level before its first episode.
    """

    initial_score: float

    def of_episode(self, level_id: int, episode: int, episode_return: float) -> float:
        """Computes the level's new score from an episode's number and undiscounted return."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""


class Scoring:
    """Scores episodes, which may come in several pieces.

    Args:
        score: of a segment, or of whole episodes.

    Raises:
        TypeError: ``score`` is neither.
        ValueError: an initial score that is not finite.
    """

    def __init__(self, score: Score | EpisodeScore) -> None:
        if isinstance(score, type) or not (callable(score) or isinstance(score, EpisodeScore)):
            raise TypeError(
                f"score is {score!r}; give a function from a segment TensorDict [T] to a number, or an object such as "
                "L1ValueLoss(discount=0.999, gae_lambda=0.95)"
            )
        if inspect.isfunction(score) and score.__module__ in (scores.__name__, segments.__name__):
            raise TypeError(
                f"score is {score!r}, a function of tensors; give the object of lightning_replay.levels.scores "
                "that takes a segment, such as L1ValueLoss()"
            )
        self._of_episodes: EpisodeScore | None = score if isinstance(score, EpisodeScore) else None
        if self._of_episodes is not None and not math.isfinite(self._of_episodes.initial_score):
            raise ValueError(f"initial_score is {self._of_episodes.initial_score}; it must be finite")
        self._of_segments: Any = score
        # a subclass may override __call__, which of_columns would bypass
        self._takes_columns = isinstance(score, ValueScore) and type(score).__call__ is ValueScore.__call__
        self._needs_best_return = isinstance(score, SegmentScore) and score.needs_best_return
        self._best_returns: dict[int, float] = {}  # of finished episodes, by level

    @property
    def initial_score(self) -> float | None:
        """Score of every level before its first episode; ``None`` if levels start without one."""
        return None if self._of_episodes is None else self._of_episodes.initial_score

    def learn(self, episode: ActiveEpisode, segment: Segment, is_done: bool) -> float | None:
        """Adds more steps of an episode.

        Returns:
            Its score if it is done, otherwise ``None``.

        Raises:
            KeyError: a key that a score of this library needs is missing; nothing is changed.
            ValueError: the score is not finite, or the user's function fails; nothing is changed.
        """
        level_id, episode_return = episode.level_id, episode.episode_return + segment.reward_sum
        if self._of_episodes is not None:
            score = None
            if is_done:
                score = _finite(self._of_episodes.of_episode(level_id, episode.started, episode_return), level_id)
            episode.episode_return = episode_return
            return score
        best = self._best_returns.get(level_id, episode_return)
        best = max(best, episode_return) if is_done else best
        mean = _finite(self._mean(level_id, segment, best), level_id)
        episode.episode_return = episode_return
        # the pieces of an episode are joined by their lengths (paper, appendix C)
        steps = episode.steps + segment.length
        episode.mean = (mean * segment.length + episode.mean * episode.steps) / steps
        episode.steps = steps
        if not is_done:
            return None
        if self._needs_best_return:
            self._best_returns[level_id] = best
        return episode.mean

    def _mean(self, level_id: int, segment: Segment, best_return: float) -> Any:
        if self._takes_columns and segment.columns is not None:
            return self._of_segments.of_columns(segment.columns)
        steps = segment.steps
        if self._needs_best_return:
            steps = steps.copy().set("best_return", torch.full((segment.length,), best_return, dtype=torch.float64))
        try:
            return self._of_segments(steps)
        except Exception as error:
            if type(self._of_segments).__module__ == scores.__name__:  # their errors are clear as they are
                raise
            raise ValueError(
                f"the score function {self._of_segments!r} failed on the steps of level {level_id}: {error!r}. "
                f"They have the keys {key_names(steps)}"
            ) from error

    def forget(self, level_id: int) -> None:
        """Removes the best return of a level that is neither kept nor played."""
        self._best_returns.pop(level_id, None)

    def state_dict(self) -> dict[str, Any]:
        """Best returns, and the state of a score of whole episodes."""
        best_returns = {
            "level_id": torch.tensor(list(self._best_returns), dtype=torch.int64),
            "best_return": torch.tensor(list(self._best_returns.values()), dtype=torch.float64),
        }
        of_episodes = None if self._of_episodes is None else self._of_episodes.state_dict()
        return {"best_returns": best_returns, "of_episodes": of_episodes}

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuses a state that does not fit.

        Raises:
            ValueError: the saved scores were of another kind.
        """
        if (self._of_episodes is None) != (state["of_episodes"] is None):
            raise ValueError("the saved levels were scored by segments and these by episodes, or the other way round")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, which was checked."""
        saved = state["best_returns"]
        self._best_returns = dict(zip(saved["level_id"].tolist(), saved["best_return"].tolist(), strict=True))
        if self._of_episodes is not None:
            self._of_episodes.load_state_dict(state["of_episodes"])


def _finite(given: Any, level_id: int) -> float:
    """Converts what a score returned."""
    if isinstance(given, torch.Tensor) and given.numel() != 1:
        raise ValueError(f"the score function gave a tensor of shape {list(given.shape)}; it must give one number")
    try:
        score = float(given)
    except (TypeError, ValueError):
        raise ValueError(f"the score function gave {given!r}; it must give one number") from None
    if not math.isfinite(score):
        raise ValueError(f"the score of level {level_id} is {score}; the score function must give a finite number")
    return score


def _some(actors: Any) -> str:
    named = list(actors)
    return f"{named[:8]}{' and more' if len(named) > 8 else ''}" if named else "none"
