# SPDX-License-Identifier: Apache-2.0
"""Which errors the command line reports in one sentence, and which keep their tracebacks."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentError
from traceback import walk_tb

from lightning_replay.extras import MissingExtraError

__all__ = ["SEE_HELP", "sentence_and_cause"]

SEE_HELP = " (see lightning-replay --help)"
_OTHER_WEIGHTS = (
    "ckpt_path is a checkpoint of another agent, or of one with networks of other sizes; give model and data as in "
    "its run"
)
_HOSTS = sys.stdlib_module_names | {"lightning", "lightning_replay", "torch", "fsspec", "jsonargparse"}
_PARSERS = {"importlib", "jsonargparse", "yaml"}  # an option that is not YAML, or that names an unknown module


def sentence_and_cause(error: Exception, is_begun: bool) -> tuple[str | None, BaseException]:
    """Returns a line on the wrong option or the missing extra, and the error that jsonargparse wrapped.

    The line is ``None`` where the traceback is needed. A missing extra and an unknown environment are reported at any
    time, other refusals before the run begins, or where none of the user's code took part. A ``ValueError`` of a class
    that is built from the options is a refusal; other errors in the user's code, such as an import that fails in a
    module of theirs, keep their tracebacks. The run begins, ``is_begun``, when all classes are instantiated.
    """
    from lightning_replay.envs.building import UnknownEnvironmentError

    key, root = _option_and_cause(error)
    sentence = key + " ".join(str(root).split()).rstrip(".")
    is_lightnings = isinstance(root, ModuleNotFoundError) and _origin(root) == "lightning"  # wandb, for its logger
    if is_lightnings or isinstance(root, MissingExtraError | UnknownEnvironmentError):
        return sentence, root
    if is_begun and any(frame.f_code.co_name == "restore_model" for frame, _ in walk_tb(root.__traceback__)):
        return _OTHER_WEIGHTS, root
    if is_begun:
        return (sentence if _is_refused_by_hosts(root) else None), root
    return (sentence + SEE_HELP if _is_refusal(root) or isinstance(root, OSError) else None), root


def _is_refused_by_hosts(root: BaseException) -> bool:
    """Returns whether an error is of the system or of a part of ours, without code of the user's."""
    names = {str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in walk_tb(root.__traceback__)}
    if not names <= _HOSTS:
        return False
    is_ours = isinstance(root, ValueError | TypeError | RuntimeError) and _origin(root) == "lightning_replay"
    return is_ours or isinstance(root, OSError)


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

    jsonargparse wraps errors once for each level of nesting, ``Parser key "data": ...``.
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
    """Returns the package whose code raised the error; ``""`` for an error without a traceback."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    return names[-1].partition(".")[0] if names else ""
