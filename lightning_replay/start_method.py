# SPDX-License-Identifier: Apache-2.0
"""An import of TorchRL that leaves the start method of ``multiprocessing`` as it was.

TorchRL sets ``"spawn"`` if none is set. A script without ``if __name__ == "__main__"`` then fails in Gymnasium's
``AsyncVectorEnv`` and in workers of a ``DataLoader``. TorchRL's own processes are spawned as before, from a context.
A hook is needed because TorchRL, which takes seconds, is imported by whichever module needs it first. If a program
imports TorchRL itself, its import stays as it is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from lightning_replay import hooks


class _TorchRLFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchrl":
            return None
        sys.meta_path.remove(self)  # This finder acts once. After that the other finders find the module.
        spec = importlib.util.find_spec(fullname)
        if hooks.are_on and _is_imported_by_us() and spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _restoring(loader.exec_module)
        return spec


def _is_imported_by_us() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("importlib", __name__)):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith(("lightning_replay.", "rllib_ext"))


def _restoring(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        import multiprocessing

        before = multiprocessing.get_start_method(allow_none=True)
        try:
            execute(module)
        finally:
            if before is None:
                multiprocessing.set_start_method(None, force=True)

    return exec_module


if hooks.are_on and "torchrl" not in sys.modules:
    sys.meta_path.insert(0, _TorchRLFinder())
