# SPDX-License-Identifier: Apache-2.0
"""Buffers and storages in forked processes: they get new locks, and are refused where another thread held the old ones.

A fork copies the forking thread alone: what another thread held stays locked in the child, and half-written.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any, Protocol

import numpy as np

__all__ = ["Forkable", "SharedWrites", "is_held_elsewhere", "register"]


class Forkable(Protocol):
    """An object with locks or threads."""

    def after_fork(self) -> None:
        """Replaces its locks and threads; called in the forked process."""


class SharedWrites:
    """Counts writes into a file that forked processes share, so that a fork can refuse rows written since."""

    def __init__(self) -> None:
        self._of_all = np.frombuffer(mmap.mmap(-1, 8), dtype=np.int64)  # anonymous, and shared with forked processes
        self._own = 0  # which a fork copies

    def add(self) -> None:
        """Counts a write; to be called before anything is changed."""
        self._of_all[0] += 1
        self._own += 1

    @property
    def came_since(self) -> bool:
        """Whether this is a forked process, and another one has written since."""
        return int(self._of_all[0]) != self._own


_living: weakref.WeakSet[Any] = weakref.WeakSet()


def register(one: Forkable) -> None:
    """Calls an object's ``after_fork`` in each process that is forked from this one, for as long as it lives."""
    _living.add(one)


def is_held_elsewhere(lock: Any) -> bool:
    """Returns whether another thread holds the lock: in a forked process, whether one held it at the fork."""
    if not lock.acquire(blocking=False):
        return True
    lock.release()
    return False


def _after() -> None:
    for one in list(_living):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after)
