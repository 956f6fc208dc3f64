# SPDX-License-Identifier: Apache-2.0
"""Active episodes: the level each actor plays, and partial scores of episodes that span several rollouts."""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass
from typing import Any

__all__ = ["ActiveEpisode", "ActiveEpisodes", "Actor", "checked_actor"]

Actor = int | str


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


def checked_actor(actor: Any) -> Actor:
    """Returns an actor's number or name.

    Raises:
        TypeError: ``actor`` is neither.
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
