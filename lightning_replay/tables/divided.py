# SPDX-License-Identifier: Apache-2.0
"""Tables of one of several replays that a draw is divided over."""

from __future__ import annotations

import numpy as np

from lightning_replay.tables.tables import Tables


class PartOfTables(Tables):
    """Tables whose lengths are those of all replays together; all else is that of one replay, and is shared with it.

    Args:
        tables: of one replay.
        length: int64 ``[L]``, entries of each table in all replays.
        fractions: float64 ``[L]``, the part of the draws from each table that goes to this replay.
    """

    def __init__(self, tables: Tables, length: np.ndarray, fractions: np.ndarray) -> None:
        self.__dict__.update(vars(tables))
        self._length_of_all = length
        held = tables.length
        self._drawn_among = np.divide(held, fractions, out=np.full(len(held), np.inf), where=fractions > 0)

    @property
    def length(self) -> np.ndarray:
        """Entries of each table in all replays, int64 ``[L]``."""
        return self._length_of_all

    @property
    def drawn_among(self) -> np.ndarray:
        """As many entries as each entry here is one of in a draw from its table, float64 ``[L]``."""
        return self._drawn_among
