# SPDX-License-Identifier: Apache-2.0
"""State as files without code in them: tensors in safetensors, everything else in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS_FILE = "tensors.safetensors"
VALUES_FILE = "values.json"


class DamagedFileError(RuntimeError):
    """A saved file is missing, truncated or does not hold what was written."""


def write_state(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes a nested dictionary of tensors and plain values into the directory ``path``.

    Args:
        path: directory, created when missing.
        state: string keys; values are tensors, ``None``, bool, int, float, str, and lists and dictionaries of these.

    Raises:
        TypeError: a value is none of these; the message names its key.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    values = _split(state, "", tensors)
    save_file(_separate(tensors), directory / TENSORS_FILE)
    (directory / VALUES_FILE).write_text(json.dumps(values))


def read_state(path: str | Path) -> dict[str, Any]:
    """Reads what :func:`write_state` wrote.

    Raises:
        DamagedFileError: a file is missing, truncated or unreadable.
    """
    directory = Path(path)
    try:
        tensors = load_file(directory / TENSORS_FILE)
        values = json.loads((directory / VALUES_FILE).read_text())
        return _join(values, tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"the saved state in {directory} cannot be read ({error}); it is damaged or truncated. "
            "Load an earlier save, or build the object anew."
        ) from error


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, no two sharing memory: safetensors refuses those that do."""
    separate: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in taken:
            tensor = tensor.clone()
        taken.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    return separate


def _split(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON half of ``value``; tensors are moved to ``tensors`` and leave a reference behind."""
    if isinstance(value, Tensor):
        tensors[name or "tensor"] = value
        return {"$tensor": name or "tensor"}
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        return {"$dict": {str(key): _split(item, f"{prefix}{key}", tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_split(item, f"{name}.{position}", tensors) for position, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"state entry {name!r} is a {type(value).__name__}; accepted are tensors, None, bool, int, float, str, "
        "and lists and dictionaries of these"
    )


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        return {key: _join(item, tensors) for key, item in value["$dict"].items()}
    if isinstance(value, list):
        return [_join(item, tensors) for item in value]
    return value
