# SPDX-License-Identifier: Apache-2.0
"""Published experience replay methods for TorchRL, PyTorch Lightning and Ray RLlib, as TorchRL samplers and writers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_replay.lazy import Getter, lazy_names

if TYPE_CHECKING:
    from lightning_replay import recipes
    from lightning_replay.ages import Age
    from lightning_replay.loading import load_replay
    from lightning_replay.mixed_replay import MixedReplay
    from lightning_replay.replay import Replay
    from lightning_replay.saves import SavedSize, save_replay, verify_replay
    from lightning_replay.storage.packed import PackedStorage
    from lightning_replay.table_replay import CurriculumReplay, TableReplay

from lightning_replay import start_method  # noqa: F401  It sets a hook for an import of TorchRL by this library.

__version__ = "0.1.0"

__all__ = [
    "Age",
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

__getattr__: Getter = lazy_names(
    __name__,
    {
        ".ages": ("Age",),
        ".loading": ("load_replay",),
        ".mixed_replay": ("MixedReplay",),
        ".replay": ("Replay",),
        ".saves": ("SavedSize", "save_replay", "verify_replay"),
        ".storage.packed": ("PackedStorage",),
        ".table_replay": ("CurriculumReplay", "TableReplay"),
    },
    submodules=("recipes",),
)
