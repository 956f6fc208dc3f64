# SPDX-License-Identifier: Apache-2.0
"""Methods that draw single stored transitions from one first-in-first-out buffer.

Options that a recipe's own documentation leaves out are those of :mod:`lightning_replay.recipes.options`.
"""

from __future__ import annotations

from typing import Unpack

from lightning_replay.events.event_table import ConditionLike
from lightning_replay.recipes.options import FrameOptions, assemble, recipe
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler, ReverseSweepSampler, UniformSampler
from lightning_replay.schedules import Schedule


@recipe
def uniform(
    capacity: int,
    batch_size: int | None = None,
    **options: Unpack[FrameOptions],
) -> Replay:
    """Draws uniformly and evicts the oldest: experience replay as introduced by Lin (1992)."""
    return assemble(Replay, capacity, batch_size, options, UniformSampler())


@recipe
def prioritized(
    capacity: int,
    batch_size: int | None = None,
    *,
    priority_exponent: float = 0.6,
    importance_exponent: float | Schedule = 0.4,
    priority_offset: float = 1e-6,
    normalize_over_batch: bool = False,
    **options: Unpack[FrameOptions],
) -> Replay:
    """Draws rows of large TD errors more often (Schaul et al. 2016, https://arxiv.org/abs/1511.05952).

    Multiply the loss by ``batch["priority_weight"]`` and return TD errors with ``replay.update_priority``.

    Args:
        priority_exponent: α; 0 draws uniformly, 1 in proportion to the priority.
        importance_exponent: β of the correction; a number or a schedule.
        normalize_over_batch: divide weights by the batch's largest instead of the memory's.
    """
    sampler = PrioritizedSampler(
        capacity=capacity,
        priority_exponent=priority_exponent,
        importance_exponent=importance_exponent,
        priority_offset=priority_offset,
        normalize_over_batch=normalize_over_batch,
    )
    return assemble(Replay, capacity, batch_size, options, sampler)


@recipe
def reverse_sweep(
    capacity: int,
    batch_size: int | None = None,
    *,
    goal: ConditionLike,
    sweep_share: float = 0.5,
    **options: Unpack[FrameOptions],
) -> Replay:
    """Replays episodes that reached a goal backwards in contiguous batches, mixed with uniform ones.

    A baseline of Stratified Sampling from Event Tables (arXiv:2211.00576), which reports no numbers for it.

    Args:
        batch_size: transitions per batch, and steps of an episode in one batch of a sweep.
        goal: which steps reach the goal, for instance :func:`lightning_replay.events.reward_at_least`.
        sweep_share: share of batches that are part of a sweep.
    """
    sampler = ReverseSweepSampler(goal=goal, sweep_share=sweep_share, check_continuity=options["check_continuity"])
    return assemble(Replay, capacity, batch_size, options, sampler)
