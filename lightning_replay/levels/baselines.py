# SPDX-License-Identifier: Apache-2.0
"""Baselines of level replay, which use no scores: levels drawn uniformly, or one after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_replay.levels.episodes import ActiveEpisode
from lightning_replay.levels.level_ids import LEVEL_IDS, Actor
from lightning_replay.levels.level_set import LevelSet
from lightning_replay.levels.selector import LevelSelector
from lightning_replay.levels.table import different_places

__all__ = ["SequentialLevels", "UniformLevels"]


class _Unscored(LevelSelector):
    """Chooses levels without feedback."""

    saved_attributes: tuple[str, ...] = ("episodes", "new")
    episodes: int = 0

    def __init__(self, levels: int | Iterable[int] | LevelSet | None) -> None:
        super().__init__(levels)
        self.episodes = 0
        self.new: list[int] = []  #: Levels that were added and not drawn yet, which come first.

    @property
    def _ids(self) -> Sequence[int]:
        return range(LEVEL_IDS) if self.known is None else self.known.ids

    def _enter(self, level_ids: list[int]) -> None:
        self.new += level_ids

    def _remove(self, level_ids: set[int]) -> None:
        self.new = [one for one in self.new if one not in level_ids]

    def _next(self, actor: Actor) -> int:
        level_id = self.new.pop(0) if self.new else self._choose()
        self._play(actor, level_id)
        return level_id

    def _play(self, actor: Actor, level_id: int) -> None:
        self.episodes += 1
        # The learner learns from every episode, because no level has a score.
        self.running.begin(actor, ActiveEpisode(level_id, self.episodes, replayed=False, trains=True))

    def _draw(self, count: int, replace: bool) -> list[int]:
        level_ids = self.new[:count]
        self.new = self.new[count:]
        rest = count - len(level_ids)
        if replace:
            level_ids += [self._choose() for _ in range(rest)]
        elif rest:
            level_ids += self._choose_others(rest, {*level_ids})
        self.running.await_scores(level_ids, self.episodes + 1, self.episodes + 1)
        self.episodes += count
        return level_ids

    @abstractmethod
    def _choose(self) -> int: ...

    @abstractmethod
    def _choose_others(self, count: int, taken: set[int]) -> list[int]:
        """Chooses ``count`` different levels that are not ``taken``."""

    def _restore(self, state: dict[str, Any], translation: Mapping[int, int] | None) -> None:
        super()._restore(state, translation)
        if translation is not None:
            self.new = [translation[one] for one in self.new if one in translation]


class UniformLevels(_Unscored):
    """Draws every level with the same probability: domain randomization, the usual baseline.

    Args:
        levels: Distinct ids, or their number for 0, 1, 2, ..., or ``None`` for any id below 2^31.
        seed: Seed for the selector's generator. If ``None``, it is taken from torch's global generator.

    Raises:
        TypeError, ValueError: No level, one given twice, or an id that is no whole number from 0 on.
    """

    def __init__(self, levels: int | Iterable[int] | LevelSet | None, seed: int | None = None) -> None:
        super().__init__(levels)
        self._seed_generator(seed)

    def _choose(self) -> int:
        return self._ids[int(torch.randint(len(self._ids), (), generator=self._generator, device="cpu"))]

    def _choose_others(self, count: int, taken: set[int]) -> list[int]:
        # So many levels are drawn that enough are left after the taken levels are removed.
        places = different_places(len(self._ids), count + len(taken), self._generator)
        return [self._ids[place] for place in places if self._ids[place] not in taken][:count]


class SequentialLevels(_Unscored):
    """Plays all levels in order, again and again.

    Args:
        levels: Distinct ids, or their number for 0, 1, 2, ...

    Raises:
        TypeError, ValueError: As :class:`UniformLevels`, and also for ``None``.
    """

    saved_attributes: tuple[str, ...] = (*_Unscored.saved_attributes, "place")

    def __init__(self, levels: int | Iterable[int] | LevelSet) -> None:
        if levels is None:
            raise ValueError("levels is None; give ids, or their number for 0, 1, 2, ..., to play one after the other")
        super().__init__(levels)
        self.place: int = 0

    def _choose(self) -> int:
        place = self.place % len(self._ids)  # Levels may have been retired.
        self.place = (place + 1) % len(self._ids)
        return self._ids[place]

    def _choose_others(self, count: int, taken: set[int]) -> list[int]:
        others: list[int] = []
        while len(others) < count:
            level_id = self._choose()
            if level_id not in taken:
                others.append(level_id)
        return others
