# SPDX-License-Identifier: Apache-2.0
"""Levels from a source that is read as they are needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lightning_replay.levels.buffer import LevelBuffer
from lightning_replay.options import check_kind, checked_count, checked_optional_count

__all__ = ["LevelStream"]


class LevelStream:
    """Adds levels from a source to a :class:`LevelBuffer` as new ones run out, and retires the least likely.

    For prompts that are not known beforehand, such as an iterable data set of Hugging Face's ``datasets``. Give it to
    :class:`LevelBatchSampler`, or call :meth:`top_up` before each draw.

    Args:
        levels: Buffer of a :class:`LevelSet`, which has the first objects of the source.
        source: Objects that follow the objects of the set, an iterable in a fixed order.
        num_new: Number of levels without a score that are kept ready, at least as many as a batch needs.
        capacity: Largest number of levels with a score. The least likely of more are retired, never those in flight.
            ``None`` keeps all.

    Raises:
        TypeError: ``levels`` is no buffer of a :class:`LevelSet`.

    Example:
        >>> from lightning_replay.levels import LevelSet
        >>> from lightning_replay.levels.scores import Learnability
        >>> prompts = (f"{number} + 1 =" for number in itertools.count())
        >>> levels = LevelBuffer(LevelSet(itertools.islice(prompts, 8)), score=Learnability(), seed=0)
        >>> stream = LevelStream(levels, prompts, num_new=8)
        >>> levels.record(levels.next_levels(4), outcomes=[0.0, 1.0, 0.0, 1.0]).shape
        torch.Size([4])
        >>> stream.top_up()
        [8, 9, 10, 11]
    """

    def __init__(
        self, levels: LevelBuffer, source: Iterable[Any], *, num_new: int, capacity: int | None = None
    ) -> None:
        check_kind("levels", levels, LevelBuffer, "a LevelBuffer of a LevelSet")
        if levels.levels is None:
            raise TypeError("levels has ids and no objects; build LevelBuffer(LevelSet(...)) of the first objects")
        check_kind("source", source, Iterable, "an iterable of objects, such as a data set")
        self.levels: LevelBuffer = levels
        self.num_new: int = checked_count("num_new", num_new, of="levels")
        self.capacity: int | None = checked_optional_count("capacity", capacity)
        self._source: Iterator[Any] = iter(source)

    def top_up(self) -> list[int]:
        """Adds levels until ``num_new`` have no score, or the source ends, and returns their ids."""
        levels = self.levels
        missing = self.num_new - (levels.num_unseen or 0)
        new = [*itertools.islice(self._source, max(missing, 0))]
        added = levels.add(new) if new else []
        if self.capacity is not None and len(levels) > self.capacity:
            known = levels.probabilities()
            level_ids = known["level_id"].numpy()
            is_free = ~np.isin(level_ids, [*levels.running.played])
            # Of equally likely levels, the one that was drawn last leaves first.
            order = np.lexsort((known["staleness"].numpy(), known["probability"].numpy()))
            leaving = level_ids[order[is_free[order]]][: len(levels) - self.capacity]
            if len(leaving):
                levels.retire(leaving)
        return added

    def state_dict(self) -> dict[str, Any]:
        """Returns how many objects were read. The levels have a separate state."""
        assert self.levels.levels is not None
        return {"objects": len(self.levels.levels)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reads the objects again that were read before the save. Load the levels after it.

        Raises:
            ValueError: The source ends before.
        """
        known = self.levels.levels
        assert known is not None
        missing = int(state["objects"]) - len(known)
        new = [*itertools.islice(self._source, max(missing, 0))]
        if len(new) < missing:
            raise ValueError(f"the source ended after {len(known) + len(new)} of {state['objects']} saved objects")
        if new:
            self.levels.add(new)
