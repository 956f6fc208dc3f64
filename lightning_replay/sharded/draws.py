# SPDX-License-Identifier: Apache-2.0
"""Batches drawn from shards and their TD errors returned: the part of a sharded replay that moves numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_replay.sharded.actors import ShardActors
from lightning_replay.sharded.reports import RemotePart
from lightning_replay.sharded.row_ids import RowIds

if TYPE_CHECKING:
    from lightning_replay.divided_draws import Divider, Division

_MOST_EMPTY_DRAWS = 10  # in a row, in which every shard asked was lost


class RemoteBatch(NamedTuple):
    """A batch whose rows are in the object store.

    Attributes:
        parts: of each shard that was asked and has answered, in order.
        ids: of the rows, those of one part after those of the other.
        columns: ``[B]`` each, which depend on all shards, such as ``priority_weight``; none without weights.
    """

    parts: list[RemotePart]
    ids: RowIds
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.ids.shard)

    @property
    def weights(self) -> np.ndarray:
        """Importance weights, float32 ``[B]``; 1 where the sampler makes none."""
        weights = self.columns.get("priority_weight")
        return np.ones(len(self), dtype=np.float32) if weights is None else weights


class DividedDraws:
    """Divides draws over the shards of an algorithm, one draw for each of its modules, and returns TD errors to rows.

    The actors have the methods ``draw(parts, *request)``, which returns a
    :class:`~lightning_replay.sharded.reports.RemotePart`
    by module, and ``update(module, slot, generation, td_errors)``.

    Args:
        actors: of the shards.
        build: builds the divider of a module.

    Attributes:
        dividers: by module; built when its first draw comes.
    """

    def __init__(self, actors: ShardActors, build: Callable[[str], Divider]) -> None:
        self._actors, self._build = actors, build
        self.dividers: dict[str, Divider] = {}
        self._td_errors_late = 0

    @property
    def td_errors_dropped(self) -> int:
        """TD errors of rows of shards that were lost since the draw."""
        return self._td_errors_late + self._actors.td_errors_lost

    def divider(self, module_id: str) -> Divider:
        """Returns the divider of a module."""
        if module_id not in self.dividers:
            self.dividers[module_id] = self._build(module_id)
        return self.dividers[module_id]

    def draw(self, batch_size: int, prepare: Callable[[str, int], None], *request: Any) -> dict[str, RemoteBatch]:
        """Draws ``batch_size`` rows of each module that has any.

        A shard that is lost, or late, after it was asked gives no rows: the batch is shorter.

        Args:
            batch_size: rows, of each module.
            prepare: called before the draw of each module, with the rows of all its groups.
            request: further arguments of the actors' ``draw``.

        Raises:
            RuntimeError: no shard has rows.
        """
        for _ in range(_MOST_EMPTY_DRAWS):
            drawn = self._draw_once(batch_size, prepare, request)
            if drawn:
                return drawn
        raise RuntimeError(f"every shard that was asked for rows was lost or late, {_MOST_EMPTY_DRAWS} times in a row")

    def _draw_once(
        self, batch_size: int, prepare: Callable[[str, int], None], request: tuple[Any, ...]
    ) -> dict[str, RemoteBatch]:
        divisions = self._divisions(batch_size, prepare)
        asked = {}
        for shard in range(len(self._actors)):
            parts = {name: one.parts[shard] for name, one in divisions.items() if len(one.parts[shard])}
            if parts:
                asked[shard] = self._actors.send(shard, "draw", parts, *request)
        epochs = self._actors.epochs.copy()
        values = self._actors.settle()
        answers = {shard: values[reference] for shard, reference in asked.items() if reference in values}
        batches = {}
        for name, division in divisions.items():
            parts_of = {shard: answer[name] for shard, answer in answers.items() if name in answer}
            if parts_of:
                replies = [parts_of[shard].reply if shard in parts_of else None for shard in range(len(self._actors))]
                ids = [RowIds.of_shard(shard, epochs[shard], *part[1:3]) for shard, part in parts_of.items()]
                columns = self.divider(name).weigh(division, replies)
                batches[name] = RemoteBatch(list(parts_of.values()), RowIds.joined(ids), columns)
        return batches

    def _divisions(self, batch_size: int, prepare: Callable[[str, int], None]) -> dict[str, Division]:
        actors = self._actors
        actors.settle()
        while not self._drawable() and not all(actors.alive):
            before = actors.alive, actors.epochs.tolist()
            actors.wait_for_any()  # steps were sent to these shards, too
            if before == (actors.alive, actors.epochs.tolist()):
                raise RuntimeError(
                    "no shard that holds rows has answered; look for processes that hang, or ray.nodes()"
                )
        names = self._drawable()
        if not names:
            raise RuntimeError("cannot sample from an empty replay buffer; call add first")
        divisions = {}
        for name in names:
            prepare(name, batch_size)
            divisions[name] = self.divider(name).divide(batch_size, actors.totals(name))
        return divisions

    def _drawable(self) -> list[str]:
        """Returns the modules that have rows in a shard that can be drawn from, in the same order in every run."""
        pairs = zip(self._actors.reports, self._actors.alive, strict=True)
        return sorted({name for report, alive in pairs if alive for name, count in report.rows.items() if count})

    def update(self, module_id: str, ids: RowIds, td_errors: np.ndarray) -> None:
        """Sends TD errors, ``[B]`` or ``[B, k]``, to the shards of their rows, without waiting.

        Those of rows of a shard that was lost since are dropped and counted.

        Raises:
            ValueError: another number of TD errors than of rows, or NaN or infinite values; none was sent.
        """
        if len(td_errors) != len(ids.shard) or not np.isfinite(td_errors).all():
            raise ValueError(
                f"td_error must hold one finite value for each of the {len(ids.shard)} rows of the batch; got shape "
                f"{list(td_errors.shape)}, {np.count_nonzero(~np.isfinite(td_errors))} of them NaN or infinite. No "
                "priority was changed"
            )
        current = ids.current(self._actors.epochs)
        self._td_errors_late += int(np.count_nonzero(~current))
        ids, td_errors = ids.take(current), td_errors[current]
        for shard, places in ids.by_shard():
            given = (module_id, ids.slot[places], ids.generation[places], td_errors[places])
            self._actors.send(shard, "update", *given, td_errors=len(places))

    def largest(self, shard: int) -> dict[str, float]:
        """Returns the largest priority of each module over all shards, where it is above that of this one."""
        largest: dict[str, float] = {}
        for report in self._actors.reports:
            for name, total in report.totals.items():
                largest[name] = max(largest.get(name, -1.0), total.largest_priority)
        own = self._actors.reports[shard].totals
        return {
            name: priority
            for name, priority in largest.items()
            if priority > (own[name].largest_priority if name in own else 0.0)
        }

    def state_dict(self) -> Mapping[str, Any]:
        """Returns what decides the next draws beside the shards themselves."""
        return {name: divider.state_dict() for name, divider in self.dividers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        for name, saved in state.items():
            self.divider(name).load_state_dict(saved)
