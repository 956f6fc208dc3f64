# SPDX-License-Identifier: Apache-2.0
"""Which errors the command line reports in one sentence, and which keep their tracebacks."""

from __future__ import annotations

import re
from argparse import ArgumentError
from traceback import walk_tb

from lightning_replay.extras import MissingExtraError

__all__ = ["SEE_HELP", "cause_of", "sentence_of"]

SEE_HELP = " (see lightning-replay --help)"
_PARSERS = {"importlib", "jsonargparse", "yaml"}  # an option that is no YAML, or that names what cannot be imported


def sentence_of(error: Exception, is_begun: bool) -> str | None:
    """Returns what is wrong with the options or missing, in one line; ``None`` where the traceback is needed.

    A missing extra and an unknown environment are reported at any time, other refusals only before the run begins.
    A ``ValueError`` of a class that is built from the options is a refusal; other errors in the code of a user, such as
    an import that fails in a module of theirs, keep their tracebacks.

    Args:
        error: that ended the command.
        is_begun: whether all classes were instantiated before.
    """
    from lightning_replay.envs.building import UnknownEnvironmentError

    key, root = _option_and_cause(error)
    sentence = key + " ".join(str(root).split()).rstrip(".")
    is_lightnings = isinstance(root, ModuleNotFoundError) and _origin(root) == "lightning"  # wandb, for its logger
    if is_lightnings or isinstance(root, MissingExtraError | UnknownEnvironmentError):
        return sentence
    return None if is_begun or not _is_refusal(root) else sentence + SEE_HELP


def cause_of(error: BaseException) -> BaseException:
    """Returns the error that a class or a module raised and that jsonargparse wrapped, or the error itself."""
    return _option_and_cause(error)[1]


def _is_refusal(root: BaseException) -> bool:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    if isinstance(root, ArgumentError | ValueError | MisconfigurationException):
        return True
    origin = _origin(root)
    is_option = origin in _PARSERS and not isinstance(root, SyntaxError)  # of a module, which importlib compiles
    # AttributeError: a class path that a module of this library does not have
    return is_option or (isinstance(root, TypeError | AttributeError) and origin == "lightning_replay")


def _option_and_cause(error: BaseException) -> tuple[str, BaseException]:
    """Returns the option, ``"data.levels: "``, and the error that a class or jsonargparse raised first.

    jsonargparse raises errors from errors, one for each level of nesting, ``Parser key "data": ...``.
    """
    keys: list[str] = []
    while _origin(error) == "jsonargparse":
        found = re.match(r'Parser key "([^"]+)":', str(error))
        if found and keys[-1:] != [found[1]]:
            keys.append(found[1])
        following = error.__cause__ or error.__context__
        if following is None:
            break
        error = following
    return ".".join(keys) + ": " if keys else "", error


def _origin(error: BaseException) -> str:
    """The package whose code raised the error; ``""`` of an error without a traceback."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    return names[-1].partition(".")[0] if names else ""
