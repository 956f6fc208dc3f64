# SPDX-License-Identifier: Apache-2.0
"""Batches of levels for a DataLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from lightning_replay.levels.selector import LevelSelector
from lightning_replay.options import check_kind, checked_count, checked_optional_count

__all__ = ["LevelBatchSampler"]

_KEPT = 256  # batches that a state may hold; a DataLoader draws prefetch_factor batches ahead for each worker


class LevelBatchSampler(Sampler[list[int]]):
    """Batches of level ids, drawn when they are needed: ``DataLoader(level_set, batch_sampler=...)``.

    Workers that prefetch only fetch the objects: all draws are in the process of the DataLoader, from the scores that
    :meth:`~lightning_replay.levels.LevelBuffer.record` has until then. Save ``levels`` and this sampler together: after
    both are loaded, batches that were drawn ahead and not recorded come first, and then those of a run without a break.

    Args:
        levels: a :class:`~lightning_replay.levels.LevelBuffer` or a baseline.
        batch_size: levels of a batch, all different.
        num_batches: of one iteration; ``None`` for no end.
    """

    def __init__(self, levels: LevelSelector, batch_size: int, num_batches: int | None = None) -> None:
        check_kind("levels", levels, LevelSelector, "a level selector, such as LevelBuffer(...)")
        self.levels: LevelSelector = levels
        self.batch_size: int = checked_count("batch_size", batch_size, of="levels")
        levels.check_draw(self.batch_size, replace=False)
        self.num_batches: int | None = checked_optional_count("num_batches", num_batches)
        self._drawn = 0
        self._recent: deque[list[int]] = deque(maxlen=_KEPT)
        self._again: deque[list[int]] = deque()  # of a state: drawn before it, and not recorded

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("num_batches is None: the batches have no end; give num_batches to LevelBatchSampler")
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        while self.num_batches is None or self._drawn < self.num_batches or self._again:
            if self._again:
                batch = self._again.popleft()
            else:
                batch = self.levels.next_levels(self.batch_size).tolist()
                self._drawn += 1
            self._recent.append(batch)
            yield batch
        self._drawn = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the iteration and the batches, of the last 256, that await their scores."""
        awaited = self.levels.running.awaited
        waiting = [batch for batch in self._recent if all(level_id in awaited for level_id in batch)]
        return {"drawn": self._drawn, "waiting": [*waiting, *self._again]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`; load the levels, too."""
        self._drawn, self._again = int(state["drawn"]), deque(map(list, state["waiting"]))
        self._recent.clear()
