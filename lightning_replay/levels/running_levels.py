# SPDX-License-Identifier: Apache-2.0
"""Levels in play: who plays which, since when, and the score so far of episodes that span several rollouts."""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass
from typing import Any

__all__ = ["Actor", "RunningLevel", "RunningLevels", "checked_actor"]

Actor = int | str


@dataclass
class RunningLevel:
    """An episode that an actor began and that has no score yet.

    Attributes:
        level_id: what is played.
        started: number of the episode, among all of all actors.
        replayed: whether the level had a score when the episode began.
        trains: whether the learner learns from it, or it is scored only.
        mean: of the steps seen so far, what the score is made of.
        steps: how many these are.
        episode_return: sum of all rewards so far.
    """

    level_id: int
    started: int
    replayed: bool
    trains: bool
    mean: float = 0.0
    steps: int = 0
    episode_return: float = 0.0

    def merge(self, mean: float, steps: int) -> None:
        """Adds the mean over ``steps`` more steps (paper, appendix C)."""
        self.mean = (mean * steps + self.mean * self.steps) / (steps + self.steps)
        self.steps += steps


class RunningLevels:
    """The episodes in flight of every actor, oldest first; an actor may have several, also on one level."""

    def __init__(self) -> None:
        self._of: dict[Actor, list[RunningLevel]] = {}
        self._times: dict[int, int] = {}

    def __len__(self) -> int:
        """Episodes in flight."""
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Any:
        """All of them, actor after actor."""
        return (episode for episodes in self._of.values() for episode in episodes)

    def plays(self, level_id: int) -> bool:
        """Whether anybody plays a level."""
        return level_id in self._times

    def of(self, actor: Actor) -> list[RunningLevel]:
        """Those of an actor, oldest first."""
        return self._of.get(actor, [])

    def begin(self, actor: Actor, episode: RunningLevel) -> None:
        """An actor begins an episode."""
        self._of.setdefault(actor, []).append(episode)
        self._times[episode.level_id] = self._times.get(episode.level_id, 0) + 1

    def oldest(self, actor: Actor, level_id: int) -> RunningLevel:
        """The episode that an actor has played longest on a level.

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

    def end(self, actor: Actor, episode: RunningLevel) -> None:
        """An episode is scored or abandoned."""
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
                self.begin(actor, RunningLevel(*episode))


def checked_actor(actor: Any) -> Actor:
    """A number or a name.

    Raises:
        TypeError: neither.
    """
    if isinstance(actor, str):
        return actor
    try:
        return operator.index(actor)
    except TypeError:
        raise TypeError(f"an actor is a number or a name; got {actor!r}") from None


def _some(actors: Any) -> str:
    named = list(actors)
    return f"{named[:8]}{' and more' if len(named) > 8 else ''}" if named else "none"
