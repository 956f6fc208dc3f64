# SPDX-License-Identifier: Apache-2.0
"""A first-in-first-out buffer put together."""

from __future__ import annotations

from torchrl.data.replay_buffers import Sampler
from torchrl.envs import Transform

from lightning_replay.replay import Replay
from lightning_replay.storage import PackedStorage


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
    seed: int | None,
    storage: PackedStorage | None = None,
) -> Replay:
    """A buffer in which the oldest transition leaves; ``storage`` takes the place of a packed one."""
    return Replay(
        storage=PackedStorage(capacity, device=device, memmap=memmap) if storage is None else storage,
        sampler=sampler,
        transform=transform,
        batch_size=batch_size,
        n_steps=n_steps,
        discount=discount,
        prefetch=prefetch,
        seed=seed,
    )
