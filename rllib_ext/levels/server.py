# SPDX-License-Identifier: Apache-2.0
"""The level buffer that all EnvRunners and Learners of an algorithm share, in a process of its own."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ray import cloudpickle

from lightning_replay.saving import read_state, write_state
from lightning_replay.saving.state import STATE_MANIFEST
from rllib_ext.levels.episodes import Episode, Episodes
from rllib_ext.levels.fragment import Fragment

if TYPE_CHECKING:
    from tensordict import TensorDict

_MOST_PLAYED = 100_000


class LevelServer:
    """Says which level an environment plays, and learns how it went.

    Every episode is an actor of its own in the level buffer, named by RLlib's identity of it: an environment may have
    several episodes in flight on one level, whose fragments come in any order.

    If the process is lost, Ray starts it again, and it goes on from what :meth:`report` wrote last; episodes begun
    since then are not scored.

    Args:
        packed: the level buffer, as cloudpickle has it.
        environments: that play.
        patience: see :class:`~rllib_ext.levels.episodes.Episodes`, as for the next.
        most: episodes of one environment that may be unscored.
        flush: whether unfinished episodes are scored after every update, see
            :meth:`~lightning_replay.levels.LevelSelector.flush`.
        spare: directory for :meth:`report`, on the disk of this node.
    """

    def __init__(self, packed: bytes, *, environments: int, patience: int, most: int, flush: bool, spare: str) -> None:
        self._levels = cloudpickle.loads(packed)
        self._environments, self._flush, self._spare = environments, flush, Path(spare)
        self._episodes = Episodes(patience, most)
        self._processes: dict[int, str] = {}
        self._played: dict[int, None] = {}
        self._left: list[str] = []
        self._choices = 0
        self._fault: str | None = None
        self._any_level = 0
        self._restarts = 0
        self._resume()

    def begin(
        self,
        player: tuple[int, int],
        process: str,
        episode_id: str,
        *,
        instead_of: str | None = None,
        broken_off: str | None = None,
    ) -> int:
        """The level of an episode that begins.

        Args:
            player: index of the EnvRunner, and of the environment on it.
            process: of the EnvRunner; another than before means that it was lost.
            episode_id: RLlib's.
            instead_of: an episode that got a level and was never played: its level is this one's.
            broken_off: an episode that ended without being done.
        """
        if self._processes.setdefault(player[0], process) != process:
            self._processes[player[0]] = process
            self.lose_runners([player[0]])
        if broken_off is not None:
            self._abandon(self._episodes.lose(broken_off))
        if instead_of is not None and self._episodes.get(instead_of) is not None:
            return self._episodes.rename(instead_of, episode_id)
        try:
            level_id = int(self._levels.next_level(episode_id))
        except Exception:  # said where it is heard: what an EnvRunner raises has it started again without a word
            self._fault = traceback.format_exc()
            return self._any_level
        self._any_level = level_id
        self._played.pop(level_id, None)
        self._played[level_id] = None
        if len(self._played) > _MOST_PLAYED:
            del self._played[next(iter(self._played))]
        self._episodes.begin(episode_id, Episode(episode_id, level_id, player))
        self._abandon(self._episodes.lose_excess(player))
        self._forget_left()
        return level_id

    def score(self, fragments: Sequence[Fragment]) -> None:
        """Learns from what a Learner is about to learn from.

        Raises:
            RuntimeError: levels could not be chosen meanwhile.
            ValueError: values or rewards that are NaN, or a score that is.
        """
        self.check()
        learned, lost = self._episodes.take(fragments)
        for episode, fragment in learned:
            self._levels.update(episode.actor, episode.level_id, fragment.steps(), fragment.is_done)
        self._abandon(lost)
        if self._flush:
            self._levels.flush()

    def trains_on(self, episode_ids: Sequence[str]) -> list[bool]:
        """Whether the Learner may learn from each episode: of one that was given up nobody knows, so it may not."""
        episodes = [self._episodes.get(name) for name in episode_ids]
        return [one is not None and self._levels.trains_on(one.actor, one.level_id) for one in episodes]

    def lose_runners(self, runners: Sequence[int]) -> None:
        """Gives up the episodes of EnvRunners that were lost."""
        for runner in runners:
            self._abandon(self._episodes.lose_runner(runner))

    def check(self) -> None:
        """Raises what went wrong where it could not be raised.

        Raises:
            RuntimeError: levels could not be chosen.
        """
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise RuntimeError(f"the level buffer could not choose a level:\n{fault}")

    def report(self, lost_runners: Sequence[int]) -> dict[str, float]:
        """Figures for a log; what is to survive the loss of this process is written.

        Args:
            lost_runners: EnvRunners that are gone.

        Raises:
            RuntimeError: levels could not be chosen.
        """
        self.check()
        self.lose_runners(lost_runners)
        self._write()
        return self.stats()

    def _write(self) -> None:
        """Writes what :meth:`_resume` reads."""
        write_state(self._spare, self.state() | {"restarts": self._restarts})

    def stats(self) -> dict[str, float]:
        """Figures of the level buffer, and of what was lost."""
        figures = dict(self._levels.stats())
        rows = self._levels.probabilities()
        if len(rows):
            figures["expected_staleness"] = float((rows["probability"] * rows["staleness"]).sum())
        return figures | dict(self._episodes.counts) | {"restarts": self._restarts}

    def probabilities(self) -> TensorDict:
        """See :meth:`~lightning_replay.levels.LevelSelector.probabilities`."""
        return self._levels.probabilities()

    def played_levels(self) -> list[int]:
        """Levels with a score, and those played since the start, at most the last 100,000 of them."""
        return sorted({*self._levels.probabilities()["level_id"].tolist(), *self._played})

    def state(self) -> dict[str, Any]:
        """Tensors and plain values: the level buffer's state as ``levels``, and ids of levels that were ``played``."""
        return {"levels": self._levels.state_dict(), "played": torch.tensor(list(self._played), dtype=torch.int64)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state`; the episodes in flight are forgotten once every environment chose again.

        Raises:
            ValueError: a state of other levels; nothing is changed.
        """
        self._levels.load_state_dict(state["levels"])
        self._played = dict.fromkeys(state["played"].tolist())
        self._episodes.clear()
        self._left = [str(actor) for actor in state["levels"]["running"]["actors"]]
        self._choices = 0
        self._write()

    def _forget_left(self) -> None:
        """What was in flight before a resume counts for the choices of the first episodes, as without a break."""
        self._choices += 1
        if self._left and self._choices >= self._environments:
            for actor in self._left:
                self._levels.abandon(actor)
            self._left = []

    def _abandon(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            self._levels.abandon(episode.actor)

    def _resume(self) -> None:
        """After a loss of this process."""
        if (self._spare / STATE_MANIFEST).exists():  # a loss during the first write leaves files, and no manifest
            state = read_state(self._spare)
            self._restarts = int(state.pop("restarts")) + 1
            self.load_state(state)
        else:
            self._write()
