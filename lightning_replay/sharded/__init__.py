# SPDX-License-Identifier: Apache-2.0
"""One replay divided over Ray actors: exact draws, and what becomes of actors that are lost."""

from __future__ import annotations

import importlib
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
