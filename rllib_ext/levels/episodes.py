# SPDX-License-Identifier: Apache-2.0
"""Episodes in flight and their fragments, which may arrive late, twice, out of order or not at all."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tensordict import TensorDict

Player = tuple[int, int]  # index of the EnvRunner, and of the environment on it


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Consecutive steps of one episode with the values that the Learner's module computed."""

    episode_id: str  # RLlib's
    t_started: int  # number of the first step in its episode
    reward: np.ndarray  # float32 [T], those the Learner learns from
    state_value: np.ndarray  # float32 [T + 1], the last of the observation behind the last step
    terminated: bool  # of the last step
    truncated: bool
    logits: np.ndarray | None = None  # float32 [T, A] of the policy that acted, where actions are discrete

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def is_done(self) -> bool:
        return self.terminated or self.truncated

    def steps(self) -> TensorDict:
        """Returns the steps in TorchRL's layout, ``[T]``."""
        import torch
        from tensordict import TensorDict

        ends = torch.zeros(3, len(self), dtype=torch.bool)
        ends[:, -1] = torch.tensor([self.terminated, self.truncated, self.is_done])
        values = torch.tensor(self.state_value, dtype=torch.float32)
        following = {"reward": torch.tensor(self.reward, dtype=torch.float32), "state_value": values[1:]}
        following |= dict(zip(("terminated", "truncated", "done"), ends, strict=True))
        columns = {"state_value": values[:-1], "next": following}
        if self.logits is not None:
            columns["logits"] = torch.tensor(self.logits, dtype=torch.float32)
        return TensorDict(columns, [len(self)])


@dataclasses.dataclass
class PendingEpisode:
    """An episode that has begun and has no score yet."""

    actor: str  # its name in the level buffer
    level_id: int
    player: Player
    number: int = 0  # in the order in which all episodes began
    first_steps: set[int] = dataclasses.field(default_factory=set)  # of the fragments that arrived
    steps: int = 0  # that arrived
    last: Fragment | None = None  # the fragment that ends it, kept until all steps before it have arrived
    lag: int = 0  # how often fragments of later episodes of its environment arrived


class PendingEpisodes:
    """Tracks the episodes in flight by RLlib's ids.

    A score is a mean over steps, so fragments count in any order of arrival. The one that ends the episode counts
    last: with several Learners it may overtake others, and waits for them. An episode is dropped if fragments of later
    episodes of its environment arrived more than ``max_lag`` times, or if it is the oldest of more than ``max_pending``
    unscored episodes of its environment.

    Attributes:
        counts: ``fragments_dropped``, of unknown episodes or duplicates; ``gaps``, scored episodes of which a fragment
            never arrived; ``episodes_lost``, dropped without a score.
    """

    def __init__(self, max_lag: int, max_pending: int) -> None:
        self._max_lag, self._max_pending = max_lag, max_pending
        self._active: dict[str, PendingEpisode] = {}
        self._begun = 0
        self.counts: Counter[str] = Counter(fragments_dropped=0, gaps=0, episodes_lost=0)

    def __len__(self) -> int:
        return len(self._active)

    def get(self, episode_id: str | None) -> PendingEpisode | None:
        """Returns the episode of an id; ``None`` if it is not in flight."""
        return None if episode_id is None else self._active.get(episode_id)

    def begin(self, episode_id: str, episode: PendingEpisode) -> None:
        self._begun += 1
        episode.number = self._begun
        self._active[episode_id] = episode

    def rename(self, episode_id: str, new_id: str) -> int:
        """Continues an episode without steps under another id; returns its level."""
        episode = self._active.pop(episode_id)
        self.begin(new_id, episode)
        return episode.level_id

    def lose(self, *episode_ids: str) -> list[PendingEpisode]:
        """Removes episodes without a score; returns those that were in flight."""
        lost = [self._active.pop(name) for name in episode_ids if name in self._active]
        self.counts["episodes_lost"] += len(lost)
        return lost

    def lose_runner(self, runner: int) -> list[PendingEpisode]:
        return self.lose(*(name for name, episode in self._active.items() if episode.player[0] == runner))

    def lose_excess(self, player: Player) -> list[PendingEpisode]:
        """Removes the oldest episodes of an environment beyond ``max_pending``."""
        pending = [name for name, episode in self._active.items() if episode.player == player]
        return self.lose(*pending[: max(len(pending) - self._max_pending, 0)])

    def clear(self) -> None:
        """Removes all episodes, as after a resume, and keeps the counts."""
        self._active.clear()

    def take(self, fragments: Iterable[Fragment]) -> tuple[list[tuple[PendingEpisode, Fragment]], list[PendingEpisode]]:
        """Assigns fragments to episodes; drops and counts those of unknown episodes and duplicates.

        Returns:
            Fragments to learn from, each with its episode, ends last; and the episodes dropped without a score.
        """
        learned: list[tuple[PendingEpisode, Fragment]] = []
        newest: dict[Player, int] = {}
        for fragment in fragments:
            episode = self._active.get(fragment.episode_id)
            if episode is None or fragment.t_started in episode.first_steps:
                self.counts["fragments_dropped"] += 1
                continue
            newest[episode.player] = max(newest.get(episode.player, 0), episode.number)
            episode.first_steps.add(fragment.t_started)
            episode.steps += len(fragment)
            if fragment.is_done:
                episode.last = fragment
            else:
                learned.append((episode, fragment))
            if episode.last is not None and episode.steps == episode.last.t_started + len(episode.last):
                learned.append((self._active.pop(fragment.episode_id), episode.last))
        overtaken = [(name, one) for name, one in self._active.items() if one.number < newest.get(one.player, 0)]
        late: list[str] = []
        for name, episode in overtaken:
            episode.lag += 1
            if episode.lag > self._max_lag and episode.last is not None:
                learned.append((self._active.pop(name), episode.last))
                self.counts["gaps"] += 1
            elif episode.lag > self._max_lag:
                late.append(name)
        return learned, self.lose(*late)
