# SPDX-License-Identifier: Apache-2.0
"""Which errors the command line reports in one sentence, and which keep their tracebacks."""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Iterator
from traceback import walk_tb

from lightning_replay.extras import MissingExtraError

__all__ = ["cause_of", "sentence_of"]

_PARSERS = {"importlib", "jsonargparse", "yaml"}  # an option that is no YAML, or that names what cannot be imported


def sentence_of(error: Exception, is_begun: bool) -> str | None:
    """Returns what is wrong with the options, in one line; ``None`` where the traceback is needed.

    A missing extra and an unknown environment are reported at any time, other refusals only before the run begins.
    Errors in the code of a user, such as an import that fails in a module of theirs, are never reported this way.

    Args:
        error: that ended the command.
        is_begun: whether all classes were instantiated before.
    """
    from lightning_replay.lit.environments import UnknownEnvironmentError

    for each in _chain(error):
        if isinstance(each, MissingExtraError | UnknownEnvironmentError):
            return _in_one_line(each)
    key, root = _option_and_cause(error)
    is_missing_package = isinstance(root, ModuleNotFoundError) and _origin(root) == "lightning"
    if is_missing_package or (not is_begun and _is_refusal(root)):
        return key + _in_one_line(root)
    return None


def cause_of(error: BaseException) -> BaseException:
    """Returns the error that a class or a module raised and that jsonargparse wrapped, or the error itself."""
    return _option_and_cause(error)[1]


def _is_refusal(root: BaseException) -> bool:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    if isinstance(root, ArgumentError | ValueError | MisconfigurationException):
        return True
    origin = _origin(root)
    is_option = origin in _PARSERS and not isinstance(root, SyntaxError)  # of a module, which importlib compiles
    return is_option or (isinstance(root, TypeError) and origin == "lightning_replay")


def _option_and_cause(error: BaseException) -> tuple[str, BaseException]:
    """What a class or jsonargparse said first, and of which option, ``"data.levels: "``.

    jsonargparse raises errors from errors, one for each level of nesting, ``Parser key "data": ...``.
    """
    keys: list[str] = []
    root = error
    for each in _chain(error):
        root = each
        if _origin(each) != "jsonargparse":
            break
        found = re.match(r'Parser key "([^"]+)":', str(each))
        if found and keys[-1:] != [found[1]]:
            keys.append(found[1])
    return ".".join(keys) + ": " if keys else "", root


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, down to the first cause."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def _origin(error: BaseException) -> str:
    """The package whose code raised the error; ``""`` of an error without a traceback."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    return names[-1].partition(".")[0] if names else ""


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
