# SPDX-License-Identifier: Apache-2.0
"""The tables over a storage, and how often rows are drawn from them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from torchrl.data.replay_buffers import Storage

from lightning_replay.storage.packed import PackedStorage
from lightning_replay.tables.tables import Tables


class DrawnRatios(NamedTuple):
    """How often the rows of a batch are drawn, compared with a uniform draw from the table of each."""

    ratio: np.ndarray  #: float64 ``[B]``, ``|B| P`` of each row.
    smallest: float  #: The least it can be for any row of any table drawn from.

    def importance(self, exponent: float) -> np.ndarray:
        """Returns ``ratio ** -exponent`` over the largest it can be, float64 ``[B]``."""
        return (self.ratio / self.smallest) ** -exponent


class HeldTables(Protocol):
    """What the rows of tables are chosen by: :class:`~lightning_replay.tables.tables.Tables`, or sums over several."""

    names: list[str]

    @property
    def length(self) -> np.ndarray:
        """Entries of each table, int64 ``[L]``."""


class SummedTables:
    """The tables of several replays that a draw is divided over.

    Args:
        names: of the tables.
        length: int64 ``[L]``, entries of each in all replays together.
    """

    def __init__(self, names: list[str], length: np.ndarray) -> None:
        self.names: list[str] = names
        self.length: np.ndarray = length


def tables_of(storage: Storage, sampler: Any) -> Tables:
    """Returns the tables over a storage; raises TypeError where its writer keeps none."""
    tables = storage.occupancy if isinstance(storage, PackedStorage) else None
    if not isinstance(tables, Tables):
        raise without_tables(type(sampler).__name__)
    return tables


def without_tables(sampler: str) -> TypeError:
    """Returns the error for a sampler of tables, by its name, beside a writer that keeps none."""
    return TypeError(
        f"{sampler} draws from tables and the buffer's writer keeps none; give it an EventTableWriter or a "
        "TaskTableWriter"
    )
