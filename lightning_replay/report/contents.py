# SPDX-License-Identifier: Apache-2.0
"""What a replay buffer holds, from its state: rows and their ages, priorities, tables, counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_replay.report.draws import Draws, draws_of
from lightning_replay.report.facts import counters_of, options_of, table_shares_of
from lightning_replay.report.images import RowImages, images_of
from lightning_replay.report.reading import PackedColumns, array_of
from lightning_replay.report.retention import Retained, retained_of
from lightning_replay.storage.row_layout import Key, RowLayout

REWARD: Key = ("next", "reward")
TERMINATED: Key = ("next", "terminated")
TRUNCATED: Key = ("next", "truncated")
DONE: Key = ("next", "done")
TRAJECTORY: Key = ("trajectory",)
_READ = (REWARD, TERMINATED, TRUNCATED, DONE, TRAJECTORY)


@dataclass(frozen=True)
class Table:
    """A table: its slots, int64 ``[n]`` oldest first; ``share`` of a batch by the options, ``None`` if none is fixed.

    ``appended`` entries ever came; ``drawn`` rows were drawn from it so far. ``events``: the share of all steps that
    were its events, ``None`` of other tables.
    """

    name: str
    slots: np.ndarray
    capacity: int
    appended: int
    share: float | None
    drawn: int
    events: float | None = None

    @property
    def fill(self) -> float:
        """Entries over the capacity."""
        return len(self.slots) / self.capacity


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
    tables = _tables_of(state, built_by)
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
    slots = np.arange(int(state["length"] if "length" in state else storage["length"]))  # early saves have the latter
    if storage.get("live") is not None:  # rows left for others' frames
        slots = np.sort(array_of(storage["live"]))
    if "cursor" not in writer:
        return slots, None, None
    capacity, given = int(state["built_from"]["capacity"]), int(writer["write_count"])
    return slots, given - 1 - (int(writer["cursor"]) - 1 - slots) % capacity, given


def _tables_of(state: Mapping[str, Any], built_by: Any) -> list[Table]:
    writer = state["writer"]
    if "tables" not in writer:
        return []
    saved = writer["tables"]
    named: list[tuple[str, int]] = [(str(name), int(capacity)) for name, capacity in state["built_from"]["tables"]]
    entries, appended = array_of(saved["entries"]), array_of(saved["appended"])
    first = array_of(saved["first"]) if "first" in saved else np.zeros(len(named), np.int64)
    drawn = state["sampler"].get("rows_drawn", [])
    shares, events = table_shares_of(built_by), _event_shares(writer, named, built_by)
    tables, offset = [], 0
    for number, (name, capacity) in enumerate(named):
        oldest = max(int(first[number]), int(appended[number]) - capacity)
        places = np.arange(oldest, int(appended[number])) % capacity
        tables.append(
            Table(
                name=name,
                slots=entries[offset + places],
                capacity=capacity,
                appended=int(appended[number]),
                share=shares.get(name),
                drawn=int(drawn[number]) if len(drawn) == len(named) else 0,
                events=events.get(name),
            )
        )
        offset += capacity
    return tables


def _event_shares(writer: Mapping[str, Any], named: list[tuple[str, int]], built_by: Any) -> dict[str, float]:
    """Returns the share of tested steps that were events by table, where each table has the events of one option."""
    fired, tested = writer.get("fired", []), int(writer.get("rows_tested", 0))
    if len(fired) != len(named) - 1 or not tested:  # several events into one table
        return {}
    return {name: count / tested for (name, _), count in zip(named[1:], fired, strict=True)}


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
