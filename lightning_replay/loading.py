# SPDX-License-Identifier: Apache-2.0
"""Saved replay buffers, rebuilt from the names in their files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_replay.options import checked_flag, checked_local_path
from lightning_replay.replay import Replay
from lightning_replay.saves import MANIFEST, read_replay
from lightning_replay.saving.files import MALFORMED, DamagedFileError
from lightning_replay.saving.spec import NotRebuildableError, build
from lightning_replay.storage.columns import MissingDeviceError
from lightning_replay.training_replay import TrainingReplay


def load_replay(
    path: str | Path, *, trust: Sequence[str] = (), memmap: str | Path | None = None, end_episodes: bool = True
) -> Replay:
    """Rebuilds a saved buffer and restores it: the next draws are those the saved one would have made.

    Episodes that ran when it was saved end before the next rows are stored, see :meth:`Replay.end_episodes`.

    The file may name this library's rebuildable classes, its corrections of event tables, and the environments that
    Gymnasium, Gymnasium-Robotics, and this library register. Anything else is neither imported nor called unless you
    name its package in ``trust``. This is also true for functions and methods of this library, TorchRL, torch, and
    tensordict.

    Args:
        path: a directory that :func:`save_replay` wrote, or a URL, which is downloaded to a temporary one first.
        trust: modules and packages to import from: ``["my_package"]`` allows ``my_package`` and all below it. A file
            that names a function of a trusted package lets it read the saved rows: trust only files of known origin.
        memmap: a directory for the scratch file of a buffer that keeps its rows on disk, in memory if absent, even if
            the saved buffer had them on disk.
        end_episodes: ``False`` continues the episodes that ran, if their environments were restored with the buffer.

    Returns:
        The buffer, which is a :class:`~lightning_replay.MixedReplay` if one was saved.

    Raises:
        FileNotFoundError: The directory holds no saved buffer.
        DamagedFileError: A file is missing, truncated, or changed.
        TypeError: ``trust`` is one name, not a list.
        ValueError: The save has another format, for example of a newer version of this library. Or the rows were on
            a GPU that this machine lacks.
        NotRebuildableError: an option is a name that needs ``trust``, or has no form in a file. Nothing was imported
            or called. Add the module to ``trust``, or build the buffer and call ``replay.load(path)``.
        MemoryError: the rows do not fit: give ``memmap``.
    """
    if isinstance(trust, str):
        # As a sequence of letters it would trust packages of one letter.
        raise TypeError(f"trust is {trust!r}; it must be a list of packages, as trust=[{trust!r}]")
    checked_flag("end_episodes", end_episodes)
    saved, state = read_replay(path)
    chosen = {"memmap": None if memmap is None else os.fspath(checked_local_path("memmap", memmap))}
    try:
        _check_capacity(saved["built_by"], state)
        replay = build(saved["built_by"], trust=trust, chosen=chosen)
        is_buffer = isinstance(replay, TrainingReplay)
        if not is_buffer:
            raise TypeError(f"it describes a {type(replay).__name__}, not a replay buffer")
        replay.load_state_dict(state)
        replay.awaits_new_episodes = end_episodes
    except (NotRebuildableError, MissingDeviceError):
        raise
    except MALFORMED as error:  # A changed file may call constructors with any arguments.
        raise DamagedFileError(
            f"{path}/{MANIFEST} does not describe the buffer whose state is saved there ({error}); load an earlier save"
        ) from error
    return replay


def _check_capacity(built_by: Mapping[str, Any], state: dict[str, Any]) -> None:
    # Before the buffer is built: the capacity of a changed file could take all memory.
    storage = built_by["arguments"].get("storage")
    if storage is not None and "capacity" in storage.get("arguments", ()):  # a part that was not saved has none
        given = storage["arguments"]["capacity"]
        saved = state["built_from"]["capacity"]
        if given != saved:
            raise ValueError(f"its capacity is {given}, and the state has {saved}")
