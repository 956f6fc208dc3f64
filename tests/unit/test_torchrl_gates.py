# SPDX-License-Identifier: Apache-2.0
"""Each private name of TorchRL that the library uses is there and does what the library expects."""

from __future__ import annotations

from torchrl.data import LazyTensorStorage, ReplayBuffer

from lightning_replay.torchrl_compat import attached_buffers


def test_a_storage_knows_its_buffers() -> None:
    storage = LazyTensorStorage(4)
    assert not attached_buffers(storage)
    buffers = [ReplayBuffer(storage=storage, batch_size=1) for _ in range(2)]
    assert list(attached_buffers(storage)) == buffers
