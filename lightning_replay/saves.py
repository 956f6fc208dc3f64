# SPDX-License-Identifier: Apache-2.0
"""Saves of replay buffers: everything that decides the next draws, written to a directory without code in the files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import StoreStorage
from torchrl.data.replay_buffers import Sampler, Storage, Writer
from torchrl.envs import Transform

from lightning_replay.episodes.returns import EpisodeTracker
from lightning_replay.feedback import Feedback
from lightning_replay.options import check_kind, checked_local_path
from lightning_replay.parts import as_replay_sampler, unwrap
from lightning_replay.prefetch import Prefetch
from lightning_replay.saving.chunks import CHUNK_SUFFIX, Fingerprint
from lightning_replay.saving.directory import data_of, local_folder, read_manifest, read_save, replaced_save
from lightning_replay.saving.files import DamagedFileError
from lightning_replay.saving.spec import comparable, describe, is_public
from lightning_replay.saving.states import (
    FORMAT_VERSION,
    MANIFEST,
    MANIFEST_OF_SHARDS,
    SHARDS_VERSION,
    SavedSize,
    chunks_of,
    open_data,
    replay_manifest,
    write_data,
)
from lightning_replay.state import Stateful
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.training_replay import TrainingReplay

__all__ = ["FrozenReplay", "SavedSize", "read_replay", "save_id", "save_replay", "verify_replay"]

_NEEDED = ("built_from", "sampler", "writer", "transform", "feedback", "generator", "storage")
_OPTIONAL = ("episodes", "generator")  # These entries are None in the state of a buffer without them.

R = TypeVar("R")

logger: logging.Logger = logging.getLogger(__name__)


class SavedParts(NamedTuple):
    """The objects of a replay whose states a save holds."""

    storage: Storage
    sampler: Sampler
    writer: Writer
    transform: Transform
    episodes: EpisodeTracker | None
    feedback: Feedback
    generator: torch.Generator | None  #: Generator of a TorchRL sampler; ``None`` for samplers of this library.
    prefetch: Prefetch


@contextmanager
def present_state(replay: Any) -> Iterator[dict[str, Any]]:
    """Context manager for the state as it is, without copies of the rows. Other threads wait until the body ends.

    Rows may be views. Copy the rows that are needed after the body.
    """
    with replay.locked():
        yield _state_of(replay) | {"storage": replay.storage.state_dict()}


def read_state(replay: Any) -> dict[str, Any]:
    """Returns a copy of rows, episodes, priorities, generators, counters, and the batches drawn ahead."""
    with present_state(replay) as state:
        state["storage"] = _copied(state["storage"])
        if isinstance(replay.storage, PackedStorage):
            replay.storage.check_read()
    return state


@contextmanager
def frozen_state(replay: Any) -> Iterator[dict[str, Any]]:
    """Context manager for the state as it is now. Other threads may write and draw while the body reads it.

    Rows and frames are snapshots. TorchRL's storages have no snapshots: other threads wait until the body ends.
    """
    storage = replay.storage
    if not isinstance(storage, PackedStorage):
        with present_state(replay) as state:
            yield state
        return
    with ExitStack() as until_read:
        with replay.locked():
            state = _state_of(replay) | {"storage": until_read.enter_context(storage.frozen_state())}
        yield state


def restore_state(replay: Any, state: dict[str, Any]) -> None:
    """Restores what :func:`read_state` returned, into a buffer of the same capacity, parts, and tables.

    Raises:
        TypeError, ValueError: This is not the state of a buffer, or a part refuses it. Nothing is changed.
    """
    check_kind("the state", state, Mapping, "what state_dict() of a replay buffer returned")
    lacking = [name for name in _NEEDED if name not in state]
    if lacking:
        raise ValueError(
            f"the state lacks {lacking}; it is not what state_dict() of a replay buffer returned. Nothing was loaded"
        )
    # Its state names an address, to which it would connect, and rows from there are unpickled.
    if isinstance(replay.storage, StoreStorage):
        raise ValueError(
            "the rows of a StoreStorage are on a server, and a state could name another server. Nothing was loaded; "
            "build the replay with a PackedStorage, whose rows are saved"
        )
    saved = state["built_from"]
    different = [
        f"{name} {saved.get(name)}, here {here}"
        for name, here in _built_from(replay).items()
        if saved.get(name) != here
    ]
    if different:
        raise ValueError(
            f"the saved buffer has {'; '.join(different)}. Nothing was loaded; build the buffer with the options of "
            "the saved one, or let load_replay build it"
        )
    batches = [(TensorDict(batch["data"], batch["batch_size"]), dict(batch["info"])) for batch in state["prefetched"]]
    with replay.locked():
        _restore_parts(replay.saved_parts, state)
        replay.saved_parts.prefetch.replace([batch for batch in batches if batch[0].shape[0] == replay.batch_size])


def _access(parts: SavedParts) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    # By the entry of each part, the functions that copy its state and restore it.
    transform = parts.transform
    access: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "sampler": (partial(_own_state, parts.sampler), parts.sampler.load_state_dict),
        "writer": (partial(_own_state, parts.writer), parts.writer.load_state_dict),
        "feedback": (parts.feedback.state_dict, parts.feedback.load_state_dict),
        "transform": (lambda: _copied(dict(transform.state_dict())), transform.load_state_dict),
    }
    if parts.episodes is not None:
        load = partial(parts.episodes.load_state_dict, storage=parts.storage)
        access["episodes"] = (parts.episodes.state_dict, load)
    if parts.generator is not None:
        access["generator"] = (parts.generator.get_state, partial(_set_generator, parts.generator))
    return access


def _state_of(replay: Any) -> dict[str, Any]:
    parts = replay.saved_parts
    return {
        "built_from": _built_from(replay),
        "length": len(replay),
        **dict.fromkeys(_OPTIONAL),
        **{name: read() for name, (read, _) in _access(parts).items()},
        "prefetched": [
            {"data": data.to_dict(), "batch_size": list(data.batch_size), "info": info}
            for data, info in parts.prefetch.batches()
        ],
    }


def _own_state(part: Sampler | Writer) -> dict[str, Any]:
    # Parts of this library return copies. Other parts may return the tensors that they write into.
    state: dict[str, Any] = part.state_dict()
    return state if is_public(type(part)) else _copied(state)


def _set_generator(generator: torch.Generator, saved: Tensor) -> None:
    # The states of generators on the CPU and on a GPU have different lengths.
    if len(saved) == len(generator.get_state()):
        generator.set_state(saved.cpu())


def _restore_parts(parts: SavedParts, state: dict[str, Any]) -> None:
    # All states or none: if a part refuses its state, the parts before it get their former state again. The rows come
    # last, because nothing is refused after them, and they are never reverted.
    loaded: list[tuple[Callable[[Any], Any], Any]] = []
    try:
        for name, (read, load) in _access(parts).items():
            if state[name] is not None or name not in _OPTIONAL:
                loaded.append((load, read()))
                load(state[name])
        parts.storage.load_state_dict(state["storage"])
    except BaseException:
        for load, before in reversed(loaded):
            load(before)
        raise


def _built_from(replay: Any) -> dict[str, Any]:
    # These entries must be equal in the buffer that the state is loaded into.
    storage, sampler, writer, transform, episodes, *_ = replay.saved_parts
    built = {
        "capacity": storage.max_size,
        "storage": type(storage).__name__,
        "writer": type(writer).__name__,
        # A sampler that wraps no other is the same object twice.
        "sampler": [
            as_replay_sampler(each).has_state_of or type(each).__name__
            for each in dict.fromkeys((sampler, unwrap(sampler)))
        ],
        "transforms": [type(each).__name__ for each in transform.transforms],
        "n-step links": episodes is not None,
    }
    if isinstance(storage, PackedStorage):
        built |= storage.build_options()
    if replay.sequence_length is not None:
        built["sequence length"] = replay.sequence_length
    if episodes is not None:
        built["check_continuity"] = episodes.check_continuity
    for part in (sampler, writer, *transform.transforms):
        if isinstance(part, Stateful):
            built |= {
                f"{name.lstrip('_')} of {type(part).__name__}": comparable(describe(getattr(part, name)))
                for name in part.stored_options
            }
    if replay.tables is not None:
        built["tables"] = [[*pair] for pair in zip(replay.tables.names, replay.tables.capacity.tolist(), strict=True)]
    return built


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        copied = type(state)((key, _copied(value)) for key, value in state.items())
        if hasattr(state, "_metadata"):  # TensorDict's states have this attribute.
            copied._metadata = state._metadata  # type: ignore[attr-defined]
        return copied
    if isinstance(state, list | tuple):
        return type(state)(_copied(value) for value in state)
    return state


def save_replay(replay: TrainingReplay, path: str | Path, *, previous: str | Path | None = None) -> SavedSize:
    """Saves a replay buffer at one moment: rows, priorities, generators, counters, and the options of its constructor.

    Other threads wait only while the small parts of the state are copied (priorities, links, lists). Until a row is
    saved, a write first copies the 256 KiB around it. The directory is replaced as a whole, see
    :mod:`lightning_replay.saving.directory`. If a crash, ``kill -9``, or a power loss interrupts a save, the previous
    save can be loaded.

    Chunks of rows that an earlier save holds are hard-linked instead of written. Every save is complete, and you may
    remove any other save. Damage on the disk in a shared file affects all saves that share the file. A load and
    :func:`verify_replay` detect the damage.

    Args:
        replay: Buffer. It is not changed.
        path: Directory, created if missing. Files of an earlier save in it are shared, and then that save is replaced.
            Or a URL of fsspec, such as ``s3://bucket/replay``, to which the save is uploaded (extra ``remote``).
        previous: Directory of another save to share files with. Everything is written if that save is missing,
            damaged, from another buffer, or on another file system.

    Returns:
        Bytes of the save, and the bytes that were written now.

    Raises:
        TypeError: ``replay`` is not a replay buffer, for example a level buffer.
        FileExistsError: One of your files in ``path`` is named ``replay.json``. Nothing is written.

    Example:
        >>> import tempfile
        >>> from lightning_replay import load_replay, recipes, save_replay
        >>> replay = recipes.uniform(capacity=100, batch_size=4)
        >>> size = save_replay(replay, tempfile.mkdtemp() + "/buffer")
    """
    if not isinstance(replay, TrainingReplay):
        raise TypeError(
            f"replay is a {type(replay).__name__}; save_replay saves replay buffers. Of a RecipeBuffer rb give "
            "rb.replay. A level buffer saves and loads itself: levels.save(path), levels.load(path)"
        )
    return _write(path, previous, _frozen(replay))


@contextmanager
def _frozen(replay: TrainingReplay) -> Iterator[tuple[Any, dict[str, Any]]]:
    with replay.frozen_state() as state:
        yield describe(replay), state


class FrozenReplay:
    """A snapshot of a replay, which another thread can save while the replay goes on.

    Call :meth:`save` once, or :meth:`close`. Until then, writes first copy the rows that they overwrite.

    Raises:
        TypeError: The rows have no snapshots, because they are in a TorchRL storage or in shards.

    Example:
        >>> import tempfile, threading
        >>> from lightning_replay import recipes
        >>> frozen = FrozenReplay(recipes.uniform(capacity=100, batch_size=4))
        >>> thread = threading.Thread(target=frozen.save, args=[tempfile.mkdtemp() + "/buffer"])
        >>> thread.start(); thread.join()
    """

    def __init__(self, replay: TrainingReplay) -> None:
        if not (isinstance(replay, TrainingReplay) and replay.has_snapshots):
            raise TypeError(
                f"this {type(replay).__name__} cannot be saved in the background, which takes rows in a PackedStorage "
                "of this process; save it in the foreground"
            )
        self._is_closed = False
        self._until_saved = ExitStack()
        self._content = self._until_saved.enter_context(_frozen(replay))

    def save(self, path: str | Path, *, previous: str | Path | None = None) -> SavedSize:
        """Saves the state as :func:`save_replay` does."""
        if self._is_closed:
            raise RuntimeError("this FrozenReplay was saved or closed already; freeze the replay again")
        self._is_closed = True
        with self._until_saved:
            return _write(path, previous, nullcontext(self._content))

    def close(self) -> None:
        """Releases the snapshot without a save."""
        self._is_closed = True
        self._until_saved.close()


def _write(
    path: str | Path, previous: str | Path | None, frozen: AbstractContextManager[tuple[Any, dict[str, Any]]]
) -> SavedSize:
    with (
        local_folder(path, writes=True) as directory,
        replaced_save(directory, MANIFEST, folder="data", replaces=MANIFEST_OF_SHARDS) as save,
    ):
        earlier = {}
        if (directory / MANIFEST).exists():
            earlier = _chunks_in(directory)
        if previous is not None:
            earlier |= _chunks_in(checked_local_path("previous", previous))
        with frozen as (built_by, state):
            save.manifest |= {
                "format": "lightning-replay",
                "version": FORMAT_VERSION,
                "built_by": built_by,
                "length": state["length"],
            }
            size = write_data(save, state, earlier)
    has_chunks = any(name.endswith(CHUNK_SUFFIX) for name in save.manifest["files"])
    if previous is not None and has_chunks and size.written == size.total:
        logger.info("no file of %s could be shared; everything was written to %s", previous, path)
    return SavedSize(size.total + save.bytes_of_manifest, size.written + save.bytes_of_manifest)


def verify_replay(path: str | Path) -> dict[str, Any]:
    """Reads and checks a saved buffer. No buffer is built.

    Returns:
        ``built_by``, class and options of the buffer as plain values, and ``length``, the number of transitions.

    Raises:
        FileNotFoundError: The directory holds no saved buffer.
        DamagedFileError: A file is missing, truncated, or changed.
        ValueError: The save has another format, for example of a newer version of this library.
    """
    return _read(path, _checked)


def _checked(manifest: dict[str, Any], data: Path) -> dict[str, Any]:
    open_data(manifest, data).check()
    return {key: manifest[key] for key in ("built_by", "length")}


def save_id(path: str | Path) -> str:
    """Returns the unique id of the save of a replay, sharded or not, or raises the errors of :func:`verify_replay`."""
    with local_folder(path, deep=False) as directory:
        file = directory / MANIFEST_OF_SHARDS
        if file.exists():
            return str(read_manifest(file, SHARDS_VERSION)["id"])
        return str(replay_manifest(directory)["id"])


def read_replay(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the checked manifest of a saved buffer and its state, or raises the errors of :func:`verify_replay`."""
    return _read(path, lambda manifest, data: (manifest, open_data(manifest, data).read()))


def _read(path: str | Path, use: Callable[[dict[str, Any], Path], R]) -> R:
    with local_folder(path) as directory:
        return read_save(directory, lambda: replay_manifest(directory), use)


def _chunks_in(directory: Path) -> dict[Fingerprint, Path]:
    try:
        manifest = replay_manifest(directory)
        data = data_of(directory, manifest)
    except (OSError, ValueError, DamagedFileError) as error:
        logger.info("%s is not used as an earlier save: %s", directory, error)
        return {}
    return chunks_of(manifest, data)
