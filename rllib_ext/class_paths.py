# SPDX-License-Identifier: Apache-2.0
"""Objects built from class paths with arguments, as in an RLlib config or a YAML file."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lightning_replay.validation import did_you_mean

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
        ValueError: a path cannot be imported or names no class, or arguments are unknown or missing.
        TypeError: arguments that are not given by name.
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
    accepted = inspect.signature(_constructor(cls)).parameters
    return call(cls, {key: item for key, item in (defaults or {}).items() if key in accepted} | given, name)


def class_and_arguments(value: Mapping[str, Any], name: str, example: str = _EXAMPLE) -> tuple[Any, dict[str, Any]]:
    """Returns the object that a class path names, and its ``init_args``; arguments and errors as :func:`built`."""
    beyond = set(value) - {"class_path", "init_args"}
    if beyond:
        raise ValueError(f"{name} has {sorted(beyond)}; beside class_path only init_args is accepted")
    arguments = value.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        raise TypeError(f"init_args of {name} is {arguments!r}; it must be arguments by name")
    return imported(value["class_path"], name, example), dict(arguments)


def imported(path: Any, name: str, example: str = _EXAMPLE) -> Any:
    """Returns the object that a dotted path names.

    Args:
        path: of a module and something in it.
        name, example: of the option, for messages.

    Raises:
        ValueError: it cannot be imported.
    """
    module, _, attribute = str(path).rpartition(".")
    try:
        if not module:
            raise ValueError("it names no module")
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} names {path!r}, which cannot be imported ({error}). Give a full path, as "
            f"{example!r}, of a module that Python finds"
        ) from error


def call(function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> Any:
    """Calls a class or function; ``name`` is that of the option, for messages.

    Raises:
        ValueError: unknown or missing arguments.
    """
    # The constructor's signature: TorchRL's samplers have a __new__ that hides it.
    signature = inspect.signature(_constructor(function) if inspect.isclass(function) else function)
    accepted = {key: parameter for key, parameter in signature.parameters.items() if key != "self"}
    unknown = [key for key in arguments if key not in accepted]
    if unknown:
        hint = did_you_mean(unknown[0], accepted) or f"; accepted are {', '.join(accepted)}"
        raise ValueError(f"{name}: {function.__name__} has no argument {', '.join(map(repr, unknown))}{hint}")
    missing = [
        key
        for key, parameter in accepted.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and key not in arguments
    ]
    if missing:
        raise ValueError(f"{name}: {function.__name__} needs {', '.join(missing)}; accepted are {', '.join(accepted)}")
    return function(**arguments)


def _constructor(cls: type) -> Any:
    """Returns the ``__init__`` that a class has or inherits."""
    return next(vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))
