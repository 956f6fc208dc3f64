# SPDX-License-Identifier: Apache-2.0
"""The error for a missing package that an extra of this library installs."""

from __future__ import annotations

__all__ = ["MissingExtraError", "missing_extra", "missing_extra_of"]

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
    """A missing package that an extra of this library installs; the command line prints the message alone."""


def missing_extra(what: str, package: str, extra: str, otherwise: str = "") -> MissingExtraError:
    """Returns the error for a package that is not installed.

    Args:
        what: the part that needs the package; the subject of a sentence in the singular.
        package: its name.
        extra: of this library, that installs it.
        otherwise: what can be done instead, such as ``"or use backend='torch'"``.

    Example:
        >>> print(missing_extra("the picture", "matplotlib", "plots"))
        the picture needs matplotlib, which is not installed: pip install 'lightning-replay[plots]'
    """
    # In quotes, because zsh takes brackets for a pattern.
    sentence = f"{what} needs {package}, which is not installed: pip install 'lightning-replay[{extra}]'"
    return MissingExtraError(f"{sentence}, {otherwise}" if otherwise else sentence, name=package)


def missing_extra_of(what: str, error: BaseException) -> MissingExtraError | None:
    """Returns the error for the package whose failed import is the cause of ``error``; ``None`` if no extra has it.

    Args:
        what: the part that needs the package; the subject of a sentence in the singular.
        error: a ``ModuleNotFoundError``, or what another library raised from one.
    """
    cause: BaseException | None = error
    while cause is not None:
        module = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if module is not None and module.split(".")[0] in _EXTRAS:
            return missing_extra(what, *_EXTRAS[module.split(".")[0]])
        cause = cause.__cause__ or cause.__context__
    return None
