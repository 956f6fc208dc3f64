# SPDX-License-Identifier: Apache-2.0
"""Parts that recipes share: a first-in-first-out buffer, and a sampler that may be prioritized."""

from __future__ import annotations

from typing import NamedTuple

from torchrl.data.replay_buffers import Sampler
from torchrl.envs import Transform

from lightning_replay.recipes.storage import storage_for
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler, UniformSampler
from lightning_replay.schedules import Schedule, checked_schedule
from lightning_replay.validation import checked_number


class Frames(NamedTuple):
    """Options of stacked frames, see :func:`~lightning_replay.recipes.storage.storage_for`."""

    frame_stack: int | None = None
    image_key: str | tuple[str, ...] = "pixels"
    frame_capacity: int | None = None


def assemble(
    capacity: int,
    batch_size: int,
    sampler: Sampler,
    transform: Transform | None,
    n_steps: int,
    discount: float,
    device: str,
    memmap: str | None,
    prefetch: int | None,
    check_finite: bool,
    seed: int | None,
    frames: Frames | None = None,
) -> Replay:
    """Builds a buffer that evicts the oldest transition, with the options of a recipe."""
    stack, key, most = frames or Frames()
    return Replay(
        storage=storage_for(
            capacity,
            device=device,
            memmap=memmap,
            frame_stack=stack,
            image_key=key,
            frame_capacity=most,
            n_steps=n_steps,
        ),
        sampler=sampler,
        transform=transform,
        batch_size=batch_size,
        n_steps=n_steps,
        discount=discount,
        prefetch=prefetch,
        check_finite=check_finite,
        seed=seed,
    )


def prioritized_or_uniform(
    capacity: int, priority_exponent: float, importance_exponent: float | Schedule, priority_offset: float = 1e-6
) -> Sampler:
    """Returns a prioritized sampler; with ``priority_exponent`` 0 a uniform one, on which the others have no effect."""
    if priority_exponent != 0:
        return PrioritizedSampler(
            capacity=capacity,
            priority_exponent=priority_exponent,
            importance_exponent=importance_exponent,
            priority_offset=priority_offset,
        )
    checked_number("priority_exponent", priority_exponent)  # False == 0, and is refused
    checked_schedule("importance_exponent", importance_exponent, highest=1.0)
    checked_number("priority_offset", priority_offset, 0.0)
    return UniformSampler()
