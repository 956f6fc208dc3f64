# SPDX-License-Identifier: Apache-2.0
"""Forked processes: their buffers get new locks, and with Ray in the process they keep the garbage of their parent."""

from __future__ import annotations

import gc
import os
import sys
import threading
import uuid
import weakref
from typing import Any

from lightning_replay import hooks

process: str = uuid.uuid4().hex  #: Identifies this process; a forked one has another.
inherits_ray: bool = False  #: Whether this process was forked from one that was connected to Ray.
_living: weakref.WeakSet[Any] = weakref.WeakSet()


def register(one: Any) -> None:
    """Calls ``after_fork`` of an object with locks or threads in each process forked from this one, while it lives."""
    _living.add(one)


class ForkGuard:
    """Refuses an object with a lock in a process that was forked while another thread used the object.

    ``after_fork`` of the object is called in each forked process, and replaces the lock by :meth:`renew`.
    """

    def __init__(self, owner: Any) -> None:
        self.refusal: str | None = None  #: Why the object is refused; ``None`` if it may be used.
        self._name = type(owner).__name__
        register(owner)

    def check(self) -> None:
        """Raises ``RuntimeError`` if the object is refused."""
        if self.refusal is not None:
            raise RuntimeError(self.refusal)

    def renew(self, lock: Any) -> Any:
        """Returns a new lock for a forked process, and refuses the object if a thread held ``lock`` at the fork."""
        if lock.acquire(blocking=False):
            lock.release()
        else:
            self.refusal = (
                f"this process was forked while another thread used this {self._name}, which may be half-changed here. "
                "Fork when nobody uses it, or build it in this process"
            )
        return threading.RLock()


# A child that collects the handle of a Ray actor reports this through its parent's connection. Ray's control process
# then takes the parent's next request for one that it already had, and the parent waits forever.
_pausing: set[int] = set()  # threads that fork and have switched the collector off


def _has_handles() -> bool:
    # TorchRL loads Ray if it is installed. Only then can a process hold handles of actors.
    return hooks.are_on and "ray" in sys.modules


def _pause_collector() -> None:
    if gc.isenabled() and _has_handles():
        _pausing.add(threading.get_ident())
        gc.disable()


def _resume_collector() -> None:
    if threading.get_ident() in _pausing:
        # The collector comes first. A fork between the two lines would otherwise leave it off in the child.
        gc.enable()
        _pausing.remove(threading.get_ident())


def _begin_child() -> None:
    global inherits_ray, process
    process = uuid.uuid4().hex
    if _has_handles():
        gc.freeze()
    if _pausing:  # also those of other threads, which do not exist here
        _pausing.clear()
        gc.enable()
    for one in list(_living):
        one.after_fork()
    ray = sys.modules.get("ray")
    inherits_ray = inherits_ray or (ray is not None and ray.is_initialized())


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_pause_collector, after_in_parent=_resume_collector, after_in_child=_begin_child)
