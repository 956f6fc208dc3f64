# SPDX-License-Identifier: Apache-2.0
"""Processes that train together and choose from one set of levels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as distributed

from lightning_replay.options import checked_count

__all__ = ["Ranks"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """Number of this process among the processes that share a set of levels. See :meth:`find`."""

    rank: int = 0
    world_size: int = 1
    divides: bool = True  #: Whether a process gets its part of a batch, and not the whole batch.
    process_group: Any = None  #: Process group of ``torch.distributed``, or ``None`` for all processes.
    is_connected: bool = False  #: Whether ``torch.distributed`` connects the processes.

    @classmethod
    def find(
        cls, rank: int | None = None, world_size: int | None = None, divides: bool = True, process_group: Any = None
    ) -> Ranks:
        """Returns the given numbers, or the numbers of ``torch.distributed`` if they are absent.

        Raises:
            ValueError: Only one of both is given, or the rank is not below ``world_size``.
            RuntimeError: A launcher started several processes that are not connected yet, or ``process_group`` is given
                without a connection.
        """
        is_connected = distributed.is_available() and distributed.is_initialized()
        if rank is None and world_size is None:
            if is_connected:
                size = distributed.get_world_size(process_group)
                return cls(distributed.get_rank(process_group), size, divides, process_group, size > 1)
            launched = os.environ.get("WORLD_SIZE", "1")
            if process_group is not None or launched not in ("", "1"):
                raise RuntimeError(
                    f"WORLD_SIZE is {launched} and torch.distributed is not initialized, so that this process does not "
                    "know its part of the levels; call torch.distributed.init_process_group() before the first draw, "
                    "or give rank= and world_size= (rank=0, world_size=1 for levels of this process alone)"
                )
            return cls(divides=divides)
        if rank is None or world_size is None:
            raise ValueError(f"rank is {rank} and world_size is {world_size}; give both, or none of them")
        size = checked_count("world_size", world_size)
        own = checked_count("rank", rank, 0)
        if own >= size:
            raise ValueError(f"rank is {rank} and world_size is {world_size}; ranks are counted from 0 to {size - 1}")
        # Numbers that differ from the connection's numbers are of processes that it does not connect.
        connects = is_connected and (
            distributed.get_rank(process_group),
            distributed.get_world_size(process_group),
        ) == (own, size)
        return cls(own, size, divides, process_group, connects and size > 1)

    def part(self, items: Sequence[_T]) -> Sequence[_T]:
        """Returns the items of this process, as many as of any other or one fewer."""
        if not self.divides:
            return items
        first = len(items) * self.rank // self.world_size
        last = len(items) * (self.rank + 1) // self.world_size
        return items[first:last]

    def gather(self, read: Callable[[], _T]) -> list[_T]:
        """Returns what ``read`` returns in each process, in the order of ranks.

        Raises:
            ValueError, TypeError: ``read`` raised in this process.
            RuntimeError: ``read`` raised in another process, which then raises its own error.
        """
        if not self.is_connected:
            return [read()]
        mine: tuple[Any, str] = (None, "")
        failure: Exception | None = None
        try:
            mine = (read(), "")
        except (TypeError, ValueError) as error:
            failure = error
            mine = (None, str(error))
        every: list[Any] = [None] * self.world_size
        distributed.all_gather_object(every, mine, group=self.process_group)
        if failure is not None:
            raise failure
        for rank, (_, refusal) in enumerate(every):
            if refusal:
                raise RuntimeError(f"rank {rank} refused its values, and nothing was changed in any process: {refusal}")
        return [value for value, _ in every]

    def from_first(self, value: _T) -> _T:
        """Returns the value of the process of rank 0."""
        if not self.is_connected:
            return value
        given = [value]
        source = 0 if self.process_group is None else distributed.get_global_rank(self.process_group, 0)
        distributed.broadcast_object_list(given, src=source, group=self.process_group)
        return given[0]
