# SPDX-License-Identifier: Apache-2.0
"""The oldest transition leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import TensorDictRoundRobinWriter

from lightning_replay.recorded import recorded
from lightning_replay.state_files import read_state, write_state
from lightning_replay.storage import PackedStorage


@recorded
class FirstInFirstOutWriter(TensorDictRoundRobinWriter):
    """Writes transitions in a ring: when the storage is full, the oldest ones are overwritten.

    More transitions at once than the storage holds keep the last ones. Rows that do not fit the storage's
    columns are refused before anything is written, by :class:`~lightning_replay.storage.PackedStorage`; over TorchRL's
    storages this is TorchRL's own round-robin writer. Needs no feedback.
    """

    _cursor: int
    _write_count: int

    def __init__(self) -> None:
        super().__init__()

    def extend(self, data: TensorDictBase) -> Tensor:
        """Writes transitions ``[N]``, oldest first.

        Returns:
            Their slots, int64 ``[min(N, capacity)]``, in the order of the (last) rows of ``data``.

        Raises:
            ValueError: keys, shapes or dtypes are not those of the rows stored first.
        """
        storage = self._storage
        if not isinstance(storage, PackedStorage):
            return super().extend(data.copy())  # TorchRL's writes an index into what it is given
        count = data.shape[0]
        capacity = storage.capacity
        values = storage.checked_values(data)
        if count > capacity:
            values = [value[-capacity:] for value in values]
        kept = min(count, capacity)
        start = (self._cursor + count - kept) % capacity
        until_end = min(kept, capacity - start)
        if until_end == kept:
            storage.write(slice(start, start + kept), values)
        else:
            storage.write(slice(start, capacity), [value[:until_end] for value in values])
            storage.write(slice(0, kept - until_end), [value[until_end:] for value in values])
        self._cursor = (start + kept) % capacity
        self._write_count += count
        index = torch.arange(start, start + kept, device=storage.device)
        if until_end < kept:
            index %= capacity
        for buffer in storage._attached_entities:
            buffer.mark_update(index)
        return index

    def add(self, data: TensorDictBase) -> Tensor | int:
        """Writes one transition of batch size ``[]``; see :meth:`extend`."""
        if not isinstance(self._storage, PackedStorage):
            return super().add(data.copy())
        return int(self.extend(data.unsqueeze(0)))

    def age_of(self, index: Tensor) -> Tensor:
        """How many transitions were written after those in the slots ``index``, int64 of its shape."""
        return (self._cursor - 1 - index) % self._storage.max_size

    def state_dict(self) -> dict[str, Any]:
        """Where the next transition goes, and how many were written."""
        return {"cursor": self._cursor, "write_count": self._write_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        self._cursor = state_dict["cursor"] % self._storage.max_size
        self._write_count = state_dict["write_count"]

    def dumps(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` into the directory ``path``."""
        write_state(path, self.state_dict())

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        self.load_state_dict(read_state(path))
