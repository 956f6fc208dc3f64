# SPDX-License-Identifier: Apache-2.0
"""Writes states of any part of the library into a directory, crash-safe and without code, and reads them."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_replay.saving.chunks import (
    CHUNK_SUFFIX,
    ChunkedTensor,
    Fingerprint,
    check_file,
    check_files,
    fingerprint,
    is_regular,
    locate_chunks,
    read_chunks,
    write_chunks,
)
from lightning_replay.saving.directory import NewSave, local_folder, read_manifest, read_save, replaced_save
from lightning_replay.saving.files import MALFORMED, DamagedFileError, sync
from lightning_replay.saving.snapshot import Snapshot

logger: logging.Logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
MANIFEST = "replay.json"
SHARDS_VERSION = 1
MANIFEST_OF_SHARDS = "replay_shards.json"  # A replay in several processes has this manifest.
STATE_MANIFEST = "state.json"
STATE_FOLDER = "state"
STATE_VERSION = 1
TENSORS_FILE = "tensors.safetensors"
VALUES_FILE = "values.json"
LARGE_BYTES = 1 << 20  # Tensors of at least this size are written as chunk files.


class SavedSize(NamedTuple):
    """Bytes of all files of a save, and of the files that it wrote. It shares the others with an earlier save."""

    total: int
    written: int


class SavedState(NamedTuple):
    """The data of a save whose small files are read and checked, and whose chunks are not read yet."""

    data: Path
    values: Any
    tensors: dict[str, Tensor]
    chunked: dict[str, ChunkedTensor]

    def read(self) -> Any:
        """Returns the whole state, or raises ``DamagedFileError`` if a chunk was changed."""
        return join_state(self.values, self.tensors | read_chunks(self.chunked, scratch=self.data.parent))

    def check(self) -> None:
        """Checks the chunks without keeping them, and raises ``DamagedFileError`` if a chunk was changed."""
        check_files((file, expected, None) for tensor in self.chunked.values() for file, expected in tensor.files)


def write_state(path: str | Path, state: Mapping[str, Any], *, of: str | None = None) -> None:
    """Writes a nested dictionary of tensors and plain values into the directory ``path``.

    An existing state is replaced as a whole: after a crash the directory holds the old state or the new.

    Args:
        path: directory, created when missing, or a URL of fsspec, such as ``s3://bucket/levels``, with the extra
            ``remote``.
        state: string keys. Values are tensors, ``None``, bool, int, float, str, and lists and dictionaries of these.
        of: Name of the class that the state belongs to. The state of another class is not replaced.

    Raises:
        TypeError: A value has another type. The message names its key.
        ValueError: The directory holds the state of another class. Nothing is written.
        FileExistsError: One of your files has the name of the manifest. Nothing is written.
    """
    with (
        local_folder(path, writes=True) as directory,
        replaced_save(directory, STATE_MANIFEST, folder=STATE_FOLDER) as save,
    ):
        try:
            there = read_manifest(directory / STATE_MANIFEST, STATE_VERSION).get("of")
        except (OSError, ValueError, DamagedFileError):  # no state, or one that cannot be read
            there = None
        if of is not None and there not in (None, of):
            raise ValueError(
                f"{path} holds the state of a {there}, and that of a {of} would replace it; nothing was written. "
                "Give each a directory of its own"
            )
        save.manifest |= {"format": "lightning-replay-state", "version": STATE_VERSION, "of": of}
        write_data(save, state)


def read_state(path: str | Path) -> dict[str, Any]:
    """Reads a state that :func:`write_state` wrote.

    Raises:
        FileNotFoundError: The directory holds no state.
        DamagedFileError: A file of the save is missing, truncated, or changed.
        ValueError: The save has another format, for example of a newer version of this library.
    """
    with local_folder(path) as directory:
        file = directory / STATE_MANIFEST
        if not file.exists():
            if any(directory.glob(f"{STATE_FOLDER}-*")):
                raise DamagedFileError(f"{file} does not exist, and data of a save do; load an earlier save")
            raise FileNotFoundError(
                f"no state was saved in {directory}: {STATE_MANIFEST} does not exist. Give the directory that was "
                "written"
            )
        return read_save(directory, lambda: read_manifest(file, STATE_VERSION), lambda *save: open_data(*save).read())


def replay_manifest(directory: Path) -> dict[str, Any]:
    """Returns the checked manifest of a saved buffer. Raises as :func:`read_manifest`."""
    file = directory / MANIFEST
    if not file.exists():
        is_of_levels = (directory / STATE_MANIFEST).exists()
        hint = ". A level buffer is there: levels.load(path) of one built alike reads it" if is_of_levels else ""
        if (directory / MANIFEST_OF_SHARDS).exists():
            hint = ". A sharded replay is there: ShardedReplay(...).load(path) of one built alike reads it"
        raise FileNotFoundError(f"no saved replay buffer in {directory}: {MANIFEST} is missing{hint}")
    manifest = read_manifest(file, FORMAT_VERSION)
    try:
        _ = manifest["built_by"], manifest["length"], Path(manifest["data"])
        _ = [record["bytes"] for record in manifest["files"].values()]
    except MALFORMED as error:
        raise DamagedFileError(f"{file} is damaged ({error}); load an earlier save") from error
    return manifest


def load_state(path: str | Path, load: Callable[[dict[str, Any]], Any]) -> None:
    """Reads a state with :func:`read_state`, and calls ``load`` with it. Raises what either raises."""
    state = read_state(path)
    with refusing_other_states(path):
        load(state)


@contextmanager
def refusing_other_states(path: str | Path) -> Iterator[None]:
    """Context manager for loading a state in its body. Errors of an unexpected shape become ``DamagedFileError``."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, StopIteration, TypeError) as error:
        raise DamagedFileError(
            f"the state saved in {path} is not one of what it is loaded into ({error!r}); nothing was loaded"
        ) from error


def write_data(save: NewSave, state: Mapping[str, Any], earlier: Mapping[Fingerprint, Path] | None = None) -> SavedSize:
    """Writes the files of a state into a new save, and their fingerprints into its manifest.

    Tensors of 1 MiB or more are separate files. Files of ``earlier`` are linked if the content is the same.
    """
    values, tensors = split_state(state)
    large = {name: tensor for name, tensor in tensors.items() if tensor.nbytes >= LARGE_BYTES}
    records, chunks = write_chunks(save.data, large, earlier or {})
    small = {
        # Copied: safetensors needs contiguous tensors that share no memory.
        name: tensor.tensor() if isinstance(tensor, Snapshot) else tensor.cpu().contiguous().clone()
        for name, tensor in tensors.items()
        if name not in large
    }
    save_file(small, save.data / TENSORS_FILE)
    (save.data / VALUES_FILE).write_text(json.dumps({"state": values, "chunked": records}))
    for name in (TENSORS_FILE, VALUES_FILE):
        sync(save.data / name)
    files = {
        **{name: fingerprint(save.data / name) for name in (TENSORS_FILE, VALUES_FILE)},
        **{chunk.name: chunk.fingerprint for chunk in chunks},
    }
    save.manifest["files"] = {name: file._asdict() for name, file in files.items()}
    total = sum(file.bytes for file in files.values())
    return SavedSize(total, total - sum(chunk.fingerprint.bytes for chunk in chunks if chunk.linked))


def open_data(manifest: Mapping[str, Any], data: Path) -> SavedState:
    """Reads and checks the small files of a save, and the sizes of the others, and raises ``DamagedFileError``."""
    try:
        files = manifest["files"]
        for name in dict.fromkeys((TENSORS_FILE, VALUES_FILE, *files)):
            if not name.endswith(CHUNK_SUFFIX):
                check_file(data / Path(name).name, files.get(name, {}))
        values = json.loads((data / VALUES_FILE).read_text())
        tensors = load_file(data / TENSORS_FILE)
        return SavedState(data, values["state"], tensors, locate_chunks(data, values["chunked"], files))
    except DamagedFileError:
        raise
    except (OSError, SafetensorError, *MALFORMED) as error:  # a folder that others replace may vanish
        raise DamagedFileError(
            f"{data / VALUES_FILE} holds no saved state ({error!r}); load an earlier save"
        ) from error


def chunks_of(manifest: Mapping[str, Any], data: Path) -> dict[Fingerprint, Path]:
    """Returns the chunk files of an earlier save that have the expected size."""
    chunks = {}
    for name, record in manifest["files"].items():
        file = data / Path(name).name
        if not is_regular(file, record.get("bytes")):
            logger.info("%s is missing or damaged in an earlier save", file)
        elif name.endswith(CHUNK_SUFFIX):
            chunks[Fingerprint(record["bytes"], str(record.get("blake2b")))] = file
    return chunks


def split_state(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor | Snapshot]]:
    """Returns a state as JSON values with references to tensors, and the tensors by these references.

    Keys are strings. Values are tensors, snapshots, ``None``, bool, int, float, str, sizes and devices of torch, and
    lists and dictionaries of these. Raises ``TypeError`` for another, with its key.
    """
    tensors: dict[str, Tensor | Snapshot] = {}
    return _split(state, "", tensors), tensors


def join_state(values: object, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the state that :func:`split_state` took apart, or raises ``DamagedFileError`` if they don't fit."""
    try:
        return _join(values, tensors)
    except MALFORMED as error:
        raise DamagedFileError(
            f"saved values and tensors do not fit together: {error!r}; load an earlier save"
        ) from error


def _split(value: object, name: str, tensors: dict[str, Tensor | Snapshot]) -> Any:
    if isinstance(value, Tensor | Snapshot):
        reference = name or "tensor"
        while reference in tensors:  # {"a": {"b": ...}, "a.b": ...}
            reference += "'"
        if isinstance(value, Tensor):
            # Lazy conjugates and negatives would be written as the tensors they are computed from.
            value = value.detach().resolve_conj().resolve_neg()
        tensors[reference] = value
        return {"$tensor": reference}
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        halved = {"$dict": {str(key): _split(item, f"{prefix}{key}", tensors) for key, item in value.items()}}
        # TensorDict stores batch sizes and the nesting of its keys in an attribute of its flat state.
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


def _join(value: object, tensors: Mapping[str, Tensor]) -> Any:
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
