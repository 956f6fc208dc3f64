# SPDX-License-Identifier: Apache-2.0
"""Levels without scores: drawn uniformly, or one after the other. The baselines of level replay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict

from lightning_replay.levels.level_ids import LARGEST_SEED, checked_level_id, checked_level_ids
from lightning_replay.levels.level_source import LevelSource
from lightning_replay.levels.running_levels import Actor, RunningLevel, Segment

__all__ = ["SequentialLevels", "UniformLevels"]


class _Unscored(LevelSource):
    """Chooses without feedback."""

    def __init__(self, levels: int | Iterable[int] | None) -> None:
        super().__init__()
        self._ids = None if levels is None else checked_level_ids(levels)
        self._members = None if self._ids is None else frozenset(self._ids)
        self._episodes = 0

    @property
    def episodes(self) -> int:
        """Episodes that all actors began."""
        return self._episodes

    def __len__(self) -> int:
        """0: no level has a score."""
        return 0

    def next_level(self, actor: Actor) -> int:
        """The level an actor plays from now on."""
        level_id = self._choose()
        self._note(actor, level_id)
        return level_id

    def start(self, actor: Actor, level_id: int) -> None:
        """Notes that an actor plays a level that another chose for it.

        Raises:
            ValueError: none of the levels.
        """
        whole = checked_level_id(level_id)
        if self._members is not None and whole not in self._members:
            raise ValueError(f"level {whole} is none of the {len(self._members)} levels that were given")
        self._note(actor, whole)

    def _note(self, actor: Actor, level_id: int) -> None:
        self._begin(actor, RunningLevel(level_id, self._episodes + 1, replayed=False, trains=True))
        self._episodes += 1

    def _choose(self) -> int:
        raise NotImplementedError

    def _learn(self, episode: RunningLevel, segment: Segment, is_done: bool) -> None:
        """Nothing."""

    def probabilities(self) -> TensorDict:
        """No level: none has a score."""
        whole, real = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
        columns = {"level_id": whole, "probability": real, "score": real.clone(), "staleness": whole.clone()}
        return TensorDict(columns, [0])

    def state_dict(self) -> dict[str, Any]:
        """Counters, levels in flight and where the choice stands."""
        return super().state_dict() | {
            "episodes": self._episodes,
            "count": None if self._ids is None else len(self._ids),
        }

    def _load(self, state: dict[str, Any]) -> None:
        count = None if self._ids is None else len(self._ids)
        if state["count"] != count:
            raise ValueError(f"the saved choice is among {state['count']} levels, this one among {count}")
        self._episodes = int(state["episodes"])


class UniformLevels(_Unscored):
    """Each level with the same chance: domain randomisation, the baseline every method is compared with.

    Args:
        levels: distinct ids, or their number for 0, 1, 2, ...; ``None`` for any id below 2^31.
        seed: of its own generator; ``None`` seeds it from torch's global generator.

    Raises:
        ValueError: negative ids, or one twice.
    """

    def __init__(self, levels: int | Iterable[int] | None, seed: int | None = None) -> None:
        super().__init__(levels)
        self.generator = torch.Generator()
        self.generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)

    def _choose(self) -> int:
        drawn = int(torch.randint(LARGEST_SEED if self._ids is None else len(self._ids), (), generator=self.generator))
        return drawn if self._ids is None else self._ids[drawn]

    def state_dict(self) -> dict[str, Any]:
        """Counters, levels in flight and generator."""
        return super().state_dict() | {"generator": self.generator.get_state()}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self.generator.set_state(state["generator"].cpu())


class SequentialLevels(_Unscored):
    """One level after the other, again and again.

    Args:
        levels: distinct ids, or their number for 0, 1, 2, ...

    Raises:
        ValueError: negative ids, or one twice.
    """

    def __init__(self, levels: int | Iterable[int]) -> None:
        super().__init__(levels)
        self._next = 0

    def _choose(self) -> int:
        assert self._ids is not None
        level_id = self._ids[self._next]
        self._next = (self._next + 1) % len(self._ids)
        return level_id

    def state_dict(self) -> dict[str, Any]:
        """Counters, levels in flight and place in the sequence."""
        return super().state_dict() | {"next": self._next}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._next = int(state["next"])
