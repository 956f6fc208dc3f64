# SPDX-License-Identifier: Apache-2.0
"""Files of states: tensors without code, checked by their digests."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_replay.saving.snapshot import Snapshot

TENSORS_FILE = "tensors.safetensors"
VALUES_FILE = "values.json"

#: Errors of code that reads values of an unexpected shape.
MALFORMED = (
    *(AttributeError, IndexError, KeyError, OverflowError, RecursionError, RuntimeError, StopIteration, TypeError),
    ValueError,
)


class DamagedFileError(RuntimeError):
    """A saved file is missing, truncated or does not hold what was written."""


def split_state(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor | Snapshot]]:
    """Returns a state as JSON values with references to tensors, and the tensors by these references.

    Keys are strings; values are tensors, snapshots, ``None``, bool, int, float, str, sizes and devices of torch, and
    lists and dictionaries of these. Raises ``TypeError`` for another, with its key.
    """
    tensors: dict[str, Tensor | Snapshot] = {}
    return _split(state, "", tensors), tensors


def join_state(values: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the state that :func:`split_state` took apart; raises ``DamagedFileError`` if the halves do not fit."""
    try:
        return _join(values, tensors)
    except MALFORMED as error:
        raise DamagedFileError(
            f"saved values and tensors do not fit together: {error!r}; load an earlier save"
        ) from error


def write_halves(directory: Path, values: Any, tensors: Mapping[str, Tensor | Snapshot]) -> None:
    save_file(_separate(tensors), directory / TENSORS_FILE)
    (directory / VALUES_FILE).write_text(json.dumps(values))
    for name in (TENSORS_FILE, VALUES_FILE):
        sync(directory / name)


def check_regular(file: Path) -> None:
    """Raises ``OSError`` if what would be read is no file: reading a pipe waits for ever, and a device has no end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(f"{file} is no regular file")


def check_writable(option: str, folder: str | Path) -> None:
    """Raises ``OSError`` where no file can be created in the folder of an option, or where it will be created."""
    path = Path(folder).absolute()
    try:
        # Nothing is created: other processes may try the same place.
        with tempfile.TemporaryFile(dir=next(one for one in (path, *path.parents) if one.exists())):
            pass
    except OSError as error:
        raise OSError(f"{option} is {str(folder)!r}, where nothing can be written ({error}); give another") from error


def replace_file(file: Path, content: bytes | memoryview) -> None:
    """Writes a file under another name, waits until it is on the disk, and renames it to ``file``."""
    temporary = file.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp")
    with temporary.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)


def sync(path: Path) -> None:
    """Waits until a file, or the file names in a directory, are on the disk and survive a power loss."""
    if os.name == "nt" and path.is_dir():  # Windows opens no directories
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no directory
            raise
    finally:
        os.close(handle)


def _separate(tensors: Mapping[str, Tensor | Snapshot]) -> dict[str, Tensor]:
    # safetensors needs contiguous tensors that share no memory.
    separate: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.tensor() if isinstance(tensor, Snapshot) else tensor.cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in taken:
            tensor = tensor.clone()
        taken.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    return separate


def _split(value: Any, name: str, tensors: dict[str, Tensor | Snapshot]) -> Any:
    if isinstance(value, Tensor | Snapshot):
        reference = name or "tensor"
        while reference in tensors:  # {"a": {"b": ...}, "a.b": ...}
            reference += "'"
        if isinstance(value, Tensor):
            # lazy conjugates and negatives would be written as the tensors they are computed from
            value = value.detach().resolve_conj().resolve_neg()
        tensors[reference] = value
        return {"$tensor": reference}
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        halved = {"$dict": {str(key): _split(item, f"{prefix}{key}", tensors) for key, item in value.items()}}
        # TensorDict stores batch sizes and the nesting of its keys in an attribute of its flat state
        metadata = getattr(value, "_metadata", None)
        return halved if metadata is None else halved | {"$metadata": _split(metadata, f"{prefix}_metadata", tensors)}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, list | tuple):
        return [_split(item, f"{name}.{position}", tensors) for position, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"state entry {name!r} is a {type(value).__name__}; accepted are tensors, None, bool, int, float, str, "
        "and lists and dictionaries of these. Return these from the part's state_dict(), of a generator its get_state()"
    )


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$size" in value:
            return torch.Size(value["$size"])
        if "$device" in value:
            return torch.device(value["$device"])
        joined = {key: _join(item, tensors) for key, item in value["$dict"].items()}
        if "$metadata" not in value:
            return joined
        described = OrderedDict(joined)
        described._metadata = _join(value["$metadata"], tensors)  # type: ignore[attr-defined]
        return described
    if isinstance(value, list):
        return [_join(item, tensors) for item in value]
    return value
