# SPDX-License-Identifier: Apache-2.0
"""Published experience replay methods for TorchRL, PyTorch Lightning and Ray RLlib, as TorchRL samplers and writers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_replay import recipes
    from lightning_replay.loading import load_replay
    from lightning_replay.mixed_replay import MixedReplay
    from lightning_replay.replay import Replay
    from lightning_replay.saves import SavedSize, save_replay, verify_replay
    from lightning_replay.storage.packed import PackedStorage
    from lightning_replay.table_replay import CurriculumReplay, TableReplay

from lightning_replay import forking, start_method  # noqa: F401  hooks of forks, and of an import of TorchRL

__version__ = "0.1.0"

__all__ = [
    "CurriculumReplay",
    "MixedReplay",
    "PackedStorage",
    "Replay",
    "SavedSize",
    "TableReplay",
    "__version__",
    "load_replay",
    "recipes",
    "save_replay",
    "verify_replay",
]

_MODULES = {
    "CurriculumReplay": "table_replay",
    "MixedReplay": "mixed_replay",
    "PackedStorage": "storage",
    "Replay": "replay",
    "SavedSize": "saves",
    "TableReplay": "table_replay",
    "load_replay": "loading",
    "save_replay": "saves",
    "verify_replay": "saves",
}


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return importlib.import_module("lightning_replay.recipes")
    if name in _MODULES:
        return getattr(importlib.import_module(f"lightning_replay.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
