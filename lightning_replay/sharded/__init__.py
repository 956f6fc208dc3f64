# SPDX-License-Identifier: Apache-2.0
"""One replay divided over Ray actors: exact draws, and what becomes of actors that are lost."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from lightning_replay.options import missing_extra

if TYPE_CHECKING:
    from lightning_replay.sharded.replay import ShardedReplay

__all__ = ["ShardedReplay"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        try:
            return getattr(importlib.import_module("lightning_replay.sharded.replay"), name)
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise missing_extra(name, "ray", "rllib") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_forking = threading.local()


def _pause_collection() -> None:
    _forking.collects = gc.isenabled()
    gc.disable()


def _resume_collection() -> None:
    if _forking.collects:
        gc.enable()


def _leave_inherited() -> None:
    gc.freeze()
    _resume_collection()


# A forked process, as of an AsyncVectorEnv, that collects a handle of an actor reports this through the connection of
# its parent. Ray's control process then ignores the parent's next request, and the parent waits for ever.
if sys.platform != "win32":
    os.register_at_fork(before=_pause_collection, after_in_parent=_resume_collection, after_in_child=_leave_inherited)
