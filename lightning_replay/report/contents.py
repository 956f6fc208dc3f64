# SPDX-License-Identifier: Apache-2.0
"""What a replay buffer holds, from its state: rows and their ages, priorities, tables, counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from lightning_replay.report.draws import Draws, draws_of
from lightning_replay.report.facts import counters_of, options_of
from lightning_replay.report.images import RowImages, images_of
from lightning_replay.report.reading import PackedColumns, array_of
from lightning_replay.report.retention import Retained, retained_of
from lightning_replay.report.tables import Table, tables_of
from lightning_replay.saving.chunks import ChunkedTensor
from lightning_replay.storage.row_layout import Key, RowLayout

REWARD: Key = ("next", "reward")
TERMINATED: Key = ("next", "terminated")
TRUNCATED: Key = ("next", "truncated")
DONE: Key = ("next", "done")
TRAJECTORY: Key = ("trajectory",)
_READ = (REWARD, TERMINATED, TRUNCATED, DONE, TRAJECTORY)


@dataclass(frozen=True)
class ReplayContents:
    """A replay buffer at one moment. Arrays ``[N]`` are of the rows in ``slots``, int64 ``[N]``, ascending.

    Attributes:
        capacity: most rows.
        given: rows ever given, refused ones included; ``None`` if the writer does not count them.
        slots: that hold a row.
        written: the number of each row in the order in which rows were given, int64 ``[N]``, counted from 0; ``None``
            if the writer keeps no order.
        draws: how the next batch is drawn; ``None`` for samplers whose rule is not known here.
        tables: of buffers with tables, in the order of their numbers.
        retained: of buffers that keep rows by importance.
        columns: stored ones, read whole: reward, episode ends, trajectory, as far as they are stored, ``[N]``.
        layout: dtype and shape by column name.
        images: of rows; ``None`` if none are stored.
        options: parts of the buffer and their options, as text.
        counters: rows given, batches drawn and the like.
    """

    capacity: int
    given: int | None
    slots: np.ndarray
    written: np.ndarray | None
    draws: Draws | None
    tables: list[Table]
    retained: Retained | None
    columns: Mapping[Key, np.ndarray]
    layout: Mapping[str, str]
    images: RowImages | None
    options: Mapping[str, str]
    counters: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def ages(self) -> np.ndarray | None:
        """Rows given after each row, int64 ``[N]``."""
        return None if self.written is None or self.given is None else self.given - 1 - self.written

    @property
    def ended(self) -> np.ndarray | None:
        """Whether each row is the last of its episode, bool ``[N]``; ``None`` if that is not stored."""
        if DONE in self.columns:
            return self.columns[DONE]
        found = [self.columns[key] for key in (TERMINATED, TRUNCATED) if key in self.columns]
        return np.logical_or.reduce(found) if found else None

    def places_of(self, slots: np.ndarray) -> np.ndarray:
        """Returns where slots, int64 ``[n]``, stand in :attr:`slots`."""
        return np.searchsorted(self.slots, slots)


def contents_of(state: Mapping[str, Any], built_by: Any) -> ReplayContents:
    """Returns what a buffer holds.

    Args:
        state: of a buffer, see :mod:`lightning_replay.checkpoint.state`; its tensors may be in chunk files.
        built_by: class and options of the buffer, see :func:`lightning_replay.saving.spec.describe`.

    Raises:
        DamagedFileError: a chunk file that is read was changed.
    """
    writer, sampler, storage = state["writer"], state["sampler"], state["storage"]
    retained = retained_of(writer)
    slots, written, given = _rows_held(state, retained)
    tables = tables_of(state, built_by)
    draws = draws_of(state["built_from"]["sampler"], sampler, slots, tables)
    columns, layout, packed = _columns_of(storage, slots)
    return ReplayContents(
        capacity=int(state["built_from"]["capacity"]),
        given=given,
        slots=slots,
        written=written,
        draws=draws,
        tables=tables,
        retained=retained,
        columns=columns,
        layout=layout,
        images=None if packed is None else images_of(storage, packed),
        options=options_of(state["built_from"], built_by),
        counters=counters_of(state, given),
    )


def _rows_held(state: Mapping[str, Any], retained: Retained | None) -> tuple[np.ndarray, np.ndarray | None, int | None]:
    """Returns the slots that hold a row, the number of each in the order given, and how many were given."""
    writer, storage = state["writer"], state["storage"]
    if retained is not None:
        return retained.slots, retained.arrival, retained.offered
    if "tables" in writer:
        tables = writer["tables"]
        slots = np.flatnonzero(array_of(tables["slots"]["references"]) > 0)
        return slots, array_of(tables["written_at"])[slots], int(tables["rows_written"])
    length = int(state["length"])
    if not 0 <= length <= _most_rows(storage):
        raise ValueError(f"{length:,} rows are claimed, more than are stored")
    slots = np.arange(length)
    if storage.get("live") is not None:  # rows left for others' frames
        slots = np.sort(array_of(storage["live"]))
    if "cursor" not in writer:
        return slots, None, None
    capacity, given = int(state["built_from"]["capacity"]), int(writer["write_count"])
    return slots, given - 1 - (int(writer["cursor"]) - 1 - slots) % capacity, given


def _most_rows(stored: Any) -> int:
    """Returns the length of the longest tensor or list in the state of a storage."""
    if isinstance(stored, Mapping):
        return max(map(_most_rows, stored.values()), default=0)
    if isinstance(stored, list):
        return max(len(stored), *map(_most_rows, stored[:1]), 0)
    return int(stored.shape[0]) if isinstance(stored, Tensor | ChunkedTensor) and len(stored.shape) else 0


def _columns_of(
    storage: Mapping[str, Any], slots: np.ndarray
) -> tuple[dict[Key, np.ndarray], dict[str, str], PackedColumns | None]:
    """Returns the columns that are read whole, of the rows in ``slots``, a text for every column, and all of them."""
    described = storage.get("layout")
    if described is None or storage.get("rows") is None:
        return {}, {}, None
    packed = PackedColumns(storage["rows"], RowLayout.from_description(described))
    whole = packed.whole(_READ)
    columns = {key: values[slots].reshape(len(slots), -1)[:, 0] for key, values in whole.items() if values[:1].size}
    layout = {".".join(leaf["key"]): f"{leaf['dtype']} {leaf['shape']}" for leaf in described}
    return columns, layout, packed
