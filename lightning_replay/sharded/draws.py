# SPDX-License-Identifier: Apache-2.0
"""Draws batches from shards and returns TD errors to them. Rows wait in the object store until they are fetched."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from lightning_replay.sharded.actors import RemoteShardDraw, ShardActors, joined_errors
from lightning_replay.sharded.rows import NUM_EPOCHS, Block, Columns, cut_blocks, fetched, numbers_of, row_ids_of

if TYPE_CHECKING:
    import ray

    from lightning_replay.divided_draws import Divider, Division, ShardDraw


#: A draw fails if every shard that should draw rows is lost so many times in a row.
_MOST_EMPTY_DRAWS = 10


class DividedDraws:
    """Divides draws over the shards of an algorithm, one draw for each of its modules, and returns TD errors to rows.

    Draws in flight, which ``num_prefetch`` permits, are not part of the state.

    Args:
        actors: Actors of the shards.
        build: Returns the divider of a module.
        clocks: Returns ``env_steps`` and ``updates`` of a draw, given the number of draws that come before it.
        prepare: Receives module and batch size before each division.
        key: Number in the identities of all rows.
    """

    def __init__(
        self,
        actors: ShardActors,
        build: Callable[[str], Divider],
        clocks: Callable[[int], Mapping[str, int]],
        prepare: Callable[[str, int], None] = lambda module_id, batch_size: None,
        key: int = 0,
    ) -> None:
        self._actors = actors
        self._build = build
        self._clocks = clocks
        self._prepare = prepare
        self._key = key
        self.dividers: dict[str, Divider] = {}
        self.in_flight: deque[_InFlight] = deque()

    def divider(self, module_id: str) -> Divider:
        """Returns the divider of a module, which is built when it is first asked for."""
        if module_id not in self.dividers:
            self.dividers[module_id] = self._build(module_id)
        return self.dividers[module_id]

    def draw(self, batch_size: int, *request: Any) -> dict[str, DrawnRows]:
        """Draws ``batch_size`` rows of each module that has rows. ``request`` holds further arguments of the actors.

        Returns the oldest draw in flight when its shards have answered, and sends draws until ``num_prefetch`` are in
        flight. Draws that were sent for other arguments are discarded. If a shard is lost or late after the draw was
        sent, the batch is shorter.
        """
        if self.in_flight and self.in_flight[0].request != (batch_size, *request):
            self.in_flight.clear()
        for _ in range(_MOST_EMPTY_DRAWS):
            if not self.in_flight:
                self._actors.settle()
                while not self._drawable() and not all(self._actors.alive):
                    # These shards may hold rows.
                    self._actors.wait_for_any()
                if not self._drawable():
                    raise RuntimeError("cannot sample from an empty replay buffer; call add first")
                self._send(batch_size, *request)
            oldest = self.in_flight.popleft()
            # The wait is at most shard_timeout_s: a late shard gives no rows.
            self._actors.settle(oldest.answers)
            if oldest.errors:
                raise joined_errors(oldest.errors)
            if drawn := self._weighed(oldest):
                # After a loss there may be too few rows. If that lasts, the next call raises the error.
                with suppress(RuntimeError):
                    while len(self.in_flight) < self._actors.options.num_prefetch and self._drawable():
                        # These draws come after the draw that is returned now.
                        self._send(batch_size, *request, ahead=len(self.in_flight) + 1)
                return drawn
        raise RuntimeError(f"every shard that was to draw rows was lost or late, {_MOST_EMPTY_DRAWS} times in a row")

    def _send(self, batch_size: int, *request: Any, ahead: int = 0) -> None:
        actors = self._actors
        clocks = self._clocks(ahead)
        divisions = {}
        for name in self._drawable():
            self._prepare(name, batch_size)
            self.divider(name).advance(**clocks)
            # The masses that the shards reported last determine how many rows each shard draws.
            divisions[name] = self.divider(name).divide(batch_size, actors.totals(name))
        draw = _InFlight((batch_size, *request), divisions, actors.epochs.copy(), {}, {}, [])
        for shard in range(len(actors)):
            parts = {name: division.parts[shard] for name, division in divisions.items() if len(division.parts[shard])}
            if parts:
                then = functools.partial(draw.parts.__setitem__, shard)
                draw.answers[shard] = actors.send(
                    shard, "draw", parts, clocks, *request, then=then, failed=draw.errors.append
                )
        self.in_flight.append(draw)

    def _weighed(self, draw: _InFlight) -> dict[str, DrawnRows]:
        # The rows of late and lost shards are missing. The weights follow from the clocks of this draw, whatever was
        # divided later.
        current = self._actors.epochs == draw.epochs
        drawn = {}
        for name, division in draw.divisions.items():
            answers = ((shard, draw.parts.get(shard, {})) for shard in draw.answers if current[shard])
            parts = {shard: answer[name] for shard, answer in answers if name in answer}
            if parts:
                replies: list[ShardDraw | None] = [None] * len(self._actors)
                for shard, part in parts.items():
                    replies[shard] = part.reply
                numbers = [
                    numbers_of(shard, draw.epochs[shard], part.slot, part.generation, self._key)
                    for shard, part in parts.items()
                ]
                index, generation = (np.concatenate(columns) for columns in zip(*numbers, strict=True))
                self.divider(name).advance(**self._clocks(0))
                columns = {"index": index, "generation": generation} | self.divider(name).weigh(division, replies)
                blocks = [Block(part.reference, 0, len(part.slot)) for part in parts.values()]
                drawn[name] = DrawnRows(blocks, columns, parts)
        return drawn

    def _drawable(self) -> list[str]:
        # The modules are sorted, so that they come in the same order in every run.
        pairs = zip(self._actors.reports, self._actors.alive, strict=True)
        return sorted({name for report, alive in pairs if alive for name, count in report.rows.items() if count})

    def update(
        self,
        module_id: str,
        index: np.ndarray,
        generation: np.ndarray,
        td_errors: np.ndarray,
        signals: Mapping[str, np.ndarray] | None = None,
        failed: Callable[[Exception], object] | None = None,
    ) -> None:
        """Sends TD errors, ``[B]`` or ``[B, k]``, to the shards of their rows. Drops TD errors of lost shards."""
        check_td_errors(td_errors, len(index))
        ids = row_ids_of(index, generation)
        # A slot of a shard that was started again holds another row, whatever its generation.
        current = (self._actors.epochs[ids.shard] - ids.epoch) % NUM_EPOCHS == 0
        self._actors.lost.td_errors += int(np.count_nonzero(~current))
        for shard in np.unique(ids.shard[current]).tolist():
            places = np.flatnonzero(current & (ids.shard == shard))
            given = [module_id, ids.slot[places], ids.generation[places], td_errors[places]]
            if signals:
                given.append({name: values[places] for name, values in signals.items()})
            self._actors.send(shard, "update", *given, td_errors=len(places), failed=failed)

    def largest(self, shard: int) -> dict[str, float]:
        """Returns the largest priority of each module over all shards, if it is above the largest of this shard."""
        largest: dict[str, float] = {}
        for report in self._actors.reports:
            for name, total in report.totals.items():
                largest[name] = max(largest.get(name, -1.0), total.max_priority)
        own = {name: total.max_priority for name, total in self._actors.reports[shard].totals.items()}
        return {name: priority for name, priority in largest.items() if priority > own.get(name, 0.0)}

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the state of each divider, by module."""
        return {name: divider.state_dict() for name, divider in self.dividers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the dividers, and discards draws in flight."""
        self.in_flight.clear()
        for name, saved in state.items():
            self.divider(name).load_state_dict(saved)


def check_td_errors(td_errors: np.ndarray, count: int) -> None:
    """Raises ``ValueError`` unless there is one finite TD error for each of ``count`` rows."""
    if len(td_errors) != count or not np.isfinite(td_errors).all():
        raise ValueError(
            f"td_error must hold one finite value for each of the {count} rows of the batch; got shape "
            f"{list(td_errors.shape)}, {np.count_nonzero(~np.isfinite(td_errors))} of them NaN or infinite. No "
            "priority was changed"
        )


class _InFlight(NamedTuple):
    """A draw that was sent to the shards."""

    request: tuple[Any, ...]
    divisions: dict[str, Division]  #: Division of each module.
    epochs: np.ndarray  #: int64 ``[S]``, epochs of the shards when the draw was sent.
    answers: dict[int, ray.ObjectRef[Any]]  #: References of the answers, by shard.
    parts: dict[int, dict[str, RemoteShardDraw]]  #: Answers that have come, by shard and module.
    errors: list[Exception]  #: Errors that shards have raised.


class DrawnRows(NamedTuple):
    """Rows of a batch, which are in the object store until a process fetches them."""

    blocks: list[Block]  #: References of the rows, in order.
    #: ``[n]`` or ``[n, 2]`` each: ``index``, ``generation``, and columns of all shards, such as ``priority_weight``.
    columns: dict[str, np.ndarray]
    #: Draws of the shards, empty if the rows are the share of one rank.
    parts: Mapping[int, RemoteShardDraw] = {}

    def __len__(self) -> int:
        return len(self.columns["index"])

    def rows(self, start: int, stop: int) -> DrawnRows:
        """Returns the rows from ``start`` to below ``stop``."""
        columns = {name: column[start:stop] for name, column in self.columns.items()}
        return DrawnRows(cut_blocks(self.blocks, start, stop), columns)

    def fetch(self, timeout_s: float) -> list[Columns]:
        """Returns the columns of each block, without blocks that were lost with their shard."""
        found: list[Columns] = []
        first = 0
        columns_of_blocks = fetched([block.reference for block in self.blocks], timeout_s)
        for (_, start, stop), columns in zip(self.blocks, columns_of_blocks, strict=True):
            of_draw: Columns = {(name,): column[first : first + stop - start] for name, column in self.columns.items()}
            first += stop - start
            if columns is not None:
                found.append({name: column[start:stop] for name, column in columns.items()} | of_draw)
        return found


def batch_of(blocks: Sequence[Columns]) -> TensorDict:
    """Returns one batch ``[B]`` of the rows of all blocks."""
    columns = {key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]}
    batch = TensorDict({}, batch_size=[len(columns["index",])])
    for key, column in columns.items():
        batch.set(key if len(key) > 1 else key[0], torch.from_numpy(column))
    return batch
