# SPDX-License-Identifier: Apache-2.0
"""A digest of what a Lightning checkpoint holds: torch reads its files without looking at their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.saving import DamagedFileError

__all__ = ["add_digest", "check_digest"]

KEY = "lightning_replay_digest"


def add_digest(checkpoint: dict[str, Any]) -> None:
    """Adds the digest of everything else in a checkpoint, under :data:`KEY`."""
    checkpoint.pop(KEY, None)
    checkpoint[KEY] = digest_of(checkpoint)


def check_digest(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Removes the digest from a checkpoint that was read, where it has one.

    Raises:
        DamagedFileError: the checkpoint is not what was saved.
    """
    expected = checkpoint.pop(KEY, None)
    if expected is not None and expected != digest_of(checkpoint):
        raise DamagedFileError(
            f"{path} was changed since it was saved; nothing was restored. Load an earlier checkpoint. To use a file "
            f"that you changed yourself, remove the key {KEY!r} from it"
        )


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
