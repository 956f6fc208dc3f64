# SPDX-License-Identifier: Apache-2.0
"""Memory of drawn batches, used again once nothing refers to the batch."""

from __future__ import annotations

import sys
from collections import deque

import numpy as np
import torch
from torch import Tensor

_KEPT = 2  # the batch in use and the one that is drawn meanwhile


class BatchMemory:
    """Tensors for batches of the same size in turn: memory fresh from the system costs more than the copy into it.

    A tensor here is a view of a NumPy array, to which it and all its views keep a reference. Memory is used again where
    the array has no other reference than the one kept here, so a batch that is still held, in whole or in part, never
    changes. At most two batches are kept.

    Example:
        >>> memory = BatchMemory()
        >>> first = memory.tensor(4)[:2]
        >>> second = memory.tensor(4)
        >>> first.data_ptr() == second.data_ptr()
        False
        >>> place = second.data_ptr()
        >>> del second
        >>> memory.tensor(4).data_ptr() == place
        True
    """

    def __init__(self) -> None:
        self._kept: deque[np.ndarray] = deque(maxlen=_KEPT)

    def tensor(self, num_bytes: int) -> Tensor:
        """Returns a tensor, uint8 ``[num_bytes]``, with any content."""
        array = self._free(num_bytes)
        self._kept.append(array)
        return torch.from_numpy(array)

    def _free(self, num_bytes: int) -> np.ndarray:
        held: list[np.ndarray] = []
        # Last used first, which is in the cache; taken out while it is looked at, so that no other thread finds it.
        while self._kept and len(held) < _KEPT:
            try:
                array = self._kept.pop()
            except IndexError:  # another thread took it
                break
            if array.size == num_bytes:
                if sys.getrefcount(array) == _REFERENCES:
                    self._kept.extend(held)
                    return array
                held.append(array)
        self._kept.extend(reversed(held[: _KEPT - 1]))
        return np.empty(num_bytes, dtype=np.uint8)


def _references() -> int:
    """Returns the count of references to an array that only a local name refers to."""
    array = np.empty(0, dtype=np.uint8)
    return sys.getrefcount(array)


_REFERENCES = _references()
