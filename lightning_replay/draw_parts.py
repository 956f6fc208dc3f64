# SPDX-License-Identifier: Apache-2.0
"""What passes between several replays and who divides a draw over them: totals, points and probabilities.

Shapes: S replays, G groups of rows, B rows of a batch, n of them drawn from one replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["DividedRows", "DrawPart", "GroupRows", "GroupTotals", "PartDraw", "indivisible"]


@dataclass(frozen=True, eq=False)
class GroupTotals:
    """What the rows of one replay add up to, by group: the rows that are drawn from with a share of their own.

    A uniform or prioritized sampler has one group, a sampler of tables one for each table.

    Attributes:
        names: of the groups, the same in all replays that a draw is divided over.
        mass: float64 ``[G]``, the sum of what rows are drawn in proportion to; their number where all are alike.
        rows: int64 ``[G]``, the number of rows.
        smallest: float64 ``[G]``, the smallest positive term of ``mass``; infinity where there is none.
        largest_priority: the largest priority given so far, before any exponent; not positive where there was none.
    """

    names: list[str]
    mass: np.ndarray
    rows: np.ndarray
    smallest: np.ndarray
    largest_priority: float = -1.0

    @classmethod
    def alike(cls, rows: int | np.ndarray, names: Sequence[str] = ("rows",)) -> GroupTotals:
        """Returns the totals of groups in which each row is equally likely.

        Args:
            rows: of each group, int64 ``[G]``, or of the only one.
            names: of the groups.

        Example:
            >>> GroupTotals.alike(3)
            GroupTotals(names=['rows'], mass=array([3.]), rows=array([3]), smallest=array([1.]), largest_priority=-1.0)
        """
        count = np.array(rows, dtype=np.int64, ndmin=1)  # a copy
        return cls([*names], count.astype(np.float64), count, np.where(count > 0, 1.0, np.inf))

    @classmethod
    def summed(cls, totals: Sequence[GroupTotals]) -> GroupTotals:
        """Returns the totals of the rows of all these replays, at least one."""
        return cls(
            totals[0].names,
            np.sum([one.mass for one in totals], axis=0),
            np.sum([one.rows for one in totals], axis=0),
            np.min([one.smallest for one in totals], axis=0),
            max(one.largest_priority for one in totals),
        )


@dataclass(frozen=True, eq=False)
class DrawPart:
    """The rows of a batch that one replay draws; made by :class:`~lightning_replay.divided_draws.Divider`.

    Attributes:
        groups: int64 ``[n]``, the group of each row, ascending.
        points: float64 ``[n]`` in [0, 1), where in the mass of the group in this replay each row lies: row i is drawn
            with its part of that mass, whatever has changed since the draw was divided.
        shares: float64 ``[G]``, how likely a row of the batch is of each group.
        fractions: float64 ``[G]``, the part of each group's mass that this replay had when the draw was divided.
        rows: int64 ``[G]``, rows of each group in all replays at that time.
    """

    groups: np.ndarray
    points: np.ndarray
    shares: np.ndarray
    fractions: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True, eq=False)
class PartDraw:
    """What a replay returns beside the rows of a :class:`DrawPart`, in the same order.

    Attributes:
        probability: float64 ``[n]``, of each row in a draw from its group in this replay.
        totals: of the replay at the draw.
        correction: float64 ``[n]``, what the sampler multiplies the weights of these rows by; ``None`` where nothing.
    """

    probability: np.ndarray
    totals: GroupTotals
    correction: np.ndarray | None = None


class GroupRows(NamedTuple):
    """How a batch is divided over groups."""

    rows: np.ndarray  #: int64 ``[G]``, of each group, the batch size together.
    shares: np.ndarray  #: float64 ``[G]``, how likely a row is of each group, given how the rows were chosen.


@dataclass(frozen=True, eq=False)
class DividedRows:
    """How the rows of a batch were drawn, one replay after the other; a sampler makes their weights of it.

    Attributes:
        group: int64 ``[B]``.
        probability: float64 ``[B]``, of each row in a draw from its group in all replays, as it was really drawn.
        least: float64 ``[G]``, the smallest ``probability`` that a row of each group has; infinity where none can be
            drawn.
        rows: int64 ``[G]``, rows of each group in all replays.
        shares: float64 ``[G]``, how likely a row of the batch is of each group.
        names: of the groups.
        correction: float64 ``[B]``, or ``None`` where there is none.
    """

    group: np.ndarray
    probability: np.ndarray
    least: np.ndarray
    rows: np.ndarray
    shares: np.ndarray
    names: list[str]
    correction: np.ndarray | None


def indivisible(sampler: str) -> TypeError:
    """Returns the error for a sampler, by its name, whose draws cannot be divided."""
    return TypeError(
        f"draws of {sampler} cannot be divided over several replays; use a sampler of lightning_replay.samplers, or "
        "define group_totals(storage) and sample_part(storage, part) in a lightning_replay.parts.ReplaySampler of your "
        "own, or keep all rows in one replay"
    )
