# SPDX-License-Identifier: Apache-2.0
"""Batches of levels for a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from torch.utils.data import Sampler

from lightning_replay.levels.selector import LevelSelector
from lightning_replay.options import check_kind, checked_count, checked_optional_count

__all__ = ["LevelBatchSampler"]


class LevelBatchSampler(Sampler[list[int]]):
    """Batches of level ids, drawn when they are needed: ``DataLoader(level_set, batch_sampler=...)``.

    Workers that prefetch only fetch the objects: all draws are in the process of the DataLoader, from the scores that
    :meth:`~lightning_replay.levels.LevelBuffer.record` has until then. Call it for baselines too: it ends the draws. A
    new iteration gives up all draws without a score; nothing else may draw batches from ``levels`` meanwhile.

    Save ``levels`` and this sampler, or torchdata's ``StatefulDataLoader`` of it, at the same time. After both are
    loaded, the batches without a score come first, then those of a run without a break; of a batch recorded in part the
    rest is given up. After the last batch a new iteration follows. Levels are not shared between processes: with
    several of them each draws from, and records for, levels of its own, which need different seeds.

    Args:
        levels: A :class:`~lightning_replay.levels.LevelBuffer` or a baseline.
        batch_size: Number of levels in a batch, all different.
        num_batches: Number of batches in one iteration; ``None`` for no end.

    Raises:
        TypeError, ValueError: ``levels`` is no level selector, or has fewer levels than a batch.
    """

    def __init__(self, levels: LevelSelector, batch_size: int, num_batches: int | None = None) -> None:
        check_kind("levels", levels, LevelSelector, "a level selector, such as LevelBuffer(...)")
        self.levels: LevelSelector = levels
        self.batch_size: int = checked_count("batch_size", batch_size, of="levels")
        levels.check_draw(self.batch_size, replace=False)
        self.num_batches: int | None = checked_optional_count("num_batches", num_batches)
        self._drawn = 0  # batches of the newest iteration
        self._loaded: int | None = None  # episode before the iteration of a loaded state

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("num_batches is None: the batches have no end; give num_batches to LevelBatchSampler")
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        if (
            self._loaded is None
        ):  # The state is kept until the first batch, because a DataLoader makes iterators that it never uses.
            self._drawn = 0
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        begun = self._loaded
        self._loaded = None
        draws = groupby(self.levels.running.draws(), itemgetter(0))
        waiting = {first: [level_id for *_, level_id in batch] for first, batch in draws}
        again: list[list[int]] = []
        drawn = 0
        if begun is not None:  # also those that workers have drawn since the state
            if begun > self.levels.episodes:
                raise ValueError("the state of the sampler is loaded and that of its levels is not; load both")
            whole = [first for first, ids in waiting.items() if first > begun and len(ids) == self.batch_size]
            again = list(map(waiting.pop, whole))
            drawn = (self.levels.episodes - begun) // self.batch_size
        for first, rest in waiting.items():
            for level_id in rest:
                self.levels.end_draw(level_id, first)
        if not again and drawn == self.num_batches:
            drawn = 0
        self._drawn = drawn
        yield from again
        while self.num_batches is None or drawn < self.num_batches:
            batch = self.levels.next_levels(self.batch_size).tolist()
            self._drawn = drawn = drawn + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the iteration; the batches that await their scores are in the state of ``levels``."""
        begun = self._loaded
        if begun is None:
            begun = self.levels.episodes - self._drawn * self.batch_size
        return {"begun": begun, "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`; load the levels, too. ``ValueError`` for the state of another object."""
        if state.get("batch_size") != self.batch_size or "begun" not in state:
            raise ValueError(f"the state is {state}; give that of a LevelBatchSampler of batch_size {self.batch_size}")
        self._loaded = int(state["begun"])
