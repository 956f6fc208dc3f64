# SPDX-License-Identifier: Apache-2.0
"""Paths of the configuration files that come with the library."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def config_directory() -> Path:
    """Returns the folder that holds ``lightning/*.yaml`` and ``rllib/*.yaml``.

    In an installed wheel it is in the package; in a checkout it is ``configs/`` beside the package.

    Example:
        >>> (config_directory() / "lightning").is_dir()
        True
    """
    candidates = (_PACKAGE / "_configs", _PACKAGE.parent / "configs")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(
        f"the configuration files are neither in {candidates[0]} nor in {candidates[1]}; reinstall lightning-replay."
    )


def config_files() -> list[str]:
    """Returns the shipped files as paths relative to :func:`config_directory`, sorted."""
    directory = config_directory()
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*.yaml"))
