# SPDX-License-Identifier: Apache-2.0
"""Packages whose names are imported at their first use, so that a program loads only the methods that it has."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Getter = Callable[[str], Any]  #: The ``__getattr__`` of a module.


def lazy_names(package: str, modules: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()) -> Getter:
    """Returns the ``__getattr__`` of a package that imports a module when one of its names is first used.

    Args:
        package: Name of the package, for relative modules and for errors.
        modules: Names that the package exports, by module. A relative module starts with a dot.
        submodules: Names of modules of the package that it exports themselves.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f".{name}", package)
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name], package), name)

    return get
