# SPDX-License-Identifier: Apache-2.0
"""State as files without code in them: tensors in safetensors, everything else in JSON."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
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
    values, tensors = split_state(state)
    write_halves(directory, values, tensors)


def read_state(path: str | Path) -> dict[str, Any]:
    """Reads what :func:`write_state` wrote.

    Raises:
        DamagedFileError: a file is missing, truncated or unreadable.
    """
    return join_state(*read_halves(Path(path)))


def split_state(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """A state as JSON values with references to tensors, and the tensors by these references.

    Raises:
        TypeError: a value is neither a tensor nor plain; the message names its key.
    """
    tensors: dict[str, Tensor] = {}
    return _split(state, "", tensors), tensors


def join_state(values: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that :func:`split_state` took apart.

    Raises:
        DamagedFileError: a tensor is missing, or the values are not such.
    """
    try:
        return _join(values, tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(
            f"saved values and tensors do not fit together: {error!r}; load an earlier save"
        ) from error


def write_halves(directory: Path, values: Any, tensors: Mapping[str, Tensor]) -> None:
    """Writes JSON values and tensors, a file each."""
    save_file(_separate(tensors), directory / TENSORS_FILE)
    (directory / VALUES_FILE).write_text(json.dumps(values))


def read_halves(directory: Path) -> tuple[Any, dict[str, Tensor]]:
    """Reads what :func:`write_halves` wrote; the tensors are read from the disk when they are used.

    Raises:
        DamagedFileError: a file is missing, truncated or unreadable.
    """
    try:
        return json.loads((directory / VALUES_FILE).read_text()), load_file(directory / TENSORS_FILE)
    except FileNotFoundError as error:
        raise DamagedFileError(
            f"no state was saved in {directory}, or not all of it: {error.filename or error} does not exist. Give the "
            "directory that was written"
        ) from error
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedFileError(
            f"the saved state in {directory} cannot be read ({error}); it is damaged or truncated. "
            "Load an earlier save, or build the object anew."
        ) from error


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, no two sharing memory: safetensors refuses those that do."""
    separate: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in taken:
            tensor = tensor.clone()
        taken.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    return separate


def _split(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON half of ``value``; tensors are moved to ``tensors`` and leave a reference behind."""
    if isinstance(value, Tensor):
        reference = name or "tensor"
        while reference in tensors:  # {"a": {"b": ...}, "a.b": ...}
            reference += "'"
        # Conjugates and negatives that are still to be computed would be written as what they are computed from.
        tensors[reference] = value.detach().resolve_conj().resolve_neg()
        return {"$tensor": reference}
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        halved = {"$dict": {str(key): _split(item, f"{prefix}{key}", tensors) for key, item in value.items()}}
        # TensorDict keeps batch sizes and the nesting of its keys in an attribute of its flat state.
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
        "and lists and dictionaries of these"
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
