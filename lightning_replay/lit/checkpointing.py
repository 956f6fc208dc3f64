# SPDX-License-Identifier: Apache-2.0
"""Writes the replay beside each checkpoint file, removes it with the file and finds it again."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO

if TYPE_CHECKING:
    from lightning_replay.lit.datamodule import ReplayDataModule

__all__ = ["ReplayCheckpointIO", "replays_beside", "saved_replay"]


class ReplayCheckpointIO(CheckpointIO):
    """Saves ``name.ckpt`` together with ``name.<updates>.replay/``, the data module's buffer, in the same folder.

    The checkpoint holds the folder's name only, so both can be moved together. A checkpoint that is overwritten
    names its new buffer before the old buffer goes: killed at any time, the file finds the buffer it was saved with.
    :class:`~lightning_replay.lit.ReplayDataModule` installs it; other plug-ins keep working underneath.

    Args:
        wrapped: writes and reads the checkpoint file itself.
        datamodule: whose replay is saved.
    """

    def __init__(self, wrapped: CheckpointIO, datamodule: ReplayDataModule) -> None:
        self.wrapped = wrapped
        self.datamodule = datamodule
        self._newest: tuple[Hashable, Path] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Saves the buffer first, then the file that names it, then drops the buffers the name had before."""
        state = checkpoint.get(type(self.datamodule).__qualname__)
        if state is None or "optimizer_states" not in checkpoint:  # weights only: nothing to resume from
            self.wrapped.save_checkpoint(checkpoint, path, storage_options)
            return
        file = _local(path)
        before = replays_beside(file)
        target = file.with_name(f"{file.stem}.{state['updates']}.replay")
        self._save_replay(target)
        state["replay"] = target.name
        self.wrapped.save_checkpoint(checkpoint, path, storage_options)
        for stale in before:
            if stale != target:
                shutil.rmtree(stale, ignore_errors=True)

    def _save_replay(self, target: Path) -> None:
        """Saves, or links the files of a save of the very same state; ``save_last=True`` asks for it twice."""
        stamp = self.datamodule.replay_stamp()
        if self._newest is not None and self._newest[0] == stamp and self._newest[1].is_dir():
            if self._newest[1] == target:
                return
            try:
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(self._newest[1], target, copy_function=os.link)
                return
            except OSError:  # a file system without hard links
                shutil.rmtree(target, ignore_errors=True)
        self.datamodule.replay.save(target, previous=None if self._newest is None else self._newest[1])
        self._newest = (stamp, target)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads the file and tells the data module where it was."""
        self.datamodule.checkpoint_path = _local(path)
        return self.wrapped.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes the file and the buffers beside it."""
        self.wrapped.remove_checkpoint(path)
        for directory in replays_beside(_local(path)):
            shutil.rmtree(directory, ignore_errors=True)

    def teardown(self) -> None:
        """Closes what it wraps."""
        self.wrapped.teardown()


def replays_beside(file: Path) -> list[Path]:
    """The buffers saved with this checkpoint file."""
    pattern = re.compile(re.escape(file.stem) + r"\.\d+\.replay")
    return [path for path in file.parent.glob("*.replay") if pattern.fullmatch(path.name)]


def saved_replay(file: Path, name: str | None) -> Path:
    """The buffer a checkpoint file refers to: the folder it names, or the one that was renamed together with it.

    Raises:
        FileNotFoundError: neither is beside the file.
    """
    candidates = [file.with_name(name)] if name else []
    candidates += replays_beside(file)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(
        f"checkpoint {file} was saved with the replay {name}, which is not beside it. "
        "Move both together, or load the weights alone with load_from_checkpoint."
    )


def _local(path: str | Path) -> Path:
    if "://" in str(path):
        raise ValueError(
            f"checkpoint path {path} is remote; a replay is saved beside local checkpoints only. "
            "Use a local dirpath, or save the weights alone (save_weights_only=True)."
        )
    return Path(path)
