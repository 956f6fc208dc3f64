# SPDX-License-Identifier: Apache-2.0
"""What a level buffer holds, from its state: scores, staleness and replay probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lightning_replay.levels.concentration import effective_number
from lightning_replay.report.reading import array_of


class LevelContents(NamedTuple):
    """The levels that have a score, ascending by id. Arrays are ``[L]``.

    ``staleness`` counts episodes since each level was played; ``probability``, of being replayed next, is ``None`` in
    saves of earlier versions. ``kind`` is the class, ``counters`` have episodes, replays and the like.
    """

    kind: str
    capacity: int | None
    level_ids: np.ndarray
    score: np.ndarray
    staleness: np.ndarray
    probability: np.ndarray | None
    counters: dict[str, int]

    def __len__(self) -> int:
        return len(self.level_ids)

    @property
    def effective_levels(self) -> float | None:
        """Effective number of levels that are replayed; ``None`` if no probabilities are known."""
        has_mass = self.probability is not None and len(self) and self.probability.sum() > 0
        return effective_number(self.probability) if has_mass and self.probability is not None else None


def levels_of(state: Mapping[str, Any]) -> LevelContents:
    """Returns what a level source holds, from its ``state_dict()``; one without scores has no levels.

    Raises:
        KeyError: not the state of a level source.
    """
    kind = str(state["kind"])
    sampler, writer = state.get("sampler"), state.get("writer")
    counters = {"episodes in flight": len(state["running"]["actors"])} if "running" in state else {}
    if not isinstance(sampler, Mapping) or not isinstance(writer, Mapping):
        none = np.zeros(0)
        return LevelContents(kind, state.get("capacity"), none.astype(np.int64), none, none, None, counters)
    level_ids = array_of(writer["level_id"])
    order = np.argsort(level_ids, kind="stable")
    episodes = int(sampler["episodes"])
    probability = sampler.get("probability")
    return LevelContents(
        kind=kind,
        capacity=int(state["capacity"]),
        level_ids=level_ids[order],
        score=array_of(sampler["score"])[order],
        staleness=(episodes - array_of(sampler["timestamp"]))[order],
        probability=None if probability is None else array_of(probability)[order],
        counters={
            "episodes": episodes,
            "episodes that replayed a level": int(state["replayed"]),
            **counters,
            "levels refused": int(writer["refused"]),
            "levels replaced": int(writer["replaced"]),
        },
    )
