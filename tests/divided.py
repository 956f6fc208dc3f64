# SPDX-License-Identifier: Apache-2.0
"""Replays over which draws are divided, beside one that holds the rows of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from lightning_replay.divided_draws import Divider, Division, GroupTotals
from lightning_replay.replay import Replay
from lightning_replay.storage import occupancy_of
from tests.event_steps import event_steps

EVENTS = ["goal"]


def episode(first: int, length: int) -> TensorDict:
    """Steps numbered from ``first`` in the column ``action``; the goal is at the last of every episode of four steps
    or more."""
    return event_steps(first, length, {length - 1: {"goal"}} if length >= 4 else {}, EVENTS)


def give_priorities(replay: Replay, priority: torch.Tensor) -> None:
    slots = occupancy_of(replay.storage).slots()
    if len(slots):
        replay.update_priority(slots, priority[replay.storage.get(slots)["action"]])


class Shards:
    """Episodes of these lengths in several replays, changed by ``prepare``, and all of them in :attr:`whole`."""

    def __init__(
        self,
        build: Callable[[], Replay],
        lengths: Sequence[Sequence[int]],
        prepare: Callable[[TensorDict, int], TensorDict] = lambda steps, number: steps,
    ) -> None:
        self.replays, self.whole = [build() for _ in lengths], build()
        self.divider = Divider(build().sampler, seed=5)
        self.owner: list[int] = []  # of each row, by number
        self._prepare, self._episodes = prepare, 0
        for shard, of_shard in enumerate(lengths):
            for length in of_shard:
                self.extend(shard, length)

    def extend(self, shard: int, length: int) -> None:
        steps = self._prepare(episode(len(self.owner), length), self._episodes)
        self.replays[shard].extend(steps)
        self.whole.extend(steps)
        self.owner += [shard] * length
        self._episodes += 1

    def give_priorities(self, priority: torch.Tensor) -> None:
        for replay in (*self.replays, self.whole):
            give_priorities(replay, priority)

    def totals(self) -> list[GroupTotals | None]:
        return [replay.group_totals() for replay in self.replays]

    def draw(
        self, batch_size: int, totals: Sequence[GroupTotals | None] | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Numbers of drawn rows, int64 ``[B]``, and the columns ``table`` and of the divider."""
        return self.weighed(*self.drawn(batch_size, self.totals() if totals is None else totals))

    def drawn(self, batch_size: int, totals: Sequence[GroupTotals | None]) -> tuple[Division, list[Any]]:
        division = self.divider.divide(batch_size, totals)
        asked = zip(self.replays, division.parts, strict=True)
        return division, [replay.sample_shard(part) if len(part) else None for replay, part in asked]

    def weighed(self, division: Division, drawn: list[Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Completes what :meth:`drawn` returned."""
        batches = [one[0] for one in drawn if one is not None]
        columns = self.divider.weigh(division, [None if one is None else one[1] for one in drawn])
        if batches[0].get("table", None) is not None:
            columns["table"] = torch.cat([batch["table"] for batch in batches]).numpy()
        return torch.cat([batch["action"] for batch in batches]).numpy(), columns

    def draw_many(
        self, draws: int, batch_size: int, totals: Sequence[GroupTotals | None] | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Draws batches by the same totals, and joins them."""
        totals = self.totals() if totals is None else totals
        batches = [self.draw(batch_size, totals) for _ in range(draws // batch_size)]
        numbers = np.concatenate([numbers for numbers, _ in batches])
        return numbers, {key: np.concatenate([columns[key] for _, columns in batches]) for key in batches[0][1]}
