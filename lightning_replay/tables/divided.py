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
        drawn_among: ``[L]``, see the property.
    """

    def __init__(self, tables: Tables, length: np.ndarray, drawn_among: np.ndarray) -> None:
        self.__dict__.update(vars(tables))
        self._length_of_all, self._drawn_among = length, drawn_among

    @property
    def length(self) -> np.ndarray:
        """Entries of each table in all replays, int64 ``[L]``."""
        return self._length_of_all

    @property
    def drawn_among(self) -> np.ndarray:
        """As many entries as each entry here is one of in a draw from its table, ``[L]``."""
        return self._drawn_among
