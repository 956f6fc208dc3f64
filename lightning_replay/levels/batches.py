# SPDX-License-Identifier: Apache-2.0
"""Batches of levels for a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import Any

from torch.utils.data import Sampler

from lightning_replay.levels.ranks import Ranks
from lightning_replay.levels.selector import LevelSelector
from lightning_replay.levels.streams import LevelStream
from lightning_replay.options import check_kind, checked_count, checked_flag, checked_optional_count

__all__ = ["LevelBatchSampler"]


class LevelBatchSampler(Sampler[list[int]]):
    """Batches of level ids, drawn when they are needed: ``DataLoader(level_set, batch_sampler=...)``.

    Workers that prefetch only fetch the objects: all draws are in the process of the DataLoader, from the scores that
    :meth:`~lightning_replay.levels.LevelBuffer.record` has until then. Call it for baselines too: it ends the draws. A
    new iteration gives up all draws without a score. Nothing else may draw batches from ``levels`` meanwhile.

    Several processes of one training run share the levels: one batch is drawn for all, from one state, and each process
    gets its part. Build ``levels`` of the same set in each process. An iteration begins with the state of rank 0, and
    ``levels.record`` gathers what all processes give, so call it equally often in each. A process that fails in between
    leaves the others waiting, as in any call of ``torch.distributed``.

    Save ``levels`` and this sampler, or torchdata's ``StatefulDataLoader`` of it, at the same time, in one process or
    in each. After both are loaded, the batches without a score come first, then the batches of a run without a break.
    If a batch was recorded in part, the rest of it is given up. After the last batch a new iteration follows. The
    number of processes may have changed, if the batches of all together have as many levels.

    Args:
        levels: A :class:`~lightning_replay.levels.LevelBuffer` or a baseline.
        batch_size: Number of entries in the batch of one process. It counts different levels, or with ``group_size``
            levels times attempts.
        num_batches: Number of batches in one iteration, or ``None`` for no end.
        rank: Number of this process. If absent, ``torch.distributed`` gives the number, see
            :meth:`~lightning_replay.levels.LevelSelector.share`.
        world_size: Number of processes.
        divides: Whether each process gets its part of the batch. If not, each gets the whole batch, of ``batch_size``
            entries, because the trainer divides it (TRL).
        process_group: Processes of ``torch.distributed`` that share the levels, or ``None`` for all.
        group_size: Number of times that each level is repeated, one after the other. A process always gets whole
            groups. If its ``batch_size`` is no multiple of a group, its batch is larger or smaller than the batch of
            others.
        stream: :class:`LevelStream` of ``levels``, which gets its turn before each draw.
        expire_after: Number of later draws after which a draw ends that nobody recorded, see
            :attr:`~lightning_replay.levels.LevelSelector.expire_after`, which it sets.

    Raises:
        TypeError, ValueError: ``levels`` is no level selector, or has fewer levels than a batch, or the batch of all
            processes is no whole number of groups.
        RuntimeError: Several processes were started and are not connected yet.
    """

    def __init__(
        self,
        levels: LevelSelector,
        batch_size: int,
        num_batches: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        divides: bool = True,
        process_group: Any = None,
        group_size: int = 1,
        stream: LevelStream | None = None,
        expire_after: int | None = None,
    ) -> None:
        check_kind("levels", levels, LevelSelector, "a level selector, such as LevelBuffer(...)")
        self.levels: LevelSelector = levels
        self.group_size: int = checked_count("group_size", group_size)
        self.batch_size: int = checked_count("batch_size", batch_size, of="entries")
        self.num_batches: int | None = checked_optional_count("num_batches", num_batches)
        self._processes = {
            "rank": rank,
            "world_size": world_size,
            "divides": checked_flag("divides", divides),
            "process_group": process_group,
        }
        if stream is not None:
            check_kind("stream", stream, LevelStream, "a LevelStream of these levels")
            if stream.levels is not levels:
                raise ValueError("stream adds levels to another buffer; build LevelStream(levels, ...) of this one")
        self.stream: LevelStream | None = stream
        if expire_after is not None:
            levels.expire_after = checked_count("expire_after", expire_after, of="draws")
        self._drawn = 0  # batches of the newest iteration
        self._loaded: int | None = None  # episode before the iteration of a loaded state
        levels.check_draw(max(self.batch_size // self.group_size, 1), replace=False)
        if world_size is not None:
            self._count_levels(Ranks.find(**self._processes))

    def _count_levels(self, ranks: Ranks) -> int:
        """Returns the number of levels in the batch of all processes."""
        entries = self.batch_size * (ranks.world_size if ranks.divides else 1)
        if entries % self.group_size:
            raise ValueError(
                f"batch_size is {self.batch_size} in {ranks.world_size} processes, and group_size is "
                f"{self.group_size}; the entries of all processes together must be whole groups"
            )
        self.levels.check_draw(entries // self.group_size, replace=False)
        return entries // self.group_size

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("num_batches is None: the batches have no end; give num_batches to LevelBatchSampler")
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        # The state is kept until the first batch, because a DataLoader makes iterators that it never uses.
        if self._loaded is None:
            self._drawn = 0
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        levels = self.levels
        ranks = levels.share(**self._processes)
        sizes = ranks.gather(lambda: self._count_levels(ranks))
        size = sizes[0]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the processes draw batches of {sizes} levels, by rank; give each process the same batch_size and "
                "group_size"
            )
        begun = ranks.from_first(self._loaded)
        self._loaded = None
        draws = groupby(levels.running.draws(), itemgetter(0))
        waiting = {first: [level_id for *_, level_id in batch] for first, batch in draws}
        again: list[list[int]] = []
        drawn = 0
        if begun is not None:  # also the draws of workers since the state
            if begun > levels.episodes:
                raise ValueError("the state of the sampler is loaded and that of its levels is not; load both")
            whole = [first for first, ids in waiting.items() if first > begun and len(ids) == size]
            again = list(map(waiting.pop, whole))
            drawn = (levels.episodes - begun) // size
        for first, rest in waiting.items():
            for level_id in rest:
                levels.end_draw(level_id, first)
        if not again and drawn == self.num_batches:
            drawn = 0
        self._drawn = drawn
        for batch in again:
            yield self._entries(batch, ranks)
        while self.num_batches is None or drawn < self.num_batches:
            if self.stream is not None:
                self.stream.top_up()
            batch = levels.draw_batch(size)
            self._drawn = drawn = drawn + 1
            yield self._entries(batch, ranks)

    def _entries(self, batch: list[int], ranks: Ranks) -> list[int]:
        return list(chain.from_iterable(repeat(level_id, self.group_size) for level_id in ranks.part(batch)))

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the iteration. The batches that await their scores are in the state of ``levels``."""
        size = self._count_levels(Ranks.find(**self._processes))
        begun = self._loaded
        if begun is None:
            begun = self.levels.episodes - self._drawn * size
        return {"begun": begun, "batch_size": size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`. Load the levels, too. ``ValueError`` for the state of another object."""
        size = self._count_levels(Ranks.find(**self._processes))
        if state.get("batch_size") != size or "begun" not in state:
            raise ValueError(
                f"the state is {dict(state)!r:.80}, and the batches of all processes together have {size} levels here; "
                "give the state of a LevelBatchSampler, and a batch_size with which the batches of all processes have "
                "as many levels as before"
            )
        self._loaded = int(state["begun"])
