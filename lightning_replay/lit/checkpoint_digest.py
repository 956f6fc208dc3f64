# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files with a digest of their content: torch reads its files without looking at their checksums."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_replay.saving import DamagedFileError
from lightning_replay.saving.serialization import sync

__all__ = ["CheckedCheckpointIO", "check_checkpoint", "digest_of"]

KEY = "lightning_replay_digest"


class CheckedCheckpointIO(CheckpointIO):
    """Writes a digest of its content into every checkpoint file, and refuses a file that was changed since.

    A data module installs it; other plug-ins keep working underneath.

    Args:
        wrapped: writes and reads the file itself.
    """

    def __init__(self, wrapped: CheckpointIO) -> None:
        self.wrapped = wrapped
        self._is_loadable_checked = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Saves the file, and warns once of hyperparameters and states in it that would not be loaded again."""
        checkpoint.pop(KEY, None)
        checkpoint[KEY] = digest_of(checkpoint)
        self.wrapped.save_checkpoint(checkpoint, path, storage_options)
        if not self._is_loadable_checked:
            self._is_loadable_checked = True
            _warn_of_unloadable(checkpoint)
        if Path(path).is_file():  # not if a plug-in writes later or elsewhere
            sync(Path(path))
            sync(Path(path).parent)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads the file.

        Raises:
            DamagedFileError: its content was changed.
        """
        checkpoint: dict[str, Any] = self.wrapped.load_checkpoint(path, *args, **kwargs)
        expected = checkpoint.pop(KEY, None)
        if expected is not None and expected != digest_of(checkpoint):
            raise DamagedFileError(
                f"{path} was changed since it was saved; nothing was restored. Load an earlier checkpoint. To use a "
                f"file that you changed yourself, remove the key {KEY!r} from it"
            )
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes the file."""
        self.wrapped.remove_checkpoint(path)

    def teardown(self) -> None:
        """Closes the wrapped plug-in."""
        self.wrapped.teardown()


def check_checkpoint(path: str | Path | None) -> None:
    """Refuses a local file that is no checkpoint of Lightning; names such as ``"last"`` and addresses pass.

    Raises:
        ValueError: there is no such file, or it is something else.
    """
    if path is None or "://" in str(path) or str(path) in ("best", "last", "hpc") or str(path).startswith("registry"):
        return
    accepted = "give a .ckpt file that a run has saved, or 'last'"
    if not Path(path).is_file():
        raise ValueError(f"ckpt_path is {str(path)!r}, which is no file; {accepted}")
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # torch raises errors of many kinds for files of other programs
        reason = " ".join(str(error).split(". ")[0].split())
        raise ValueError(f"ckpt_path is {str(path)!r}, which torch does not load ({reason}); {accepted}") from error
    if not isinstance(content, Mapping) or not {"state_dict", "pytorch-lightning_version"} <= set(content):
        raise ValueError(f"ckpt_path is {str(path)!r}, which is no checkpoint of Lightning; {accepted}")


def _warn_of_unloadable(checkpoint: Mapping[str, Any]) -> None:
    """Warns of entries with objects that torch does not load with ``weights_only``, Lightning's default."""
    parts: dict[str, Any] = {}
    for name, value in checkpoint.items():
        if name not in ("state_dict", "optimizer_states"):  # tensors, and large
            nested = isinstance(value, Mapping)
            parts |= {f"{name}.{key}": entry for key, entry in value.items()} if nested else {name: value}
    unloadable = {name: type(value).__name__ for name, value in parts.items() if not _is_loadable(value)}
    if unloadable:
        named = ", ".join(f"{name} ({kind})" for name, kind in unloadable.items())
        rank_zero_warn(
            f"a checkpoint holds {named}, which fit(ckpt_path=...) and load_from_checkpoint do not load unless "
            "weights_only=False is given. Give the hyperparameters as plain numbers, texts, lists and tensors, or "
            "leave them out with save_hyperparameters(ignore=...)."
        )


def _is_loadable(value: Any) -> bool:
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception:  # as of objects of any class
        return False
    return True


def digest_of(value: Any) -> str:
    """Returns a hash of nested dictionaries, lists, dense tensors, arrays and plain values; of others, their class."""
    digest = hashlib.blake2b(digest_size=20)
    _feed(value, digest.update)
    return digest.hexdigest()


def _feed(value: Any, update: Callable[[Any], None]) -> None:
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        update(f"tensor {value.dtype} {list(value.shape)}".encode())
        content = value.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
        update(content.view(torch.uint8).numpy().data if content.numel() else b"")
    elif isinstance(value, np.ndarray):
        update(f"array {value.dtype} {list(value.shape)}".encode())
        if value.dtype.hasobject:  # its bytes are addresses
            _feed(value.tolist(), update)
        else:
            update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        update(f"dict {len(value)}".encode())
        for key, item in value.items():
            _feed(key, update)
            _feed(item, update)
    elif isinstance(value, list | tuple):
        update(f"list {len(value)}".encode())
        for item in value:
            _feed(item, update)
    elif value is None or isinstance(value, bool | int | float | str | bytes | Path | np.generic | torch.dtype):
        update(f"{value!r}".encode())
    else:
        update(f"{type(value).__module__}.{type(value).__qualname__}".encode())
