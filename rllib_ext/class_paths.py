# SPDX-License-Identifier: Apache-2.0
"""Objects built from class paths with arguments, as in an RLlib config or a YAML file."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

_EXAMPLE = "lightning_replay.samplers.PrioritizedSampler"


def built(
    value: Any,
    name: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    functions: bool = False,
    example: str = _EXAMPLE,
    examples: Mapping[str, str] | None = None,
) -> Any:
    """Builds the object that ``{"class_path": ..., "init_args": {...}}`` describes; returns any other value as it is.

    Args:
        value: of an option; ``init_args`` may hold class paths too.
        name: of the option, for messages.
        defaults: arguments for every class that accepts them.
        functions: whether a path may name a function, which is returned and not called.
        example, examples: paths for messages; ``examples`` of arguments, by dotted name.

    Raises:
        ValueError: a path cannot be imported or names no class.
        TypeError: arguments that are not given by name, are unknown or missing.
    """
    if not (isinstance(value, Mapping) and "class_path" in value):
        return value
    cls, arguments = class_and_arguments(value, name, (examples or {}).get(name, example))
    if not inspect.isclass(cls):
        if functions:
            return cls
        raise ValueError(f"{name} names {value['class_path']!r}, which is no class but a {type(cls).__name__}")
    given = {
        key: built(item, f"{name}.{key}", defaults=defaults, functions=functions, example=example, examples=examples)
        for key, item in arguments.items()
    }
    # The constructor's signature: TorchRL's samplers have a __new__ that hides it.
    accepted = inspect.signature(cls.__init__).parameters
    return cls(**{key: item for key, item in (defaults or {}).items() if key in accepted} | given)


def class_and_arguments(value: Mapping[str, Any], name: str, example: str = _EXAMPLE) -> tuple[Any, dict[str, Any]]:
    """Returns the object that a class path names, and its ``init_args``; arguments and errors as :func:`built`."""
    if "class_path" not in value or set(value) - {"class_path", "init_args"}:
        raise ValueError(f"{name} has the keys {sorted(value)}; accepted are class_path and init_args")
    arguments = value.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        raise TypeError(f"init_args of {name} is {arguments!r}; it must be arguments by name")
    return imported(value["class_path"], name, example), dict(arguments)


def imported(path: Any, name: str, example: str = _EXAMPLE) -> Any:
    """Returns the object that the dotted path of an option names.

    Raises:
        ValueError: it cannot be imported; the message has an ``example``.
    """
    module, _, attribute = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} names {path!r}, which cannot be imported ({error}). Give a full path, as "
            f"{example!r}, of a module that Python finds"
        ) from error
