# SPDX-License-Identifier: Apache-2.0
"""Draws divided over several replays, in which each row is as likely as in one replay that holds all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torchrl.data.replay_buffers import Sampler

from lightning_replay.options import BELOW_ONE, check_kind, checked_count, checked_seed
from lightning_replay.parts import GroupTotals, ReplaySampler, ShardDraw, ShardRequest, as_replay_sampler, unwrap
from lightning_replay.state import SeededStateful

__all__ = ["Divider", "Division", "GroupTotals", "ShardDraw", "ShardRequest", "check_divisible"]

_SEED_OF_POINTS = 982_451_653  # a prime, so that points are independent of a sampler's own draws by the same seed


@dataclass(frozen=True, eq=False)
class Division:
    """A batch divided over S replays.

    Attributes:
        parts: of each replay, of length 0 for the ones that no row comes from.
        totals: of each replay when the draw was divided, or ``None`` if it could not be drawn from.
        shares: float64 ``[G]``, how likely a row of the batch is of each group.
    """

    parts: list[ShardRequest]
    totals: list[GroupTotals | None]
    shares: np.ndarray


class Divider(SeededStateful):
    """Divides draws over S replays ("shards") such that each row has the probability it has in one replay of all rows.

    Keep the last known :class:`~lightning_replay.parts.GroupTotals` of each shard. :meth:`divide` draws points in the
    sum of the masses, and returns the points of each shard. :meth:`Replay.sample_shard
    <lightning_replay.Replay.sample_shard>` of a shard draws its rows, and :meth:`weigh` computes the weights from the
    replies.

    Rows may change between :meth:`divide` and the draw of a shard. Row i of shard s then has the probability
    q_i = (M_s / M) p_i / M'_s. Here p_i is its priority, M_s and M are the masses at :meth:`divide`, and M'_s is the
    mass of s at its draw. The weights use q_i. Without such changes, rows and weights equal one replay's, except
    for rounding.

    A sampler without weights, such as the uniform one, has no weights here either. Its draws are as uniform as the
    totals are recent.

    Args:
        sampler: built with the options of the samplers of the shards, and a capacity of any size: it holds no rows. Its
            schedules, its clock of draws and, of a curriculum, its scheduler count for all shards.
        seed: of the points. ``None`` seeds them from torch's global generator.

    Raises:
        TypeError: draws of the sampler cannot be divided.

    Example:
        >>> from tensordict import TensorDict
        >>> from lightning_replay import recipes
        >>> shards = [recipes.prioritized(8, 4, seed=number) for number in range(2)]
        >>> slots = [shard.extend(TensorDict({"observation": torch.zeros(5, 3)}, [5])) for shard in shards]
        >>> divider = Divider(recipes.prioritized(8, 4).sampler, seed=0)
        >>> division = divider.divide(4, [shard.group_totals() for shard in shards])
        >>> drawn = [shard.sample_shard(part) for shard, part in zip(shards, division.parts)]
        >>> divider.weigh(division, [reply for _, reply in drawn])
        {'priority_weight': array([1., 1., 1., 1.], dtype=float32)}
    """

    saved_parts: tuple[str, ...] = ("sampler",)

    def __init__(self, sampler: Sampler, seed: int | None = None) -> None:
        check_kind("sampler", sampler, Sampler, "a sampler, such as PrioritizedSampler(capacity=1)")
        self.sampler = sampler
        self._hooks = as_replay_sampler(sampler)
        check_divisible(sampler)
        seed = checked_seed(seed)
        self._seed_generator(None if seed is None else (seed + _SEED_OF_POINTS) % 2**63)

    def divide(self, batch_size: int, totals: Sequence[GroupTotals | None]) -> Division:
        """Divides a draw of ``batch_size`` rows.

        Args:
            batch_size: B.
            totals: of each shard, or ``None`` for one that cannot be drawn from now.

        Raises:
            RuntimeError: no shard holds rows to draw from, or too few of them.
            ValueError: the shards have other groups than each other.
        """
        batch_size = checked_count("batch_size", batch_size, of="transitions")
        held = [one for one in totals if one is not None]
        if not held:
            raise RuntimeError(f"none of the {len(totals)} replays can be drawn from; give the totals of at least one")
        for one in held:
            if one.names != held[0].names:
                raise ValueError(
                    f"replays have the groups {held[0].names} and {one.names}; a draw is divided over replays of the "
                    "same options"
                )
        total = GroupTotals.summed(held)
        rows, shares = self._hooks.rows_of_groups(batch_size, total)
        empty = np.flatnonzero((rows > 0) & ~(total.mass > 0))
        if len(empty):
            stored = int(total.rows[empty[0]])
            raise RuntimeError(
                f"there are no rows to draw from: {total.names[empty[0]]!r} holds {stored} in all replays"
                + (", all of priority 0; use a positive priority_offset" if stored else "; call extend first")
            )
        mass = np.stack([np.zeros(len(total.names)) if one is None else one.mass for one in totals])
        fractions = np.divide(mass, total.mass, out=np.zeros_like(mass), where=total.mass > 0)
        uniform = torch.rand(batch_size, dtype=torch.float64, generator=self._generator, device=self._generator.device)
        group = np.repeat(np.arange(len(rows)), rows)
        shard, points = _located(mass, group, uniform.cpu().numpy())
        owns = [shard == number for number in range(len(totals))]
        parts = [
            ShardRequest(group[own], points[own], shares, fraction, total.rows)
            for own, fraction in zip(owns, fractions, strict=True)
        ]
        return Division(parts, [*totals], shares)

    def weigh(self, division: Division, replies: Sequence[ShardDraw | None]) -> dict[str, np.ndarray]:
        """Returns the columns of a batch that depend on all shards, such as ``priority_weight``. Counts one draw.

        Args:
            division: of the batch.
            replies: of each shard, in order, or ``None`` if it was sent no part, or has not answered: its rows are
                missing from the batch then.

        Returns:
            Arrays ``[B]``, the rows of one shard after the rows of the other, or no array if rows have no weights.

        Raises:
            ValueError: other replies than parts, or with another number of rows.
        """
        answered = [(part, one) for part, one in zip(division.parts, replies, strict=True) if one is not None]
        for part, one in answered:
            if len(one.probability) != len(part):
                raise ValueError(f"a reply has {len(one.probability)} rows and its part {len(part)}; mind the order")
        if not answered:
            raise ValueError("weigh got no reply; no row was drawn")
        # A shard that did not answer counts as it was when the draw was divided.
        now = [before if one is None else one.totals for before, one in zip(division.totals, replies, strict=True)]
        latest = [(part.fractions, one) for part, one in zip(division.parts, now, strict=True) if one is not None]
        total = GroupTotals.summed([one for _, one in latest])
        corrections = [one.correction for _, one in answered if one.correction is not None]
        batch = ShardRequest(
            np.concatenate([part.groups for part, _ in answered]),
            np.concatenate([part.points for part, _ in answered]),
            division.shares,
            np.ones(len(total.rows)),
            total.rows,
        )
        least = np.min([_least(one, fractions) for fractions, one in latest], axis=0)
        drawn = ShardDraw(
            np.concatenate([part.fractions[part.groups] * one.probability for part, one in answered]),
            replace(total, mass=np.ones(len(least)), smallest=least),
            np.concatenate(corrections) if corrections else None,
        )
        return self._hooks.weigh(batch, drawn)

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of the sampler's schedules, in environment steps and updates since the start of training."""
        self._hooks.advance(env_steps=env_steps, updates=updates)

    def reseed(self, seed: int) -> None:
        """Restarts the generators of the points and of the sampler from ``seed``.

        :meta private:
        """
        super().reseed((seed + _SEED_OF_POINTS) % 2**63)
        self._hooks.reseed(seed)


def check_divisible(sampler: Sampler) -> None:
    """Refuses a sampler whose draws cannot be divided, or which pairs the rows of one, by raising ``TypeError``."""
    for one in dict.fromkeys((sampler, unwrap(sampler))):
        # If a class overrides only sample, divided draws would follow the rule of its base class.
        drawing = next(base for base in type(one).__mro__ if {"sample", "sample_shard"} & vars(base).keys())
        if not isinstance(one, ReplaySampler) or "sample_shard" not in vars(drawing):
            raise TypeError(
                f"draws of {type(one).__name__} cannot be divided over several replays; use a sampler of "
                "rows or pairs of lightning_replay.samplers, or define group_totals(storage) and "
                "sample_shard(storage, part) in your subclass of lightning_replay.parts.ReplaySampler, or keep all "
                "rows in one replay"
            )


def _located(mass: np.ndarray, group: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the replay in which each point lies, and its place in the mass, in [0, 1), for points in all mass."""
    shard, points = np.empty(len(group), dtype=np.int64), np.empty(len(group))
    for number in np.unique(group):
        own = group == number
        ends = np.cumsum(mass[:, number])
        wanted = uniform[own] * ends[-1]
        # A product may be rounded to the sum itself: the last replay with mass has that point.
        found = np.minimum(np.searchsorted(ends, wanted, side="right"), np.flatnonzero(mass[:, number])[-1])
        start = ends[found] - mass[found, number]
        shard[own] = found
        points[own] = np.clip((wanted - start) / mass[found, number], 0.0, BELOW_ONE)
    return shard, points


def _least(totals: GroupTotals, fractions: np.ndarray) -> np.ndarray:
    """Returns the smallest probability of a row of one replay in a draw from its group in all, float64 ``[G]``."""
    drawable = (fractions > 0) & (totals.mass > 0)
    least = np.full(len(fractions), np.inf)
    np.divide(fractions * np.where(drawable, totals.smallest, 0.0), totals.mass, out=least, where=drawable)
    return least
