# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files with a digest of their content: torch reads its files without looking at their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from lightning_replay.saving import DamagedFileError
from lightning_replay.saving.serialization import sync

__all__ = ["CheckedCheckpointIO", "digest_of"]

KEY = "lightning_replay_digest"


class CheckedCheckpointIO(CheckpointIO):
    """Writes a digest of its content into every checkpoint file, and refuses a file that was changed since.

    A data module installs it; other plug-ins keep working underneath.

    Args:
        wrapped: writes and reads the file itself.
    """

    def __init__(self, wrapped: CheckpointIO) -> None:
        self.wrapped = wrapped

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Saves the file."""
        checkpoint.pop(KEY, None)
        checkpoint[KEY] = digest_of(checkpoint)
        self.wrapped.save_checkpoint(checkpoint, path, storage_options)
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
