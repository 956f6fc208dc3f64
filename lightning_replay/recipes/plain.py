# SPDX-License-Identifier: Apache-2.0
"""Methods that draw single stored transitions from one first-in-first-out buffer."""

from __future__ import annotations

from lightning_replay.events import ConditionLike
from lightning_replay.recipes.assemble import assemble
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler, ReverseSweepSampler, UniformSampler
from lightning_replay.schedules import Schedule


def uniform(
    capacity: int,
    batch_size: int = 256,
    *,
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    prefetch: int | None = None,
    seed: int | None = None,
) -> Replay:
    """Uniform draws, the oldest leaves: experience replay as it began (Lin 1992).

    Args:
        capacity: most transitions kept.
        batch_size: transitions per batch.
        n_steps: rewards summed into one return when a row is drawn.
        discount: γ of that return.
        device: where transitions are kept.
        memmap: a directory for a scratch file that holds the transitions, for buffers larger than memory.
        prefetch: batches drawn ahead in threads.
        seed: of every draw; ``None`` seeds from torch's global generator.
    """
    return assemble(capacity, batch_size, UniformSampler(), None, n_steps, discount, device, memmap, prefetch, seed)


def prioritized(
    capacity: int,
    batch_size: int = 256,
    *,
    priority_exponent: float = 0.6,
    importance_exponent: float | Schedule = 0.4,
    priority_offset: float = 1e-6,
    normalize_over_batch: bool = False,
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    prefetch: int | None = None,
    seed: int | None = None,
) -> Replay:
    """Rows with large TD errors are drawn more often (Schaul et al. 2016, https://arxiv.org/abs/1511.05952).

    Multiply the loss by ``batch["priority_weight"]`` and return TD errors with ``replay.update_priority``.

    Args:
        capacity: most transitions kept.
        batch_size: transitions per batch.
        priority_exponent: α; 0 draws uniformly, 1 in proportion to the priority.
        importance_exponent: β of the correction; a number or a schedule.
        priority_offset: ε, added to every priority.
        normalize_over_batch: divide weights by the batch's largest instead of the memory's.
        n_steps: rewards summed into one return when a row is drawn.
        discount: γ of that return.
        device: where transitions are kept.
        memmap: a directory for a scratch file that holds the transitions.
        prefetch: batches drawn ahead in threads.
        seed: of every draw.
    """
    sampler = PrioritizedSampler(
        capacity=capacity,
        priority_exponent=priority_exponent,
        importance_exponent=importance_exponent,
        priority_offset=priority_offset,
        normalize_over_batch=normalize_over_batch,
    )
    return assemble(capacity, batch_size, sampler, None, n_steps, discount, device, memmap, prefetch, seed)


def reverse_sweep(
    capacity: int,
    batch_size: int = 256,
    *,
    goal: ConditionLike,
    sweep_share: float = 0.5,
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    prefetch: int | None = None,
    seed: int | None = None,
) -> Replay:
    """Episodes that reached a goal are replayed backwards in contiguous batches, mixed with uniform ones.

    A baseline of Stratified Sampling from Event Tables (arXiv:2211.00576), which gives no numbers for it.

    Args:
        capacity: most transitions kept.
        batch_size: transitions per batch, and steps of an episode in one batch of a sweep.
        goal: which steps reach the goal, for instance :func:`lightning_replay.events.reward_at_least`.
        sweep_share: share of batches that are part of a sweep.
        n_steps: rewards summed into one return when a row is drawn.
        discount: γ of that return.
        device: where transitions are kept.
        memmap: a directory for a scratch file that holds the transitions.
        prefetch: batches drawn ahead in threads.
        seed: of every draw.
    """
    sampler = ReverseSweepSampler(goal=goal, sweep_share=sweep_share)
    return assemble(capacity, batch_size, sampler, None, n_steps, discount, device, memmap, prefetch, seed)
