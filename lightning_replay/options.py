# SPDX-License-Identifier: Apache-2.0
"""Options of constructors and calls: checked by kind and range. Every error names the option and what is accepted.

Each function gets the ``name`` of an option and the ``value`` that was given. A value of the wrong kind is a
``TypeError``, a value out of range (NaN included) a ``ValueError``. ``True`` and ``False`` are no numbers here, NumPy's
numbers are. ``accepted`` completes the sentence "it must be ...".
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

ABOVE_ZERO = math.ulp(0.0)  # the least float above 0
BELOW_ONE = math.nextafter(1.0, 0.0)  # the largest float below 1
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:+/")  # also of a pathlib.Path, which drops a slash; no drive such as C:/
LOCAL_ONLY = "a path of this machine; copy files from and to a URL yourself"
LOCAL_OR_URL = "a folder, or a URL as text: a pathlib.Path drops one of its slashes"
LARGEST_COUNT = 2**63 - 1  # the largest number that an int64 index can be
LARGEST = math.nextafter(math.inf, 0.0)  # the largest float that is finite


def plain_number(value: object) -> Any:
    """Returns a tensor or array of no dimension as the number in it, anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def check_option(
    name: str, value: object, kind: type, accepted: str, lowest: float = -LARGEST, highest: float = LARGEST
) -> None:
    """Refuses a value of another ``kind`` than ``Real``, ``Integral`` (no flags) or ``bool``, or out of its range."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {value!r}; it must be {accepted}")
    # As plain numbers: NumPy warns of an overflow when it compares its floats with the largest Python float.
    number = int(value) if isinstance(value, Integral) else float(value)  # type: ignore[arg-type]
    if not lowest <= number <= highest:
        raise ValueError(f"{name} is {value}; it must be {accepted}")


def check_kind(name: str, value: object, kind: Any, accepted: str) -> None:
    """Refuses an object of another class than ``kind``, and a class in place of an object."""
    if isinstance(value, type) or not isinstance(value, kind):
        given = repr(value)
        if "\n" in given:  # The repr of a buffer or a module is its whole content.
            given = f"a {type(value).__name__}"
        raise TypeError(f"{name} is {given}; it must be {accepted}")


def checked_count(name: str, value: Any, lowest: int = 1, *, of: str = "") -> int:
    """Returns a whole number from ``lowest`` to the largest of int64 as an int. ``of`` names the objects counted."""
    what = f"a whole number{f' of {of}' if of else ''} from {lowest} on"
    check_option(name, value, Integral, what, lowest)
    if value > LARGEST_COUNT:
        raise ValueError(f"{name} is {value}; it must be {what}, and at most {LARGEST_COUNT}, the largest of 64 bits")
    return int(value)


def checked_optional_count(name: str, value: object, lowest: int = 1) -> int | None:
    """Returns a whole number as :func:`checked_count` does. ``None`` stays."""
    return None if value is None else checked_count(name, value, lowest)


def checked_number(
    name: str, value: object, lowest: float = -LARGEST, highest: float = LARGEST, *, accepted: str = ""
) -> float:
    """Returns a finite number from ``lowest`` to ``highest`` as a float. See :func:`check_option`."""
    number = plain_number(value)
    check_option(name, number, Real, accepted or range_of(lowest, highest), lowest, highest)
    return float(number)


def checked_share(name: str, value: object, lowest: float = 0.0) -> float:
    """Returns a number in [0, 1], or with ``lowest=ABOVE_ZERO`` in (0, 1]."""
    return checked_number(name, value, lowest, 1.0)


def checked_entries(name: str, values: object, accepted: str = "a sequence of numbers") -> list[Any]:
    """Returns the entries of a sequence (no text), an array or a tensor, themselves not checked."""
    entries = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise TypeError(f"{name} is {values!r}; it must be {accepted}")
    return list(entries)


def checked_names(name: str, values: object, of: str, known: Iterable[str] | None = None) -> list[str]:
    """Returns names of objects, ``of`` what kind, at least one and each once, only ``known`` ones if given."""
    names = checked_entries(name, values, f"a list of the names of {of}s")
    for place, one in enumerate(names):
        check_kind(f"{name}[{place}]", one, str, f"the name of a {of}")
        if known is not None:
            checked_choice(f"{name}[{place}]", one, [*known])
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{name} is {values!r}; it must be the names of {of}s, at least one and each once")
    return names


def checked_key(name: str, value: object) -> tuple[str, ...]:
    """Returns the names of a column's key from the outermost on, given as a name, a tuple or, from YAML, a list."""
    parts = value if isinstance(value, list | tuple) else [value]
    names: list[str] = []
    for part in parts:
        if isinstance(part, list | tuple):
            names += checked_key(name, part)
        elif isinstance(part, str) and part:
            names.append(part)
    if len(names) < max(len(parts), 1):
        raise TypeError(f"{name} is {value!r}; it must be the name of a column, or a tuple of names where it is nested")
    return tuple(names)


def checked_keys(name: str, values: object) -> list[tuple[str, ...]]:
    """Returns keys of columns as tuples, or raises ``TypeError`` for a single key."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        example = repr(values) if isinstance(values, str) else "'observation'"
        raise TypeError(f"{name} is {values!r}; it must be a sequence of keys, as [{example}]")
    return [checked_key(f"{name}[{place}]", key) for place, key in enumerate(values)]


def checked_counts(name: str, values: object, lowest: int = 1) -> list[int]:
    """Returns a list of whole numbers. See :func:`checked_count`."""
    entries = checked_entries(name, values)
    return [checked_count(f"{name}[{place}]", value, lowest) for place, value in enumerate(entries)]


def checked_numbers(name: str, values: object) -> list[float]:
    """Returns a list of finite numbers. See :func:`checked_number`."""
    return [checked_number(f"{name}[{place}]", value) for place, value in enumerate(checked_entries(name, values))]


def checked_bound(name: str, value: Any) -> float | None:
    """Returns a bound as a float, which may be infinite, or ``None`` if there is none."""
    if value is None:
        return None
    check_option(name, value, Real, "a number, or None where there is no bound", -math.inf, math.inf)
    return float(value)


def checked_flag(name: str, value: object) -> bool:
    """Returns a flag, or raises ``TypeError`` for any other value."""
    check_option(name, value, bool, "True or False")
    return bool(value)


def checked_choice(name: str, value: object, choices: Sequence[Any]) -> Any:
    """Returns one of ``choices``. The ``ValueError`` lists them and names a similar one."""
    for choice in choices:
        if isinstance(value, type(choice)) and isinstance(value, bool) is isinstance(choice, bool) and value == choice:
            return choice
    listed = ", ".join(map(repr, choices))
    raise ValueError(f"{name} is {value!r}; it must be one of {listed}{did_you_mean(value, choices)}")


def checked_seed(value: Any, name: str = "seed") -> int | None:
    """Returns a seed of 64 bits, which every generator of torch accepts, or ``None``."""
    if value is None:
        return None
    check_option(name, value, Integral, "a whole number that fits into 64 bits, or None", -(2**63), 2**64 - 1)
    return int(value)


def did_you_mean(given: object, known: Iterable[Any]) -> str:
    """Returns ``". Did you mean 'x'?"`` for the name in ``known`` that is most similar to ``given``, or nothing."""
    names = [name for name in known if isinstance(name, str)]
    near = difflib.get_close_matches(given, names, n=1) if isinstance(given, str) else []
    return f". Did you mean {near[0]!r}?" if near else ""


def range_of(lowest: float, highest: float) -> str:
    """Returns the numbers from ``lowest`` to ``highest`` in words, to complete the sentence "it must be ..."."""
    if highest < LARGEST:
        first = "(0" if lowest == ABOVE_ZERO else f"[{lowest:g}"
        last = "1)" if highest == BELOW_ONE else f"{highest:g}]"
        return f"a number in {first}, {last}"
    if lowest == ABOVE_ZERO:
        return "a finite number above 0"
    return "a finite number" if lowest == -LARGEST else f"a finite number from {lowest:g} on"


P = ParamSpec("P")
R = TypeVar("R")


def accepted_names(function: Callable[..., object]) -> list[str] | None:
    """Returns the names a function can be called with, including the names of ``Unpack[...]``, or ``None`` if it takes
    any.
    """
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
        elif str(parameter.annotation).startswith("Unpack["):
            names += get_type_hints(get_args(get_type_hints(function)[parameter.name])[0])
        else:
            return None
    return [name for name in names if name != "self"]


def refuse_unknown(owner: str, given: Iterable[str], accepted: Collection[str] | None) -> None:
    """Raises ``TypeError`` for names of arguments that are not ``accepted``, of which ``None`` stands for all."""
    for name in given:
        if accepted is not None and name not in accepted:
            hint = did_you_mean(name, accepted) or f"; accepted are {', '.join(accepted) or 'none'}"
            raise TypeError(f"{owner} has no argument {name!r}{hint}")


def with_named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of constructors and recipes: unknown arguments are refused. Signature and documentation stay."""
    accepted = accepted_names(function)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(owner, kwargs, accepted)
        return function(*args, **kwargs)

    return checked


# Extras by the module that is imported, for packages that others import: Gymnasium, a user's environment.
_EXTRAS = {
    "mujoco": ("MuJoCo", "mujoco"),
    "Box2D": ("Box2D", "box2d"),
    "minigrid": ("MiniGrid", "grids"),
    "gymnasium_robotics": ("gymnasium-robotics", "mazes"),
    "ale_py": ("ale-py", "atari"),
    "cv2": ("opencv-python-headless", "atari"),
    "minatar": ("MinAtar", "minatar"),
}


class MissingExtraError(ModuleNotFoundError):
    """A missing package that an extra of this library installs. The command line prints the message alone."""


def missing_extra(what: str, package: str, extra: str, otherwise: str = "") -> MissingExtraError:
    """Returns the error for the ``package`` of an extra, which ``what`` needs. ``otherwise`` is an alternative."""
    # In quotes, because zsh takes brackets for a pattern.
    sentence = f"{what} needs {package}, which is not installed: pip install 'lightning-replay[{extra}]'"
    return MissingExtraError(f"{sentence}, {otherwise}" if otherwise else sentence, name=package)


def missing_extra_of(what: str, error: BaseException) -> MissingExtraError | None:
    """Returns the error for the package of an extra whose failed import is the cause of ``error``, if there is one."""
    cause: BaseException | None = error
    while cause is not None:
        module = str(cause.name).split(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        if module in _EXTRAS:
            return missing_extra(what, *_EXTRAS[module])
        cause = cause.__cause__ or cause.__context__
    return None


def checked_local_path(name: str, value: str | os.PathLike[str], accepted: str = LOCAL_ONLY) -> Path:
    """Returns a path of this machine. A URL is refused, because a local folder such as ``s3:`` would be created."""
    if _URL.match(str(value)):
        raise ValueError(f"{name} is {str(value)!r}; it must be {accepted}")
    return Path(value)


def config_directory() -> Path:
    """Returns the folder of ``lightning/*.yaml`` and ``rllib/*.yaml``, in the package or, of a checkout, beside it."""
    package = Path(__file__).resolve().parent
    candidates = (package / "_configs", package.parent / "configs")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the configuration files are in none of {candidates}; reinstall lightning-replay")


def config_files() -> list[str]:
    directory = config_directory()
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*.yaml"))
