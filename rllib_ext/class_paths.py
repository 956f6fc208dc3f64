# SPDX-License-Identifier: Apache-2.0
"""What an import path in a config names, and calling it with arguments that are checked first."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lightning_replay.argument_names import hint_for


def imported(path: Any, name: str, example: str = "lightning_replay.samplers.PrioritizedSampler") -> Any:
    """The class, function or object that ``path`` names.

    Args:
        path: dotted, of a module and something in it.
        name: of the option, for messages.
        example: of a path that fits the option.

    Raises:
        ValueError: nothing can be imported from there.
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
    """Builds an object, or calls a function, once its arguments are known to be complete and its own.

    Args:
        function: a class or a function.
        arguments: by name.
        name: of the option, for messages.

    Raises:
        ValueError: an argument it does not have, or one it needs is missing.
    """
    # Of the constructor: TorchRL's samplers have a __new__ that hides it.
    signature = inspect.signature(constructor(function) if inspect.isclass(function) else function)
    accepted = {key: parameter for key, parameter in signature.parameters.items() if key != "self"}
    unknown = [key for key in arguments if key not in accepted]
    if unknown:
        hint = hint_for(unknown[0], accepted) or f"; accepted are {', '.join(accepted)}"
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


def constructor(cls: type) -> Any:
    """The ``__init__`` that a class has or inherits."""
    return next(vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))
