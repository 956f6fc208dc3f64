# SPDX-License-Identifier: Apache-2.0
"""Prioritizations of levels by their scores: by rank, proportional, greedy, or Boltzmann, and their sum trees."""

from __future__ import annotations

import copy
import math
import operator
import warnings
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sortedcontainers import SortedList

from lightning_replay.options import ABOVE_ZERO, check_option, checked_count, checked_share
from lightning_replay.state import Stateful, uniform

__all__ = ["Boltzmann", "Greedy", "Prioritization", "Proportional", "Rank", "Top"]

_FARTHEST_LOG = 300.0  # weights stay within e^-300 and e^300 of the reference, so that float64 sums lose nothing
_WINDOW = 1_000  # replays, 16 rollouts of 64 environments. An estimate of 5 then has a standard error of 0.3
_FEWEST_EFFECTIVE = 5
_FEWEST_SCORED = 4 * _FEWEST_EFFECTIVE  # 5 effective levels out of fewer are no narrow replay


class Prioritization(Stateful, ABC):
    """Turns scores into probabilities. :class:`~lightning_replay.levels.LevelSampler` binds and fills it.

    A subclass implements its distribution twice: :meth:`probabilities` computes it for all rows, and :meth:`draw` draws
    one row in time logarithmic in the number of levels. ``saved_attributes`` names what does not follow from scores and
    timestamps. It is restored after :meth:`fill`.

    Attributes:
        score_temperature: β of the paper.
        uses_temperature: Whether a higher temperature spreads the probability over more levels.
    """

    score_temperature: float = math.nan
    uses_temperature: ClassVar[bool] = True

    def bind(self, score_temperature: float) -> Self:
        """Returns an empty copy with the same options and a temperature above 0. :class:`Greedy` needs none.

        :meta private:
        """
        accepted = "a number above 0; for the highest score alone use prioritization=Greedy()"
        check_option("score_temperature", score_temperature, Real, accepted, lowest=ABOVE_ZERO)
        bound = copy.copy(self)
        bound.score_temperature = score_temperature
        bound.fill(np.zeros(0), np.zeros(0, np.int64))
        return bound

    @abstractmethod
    def fill(self, scores: np.ndarray, timestamps: np.ndarray) -> None:
        """Replaces all rows: row k has ``scores[k]`` and was played at ``timestamps[k]``, both ``[L]``."""

    @abstractmethod
    def put(self, row: int, score: float, timestamp: int) -> None:
        """Adds a row, or changes its score or timestamp."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> int:
        """Draws a row by its probability. At least one row is needed."""

    @abstractmethod
    def probabilities(self, scores: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
        """Returns the probability of each row, float64 ``[L]``. They sum to 1."""


class _Ordered(Prioritization):
    """Keeps rows sorted from the highest score to the lowest. Ties go by the older timestamp, then the lower row."""

    _order: SortedList
    _keys: list[tuple[float, int, int]]

    def fill(self, scores: np.ndarray, timestamps: np.ndarray) -> None:
        """Sorts all rows, by score and then by time.

        :meta private:
        """
        self._keys = list(zip((-scores).tolist(), timestamps.tolist(), range(len(scores)), strict=True))
        self._order = SortedList(self._keys)

    def put(self, row: int, score: float, timestamp: int) -> None:
        """Moves or adds a row in logarithmic time.

        :meta private:
        """
        key = (-score, timestamp, row)
        if row < len(self._keys):
            self._order.remove(self._keys[row])
        self._keys[row : row + 1] = [key]
        self._order.add(key)


class Rank(_Ordered):
    """Probability proportional to ``(1 / rank) ** (1 / score_temperature)``, rank 1 the highest score.

    The default of Jiang et al. 2021, section 3. Ranks are among levels with a score alone. Of equal scores the level
    played longer ago has the better rank.
    """

    def fill(self, scores: np.ndarray, timestamps: np.ndarray) -> None:
        """Sorts all rows. Weights are computed at the next draw.

        :meta private:
        """
        super().fill(scores, timestamps)
        self._weights = self._cumulative = np.zeros(0)

    def draw(self, generator: torch.Generator) -> int:
        """Draws a rank, and returns the row that has it.

        :meta private:
        """
        count = len(self._order)
        self._extend_weights(count)
        # By rank, whose weights are the same for all scores: one search, and one look-up in the sorted list.
        point = uniform(generator) * self._cumulative[count - 1]
        rank = int(np.searchsorted(self._cumulative[:count], point, side="right"))
        return int(self._order[min(rank, count - 1)][2])

    def probabilities(self, scores: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
        """Returns the probability of each row, float64 ``[L]``."""
        count = len(scores)
        self._extend_weights(count)
        weights = np.empty(count)
        weights[by_rank(scores, timestamps)] = self._weights[:count]
        return weights / self._cumulative[count - 1]

    def _extend_weights(self, count: int) -> None:
        if count > len(self._weights):  # twice as many as needed, so that this is rare
            # Relative to rank 1, computed by logarithms: a low temperature would overflow the power.
            self._weights = np.exp(-np.log(np.arange(1, max(2 * count, 64) + 1)) / self.score_temperature)
            self._cumulative = np.cumsum(self._weights)


class Greedy(_Ordered):
    """Draws the highest score, ties with equal probability. The temperature has no effect.

    Args:
        epsilon: Share of draws that take any level.
    """

    uses_temperature = False

    def __init__(self, epsilon: float = 0.0) -> None:
        checked_share("epsilon", epsilon)
        self.epsilon = epsilon

    def draw(self, generator: torch.Generator) -> int:
        """Draws one of the best rows, or with probability ``epsilon`` any row.

        :meta private:
        """
        takes_any = self.epsilon > 0.0 and uniform(generator) < self.epsilon
        among = len(self._order) if takes_any else self._num_best()
        return int(self._order[int(torch.randint(among, (), generator=generator, device="cpu"))][2])

    def _num_best(self) -> int:
        return self._order.bisect_left((self._order[0][0], math.inf))

    def _is_best(self, scores: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
        return scores == scores.max()

    def probabilities(self, scores: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
        """Returns the probability of each row, float64 ``[L]``."""
        best = self._is_best(scores, timestamps)
        return (1.0 - self.epsilon) * best / best.sum() + self.epsilon / len(scores)


class Top(Greedy):
    """Draws the ``count`` highest scores with equal probability. The temperature has no effect.

    The buffer of the most learnable levels in Rutherford et al. 2024, algorithm 1, https://arxiv.org/abs/2408.15099,
    which changes only if all levels are measured again. Here it also changes with every recorded score.

    Args:
        count: Number K of levels that are drawn, or all if fewer have a score.
        epsilon: Share of draws that take any level with a score.
    """

    def __init__(self, count: int, epsilon: float = 0.0) -> None:
        super().__init__(epsilon)
        self.count: int = checked_count("count", count, of="levels")

    def _num_best(self) -> int:
        return min(self.count, len(self._order))

    def _is_best(self, scores: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
        best = np.zeros(len(scores), np.bool_)
        best[by_rank(scores, timestamps)[: self.count]] = True
        return best


class _Weighted(Prioritization):
    """Draws rows in proportion to weights, whose logarithms a subclass computes, or uniformly if all weights are 0."""

    saved_attributes: tuple[str, ...] = ("_reference",)  # The sums are rounded relative to it.
    _tree: SumTree
    _logs: list[float]
    _reference: float

    @abstractmethod
    def log_weights(self, scores: np.ndarray) -> np.ndarray:
        """Returns the logarithm of each row's weight, ``-inf`` for weight 0, as ``[L]``."""

    def fill(self, scores: np.ndarray, timestamps: np.ndarray) -> None:
        """Builds the tree of all weights.

        :meta private:
        """
        self._logs = self.log_weights(scores).tolist()
        self._tree = SumTree()
        self._rescale()

    def _restore_attributes(self, state: dict[str, Any]) -> None:
        super()._restore_attributes(state)
        self._rescale(self._reference)

    def _rescale(self, reference: float | None = None) -> None:
        # Weights are relative to the largest, so that their sums neither overflow nor vanish.
        largest = max((log for log in self._logs if log > -math.inf), default=0.0)
        self._reference = reference if reference is not None else largest
        self._tree.fill([self._weight(log) for log in self._logs])

    def _weight(self, log: float) -> float:
        # Above 0 unless the score's weight is 0, so that a level far below the others can still be drawn.
        return math.exp(max(log - self._reference, -2.0 * _FARTHEST_LOG)) if log > -math.inf else 0.0

    def put(self, row: int, score: float, timestamp: int) -> None:
        """Changes or adds a weight, and rescales all weights if it is far above the others.

        :meta private:
        """
        log = float(self.log_weights(np.array([score]))[0])
        self._logs[row : row + 1] = [log]
        if log - self._reference > _FARTHEST_LOG:  # far above the others
            self._rescale()
            return
        self._tree[row] = self._weight(log)
        if 0.0 < self._tree.total < math.exp(-_FARTHEST_LOG):  # the largest were lowered
            self._rescale()

    def draw(self, generator: torch.Generator) -> int:
        """Draws a row by one search of the tree.

        :meta private:
        """
        if self._tree.total == 0.0:  # no score has a weight: uniformly
            return int(torch.randint(len(self._logs), (), generator=generator, device="cpu"))
        return self._tree.find(uniform(generator) * self._tree.total)

    def probabilities(self, scores: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
        """Returns the probability of each row, float64 ``[L]``."""
        logs = self.log_weights(scores)
        if not np.isfinite(logs).any():
            return np.full(len(scores), 1.0 / len(scores))
        weights = np.exp(logs - logs.max())
        return weights / weights.sum()


class Proportional(_Weighted):
    """Probability proportional to ``max(score, 0) ** (1 / score_temperature)``. Uniform if no score is above 0."""

    def log_weights(self, scores: np.ndarray) -> np.ndarray:
        """Returns the logarithm of each weight, ``-inf`` for a score of at most 0.

        :meta private:
        """
        logs = np.full(len(scores), -math.inf)
        np.log(scores, out=logs, where=scores > 0.0)
        return logs / self.score_temperature


class Boltzmann(_Weighted):
    """Probability proportional to ``exp(score / score_temperature)``."""

    def log_weights(self, scores: np.ndarray) -> np.ndarray:
        """Returns the logarithm of each weight.

        :meta private:
        """
        return scores / self.score_temperature


def by_rank(scores: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
    """Returns the rows by falling score. Of equal scores, the level that was played longer ago comes first."""
    falling = -scores
    order = np.argsort(falling)
    ordered = falling[order]
    equal = ordered[1:] == ordered[:-1]
    if equal.any():  # sorting all rows by both keys takes ten times as long
        tied = np.zeros(len(order), np.bool_)
        tied[1:] |= equal
        tied[:-1] |= equal
        rows = order[tied]
        order[tied] = rows[np.lexsort((rows, timestamps[rows], falling[rows]))]
    return order


class SumTree:
    """Binary tree of sums, each recomputed from its halves, so that rounding errors do not accumulate."""

    def __init__(self) -> None:
        self.first_leaf: int = 1  # node of row 0
        self.nodes: list[float] = [0, 0]  # node 1 is the root

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self.nodes[1]

    def __setitem__(self, row: int, value: float) -> None:
        if row >= self.first_leaf:  # the leaves are doubled
            leaves = self.nodes[self.first_leaf :]
            self.fill(leaves + [0] * (row + 1 - len(leaves)))
        nodes = self.nodes
        node = self.first_leaf + row
        nodes[node] = value
        while node > 1:
            node >>= 1
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]

    def fill(self, values: list[float]) -> None:
        """Replaces all values."""
        self.first_leaf = 1 << max(len(values) - 1, 0).bit_length()
        self.nodes = [0] * self.first_leaf + values + [0] * (self.first_leaf - len(values))
        for node in range(self.first_leaf - 1, 0, -1):
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, prefix: float) -> int:
        """Returns the row in which the running sum passes ``prefix``."""
        nodes = self.nodes
        node = 1
        while node < self.first_leaf:
            node *= 2
            # Rounding may put the prefix at the end of the left half while the right half is empty
            if prefix >= nodes[node] and nodes[node + 1] > 0:
                prefix -= nodes[node]
                node += 1
        return node - self.first_leaf

    def find_below(self, top: int, rows: int, prefix: int) -> int:
        """Works like :meth:`find` on the integers ``top - value`` of the first ``rows`` rows."""
        nodes = self.nodes
        node = 1
        row, width = 0, self.first_leaf  # the first row below a node, and the number of its leaves
        while width > 1:
            node, width = 2 * node, width // 2
            left = top * min(rows - row, width) - nodes[node]  # sum over the rows below the left child
            if prefix >= left:
                prefix -= int(left)
                node, row = node + 1, row + width
        return row


def effective_number(probabilities: np.ndarray) -> float:
    """Returns how many equally likely levels would repeat as often."""
    # Two independent draws take the same level with probability 1 / n: n is L if all are equal, 1 if one has all.
    return float(1.0 / np.square(probabilities).sum())


class ReplayConcentration:
    """Warns once if replays repeat the level of the replay before too often, unless the temperature has no effect."""

    def __init__(self, prioritization: Prioritization) -> None:
        self._prioritization = prioritization
        self._drawn = [(-1, -1)] if prioritization.uses_temperature else None

    def add(self, level: tuple[int, int], scored: int) -> None:
        """Counts a replay of a level, named by its row and generation."""
        if self._drawn is None or scored < _FEWEST_SCORED:  # few levels repeat without being narrow
            return
        self._drawn.append(level)
        if len(self._drawn) <= _WINDOW:
            return
        # Probabilities would not show that levels of equal scores alternate.
        repeats = sum(map(operator.eq, self._drawn, self._drawn[1:]))
        self._drawn = [level]
        if _FEWEST_EFFECTIVE * repeats <= _WINDOW:
            return
        self._drawn = None  # warns once
        warnings.warn(
            f"of the last {_WINDOW:,} replays {repeats:,} took the same level as the replay before, as if only "
            f"{_WINDOW / repeats:.1f} levels were replayed, although {scored:,} have a score: "
            f"{type(self._prioritization).__name__}() at score_temperature="
            f"{self._prioritization.score_temperature:g} gives nearly all replays for the score to one level until "
            "its score changes. With many episodes per update that level takes most of a batch. Give a higher "
            "score_temperature, such as 1, or replay_in_flight=False; see docs/levels-when.md",
            stacklevel=2,
        )
