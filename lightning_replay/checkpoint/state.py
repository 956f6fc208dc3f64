# SPDX-License-Identifier: Apache-2.0
"""Everything that decides the next draws of a replay buffer, as tensors and plain values, at one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay.locking import LockedReplay
from lightning_replay.memory import free_bytes
from lightning_replay.parts import declared_sampler, declared_writer
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import check_kind

_NEEDED = ("built_from", "sampler", "writer", "transform", "feedback", "storage")


def read_state(replay: LockedReplay) -> dict[str, Any]:
    """Returns a copy of rows, episodes, priorities, generators, counters and the batches drawn ahead."""
    storage = replay._storage
    with replay.unchanged():
        state = _state_of(replay) | {"storage": _copied(storage.state_dict())}
        if isinstance(storage, PackedStorage):
            storage.check_read()
    return state


@contextmanager
def frozen_state(replay: LockedReplay) -> Iterator[dict[str, Any]]:
    """Context manager for the state as it is now, however others write and draw while it is read in the body.

    Rows and frames of the library's storages are snapshots, and others go on at once. The rows of TorchRL's storages
    are copied; where memory does not hold them twice, others wait until the body ends.
    """
    with ExitStack() as until_read:
        with ExitStack() as now:
            now.enter_context(replay.unchanged())
            state = _state_of(replay)
            storage = replay._storage
            if isinstance(storage, PackedStorage):
                state["storage"] = until_read.enter_context(storage.frozen_state())
            else:
                rows = storage.state_dict()
                if _fits(rows):
                    state["storage"] = _copied(rows)
                else:
                    state["storage"] = rows
                    until_read.push(now.pop_all())
        yield state


def restore_state(replay: LockedReplay, state: dict[str, Any]) -> None:
    """Restores what :func:`read_state` returned, into a buffer built with the same options.

    Raises:
        TypeError: no dictionary.
        ValueError: no state of a replay buffer, the buffer is built from other parts, or a part refuses its state;
            nothing is changed then.
    """
    check_kind("the state", state, Mapping, "what state_dict() of a replay buffer returned")
    lacking = [name for name in _NEEDED if name not in state]
    if lacking:
        raise ValueError(
            f"the state lacks {lacking}; it is not what state_dict() of a replay buffer returned. Nothing was loaded"
        )
    _refuse_other_parts(state["built_from"], _parts_of(replay))
    batches = [_ready(batch) for batch in state["prefetched"]]
    with replay.unchanged():
        _restore_all(_restorations(replay, state))
        for future in replay._prefetch_queue:
            future.cancel()
        replay._prefetch_queue.clear()
        if replay._prefetch:  # nothing else takes batches from the queue, and every call would wait for them
            replay._prefetch_queue.extend(batches)


def _state_of(replay: LockedReplay) -> dict[str, Any]:
    """Returns the state of all parts but the storage; call it while the buffer is unchanged."""
    return {
        "built_from": _parts_of(replay),
        "length": len(replay),
        "writer": _own(replay._writer),
        "sampler": _own(replay._sampler),
        "transform": _copied(dict(replay._transform.state_dict())),
        "episodes": None if replay._episodes is None else replay._episodes.state_dict(),
        "feedback": replay._feedback.state_dict(),
        # One that failed is drawn again by the buffer that this is loaded into, and fails there.
        "prefetched": [_plain(*future.result()) for future in replay._prefetch_queue if future.exception() is None],
    }


def _own(part: Any) -> dict[str, Any]:
    """Returns the state of a part that may be TorchRL's, whose tensors are then those it goes on writing into."""
    state = part.state_dict()
    return state if type(part).__module__.startswith("lightning_replay.") else _copied(state)


_Restoration = tuple[Callable[[], Any], Callable[[Any], Any], Any]  # reads the state, loads one, and which one


def _restorations(replay: LockedReplay, state: dict[str, Any]) -> list[_Restoration]:
    """Returns what is to be loaded, in order: the rows last, because nothing refuses after them."""
    episodes, storage = replay._episodes, replay._storage
    parts: list[_Restoration] = [
        (part.state_dict, part.load_state_dict, state[name])
        for name, part in (("sampler", replay._sampler), ("writer", replay._writer))
    ]
    transform = replay._transform
    parts.append((lambda: _copied(dict(transform.state_dict())), transform.load_state_dict, state["transform"]))
    if episodes is not None and state["episodes"] is not None:
        parts.append((episodes.state_dict, lambda saved: episodes.load_state_dict(saved, storage), state["episodes"]))
    parts.append((replay._feedback.state_dict, replay._feedback.load_state_dict, state["feedback"]))
    parts.append((lambda: None, storage.load_state_dict, state["storage"]))
    return parts


def _restore_all(parts: list[_Restoration]) -> None:
    """Loads all states, or none: those that were loaded before one is refused are set back."""
    loaded: list[tuple[Callable[[Any], Any], Any]] = []
    try:
        for read, load, state in parts:
            loaded.append((load, read()))
            load(state)
    except BaseException:
        for load, before in reversed(loaded):
            if before is not None:
                load(before)
        raise


def _parts_of(replay: LockedReplay) -> dict[str, Any]:
    """Returns what a buffer is built from, in names: the saved state of one part means nothing to another."""
    sampler = [type(replay._sampler).__name__]
    base = declared_sampler(replay._sampler).base_sampler
    tables = replay._storage.occupancy if isinstance(replay._storage, PackedStorage) else None
    parts = {
        "capacity": replay._storage.max_size,
        "storage": type(replay._storage).__name__,
        "writer": type(replay._writer).__name__,
        "sampler": sampler if base is replay._sampler else [*sampler, type(base).__name__],
        "transforms": [type(transform).__name__ for transform in replay._transform.transforms],
        "n-step links": replay._episodes is not None,
    }
    parts |= declared_writer(replay._writer).build_options()
    if isinstance(replay._storage, PackedStorage):
        parts |= replay._storage.build_options()
    if isinstance(tables, Tables):  # in order, which numbers them
        parts["tables"] = [[name, int(most)] for name, most in zip(tables.names, tables.capacity, strict=True)]
    return parts


def _refuse_other_parts(saved: dict[str, Any], present: dict[str, Any]) -> None:
    different = [
        f"{name} {saved[name]}, here {present[name]}"
        for name in present
        if saved.get(name, present[name]) != present[name]  # early saves do not name their tables
    ]
    if different:
        raise ValueError(
            f"the saved buffer has {'; '.join(different)}. Nothing was loaded; build the buffer with the options of "
            "the saved one, or let load_replay build it"
        )


def _plain(data: TensorDictBase, info: dict[str, Any]) -> dict[str, Any]:
    return {"data": data.to_dict(), "batch_size": list(data.batch_size), "info": info}


def _ready(batch: dict[str, Any]) -> Future[Any]:
    """Returns a batch drawn ahead as the queue holds it."""
    ready: Future[Any] = Future()
    ready.set_result((TensorDict(batch["data"], batch["batch_size"]), dict(batch["info"])))
    return ready


def _copied(state: Any) -> Any:
    """Returns a state whose tensors nobody else writes into."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        copied = type(state)((key, _copied(value)) for key, value in state.items())
        if hasattr(state, "_metadata"):  # of TensorDict's own state
            copied._metadata = state._metadata  # type: ignore[attr-defined]
        return copied
    return type(state)(_copied(value) for value in state) if isinstance(state, list | tuple) else state


def _fits(state: Any) -> bool:
    """Whether the tensors of a state fit into memory once more."""
    free = free_bytes(torch.device("cpu"))
    return free is None or 2 * _nbytes(state) <= free


def _nbytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(_nbytes, values))
