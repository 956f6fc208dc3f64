# SPDX-License-Identifier: Apache-2.0
"""Choice of a shard for each episode."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Self


class Router:
    """Chooses a shard for each new episode: that which has got the fewest steps from here.

    All fragments of an episode go to the same shard, so that links, histories and returns stay inside it. Where several
    have got as many steps, the first one from ``first`` on is taken: those that start together begin with different
    shards.

    At most ``remembered`` running episodes are; the one continued longest ago, whose end never came, is removed first.

    Example:
        >>> router = Router(num_shards=2)
        >>> fragments = [("a", 5, False), ("b", 3, True), ("a", 1, True), ("c", 1, True)]
        >>> [router.shard_of(name, steps, ended=ended) for name, steps, ended in fragments]
        [0, 1, 0, 1]
    """

    def __init__(self, num_shards: int, first: int = 0, remembered: int = 4096) -> None:
        self._remembered = remembered
        self.num_steps: list[int] = [0] * num_shards
        self._order = [(first + number) % num_shards for number in range(num_shards)]
        self._running: dict[Hashable, int] = {}

    def copied(self) -> Self:
        copied = copy.copy(self)
        copied.num_steps, copied._running = [*self.num_steps], dict(self._running)
        return copied

    def shard_of(self, episode_id: Hashable, num_steps: int, *, ended: bool) -> int:
        """Returns the shard of a fragment of so many steps, which may be the last one of its episode."""
        shard = self._running.pop(episode_id, None)
        if shard is None:
            shard = min(self._order, key=self.num_steps.__getitem__)
        if not ended:
            self._running[episode_id] = shard
            if len(self._running) > self._remembered:
                del self._running[next(iter(self._running))]
        self.num_steps[shard] += num_steps
        return shard
