# SPDX-License-Identifier: Apache-2.0
"""Saves of replay buffers: everything that decides the next draws, written to a directory without code in the files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from tensordict import TensorDict
from torch import Tensor
from torchrl.data import StoreStorage

from lightning_replay.options import check_kind, checked_local_path
from lightning_replay.parts import unwrap
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
from lightning_replay.state import SeededStateful
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.training_replay import TrainingReplay

__all__ = ["FrozenReplay", "SavedSize", "read_replay", "save_id", "save_replay", "verify_replay"]

_NEEDED = ("built_from", "sampler", "writer", "transform", "feedback", "generator", "storage")

R = TypeVar("R")

logger: logging.Logger = logging.getLogger(__name__)


@contextmanager
def present_state(replay: Any) -> Iterator[dict[str, Any]]:
    """Context manager for the state as it is, rows not copied; others wait until the body, which changes nothing, ends.

    Rows may be views: what is to stay after the body must be copied.
    """
    with replay.locked():
        yield _state_of(replay) | {"storage": replay._storage.state_dict()}


def read_state(replay: Any) -> dict[str, Any]:
    """Returns a copy of rows, episodes, priorities, generators, counters and the batches drawn ahead."""
    with present_state(replay) as state:
        state["storage"] = _copied(state["storage"])
        if isinstance(replay._storage, PackedStorage):
            replay._storage.check_read()
    return state


@contextmanager
def frozen_state(replay: Any) -> Iterator[dict[str, Any]]:
    """Context manager for the state as it is now, however others write and draw while it is read in the body.

    Rows and frames are snapshots. TorchRL's own storages have none: while those are saved others wait.
    """
    storage = replay._storage
    if not isinstance(storage, PackedStorage):
        with present_state(replay) as state:
            yield state
        return
    with ExitStack() as until_read:
        with replay.locked():
            state = _state_of(replay) | {"storage": until_read.enter_context(storage.frozen_state())}
        yield state


def restore_state(replay: Any, state: dict[str, Any]) -> None:
    """Restores what :func:`read_state` returned, into a buffer of the same capacity, parts and tables.

    ``TypeError`` and ``ValueError`` for what is no such state or is refused by a part; nothing is changed then.
    """
    check_kind("the state", state, Mapping, "what state_dict() of a replay buffer returned")
    lacking = [name for name in _NEEDED if name not in state]
    if lacking:
        raise ValueError(
            f"the state lacks {lacking}; it is not what state_dict() of a replay buffer returned. Nothing was loaded"
        )
    if isinstance(replay._storage, StoreStorage):  # which connects to the address in its state, and unpickles rows
        raise ValueError(
            "the rows of a StoreStorage are on a server, and a state could name another server. Nothing was loaded; "
            "build the replay with a PackedStorage, whose rows are saved"
        )
    saved = state["built_from"]
    different = [
        f"{name} {saved.get(name)}, here {here}" for name, here in _parts_of(replay).items() if saved.get(name) != here
    ]
    if different:
        raise ValueError(
            f"the saved buffer has {'; '.join(different)}. Nothing was loaded; build the buffer with the options of "
            "the saved one, or let load_replay build it"
        )
    batches: list[Future[Any]] = [Future() for _ in state["prefetched"]]
    for future, batch in zip(batches, state["prefetched"], strict=True):
        future.set_result((TensorDict(batch["data"], batch["batch_size"]), dict(batch["info"])))
    with replay.locked():
        _restore_all(replay, state)
        for future in replay._prefetch_queue:
            future.cancel()
        replay._prefetch_queue.clear()
        if replay._prefetch:  # nothing else takes batches from the queue, and every call would wait for them
            fitting = (batch for batch in batches if batch.result()[0].shape[0] == replay._batch_size)
            replay._prefetch_queue.extend(fitting)


def _state_of(replay: Any) -> dict[str, Any]:
    return {
        "built_from": _parts_of(replay),
        "length": len(replay),
        "writer": _own_state(replay._writer),
        "sampler": _own_state(replay._sampler),
        "transform": _copied(dict(replay._transform.state_dict())),
        "episodes": None if replay._episodes is None else replay._episodes.state_dict(),
        "feedback": replay._feedback.state_dict(),
        "generator": None if replay._torchrl_generator is None else replay._torchrl_generator.get_state(),
        "prefetched": [
            {"data": data.to_dict(), "batch_size": list(data.batch_size), "info": info}
            # a draw that failed is repeated, and fails, in the buffer that loads this
            for data, info in (future.result() for future in replay._prefetch_queue if future.exception() is None)
        ],
    }


def _own_state(part: Any) -> dict[str, Any]:
    # The library's parts return copies; TorchRL's and a user's may return the tensors that they write into.
    state: dict[str, Any] = part.state_dict()
    return state if is_public(type(part)) else _copied(state)


def _restore_all(replay: Any, state: dict[str, Any]) -> None:
    # All states or none: where one is refused, the parts before it get their former state again. The rows come last:
    # nothing is refused after them, and they are never reverted.
    episodes, storage, transform = replay._episodes, replay._storage, replay._transform
    parts: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
        ("sampler", replay._sampler.state_dict, replay._sampler.load_state_dict),
        ("writer", replay._writer.state_dict, replay._writer.load_state_dict),
        ("feedback", replay._feedback.state_dict, replay._feedback.load_state_dict),
        ("transform", lambda: _copied(dict(transform.state_dict())), transform.load_state_dict),
    ]
    if episodes is not None and state["episodes"] is not None:
        parts.append(("episodes", episodes.state_dict, lambda saved: episodes.load_state_dict(saved, storage)))
    generator = replay._torchrl_generator
    saved_generator = state["generator"]
    # The states of generators on the CPU and on a GPU have different lengths.
    if generator is not None and saved_generator is not None and len(saved_generator) == len(generator.get_state()):
        parts.append(("generator", generator.get_state, lambda saved: generator.set_state(saved.cpu())))
    loaded: list[tuple[Callable[[Any], Any], Any]] = []
    try:
        for name, read, load in parts:
            loaded.append((load, read()))
            load(state[name])
        storage.load_state_dict(state["storage"])
    except BaseException:
        for load, before in reversed(loaded):
            load(before)
        raise


def _parts_of(replay: Any) -> dict[str, Any]:
    # These must be equal where the state is loaded.
    sampler = [type(replay._sampler).__name__]
    base = unwrap(replay._sampler)
    tables = replay.tables
    parts = {
        "capacity": replay._storage.max_size,
        "storage": type(replay._storage).__name__,
        "writer": type(replay._writer).__name__,
        "sampler": sampler if base is replay._sampler else [*sampler, type(base).__name__],
        "transforms": [type(transform).__name__ for transform in replay._transform.transforms],
        "n-step links": replay._episodes is not None,
    }
    if isinstance(replay._storage, PackedStorage):
        parts |= replay._storage.build_options()
    if replay.sequence_length is not None:
        parts["sequence length"] = replay.sequence_length
    if replay._episodes is not None:
        parts["check_continuity"] = replay._episodes.check_continuity
    for part in (replay._sampler, replay._writer, *replay._transform.transforms):
        for name in part.stored_options if isinstance(part, SeededStateful) else ():
            value = comparable(describe(getattr(part, name)))
            parts[f"{name.lstrip('_')} of {type(part).__name__}"] = value
    if tables is not None:  # in the order of their numbers
        parts["tables"] = [[name, int(most)] for name, most in zip(tables.names, tables.capacity, strict=True)]
    return parts


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        copied = type(state)((key, _copied(value)) for key, value in state.items())
        if hasattr(state, "_metadata"):  # of a TensorDict's state
            copied._metadata = state._metadata  # type: ignore[attr-defined]
        return copied
    return type(state)(_copied(value) for value in state) if isinstance(state, list | tuple) else state


def save_replay(replay: Any, path: str | Path, *, previous: str | Path | None = None) -> SavedSize:
    """Saves a replay buffer at one moment: rows, priorities, generators, counters and the options it was built with.

    Other threads wait only while the small parts of the state are copied (priorities, links, lists). Later writes
    first copy the rows that they overwrite, in pieces of 256 KiB, unless these are saved already. The directory is
    replaced as a whole, see :mod:`lightning_replay.saving.directory`: a save that is interrupted (a crash, ``kill -9``,
    a power loss) leaves the previous one loadable.

    Parts of the rows whose content an earlier save holds are hard-linked instead of written. Every save is complete,
    and removing another never affects it; but damage of the disk in a shared file affects all saves that share it,
    which loading and :func:`verify_replay` detect.

    Args:
        replay: the buffer; it is not changed.
        path: a directory, created when missing; files of an earlier save in it are shared, then it is replaced. Or a
            URL of fsspec, such as ``s3://bucket/replay``, to which all is uploaded; needs the extra ``remote``.
        previous: directory of another save to share files with; if it cannot be used (missing, damaged, of another
            buffer, on another file system), everything is written.

    Returns:
        bytes of the save, and those written now.

    Raises:
        TypeError: something other than a replay buffer, such as a level buffer.
        FileExistsError: a file of yours in ``path`` is named ``replay.json``; nothing is written.

    Example:
        >>> import tempfile
        >>> from lightning_replay import load_replay, recipes, save_replay
        >>> replay = recipes.uniform(capacity=100, batch_size=4)
        >>> size = save_replay(replay, tempfile.mkdtemp() + "/buffer")
    """
    if not isinstance(replay, TrainingReplay):
        raise TypeError(
            f"replay is a {type(replay).__name__}; save_replay saves replay buffers. A level buffer saves and loads "
            "itself: levels.save(path), levels.load(path)"
        )
    return _write(path, previous, _frozen(replay))


@contextmanager
def _frozen(replay: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    with replay.frozen_state() as state:
        yield describe(replay), state


class FrozenReplay:
    """The state of a replay at the moment this is built, to be saved while the replay goes on, as by another thread.

    Call :meth:`save` once, or :meth:`close`: until then, writes first copy the rows that they overwrite.

    Raises:
        TypeError: rows that cannot be kept so, in a storage of TorchRL's or in shards.

    Example:
        >>> import tempfile, threading
        >>> from lightning_replay import recipes
        >>> frozen = FrozenReplay(recipes.uniform(capacity=100, batch_size=4))
        >>> thread = threading.Thread(target=frozen.save, args=[tempfile.mkdtemp() + "/buffer"])
        >>> thread.start(); thread.join()
    """

    def __init__(self, replay: Any) -> None:
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
            raise RuntimeError("this FrozenReplay was saved or closed already; freeze the replay anew")
        self._is_closed = True
        with self._until_saved:
            return _write(path, previous, nullcontext(self._content))

    def close(self) -> None:
        self._is_closed = True
        self._until_saved.close()


def _write(
    path: str | Path, previous: str | Path | None, frozen: AbstractContextManager[tuple[Any, dict[str, Any]]]
) -> SavedSize:
    with (
        local_folder(path, writes=True) as directory,
        replaced_save(directory, MANIFEST, folder="data", replaces=MANIFEST_OF_SHARDS) as save,
    ):
        earlier = _chunks_in(directory) if (directory / MANIFEST).exists() else {}
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
    """Reads and checks a saved buffer without building one.

    Returns:
        ``built_by``: class and options of the buffer, as plain values; ``length``: transitions.

    Raises:
        FileNotFoundError: no saved buffer there.
        DamagedFileError: a file is missing, truncated or changed.
        ValueError: saved by a newer version of this library.
    """

    def check(manifest: dict[str, Any], data: Path) -> dict[str, Any]:
        open_data(manifest, data).check()
        return {key: manifest[key] for key in ("built_by", "length")}

    return _read(path, check)


def save_id(path: str | Path) -> str:
    """Returns the unique id of a save, also of a sharded replay; raises as :func:`verify_replay`."""
    with local_folder(path, deep=False) as directory:
        file = directory / MANIFEST_OF_SHARDS
        return str((read_manifest(file, SHARDS_VERSION) if file.exists() else replay_manifest(directory))["id"])


def read_replay(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
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
