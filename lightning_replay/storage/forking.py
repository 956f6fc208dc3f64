# SPDX-License-Identifier: Apache-2.0
"""Buffers in forked processes, which get them whole, with locks that they can take.

A fork copies the forking thread alone. What another thread held or was writing at that moment would stay locked or
half-written in the child, so the forking thread takes every lock before the fork and releases it in both processes.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any, Protocol

import numpy as np

__all__ = ["Forkable", "SharedWrites", "acquired", "finished", "register", "release_futures"]

_PATIENCE_S = 30.0  # a thread that holds a lock for longer may be waiting for the one that forks


class Forkable(Protocol):
    """An object with locks or threads."""

    fork_rank: int  #: Objects of a lower rank are stopped first, in the order in which their locks are nested.

    def before_fork(self) -> None:
        """Takes the locks."""

    def after_fork(self, *, in_child: bool) -> None:
        """Releases them."""


class SharedWrites:
    """Counts writes into a file that forked processes share, so that a fork can refuse rows written since."""

    def __init__(self) -> None:
        self._count = np.frombuffer(mmap.mmap(-1, 8), dtype=np.int64)  # anonymous, and shared with forked processes
        self._before_fork = 0
        self._at_fork: int | None = None

    def add(self) -> None:
        """Counts a write; to be called before anything is changed."""
        self._count[0] += 1

    def before_fork(self) -> None:
        """Notes the count while nobody writes: the parent may write before the child runs :meth:`forked`."""
        self._before_fork = int(self._count[0])

    def forked(self) -> None:
        """Takes the noted count as that of the fork, in the forked process."""
        if self._at_fork is None:
            self._at_fork = self._before_fork

    @property
    def came_since(self) -> bool:
        """Whether this is a forked process, and another one has written since."""
        return self._at_fork is not None and int(self._count[0]) != self._at_fork


_living: weakref.WeakSet[Any] = weakref.WeakSet()
_stopped: list[Forkable] = []
_registering = threading.Lock()  # an object that is added while the set is read would end the reading
_forking = threading.RLock()  # of the thread that forks: a second one would overwrite which locks the first holds


def register(one: Forkable) -> None:
    """Calls an object's ``before_fork`` and ``after_fork`` at each fork of this process, for as long as it lives."""
    with _registering:
        _living.add(one)


def acquired(lock: Any) -> bool:
    """Acquires a lock; returns False where another thread holds it for too long."""
    return bool(lock.acquire(timeout=_PATIENCE_S))


def finished(futures: Iterable[Future[Any]]) -> bool:
    """Waits until futures are done; returns False where it takes too long."""
    return not wait(tuple(futures), timeout=_PATIENCE_S).not_done


def release_futures(futures: Iterable[Future[Any]]) -> None:
    """Gives futures that are done new locks, in a forked process: threads that wait for batches hold them briefly."""
    for future in futures:
        future._condition = threading.Condition()


def _before() -> None:
    _forking.acquire()
    with _registering:
        living = sorted(_living, key=lambda one: one.fork_rank)
    for one in living:
        one.before_fork()
        _stopped.append(one)


def _after(in_child: bool) -> None:
    global _registering
    if in_child:
        _registering = threading.Lock()  # another thread may have held it
    try:
        while _stopped:
            _stopped.pop().after_fork(in_child=in_child)
    finally:
        _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=lambda: _after(in_child=False), after_in_child=lambda: _after(in_child=True)
    )
