# SPDX-License-Identifier: Apache-2.0
"""What every way of choosing levels has in common: who plays what, and the feedback by which it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase

from lightning_replay.levels.running_levels import Actor, RunningLevel, RunningLevels, checked_actor
from lightning_replay.levels.segment import Segment
from lightning_replay.saving import load_state, write_state

__all__ = ["LevelSource"]

_FORMAT = 1


class LevelSource(ABC):
    """Says which level each actor plays next: :meth:`next_level` when an episode starts, :meth:`update` with its steps.

    Steps may come later than the next episode's start: so an actor may have several levels in flight, and an update
    names its level.

    Attributes:
        running: the episodes in flight.
        score: of a segment of an episode; ``None`` where levels have no scores.
    """

    score: Any = None

    def __init__(self) -> None:
        self.running = RunningLevels()

    @property
    @abstractmethod
    def episodes(self) -> int:
        """Episodes that all actors began."""

    @property
    @abstractmethod
    def count(self) -> int | None:
        """Of all levels, with a score or without; ``None`` where there is no end of them."""

    @abstractmethod
    def __len__(self) -> int:
        """Levels with a score."""

    def __bool__(self) -> bool:
        """``True``, also while no level has a score: ``levels or others`` means these."""
        return True

    def __repr__(self) -> str:
        known = "levels without end" if self.count is None else f"{self.count} levels"
        return f"{type(self).__name__}({known}, {len(self)} with a score, {self.episodes} episodes)"

    def next_level(self, actor: Actor) -> int:
        """The level an actor plays from now on; all levels become one episode older.

        Args:
            actor: number or name of whoever plays one episode at a time.

        Returns:
            Its id.

        Raises:
            TypeError: an actor that is neither.
        """
        return self._next(checked_actor(actor))

    @property
    def plays_unlearned(self) -> bool:
        """Whether there may be episodes that are scored and not learned from, see :meth:`trains_on`."""
        return False

    @abstractmethod
    def _next(self, actor: Actor) -> int:
        """Chooses a level and begins it."""

    def start(self, actor: Actor, level_id: int) -> None:
        """Notes that an actor plays a level that another chose for it: it counts as one more episode.

        Raises:
            TypeError: an actor that is neither a number nor a name.
            ValueError: none of the levels.
        """
        actor = checked_actor(actor)
        self._play(actor, self.checked(level_id))

    @abstractmethod
    def _play(self, actor: Actor, level_id: int) -> None:
        """Begins a level."""

    @abstractmethod
    def checked(self, level_id: int) -> int:
        """The id of a level that can be played.

        Raises:
            ValueError: none of the levels.
        """

    def may_choose(self, level_id: int) -> bool:
        """Whether :meth:`next_level` may ever give this level; of levels without end, any."""
        try:
            self.checked(level_id)
        except ValueError:
            return False
        return True

    def update(self, actor: Actor, level_id: int, steps: TensorDictBase, episode_done: bool) -> float | None:
        """Learns from steps of a level, once they are made and valued; a long episode may come in several pieces.

        The steps belong to the episode that the actor has played longest on this level. Two actors on one level never
        mix; both episodes count, and the later score stays.

        Args:
            actor: who made them.
            level_id: under which they were made.
            steps: TensorDict ``[T]``, T at least 1: ``state_value``, ``logits`` where the score needs them, ``("next",
                "reward" | "state_value" | "terminated" | "truncated" | "done")``, each ``[T]`` or ``[T, 1]``.
            episode_done: whether the episode ended with the last of them; equals its ``done``.

        Returns:
            The level's new score, if the episode is done and scored.

        Raises:
            TypeError: steps that are no TensorDict.
            ValueError: the actor does not play this level; steps that are none, NaN, or of several episodes; a score
                function that fails or gives NaN. Nothing is changed.
        """
        episode = self.running.oldest(actor, level_id)
        segment = Segment(steps, episode_done)
        score = self._learn(episode, segment, episode_done)
        if episode_done:
            self._end(actor, episode)
        return score

    @abstractmethod
    def _learn(self, episode: RunningLevel, segment: Segment, is_done: bool) -> float | None:
        """Takes up the steps; raises before anything is changed."""

    def _end(self, actor: Actor, episode: RunningLevel) -> None:
        self.running.end(actor, episode)

    def flush(self) -> None:  # noqa: B027  there is nothing to flush where nothing is scored
        """Makes scores of the non-zero means of unfinished episodes, and begins the means anew.

        The released code of the paper does so after every policy update; the paper itself joins the pieces of an
        episode, which is what happens if this is never called.
        """

    def trains_on(self, actor: Actor, level_id: int) -> bool:
        """Whether the learner may learn from the episode the actor began last on this level; ask before the next one.

        Raises:
            ValueError: the actor does not play this level.
        """
        self.running.oldest(actor, level_id)
        return next(one.trains for one in reversed(self.running.of(actor)) if one.level_id == level_id)

    def in_flight(self, actor: Actor) -> list[int]:
        """Levels the actor began and that are not done, oldest first."""
        return [episode.level_id for episode in self.running.of(actor)]

    def abandon(self, actor: Actor) -> int:
        """Forgets the levels in flight of an actor that was lost; how many they were."""
        return self._abandon(actor, list(self.running.of(actor)))

    def abandon_all_but_newest(self, actor: Actor) -> int:
        """Forgets an actor's levels in flight except the one begun last, as after a resume; how many they were."""
        return self._abandon(actor, self.running.of(actor)[:-1])

    def _abandon(self, actor: Actor, episodes: list[RunningLevel]) -> int:
        for episode in episodes:
            self._end(actor, episode)
        return len(episodes)

    @abstractmethod
    def probabilities(self) -> TensorDict:
        """Of the levels with a score, ``[L]``; all others have probability 0.

        Returns:
            ``level_id`` int64, ``probability`` float64, ``score`` float64, ``staleness`` int64 in episodes.
        """

    def stats(self) -> dict[str, float]:
        """Figures for a log."""
        return {"levels": len(self), "episodes": self.episodes, "in_flight": len(self.running)}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain values; the next choices are the same after :meth:`load_state_dict`.

        Levels in flight are kept. Where environments start new episodes on resuming, let every actor choose first, then
        forget the old ones with :meth:`abandon_all_but_newest`: so the choices are those of a run without a break.
        """
        return {"version": _FORMAT, "kind": type(self).__name__, "running": self.running.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` of a source built with the same arguments.

        Raises:
            ValueError: the state is of another format, another class or other levels; nothing is changed.
        """
        if not isinstance(state, dict):
            raise TypeError(f"the state is a {type(state).__name__}; it must be what state_dict() returned")
        if "kind" not in state:
            raise ValueError(
                f"the state holds {list(state)[:10]} and no 'kind'; it is not what state_dict() of a "
                f"{type(self).__name__} returned"
            )
        if state["kind"] != type(self).__name__:
            raise ValueError(
                f"the state is that of a {state['kind']}; this is a {type(self).__name__}. Load it into the "
                "class that it was saved by"
            )
        if state.get("version") != _FORMAT:
            raise ValueError(f"the state has version {state.get('version')}; {_FORMAT} can be read")
        before = self.state_dict()
        if set(state) != set(before):
            raise ValueError(
                f"the state lacks or adds {sorted(set(state) ^ set(before))}; it was not saved by state_dict()"
            )
        try:
            self._load_all(state)
        except BaseException:
            self._load_all(before)
            raise

    def _load_all(self, state: dict[str, Any]) -> None:
        self._load(state)
        self.running.load_state_dict(state["running"])

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Restores what the subclass adds to the state."""

    def save(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` into the directory ``path``: tensors and JSON."""
        write_state(path, self.state_dict(), of=type(self).__name__)

    def load(self, path: str | Path) -> None:
        """Reads what :meth:`save` wrote.

        Raises:
            FileNotFoundError: nothing was saved there.
            DamagedFileError: a file of the save is missing or damaged.
            ValueError: see :meth:`load_state_dict`.
        """
        load_state(path, self.load_state_dict)
