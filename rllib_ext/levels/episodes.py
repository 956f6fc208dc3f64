# SPDX-License-Identifier: Apache-2.0
"""Episodes that environments play, and their fragments, which may come late, twice, out of order or not at all."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from rllib_ext.levels.fragment import Fragment

Player = tuple[int, int]  # index of the EnvRunner, and of the environment on it


@dataclasses.dataclass
class Episode:
    """An episode that was begun and is not scored yet.

    Attributes:
        actor: its name in the level buffer.
        level_id: what is played.
        player: who plays it.
        number: among all episodes, in the order in which they began.
        pieces: first steps of the fragments that came.
        steps: that came.
        last: the fragment that ends it, kept until all steps before it have come.
        overtaken: how often fragments came of what its environment played later.
    """

    actor: str
    level_id: int
    player: Player
    number: int = 0
    pieces: set[int] = dataclasses.field(default_factory=set)
    steps: int = 0
    last: Fragment | None = None
    overtaken: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all steps are there."""
        return self.last is not None and self.steps == self.last.t_started + len(self.last)


class Episodes:
    """Who plays what, by RLlib's identity of the episode.

    A score is a mean over steps, so that fragments count in whichever order they come. The one that ends the episode
    counts last: with several Learners it may overtake others, and waits for them. What is missing is given up once
    fragments of what the environment played later came ``patience`` times.

    Args:
        patience: see above.
        most: episodes of one environment that may be unscored; the oldest is given up first.

    Attributes:
        counts: ``fragments_dropped``, of episodes that nobody knows or that came twice; ``gaps``, scored episodes of
            which a fragment never came; ``episodes_lost``, given up without a score.
    """

    def __init__(self, patience: int, most: int) -> None:
        self._patience, self._most = patience, most
        self._known: dict[str, Episode] = {}
        self._played: dict[Player, dict[str, Episode]] = {}
        self._begun = 0
        self.counts: Counter[str] = Counter(fragments_dropped=0, gaps=0, episodes_lost=0)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, episode_id: str | None) -> Episode | None:
        """The episode of this identity, if it is known."""
        return None if episode_id is None else self._known.get(episode_id)

    def begin(self, episode_id: str, episode: Episode) -> None:
        """Notes an episode that begins."""
        self._begun += 1
        episode.number = self._begun
        self._known[episode_id] = episode
        self._played.setdefault(episode.player, {})[episode_id] = episode

    def rename(self, episode_id: str, new_id: str) -> int:
        """An episode without steps goes on under another identity; its level."""
        episode = self._forget(episode_id)
        self.begin(new_id, episode)
        return episode.level_id

    def lose(self, *episode_ids: str) -> list[Episode]:
        """Gives episodes up without a score; those that were known."""
        lost = [self._forget(name) for name in episode_ids if name in self._known]
        self.counts["episodes_lost"] += len(lost)
        return lost

    def lose_runner(self, runner: int) -> list[Episode]:
        """Gives up what an EnvRunner plays."""
        return self.lose(*(name for name, episode in self._known.items() if episode.player[0] == runner))

    def lose_excess(self, player: Player) -> list[Episode]:
        """Gives up the oldest episodes of an environment that has too many."""
        played = list(self._played.get(player, ()))
        return self.lose(*played[: max(len(played) - self._most, 0)])

    def clear(self) -> None:
        """Forgets all episodes, as after a resume; the counts stay."""
        self._known.clear()
        self._played.clear()

    def take(self, fragments: Iterable[Fragment]) -> tuple[list[tuple[Episode, Fragment]], list[Episode]]:
        """What to learn from fragments, each with its episode, ends last; and the episodes given up without a score.

        Fragments of unknown episodes, and those that came before, are dropped and counted.
        """
        learned: list[tuple[Episode, Fragment]] = []
        newest: dict[Player, int] = {}
        for fragment in fragments:
            episode = self._known.get(fragment.episode_id)
            if episode is None or fragment.t_started in episode.pieces:
                self.counts["fragments_dropped"] += 1
                continue
            newest[episode.player] = max(newest.get(episode.player, 0), episode.number)
            episode.pieces.add(fragment.t_started)
            episode.steps += len(fragment)
            if fragment.is_done:
                episode.last = fragment
            else:
                learned.append((episode, fragment))
            if episode.is_complete:
                learned.append(self._end(fragment.episode_id))
        return self._give_up(newest, learned)

    def _give_up(
        self, newest: dict[Player, int], learned: list[tuple[Episode, Fragment]]
    ) -> tuple[list[tuple[Episode, Fragment]], list[Episode]]:
        """Adds episodes that have waited too long for a fragment, and finds those whose end does not come."""
        late: list[str] = []
        for player, number in newest.items():
            for name, episode in self._played.get(player, {}).items():
                if episode.number < number:
                    episode.overtaken += 1
                    if episode.overtaken > self._patience:
                        late.append(name)
        for name in late:
            if self._known[name].last is not None:
                learned.append(self._end(name))
                self.counts["gaps"] += 1
        return learned, self.lose(*late)

    def _end(self, episode_id: str) -> tuple[Episode, Fragment]:
        episode = self._forget(episode_id)
        assert episode.last is not None
        return episode, episode.last

    def _forget(self, episode_id: str) -> Episode:
        episode = self._known.pop(episode_id)
        played = self._played[episode.player]
        del played[episode_id]
        if not played:
            del self._played[episode.player]
        return episode
