# SPDX-License-Identifier: Apache-2.0
"""Parts that recipes share: the buffer around a sampler, and a sampler that may be prioritized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torchrl.data.replay_buffers import Sampler

from lightning_replay.recipes.storage import storage_for
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler, UniformSampler
from lightning_replay.schedules import Schedule, checked_schedule
from lightning_replay.validation import checked_number

R = TypeVar("R", bound=Replay)

_OF_STORAGE = ("device", "memmap", "frame_stack", "image_key", "frame_capacity", "n_steps")
_OF_BUFFER = ("batch_size", "n_steps", "discount", "prefetch", "check_finite", "seed")


def assemble(
    kind: type[R],
    given: Mapping[str, Any],
    sampler: Sampler,
    *,
    slots: int | None = None,
    default_frame_capacity: int | None = None,
    **parts: Any,
) -> R:
    """Builds the buffer of a recipe.

    Args:
        kind: class of the buffer.
        given: the recipe's arguments, as ``locals()``; those of :mod:`~lightning_replay.recipes.options` are used.
        sampler: of the buffer.
        slots: of the storage; ``None`` takes the option ``capacity``.
        default_frame_capacity: see :func:`~lightning_replay.recipes.storage.storage_for`.
        parts: further arguments of the buffer, before those in ``given``.
    """
    storage = storage_for(
        given["capacity"] if slots is None else slots,
        default_frame_capacity=default_frame_capacity,
        **{name: given[name] for name in _OF_STORAGE if name in given},
    )
    return kind(storage=storage, sampler=sampler, **({name: given[name] for name in _OF_BUFFER} | parts))


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
