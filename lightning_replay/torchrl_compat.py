# SPDX-License-Identifier: Apache-2.0
"""Private names of TorchRL that this library uses; each has a gate test."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl.data.replay_buffers import ReplayBuffer, Storage


def attached_buffers(storage: Storage) -> Sequence[ReplayBuffer]:
    """Returns the buffers of a storage, which a writer informs of the rows that it wrote."""
    return storage._attached_entities
