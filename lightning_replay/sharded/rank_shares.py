# SPDX-License-Identifier: Apache-2.0
"""One batch for several processes that train together, each of which gets its share."""

from __future__ import annotations

import numpy as np

from lightning_replay.sharded.remote_rows import DrawnRows


class RankShares:
    """Collects the requests of ranks for the next batch, and keeps their shares until they are taken.

    A rank requests the next batch by :meth:`missing` and takes its share with :meth:`take`; once all have requested it,
    it is drawn and given to :meth:`divide`.

    Example:
        >>> shares = RankShares()
        >>> shares.enter(2)
        >>> shares.missing(0, 2), shares.missing(1, 2)
        ([1], [])
    """

    def __init__(self) -> None:
        self._world_size = 1
        self._asking: set[int] = set()
        self._shares: dict[int, DrawnRows] = {}

    def enter(self, world_size: int) -> None:
        """Begins anew with as many ranks."""
        self._world_size = world_size
        self.clear()

    def clear(self) -> None:
        """Discards requests and shares."""
        self._asking.clear()
        self._shares.clear()

    def missing(self, rank: int, world_size: int) -> list[int]:
        """Returns the ranks that have not requested the batch that this one requests.

        Raises:
            ValueError: another number of ranks than entered last.
        """
        if world_size != self._world_size:
            raise ValueError(
                f"rank {rank} shares draws with {world_size} ranks, and {self._world_size} entered since; call "
                "for_rank in every rank before the first of them draws"
            )
        self._asking.add(rank)
        return sorted(set(range(world_size)) - self._asking)

    def divide(self, drawn: DrawnRows) -> None:
        """Divides a batch over the ranks, in order."""
        ends = np.linspace(0, len(drawn), self._world_size + 1).astype(int).tolist()
        self._shares = {rank: drawn.cut(*ends[rank : rank + 2]) for rank in range(self._world_size)}
        self._asking.clear()

    def take(self, rank: int) -> DrawnRows | None:
        """Returns a rank's share, once; ``None`` if it has none."""
        return self._shares.pop(rank, None)
