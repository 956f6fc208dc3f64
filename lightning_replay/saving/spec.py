# SPDX-License-Identifier: Apache-2.0
"""How an object was built, as JSON from which it can be built again."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch

from lightning_replay.options import accepted_names, refuse_unknown

C = TypeVar("C", bound=type)

# A file may name these functions and the rebuildable classes of PUBLIC. Everything else that it names needs ``trust``.
# This includes functions and methods of this library, torch, and TorchRL, because some run or unpickle their arguments.

#: Functions of this library that a file may name: the corrections of event tables, which compute with their counts.
FUNCTIONS = ("lemma2", "lemma2_exact", "mixture")

#: Modules whose environments a file may name by their ids. To build an environment is to run code of its module.
ENVIRONMENTS = ("gymnasium.envs", "gymnasium_robotics", "lightning_replay.envs")

#: Names of dtypes in a file, without ``torch.``. Other attributes of torch are not looked up.
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}

# Packages that are not recommended as a whole: they have functions that run what a file gives them.
_HOSTS = ("lightning_replay", "rllib_ext", "tensordict", "torch", "torchrl")

#: Modules of this library in which a class or function is looked up by its name, so that saves depend on no other path.
PUBLIC = tuple(
    f"lightning_replay{module}"
    for module in ("", ".schedules", ".samplers", ".writers", ".storage", ".transforms", ".events", ".schedulers")
)


class NotRebuildableError(RuntimeError):
    """A saved option is neither a plain value nor something that can be imported by name."""


class Record(NamedTuple):
    """Options of :func:`rebuildable`, kept on the class."""

    set_again: tuple[str, ...]
    chosen_when_loaded: tuple[str, ...]


def rebuildable(cls: C, *, set_again: tuple[str, ...] = (), chosen_when_loaded: tuple[str, ...] = ()) -> C:
    """Class decorator: keeps the constructor's arguments as ``self.init_arguments``.

    :func:`build` only builds such classes, so a file cannot name another class to be called. Unknown arguments are
    refused. Subclasses inherit the options.

    Args:
        cls: the class.
        set_again: arguments that are left to their defaults if they have no form in JSON. The class logs when it
            loads that they are to be set again.
        chosen_when_loaded: arguments that are taken from ``chosen`` of :func:`build`, not from the save.
    """
    original = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(original)
    accepted = accepted_names(original)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if inspect.Parameter.VAR_POSITIONAL in kinds.values() and original is not object.__init__:
        raise TypeError(f"{cls.__name__} takes *arguments; a rebuildable class names them, to be built again")

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, accepted)
        # The constructor of a subclass may have recorded its own arguments already.
        if "init_arguments" not in self.__dict__:
            try:
                bound = signature.bind(self, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{cls.__name__}: {error}") from None
            bound.apply_defaults()
            arguments: dict[str, Any] = {}
            for name, value in list(bound.arguments.items())[1:]:
                if kinds[name] is not inspect.Parameter.VAR_POSITIONAL:  # Only object has it.
                    arguments |= value if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
            object.__setattr__(self, "init_arguments", arguments)
        # The tensors of the object are written to later.
        with torch.inference_mode(False):
            original(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    inherited: Record = getattr(cls, "_record", Record((), ()))
    cls._record = Record(inherited.set_again + set_again, inherited.chosen_when_loaded + chosen_when_loaded)  # type: ignore[attr-defined]
    return cls


def describe(value: Any) -> Any:
    """Returns JSON from which ``value`` can be built again, or ``{"not_saved": ...}`` if it has no such form."""
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
    record: Record | None = getattr(type(value), "_record", None)
    if (
        record is not None
        and "init_arguments" in vars(value)
        and _is_rebuildable(type(value))
        and _importable(type(value))
    ):
        arguments = {key: describe(item) for key, item in value.init_arguments.items()}
        for name in record.set_again:
            if isinstance(arguments[name], dict) and "not_saved" in arguments[name]:
                del arguments[name]
        return {"class": _import_path(type(value)), "arguments": arguments}
    if _importable(value):
        return {"import": _import_path(value)}
    # The repr of other objects may be very long. From Python 3.14 on, a partial is a routine without a name.
    is_named = hasattr(value, "__qualname__") and (inspect.isroutine(value) or inspect.isclass(value))
    defined = value if is_named else type(value)
    return {
        "not_saved": repr(value) if is_named else f"a {type(value).__name__}",
        "defined": f"{defined.__module__ or ''}:{defined.__qualname__}",
    }


def comparable(description: object) -> Any:
    """Returns what :func:`describe` returned, with functions by their names without modules.

    A module may move, and a script is ``__main__`` in one run and imported in another. A lambda equals every other
    lambda of the same function.
    """
    if isinstance(description, list):
        return [comparable(item) for item in description]
    if not isinstance(description, dict):
        return description
    kind, content = next(iter(description.items()))
    if kind in ("tuple", "device"):
        return comparable(content)
    if kind in ("import", "not_saved"):
        return str(description.get("defined", content)).partition(":")[2]
    options = content if kind == "dict" else description["arguments"]
    compared = {key: comparable(item) for key, item in options.items()}
    return compared if kind == "dict" else {content: compared}


def build(
    description: object, name: str = "replay", *, trust: Sequence[str] = (), chosen: Mapping[str, Any] | None = None
) -> Any:
    """Builds the object that :func:`describe` described.

    Without ``trust`` a description names rebuildable classes in :data:`PUBLIC`, :data:`FUNCTIONS`, and environments of
    :data:`ENVIRONMENTS`. Nothing else is imported, looked up, or called. A module in ``trust`` is imported, and its
    functions, rebuildable classes, and environments are accepted.

    Args:
        description: JSON.
        name: name of the option, for errors.
        trust: further modules and packages.
        chosen: arguments in ``chosen_when_loaded``, see :func:`rebuildable`.

    Raises:
        NotRebuildableError: an option was neither a plain value nor one of the names above.
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
        return _resolve(content, name, trust, _is_listed)
    cls: Any = _resolve(content, name, trust, _is_rebuildable) if kind == "class" else None
    # A class that is not rebuildable must not be called because a file names it.
    if not _is_rebuildable(cls):
        raise NotRebuildableError(
            f"the option {name} was {content}, which can be rebuilt neither from plain values nor from an import path. "
            "Build the replay buffer yourself with the same options and call replay.load(path). load_replay rebuilds "
            "this library's parts, classes with the decorator lightning_replay.saving.spec.rebuildable, and functions, "
            "defined at the top level of a module that can be imported"
        )
    given = dict(description["arguments"])
    record = cls._record
    given |= {key: (chosen or {}).get(key) for key in record.chosen_when_loaded if key in given}
    env = given.get("env")
    if isinstance(env, str):
        _check_environment(env, f"{name}.env", trust)
    # Not cls(...): metaclasses of TorchRL accept further options, such as one that starts Ray with what is given.
    return type.__call__(cls, **{key: part(item, f"{name}.{key}") for key, item in given.items()})


def _is_rebuildable(value: object) -> bool:
    # A subclass with its own constructor need not accept the recorded arguments of its base class.
    if not isinstance(value, type):
        return False
    builder = next(base for base in value.__mro__ if "__init__" in vars(base))
    return isinstance(vars(builder).get("_record"), Record)


def _is_listed(value: object) -> bool:
    return inspect.isfunction(value) and value.__qualname__ in FUNCTIONS


def is_public(value: type | FunctionType) -> bool:
    """Whether a class or function is one of this library's public ones."""
    return _import_path(value).partition(":")[0] in PUBLIC


def _import_path(value: Any) -> str:
    module = value.__module__
    public = _public(value.__qualname__)
    return f"{module if public is None or public[1] is not value else public[0]}:{value.__qualname__}"


@functools.cache
def _public(name: str) -> tuple[str, Any] | None:
    """Returns the class or function of this library with a name, and before it the public module that has it."""
    for path in PUBLIC:
        found = getattr(importlib.import_module(path), name, None)
        if getattr(found, "__qualname__", None) == name and str(getattr(found, "__module__", None)).startswith(
            "lightning_replay."
        ):
            return path, found
    return None


def _importable(value: Any) -> bool:
    if not (inspect.isfunction(value) or inspect.isclass(value)) or value.__module__ == "__main__":
        return False
    path = _import_path(value)
    try:
        return _resolve(path, "", [path.partition(":")[0]], _is_listed) is value
    except NotRebuildableError:
        return False


def _resolve(path: object, name: str, trust: Sequence[str], is_accepted: Callable[[Any], bool]) -> Any:
    # A class or function of this library that is_accepted needs no trust.
    if not isinstance(path, str):
        raise TypeError(f"the option {name} has the import path {path!r}")
    module, _, qualname = path.partition(":")
    # Wherever the file that defines it was when it was saved.
    public = _public(qualname) if module.partition(".")[0] == "lightning_replay" else None
    if public is None or not is_accepted(public[1]):
        _check_trusted(module, name, path, trust)
    if public is not None:
        return public[1]
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


def _check_environment(env: str, name: str, trust: Sequence[str]) -> None:
    # Gymnasium imports the module before the colon, and then builds any environment that is registered.
    import gymnasium

    module, _, identifier = env.rpartition(":")
    if module not in ENVIRONMENTS and ":" in env:
        _check_trusted(module, name, env, trust)
    if module:
        with contextlib.suppress(ImportError):  # Gymnasium raises its own error.
            importlib.import_module(module)
    for known, found in gymnasium.registry.items():
        if identifier in (known, known.rpartition("-v")[0]):  # An id without a version names the newest version.
            entry: Any = found.entry_point
            builder = entry.partition(":")[0] if isinstance(entry, str) else str(getattr(entry, "__module__", None))
            _check_trusted(builder, name, env, trust, ENVIRONMENTS)


def _check_trusted(module: str, name: str, path: str, trust: Sequence[str], known: Sequence[str] = ()) -> None:
    if any(module == package or module.startswith(f"{package}.") for package in (*trust, *known)):
        return
    package = module.partition(".")[0]
    raise NotRebuildableError(
        f"the option {name} is {path}, and the module {module} is not imported because a file names it: a forged file "
        "could run code. If you know who wrote the file, load with "
        f"trust={[*trust, module if package in _HOSTS else package]}; or build the replay buffer yourself with the "
        "same options and call replay.load(path)."
    )
