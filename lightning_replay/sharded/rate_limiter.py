# SPDX-License-Identifier: Apache-2.0
"""Holds the ratio of drawn rows to inserted rows, in both directions."""

from __future__ import annotations

from typing import Any

from lightning_replay.options import ABOVE_ZERO, checked_count, checked_number
from lightning_replay.state import Stateful


class RateLimiter(Stateful):
    """Permits draws and inserts so that ``samples_per_insert`` rows are drawn for each row inserted.

    The balance is ``samples_per_insert * inserted - sampled``: the rows that are still to be drawn. Draws and inserts
    are permitted while they leave the balance within ``[-error_buffer, error_buffer]``. The rule is
    ``SampleToInsertRatio`` of Reverb (Cassirer et al. 2021, https://arxiv.org/abs/2102.04736) with two additions.
    Inserts happen some time after they were permitted. Rows that fill a buffer up to ``min_size_to_sample`` call for no
    draws, also after a loss of rows. With no insert pending, a draw or an insert is permitted in every state.

    Call :meth:`may_insert` before you request rows and :meth:`insert` when rows arrive. Call :meth:`may_sample` before
    a draw and :meth:`sample` after it.

    Args:
        samples_per_insert: Rows drawn for each inserted row. ``None`` leaves the ratio free.
        min_size_to_sample: Rows stored before the first draw.
        error_buffer: Rows by which draws may be ahead or behind. It is at least ``batch_size``, and at least the draws
            that ``insert_size`` rows call for. Ignored without ``samples_per_insert``.
        batch_size: Rows of one draw.
        insert_size: Rows of one request.

    Raises:
        TypeError: A value has another kind.
        ValueError: A value is out of range, or one draw or one request exceeds ``error_buffer``.

    Example:
        >>> limiter = RateLimiter(2.0, min_size_to_sample=10, error_buffer=8, batch_size=4, insert_size=4)
        >>> limiter.insert(10, size=0)
        >>> limiter.may_sample(size=10)  # two draws ahead of the inserts, and no more
        True
        >>> limiter.sample(), limiter.sample(), limiter.may_sample(size=10), limiter.may_insert(size=10, pending=0)
        (None, None, False, True)
    """

    saved_attributes: tuple[str, ...] = ("_inserted", "_sampled", "_filled", "balance")

    def __init__(
        self,
        samples_per_insert: float | None = None,
        *,
        min_size_to_sample: int = 1,
        error_buffer: float = 0.0,
        batch_size: int = 1,
        insert_size: int = 1,
    ) -> None:
        self.min_size_to_sample: int = checked_count("min_size_to_sample", min_size_to_sample, of="rows")
        self.batch_size: int = checked_count("batch_size", batch_size, of="rows")
        self.insert_size: int = checked_count("insert_size", insert_size, of="rows")
        self.samples_per_insert = samples_per_insert
        self.error_buffer: float = checked_number("error_buffer", error_buffer, 0.0)
        self._inserted = self._sampled = self._filled = 0
        self.balance: float = 0.0  #: Rows still to be drawn; 0 if the ratio is free.
        if samples_per_insert is None:
            return
        called_for = checked_number("samples_per_insert", samples_per_insert, ABOVE_ZERO) * insert_size
        if self.error_buffer < max(batch_size, called_for):
            raise ValueError(
                f"error_buffer is {error_buffer:g}; a draw takes {batch_size} rows, and an insert of {insert_size} "
                f"calls for {called_for:g} drawn rows at samples_per_insert={samples_per_insert:g}. Give at least "
                f"{max(batch_size, called_for):g}"
            )

    def may_sample(self, size: int) -> bool:
        """Returns whether the next draw is permitted, with ``size`` stored rows."""
        if size < self.min_size_to_sample:
            return False
        return self.samples_per_insert is None or self.balance - self.batch_size >= -self.error_buffer

    def may_insert(self, size: int, pending: int) -> bool:
        """Returns whether ``insert_size`` further rows may be requested. ``pending`` rows have not arrived."""
        if self.samples_per_insert is None or size + pending < self.min_size_to_sample:
            return True
        # Rows that fill the buffer up to its first draw call for no draws.
        owed = pending + self.insert_size - max(0, self.min_size_to_sample - size)
        return self.balance + self.samples_per_insert * owed <= self.error_buffer

    def insert(self, num_rows: int, size: int) -> None:
        """Counts ``num_rows`` rows that arrived when ``size`` rows were stored."""
        filled = min(num_rows, max(0, self.min_size_to_sample - size))
        self._inserted += num_rows
        self._filled += filled
        if self.samples_per_insert is not None:
            self.balance += self.samples_per_insert * (num_rows - filled)

    def sample(self) -> None:
        """Counts one draw."""
        self._sampled += self.batch_size
        if self.samples_per_insert is not None:
            self.balance -= self.batch_size

    def stats(self) -> dict[str, float]:
        """Returns the counts, the ratio without the rows that filled the buffer first, and the balance."""
        counted = self._inserted - self._filled
        return {
            "num_rows_inserted_lifetime": self._inserted,
            "num_rows_sampled_lifetime": self._sampled,
            "samples_per_insert": self._sampled / counted if counted else 0.0,
            "balance": self.balance,
        }

    def reached(self, what: str) -> str:
        """Returns the reason why no more rows may be inserted or drawn, for an error."""
        return (
            f"no more rows may be {what}: {self._inserted} were inserted and {self._sampled} drawn, with "
            f"samples_per_insert={self.samples_per_insert:g} and error_buffer={self.error_buffer:g}"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the counts, and the balance only if this limiter has a ratio."""
        super().load_state_dict(state_dict)
        if self.samples_per_insert is None:
            self.balance = 0.0
