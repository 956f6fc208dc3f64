# SPDX-License-Identifier: Apache-2.0
"""Batches drawn from shards and their TD errors returned; rows lie in the object store until they are fetched."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from lightning_replay.sharded.actors import RemotePart, ShardActors, joined_errors
from lightning_replay.sharded.rows import Block, Columns, RowIds, cut_blocks, fetched, numbers_of

if TYPE_CHECKING:
    import ray

    from lightning_replay.divided_draws import Divider, Division


_MOST_EMPTY_DRAWS = 10  # in a row, in which every shard that was sent a part was lost


class DividedDraws:
    """Divides draws over the shards of an algorithm, one draw for each of its modules, and returns TD errors to rows.

    With ``num_prefetch`` of :class:`~lightning_replay.sharded.options.ShardOptions` that many draws are in flight
    between two calls of :meth:`draw`: shards have drawn their rows before they got the TD errors of the draws before.
    Draws in flight are no part of the state; a restored one begins without.

    ``build`` builds the divider of a module, when its first draw comes.
    """

    def __init__(self, actors: ShardActors, build: Callable[[str], Divider]) -> None:
        self._actors, self._build = actors, build
        self.dividers: dict[str, Divider] = {}
        self._in_flight: deque[_InFlight] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def divider(self, module_id: str) -> Divider:
        if module_id not in self.dividers:
            self.dividers[module_id] = self._build(module_id)
        return self.dividers[module_id]

    def draw(
        self,
        batch_size: int,
        prepare: Callable[[str, int], None],
        clocks: Callable[[int], Mapping[str, int]],
        *request: Any,
    ) -> dict[str, RemoteBatch]:
        """Draws ``batch_size`` rows of each module that has any.

        Returns the oldest draw in flight, once its shards have answered, and sends others until there are
        ``num_prefetch``; they are discarded where they were sent for other arguments. A shard that is lost, or late,
        after the draw was sent gives no rows: the batch is shorter.

        Args:
            batch_size: rows, of each module.
            prepare: called with each module and the batch size before a draw is divided.
            clocks: returns ``env_steps`` and ``updates`` of a draw, given how many will be returned before it.
            request: further arguments of the actors' ``draw``.
        """
        if self._in_flight and self._in_flight[0].request != (batch_size, *request):
            self.discard()
        for _ in range(_MOST_EMPTY_DRAWS):
            if not self._in_flight:
                self._wait_for_rows()
                self._send(prepare, clocks(0), batch_size, *request)
            oldest = self._in_flight.popleft()
            self._actors.settle(oldest.answers)  # no longer than shard_timeout_s: a late shard gives no rows
            if oldest.errors:
                raise joined_errors(oldest.errors)
            drawn = self._weighed(oldest, clocks(0))
            if drawn:  # else all shards that were asked are lost: divide a draw over those that are left
                self._send_ahead(prepare, clocks, batch_size, *request)
                return drawn
        raise RuntimeError(f"every shard that was to draw rows was lost or late, {_MOST_EMPTY_DRAWS} times in a row")

    def discard(self) -> None:
        self._in_flight.clear()

    def _send(self, prepare: Callable[[str, int], None], clocks: Mapping[str, int], *request: Any) -> None:
        # Divided by what the shards last reported; raises an error where there are too few rows.
        actors, batch_size = self._actors, request[0]
        divisions = {}
        for name in self._drawable():
            prepare(name, batch_size)
            divider = self.divider(name)
            divider.advance(**clocks)
            # How many rows each shard draws, by the masses that it reported last.
            divisions[name] = divider.divide(batch_size, actors.totals(name))
        draw = _InFlight(request, divisions, actors.epochs.copy(), {}, {}, [])
        for shard in range(len(actors)):
            parts = {name: one.parts[shard] for name, one in divisions.items() if len(one.parts[shard])}
            if parts:
                then = functools.partial(draw.parts.__setitem__, shard)
                draw.answers[shard] = actors.send(
                    shard, "draw", parts, clocks, *request[1:], then=then, failed=draw.errors.append
                )
        self._in_flight.append(draw)

    def _send_ahead(
        self, prepare: Callable[[str, int], None], clocks: Callable[[int], Mapping[str, int]], *request: Any
    ) -> None:
        # Behind the draw that is about to be returned.
        while len(self._in_flight) < self._actors.options.num_prefetch and self._drawable():
            try:
                self._send(prepare, clocks(len(self._in_flight) + 1), *request)
            except RuntimeError:  # too few rows, after a loss: the next call raises it if there are still too few
                return

    def _weighed(self, draw: _InFlight, clocks: Mapping[str, int]) -> dict[str, RemoteBatch]:
        # Without the rows of shards that have not answered or were lost since. The weights are those of the draw's own
        # number, however many were divided since.
        current = self._actors.epochs == draw.epochs
        answers = {shard: draw.parts[shard] for shard in draw.answers if shard in draw.parts and current[shard]}
        batches = {}
        for name, division in draw.divisions.items():
            parts = {shard: answer[name] for shard, answer in answers.items() if name in answer}
            if parts:
                replies = [parts[shard].reply if shard in parts else None for shard in range(len(self._actors))]
                ids = [RowIds.of_shard(shard, draw.epochs[shard], *part[1:3]) for shard, part in parts.items()]
                self.divider(name).advance(**clocks)
                columns = self.divider(name).weigh(division, replies)
                batches[name] = RemoteBatch(list(parts.values()), RowIds.joined(ids), columns)
        return batches

    def _wait_for_rows(self) -> None:
        actors = self._actors
        actors.settle()
        while not self._drawable() and not all(actors.alive):
            actors.wait_for_any()  # steps were sent to these shards, too
        if not self._drawable():
            raise RuntimeError("cannot sample from an empty replay buffer; call add first")

    def _drawable(self) -> list[str]:
        # The modules that have rows in a shard that can be drawn from, in the same order in every run.
        pairs = zip(self._actors.reports, self._actors.alive, strict=True)
        return sorted({name for report, alive in pairs if alive for name, count in report.rows.items() if count})

    def update(
        self,
        module_id: str,
        ids: RowIds,
        td_errors: np.ndarray,
        signals: Mapping[str, np.ndarray] | None = None,
        failed: Callable[[Exception], object] | None = None,
    ) -> None:
        """Sends TD errors, ``[B]`` or ``[B, k]``, to the shards of their rows, without waiting.

        Those of rows of a shard that was lost since are dropped and counted. Errors of the actors go to ``failed``, see
        :meth:`~lightning_replay.sharded.actors.ShardActors.send`.
        """
        check_td_errors(td_errors, len(ids.shard))
        # A slot of a shard that was started again holds another row, whatever its generation.
        current = ids.current(self._actors.epochs)
        self._actors.lost.td_errors += int(np.count_nonzero(~current))
        ids, td_errors = ids.take(current), td_errors[current]
        for shard, places in ids.by_shard():
            given = [module_id, ids.slot[places], ids.generation[places], td_errors[places]]
            if signals:
                given.append({name: values[current][places] for name, values in signals.items()})
            self._actors.send(shard, "update", *given, td_errors=len(places), failed=failed)

    def largest(self, shard: int) -> dict[str, float]:
        """Returns the largest priority of each module over all shards, where it is above that of this one."""
        largest: dict[str, float] = {}
        for report in self._actors.reports:
            for name, total in report.totals.items():
                largest[name] = max(largest.get(name, -1.0), total.largest_priority)
        own = self._actors.reports[shard].totals
        known = {name: own[name].largest_priority if name in own else 0.0 for name in largest}
        return {name: priority for name, priority in largest.items() if priority > known[name]}

    def state_dict(self) -> Mapping[str, Any]:
        return {name: divider.state_dict() for name, divider in self.dividers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.discard()
        for name, saved in state.items():
            self.divider(name).load_state_dict(saved)


def check_td_errors(td_errors: np.ndarray, count: int) -> None:
    if len(td_errors) != count or not np.isfinite(td_errors).all():
        raise ValueError(
            f"td_error must hold one finite value for each of the {count} rows of the batch; got shape "
            f"{list(td_errors.shape)}, {np.count_nonzero(~np.isfinite(td_errors))} of them NaN or infinite. No "
            "priority was changed"
        )


class _InFlight(NamedTuple):
    """A draw that was sent to the shards."""

    request: tuple[Any, ...]
    divisions: dict[str, Division]  # by module
    epochs: np.ndarray  # of the shards when it was sent, int64 [S]
    answers: dict[int, ray.ObjectRef[Any]]  # by shard
    parts: dict[int, dict[str, RemotePart]]  # those that have come, by shard
    errors: list[Exception]  # that shards have raised


class RemoteBatch(NamedTuple):
    """A batch whose rows are in the object store."""

    parts: list[RemotePart]  # of each shard that was sent a part and has answered, in order
    ids: RowIds  # of the rows, those of one part after those of the other
    columns: dict[str, np.ndarray]  # [B] each, which depend on all shards, such as priority_weight

    def __len__(self) -> int:
        return len(self.ids.shard)

    @property
    def blocks(self) -> list[Block]:
        return [Block(part.reference, 0, len(part.slot)) for part in self.parts]

    @property
    def weights(self) -> np.ndarray:  # float32 [B]; 1 where the sampler makes none
        return self.columns.get("priority_weight", np.ones(len(self), dtype=np.float32))


class DrawnRows(NamedTuple):
    """Rows of a batch that one process fetches."""

    blocks: list[Block]  # where they are, in order
    ids: RowIds
    columns: dict[str, np.ndarray]  # [n] each, which depend on all shards, such as priority_weight

    @classmethod
    def of(cls, batch: RemoteBatch) -> DrawnRows:
        return cls(batch.blocks, batch.ids, batch.columns)

    def __len__(self) -> int:
        return len(self.ids.shard)

    def cut(self, start: int, stop: int) -> DrawnRows:
        columns = {name: column[start:stop] for name, column in self.columns.items()}
        return DrawnRows(cut_blocks(self.blocks, start, stop), self.ids.take(np.arange(start, stop)), columns)


class FetchedRows:
    """Rows of one or several draws, fetched from the object store within ``timeout_s`` and joined to a batch."""

    def __init__(self, key: int, timeout_s: float) -> None:
        self._key, self._timeout_s = key, timeout_s
        self._blocks: list[Columns] = []
        self._numbers: list[Columns] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def fetch(self, drawn: DrawnRows) -> None:
        is_here = np.ones(len(drawn), dtype=bool)  # not of rows that were lost with their shard
        found: list[Columns | None] = fetched([block.reference for block in drawn.blocks], self._timeout_s)
        first = 0  # place of the block in the draw
        for (_, start, stop), columns in zip(drawn.blocks, found, strict=True):
            if columns is None:
                is_here[first : first + stop - start] = False
            else:
                self._blocks.append({key: column[start:stop] for key, column in columns.items()})
            first += stop - start
        index, generation = numbers_of(drawn.ids.take(is_here), self._key)
        numbers: Columns = {("index",): index, ("generation",): generation}
        self._numbers.append(numbers | {(name,): column[is_here] for name, column in drawn.columns.items()})
        self._count += len(index)

    def batch(self) -> TensorDict:
        batch = TensorDict({}, batch_size=[self._count])
        for parts in (self._blocks, self._numbers):
            for key in parts[0]:
                column = np.concatenate([part[key] for part in parts])
                batch.set(key if len(key) > 1 else key[0], torch.from_numpy(column))
        return batch
