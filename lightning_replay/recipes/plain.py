# SPDX-License-Identifier: Apache-2.0
"""Methods that draw single stored transitions from one first-in-first-out buffer."""

from __future__ import annotations

from lightning_replay.argument_names import with_named_arguments
from lightning_replay.events.event_table import ConditionLike
from lightning_replay.recipes.assemble import assemble
from lightning_replay.recipes.storage import storage_for
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler, ReverseSweepSampler, UniformSampler
from lightning_replay.schedules import Schedule


@with_named_arguments
def uniform(
    capacity: int,
    batch_size: int = 256,
    *,
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    frame_stack: int | None = None,
    image_key: str | tuple[str, ...] = "pixels",
    frame_capacity: int | None = None,
    prefetch: int | None = None,
    check_finite: bool = True,
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
        frame_stack: frames in each stack under ``image_key``; each frame is then stored once, see
            :class:`~lightning_replay.storage.frames.FrameStorage`. ``None`` stores rows as they come.
        image_key: of the stacks, uint8 ``[N, frame_stack, H, W]``, and under ``"next"`` of their successors.
        frame_capacity: most frames kept; when they are full, the oldest transitions leave. By default an eighth more
            than transitions for stacks of 4, enough for episodes of 32 steps or more.
        prefetch: batches drawn ahead in threads.
        check_finite: refuse rows with NaN or infinity in rewards or observations.
        seed: of every draw; ``None`` seeds from torch's global generator.
    """
    storage = storage_for(
        capacity,
        device=device,
        memmap=memmap,
        frame_stack=frame_stack,
        image_key=image_key,
        frame_capacity=frame_capacity,
        n_steps=n_steps,
    )
    sampler = UniformSampler()
    return assemble(
        capacity, batch_size, sampler, None, n_steps, discount, device, memmap, prefetch, check_finite, seed, storage
    )


@with_named_arguments
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
    frame_stack: int | None = None,
    image_key: str | tuple[str, ...] = "pixels",
    frame_capacity: int | None = None,
    prefetch: int | None = None,
    check_finite: bool = True,
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
        frame_stack: frames in each stack under ``image_key``; each frame is then stored once, see
            :class:`~lightning_replay.storage.frames.FrameStorage`. ``None`` stores rows as they come.
        image_key: of the stacks, uint8 ``[N, frame_stack, H, W]``, and under ``"next"`` of their successors.
        frame_capacity: most frames kept; when they are full, the oldest transitions leave. By default an eighth more
            than transitions for stacks of 4, enough for episodes of 32 steps or more.
        prefetch: batches drawn ahead in threads.
        check_finite: refuse rows with NaN or infinity in rewards or observations.
        seed: of every draw.
    """
    sampler = PrioritizedSampler(
        capacity=capacity,
        priority_exponent=priority_exponent,
        importance_exponent=importance_exponent,
        priority_offset=priority_offset,
        normalize_over_batch=normalize_over_batch,
    )
    storage = storage_for(
        capacity,
        device=device,
        memmap=memmap,
        frame_stack=frame_stack,
        image_key=image_key,
        frame_capacity=frame_capacity,
        n_steps=n_steps,
    )
    return assemble(
        capacity, batch_size, sampler, None, n_steps, discount, device, memmap, prefetch, check_finite, seed, storage
    )


@with_named_arguments
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
    frame_stack: int | None = None,
    image_key: str | tuple[str, ...] = "pixels",
    frame_capacity: int | None = None,
    prefetch: int | None = None,
    check_finite: bool = True,
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
        frame_stack: frames in each stack under ``image_key``; each frame is then stored once, see
            :class:`~lightning_replay.storage.frames.FrameStorage`. ``None`` stores rows as they come.
        image_key: of the stacks, uint8 ``[N, frame_stack, H, W]``, and under ``"next"`` of their successors.
        frame_capacity: most frames kept; when they are full, the oldest transitions leave. By default an eighth more
            than transitions for stacks of 4, enough for episodes of 32 steps or more.
        prefetch: batches drawn ahead in threads.
        check_finite: refuse rows with NaN or infinity in rewards or observations.
        seed: of every draw.
    """
    sampler = ReverseSweepSampler(goal=goal, sweep_share=sweep_share)
    storage = storage_for(
        capacity,
        device=device,
        memmap=memmap,
        frame_stack=frame_stack,
        image_key=image_key,
        frame_capacity=frame_capacity,
        n_steps=n_steps,
    )
    return assemble(
        capacity, batch_size, sampler, None, n_steps, discount, device, memmap, prefetch, check_finite, seed, storage
    )
