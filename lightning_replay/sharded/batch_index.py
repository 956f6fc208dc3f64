# SPDX-License-Identifier: Apache-2.0
"""``index`` and ``generation`` of a batch from a sharded replay: the identities of its rows in two numbers each."""

from __future__ import annotations

import numpy as np

from lightning_replay.sharded.row_ids import NUM_EPOCHS, RowIds

_SLOT_BITS = 40
_GENERATION_BITS, _EPOCH_BITS, _KEY_BITS = 32, NUM_EPOCHS.bit_length() - 1, 20  # 63 together
#: Keys of replays are below it.
NUM_KEYS = 1 << _KEY_BITS


def numbers_of(ids: RowIds, key: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``index`` and ``generation`` of rows, int64 of the shapes of their slots and generations.

    The index is ``shard * 2**40 + slot``. The generation has, from its highest bits on, the key of the replay, how
    often the shard was started modulo :data:`~lightning_replay.sharded.row_ids.NUM_EPOCHS`, and how often the slot was
    written.

    Example:
        >>> index, generation = numbers_of(RowIds.of_shard(1, 2, np.array([5]), np.array([3])), key=9)
        >>> index.tolist() == [2**40 + 5], row_ids_of(index, generation, key=9)[0].slot.tolist()
        (True, [5])
    """
    head = (key << _EPOCH_BITS) + (ids.epoch & (NUM_EPOCHS - 1))
    return _with_head(ids.shard, ids.slot, _SLOT_BITS), _with_head(head, ids.generation, _GENERATION_BITS)


def row_ids_of(index: np.ndarray, generation: np.ndarray, key: int) -> tuple[RowIds, np.ndarray]:
    """Returns the identities in :func:`numbers_of`, and which rows are of the replay with this key, bool ``[n]``."""
    head = _head(generation, _GENERATION_BITS)
    shard, epoch = _head(index, _SLOT_BITS), head & (NUM_EPOCHS - 1)
    slot, generation = index & ((1 << _SLOT_BITS) - 1), generation & ((1 << _GENERATION_BITS) - 1)
    return RowIds(shard, epoch, slot, generation), (head >> _EPOCH_BITS) == key


def _with_head(head: np.ndarray, tail: np.ndarray, bits: int) -> np.ndarray:
    return (head.reshape(-1, *[1] * (tail.ndim - 1)) << bits) + tail


def _head(numbers: np.ndarray, bits: int) -> np.ndarray:
    return numbers.reshape(len(numbers), -1)[:, 0] >> bits
