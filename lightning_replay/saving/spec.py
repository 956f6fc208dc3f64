# SPDX-License-Identifier: Apache-2.0
"""How an object was built, as JSON from which it can be built again."""

from __future__ import annotations

import functools
import importlib
import inspect
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_replay.argument_names import accepted_names, refuse_unknown
from lightning_replay.moved import current_module

C = TypeVar("C", bound=type)

#: Packages whose modules may be imported because a file names them.
TRUSTED = ("lightning_replay", "rllib_ext", "tensordict", "torch", "torchrl")


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class NotRebuildableError(RuntimeError):
    """A saved option is neither a plain value nor something that can be imported by name."""


def recorded(cls: C) -> C:
    """Class decorator: keeps the constructor's arguments as ``self.init_arguments``.

    Only recorded classes are rebuilt by :func:`build`, so a file cannot name any other class to be called. A class that
    works without some arguments, and logs so when it loads, names them in ``set_again``: where they have no form in
    JSON, they are left to their defaults. An argument under the name of another library is refused with ours.
    """
    original = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(original)
    accepted = accepted_names(original)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if inspect.Parameter.VAR_POSITIONAL in kinds.values() and original is not object.__init__:
        raise TypeError(f"{cls.__name__} takes *arguments; a recorded class names them, to be built again")

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, accepted)
        if "init_arguments" not in self.__dict__:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            arguments = {name: value for name, value in bound.arguments.items() if kinds[name] in _NAMED}
            further = (value for name, value in bound.arguments.items() if kinds[name] is inspect.Parameter.VAR_KEYWORD)
            arguments.update(*further)
            arguments.pop("self", None)
            object.__setattr__(self, "init_arguments", arguments)
        original(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    cls.is_recorded = True  # type: ignore[attr-defined]
    return cls


def describe(value: Any) -> Any:
    """Returns JSON from which ``value`` is built again; what has no such form becomes ``{"not_saved": ...}``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, numbers.Real):  # NumPy's integers and floats
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, list):
        return [describe(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [describe(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe(item) for key, item in value.items()}}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if "init_arguments" in getattr(value, "__dict__", {}) and _is_rebuildable(type(value)):
        arguments = {key: describe(item) for key, item in value.init_arguments.items()}
        for name in getattr(type(value), "set_again", ()):  # left to its default, which the class logs when it loads
            if isinstance(arguments[name], dict) and "not_saved" in arguments[name]:
                del arguments[name]
        return {"class": _import_path(type(value)), "arguments": arguments}
    if _importable(value):
        return {"import": _import_path(value)}
    is_named = inspect.isroutine(value) or inspect.isclass(value)  # the repr of others may be their whole content
    defined = value if is_named else type(value)
    return {
        "not_saved": repr(value) if is_named else f"a {type(value).__name__}",
        "defined": f"{defined.__module__ or ''}:{defined.__qualname__}",
    }


def build(
    description: Any, name: str = "replay", *, trust: Sequence[str] = (), chosen: Mapping[str, Any] | None = None
) -> Any:
    """Builds what :func:`describe` described; imports nothing outside :data:`TRUSTED` and ``trust``.

    Args:
        description: of an object, as plain values.
        name: of the object, for errors.
        trust: further packages whose modules may be imported.
        chosen: arguments that are not taken from the description, by name, of classes that name them in
            ``chosen_when_loaded``; ``None`` where absent.

    Raises:
        NotRebuildableError: an option was not a plain value, a recorded class or an import path of such a package.
    """
    part = functools.partial(build, trust=trust, chosen=chosen)
    if isinstance(description, list):
        return [part(item, name) for item in description]
    if not isinstance(description, dict):
        return description
    kind, content = next(iter(description.items()))
    if kind == "tuple":
        return tuple(part(item, name) for item in content)
    if kind == "dict":
        return {key: part(item, f"{name}.{key}") for key, item in content.items()}
    if kind == "device":
        return torch.device(content)
    if kind == "import":
        return _resolve(_allowed(content, name, trust), name)
    if kind == "class":
        cls = _resolve(_allowed(content, name, trust), name)
        if not (isinstance(cls, type) and getattr(cls, "is_recorded", False)):
            raise _not_rebuildable(name, content, content)
        given = dict(description["arguments"])
        for key in getattr(cls, "chosen_when_loaded", ()):
            if key in given:
                given[key] = (chosen or {}).get(key)
        return cls(**{key: part(item, f"{name}.{key}") for key, item in given.items()})
    raise _not_rebuildable(name, content, description.get("defined"))


def _allowed(path: Any, name: str, trust: Sequence[str]) -> str:
    """Returns an import path of a package whose modules may be imported; nothing is imported here."""
    if not isinstance(path, str):
        raise TypeError(f"the option {name} has the import path {path!r}")
    module = path.partition(":")[0]
    if any(module == package or module.startswith(f"{package}.") for package in (*TRUSTED, *trust)):
        return path
    raise NotRebuildableError(
        f"the option {name} is {path}, and the module {module} is not imported because a file names it. If you trust "
        f"it, load with trust=[{module.partition('.')[0]!r}]; or build the replay buffer yourself with the same "
        "options and call replay.load(path)."
    )


def _is_rebuildable(cls: type) -> bool:
    """Whether ``cls`` takes the arguments that were recorded: not when it has a constructor of its own."""
    builder = next(base for base in cls.__mro__ if "__init__" in vars(base))
    return "is_recorded" in vars(builder) and _importable(cls)


def _not_rebuildable(name: str, what: str, defined: Any = None) -> NotRebuildableError:
    return NotRebuildableError(
        f"the option {name} was {what}, which can be rebuilt neither from plain values nor from an import path. "
        f"Build the replay buffer yourself with the same options and call replay.load(path).{_advice(defined)}"
    )


def _advice(defined: Any) -> str:
    """Returns what to change so that the next save can be rebuilt; ``defined`` is ``module:qualname``."""
    module, _, qualname = defined.partition(":") if isinstance(defined, str) else ("", "", "")
    package, name = module.partition(".")[0], qualname.rpartition(".")[2]
    if package in ("", "builtins", "functools", "torch"):  # objects that no class of the user's makes
        return ""
    if package in TRUSTED[1:]:
        return (
            f" Where load_replay is to rebuild it, use a part of lightning_replay in place of {package}'s {name}, or a "
            "subclass of it with the decorator lightning_replay.saving.spec.recorded."
        )
    is_lambda = name == "<lambda>"
    changes = [] if is_lambda else [f"put the decorator lightning_replay.saving.spec.recorded over the class {name}"]
    if is_lambda or module == "__main__" or "<locals>" in qualname:
        what = "a function with a name" if is_lambda else "it"
        changes.append(f"define {what} at the top level of a module that can be imported")
    package = "that_module" if module == "__main__" else package
    changes.append(f"save again, and load with trust=[{package!r}]")
    return f" Where load_replay is to rebuild it, {', '.join(changes)}."


def _import_path(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _importable(value: Any) -> bool:
    """Whether importing ``module:qualname`` gives this very function or class again."""
    if not (inspect.isfunction(value) or inspect.isclass(value)) or value.__module__ == "__main__":
        return False
    try:
        return _resolve(_import_path(value), "") is value
    except NotRebuildableError:
        return False


def _resolve(path: str, name: str) -> Any:
    """Imports what ``module:qualname`` names; only the place where it is defined counts, not one that imports it."""
    module, _, qualname = path.partition(":")
    module = current_module(module)
    try:
        found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
        if _import_path(found) != f"{module}:{qualname}":
            raise AttributeError(f"{path} is defined in {found.__module__}")
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise NotRebuildableError(
            f"the option {name} was {path}, which cannot be imported here: {error}. Make its module importable, for "
            "example with its folder on PYTHONPATH; or build the replay buffer yourself with the same options and call "
            "replay.load(path)."
        ) from error
