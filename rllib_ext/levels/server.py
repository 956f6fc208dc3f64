# SPDX-License-Identifier: Apache-2.0
"""The level buffer in a process of its own, shared by all EnvRunners and Learners of an algorithm."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ray import cloudpickle

from lightning_replay.saving import read_state, write_state
from lightning_replay.saving.state import STATE_MANIFEST
from rllib_ext.levels.episodes import Fragment, PendingEpisode, PendingEpisodes

if TYPE_CHECKING:
    from tensordict import TensorDict

_MOST_PLAYED = 100_000


class LevelServer:
    """Chooses the levels that environments play, and scores them.

    Every episode is an actor of its own in the level buffer, named by RLlib's id, since an environment may have several
    episodes in flight on one level. If the process is lost, Ray restarts it, and it resumes from the last
    :meth:`report`; episodes begun since then are not scored.

    Args:
        packed: the level buffer, by cloudpickle.
        environments: that play.
        max_lag, max_pending: see :class:`~rllib_ext.levels.episodes.PendingEpisodes`.
        flush: whether unfinished episodes are scored after every update, see
            :meth:`~lightning_replay.levels.LevelSelector.flush`.
        spare: directory for :meth:`report`, on the disk of this node.
    """

    def __init__(
        self, packed: bytes, *, environments: int, max_lag: int, max_pending: int, flush: bool, spare: str
    ) -> None:
        self._levels = cloudpickle.loads(packed)
        self._environments, self._flush, self._spare = environments, flush, Path(spare)
        self._episodes = PendingEpisodes(max_lag, max_pending)
        self._processes: dict[int, str] = {}
        self._played: dict[int, None] = {}
        self._left: list[str] = []
        self._choices = 0
        self._fault: str | None = None
        self._any_level = 0
        self._restarts = 0
        if (self._spare / STATE_MANIFEST).exists():  # a loss during the first write leaves files, and no manifest
            state = read_state(self._spare)
            self._restarts = int(state.pop("restarts")) + 1
            self.load_state(state)
        else:
            self._write()

    def begin(
        self,
        player: tuple[int, int],
        process: str,
        episode_id: str,
        *,
        instead_of: str | None = None,
        broken_off: str | None = None,
    ) -> int:
        """Returns the level of an episode that begins.

        Args:
            player: index of the EnvRunner, and of the environment on it.
            process: of the EnvRunner; another than before means that it was lost.
            episode_id: RLlib's.
            instead_of: an episode that was never played, whose level this one gets.
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
        except Exception:  # raised by check(): an error on an EnvRunner would have RLlib restart it endlessly
            self._fault = traceback.format_exc()
            return self._any_level
        self._any_level = level_id
        self._played.pop(level_id, None)
        self._played[level_id] = None
        if len(self._played) > _MOST_PLAYED:
            del self._played[next(iter(self._played))]
        self._episodes.begin(episode_id, PendingEpisode(episode_id, level_id, player))
        self._abandon(self._episodes.lose_excess(player))
        self._choices += 1
        if self._choices >= self._environments:  # until then episodes from before a resume influence the choices
            for actor in self._left:
                self._levels.abandon(actor)
            self._left = []
        return level_id

    def score(self, fragments: Sequence[Fragment]) -> None:
        """Updates the level buffer with fragments that a Learner is about to learn from."""
        self.check()
        learned, lost = self._episodes.take(fragments)
        for episode, fragment in learned:
            self._levels.update(episode.actor, episode.level_id, fragment.steps(), fragment.is_done)
        self._abandon(lost)
        if self._flush:
            self._levels.flush()

    def trains_on(self, episode_ids: Sequence[str]) -> list[bool]:
        """Returns whether the Learner may learn from each episode; not from one that was dropped."""
        episodes = [self._episodes.get(name) for name in episode_ids]
        return [one is not None and self._levels.trains_on(one.actor, one.level_id) for one in episodes]

    def lose_runners(self, runners: Sequence[int]) -> None:
        for runner in runners:
            self._abandon(self._episodes.lose_runner(runner))

    def check(self) -> None:
        """Raises ``RuntimeError`` if a level could not be chosen."""
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise RuntimeError(f"the level buffer could not choose a level:\n{fault}")

    def report(self, lost_runners: Sequence[int]) -> dict[str, float]:
        """Drops the episodes of lost EnvRunners, writes the state for a restart and returns :meth:`stats`."""
        self.check()
        self.lose_runners(lost_runners)
        self._write()
        return self.stats()

    def _write(self) -> None:
        write_state(self._spare, self.state() | {"restarts": self._restarts})

    def stats(self) -> dict[str, float]:
        """Returns figures of the level buffer and of lost episodes."""
        figures = dict(self._levels.stats())
        rows = self._levels.probabilities()
        if len(rows):
            figures["expected_staleness"] = float((rows["probability"] * rows["staleness"]).sum())
        return figures | dict(self._episodes.counts) | {"restarts": self._restarts}

    def probabilities(self) -> TensorDict:
        """Returns :meth:`~lightning_replay.levels.LevelSelector.probabilities`."""
        return self._levels.probabilities()

    def played_levels(self) -> list[int]:
        """Returns levels with a score, and those played since the start, at most the last 100,000 of them."""
        return sorted({*self._levels.probabilities()["level_id"].tolist(), *self._played})

    def state(self) -> dict[str, Any]:
        """Returns the level buffer's state as ``levels``, and the ids of levels that were ``played``."""
        return {"levels": self._levels.state_dict(), "played": torch.tensor(list(self._played), dtype=torch.int64)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state`; episodes in flight are abandoned once every environment has begun another."""
        self._levels.load_state_dict(state["levels"])
        self._played = dict.fromkeys(state["played"].tolist())
        self._episodes.clear()
        self._left = [str(actor) for actor in state["levels"]["running"]["actors"]]
        self._choices = 0
        self._write()

    def _abandon(self, episodes: Sequence[PendingEpisode]) -> None:
        for episode in episodes:
            self._levels.abandon(episode.actor)
