# SPDX-License-Identifier: Apache-2.0
"""Forked processes: their buffers get locks of their own, and the garbage of their parent is not collected."""

from __future__ import annotations

import gc
import os
import sys
import threading
import uuid
import weakref
from typing import Any

process: str = uuid.uuid4().hex  #: Identifies this process; a forked one has another.
inherits_ray: bool = False  #: Whether this process was forked from one that was connected to Ray.
_living: weakref.WeakSet[Any] = weakref.WeakSet()


def register(one: Any) -> None:
    """Calls ``after_fork`` of an object with locks or threads in each process forked from this one, while it lives."""
    _living.add(one)


def is_held_elsewhere(lock: Any) -> bool:
    """Returns whether another thread holds the lock: in a forked process, whether one held it at the fork."""
    if not lock.acquire(blocking=False):
        return True
    lock.release()
    return False


def half_changed(one: Any) -> str:
    """Returns why a buffer is refused in a process that was forked while another thread used it."""
    return (
        f"this process was forked while another thread used this {type(one).__name__}, which may be half-changed here. "
        "Fork when nobody uses it, or build it in this process"
    )


# A child that collects the handle of a Ray actor reports this through its parent's connection. Ray's control process
# then takes the parent's next request for one that it already had, and the parent waits for ever.
_pausing: set[int] = set()  # threads that fork and have switched the collector off


def _pause_collector() -> None:
    if gc.isenabled():
        _pausing.add(threading.get_ident())
        gc.disable()


def _resume_collector() -> None:
    if threading.get_ident() in _pausing:
        gc.enable()  # first: a thread that forks before the next line finds it on, or this thread among those that fork
        _pausing.remove(threading.get_ident())


def _begin_child() -> None:
    global inherits_ray, process
    process = uuid.uuid4().hex
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
