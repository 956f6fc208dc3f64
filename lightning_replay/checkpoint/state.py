# SPDX-License-Identifier: Apache-2.0
"""The state of a replay buffer: everything that decides its next draws, as tensors and plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay.declared import declared_sampler, declared_writer
from lightning_replay.memory import free_bytes
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import check_kind

_NEEDED = ("built_from", "sampler", "writer", "transform", "feedback", "storage")


def read_state(replay: Any) -> dict[str, Any]:
    """Returns a copy of rows, episodes, priorities, generators, counters and the batches drawn ahead."""
    storage = replay._storage
    with replay.unchanged():
        state = _state_of(replay) | {"storage": _copied(storage.state_dict())}
        if isinstance(storage, PackedStorage):
            storage.check_read()
    return state


@contextmanager
def frozen_state(replay: Any) -> Iterator[dict[str, Any]]:
    """Context manager for the state as it is now, however others write and draw while it is read in the body.

    Rows and frames of the library's storages are snapshots, and others continue at once. The rows of TorchRL's
    storages are copied; where memory does not hold them twice, others wait until the body ends.
    """
    with ExitStack() as until_read:
        with ExitStack() as now:
            now.enter_context(replay.unchanged())
            state = _state_of(replay)
            storage = replay._storage
            if isinstance(storage, PackedStorage):
                state["storage"] = until_read.enter_context(storage.frozen_state())
            else:
                state["storage"] = storage.state_dict()
                free = free_bytes(torch.device("cpu"))
                if free is None or 2 * _nbytes(state["storage"]) <= free:
                    state["storage"] = _copied(state["storage"])
                else:
                    until_read.push(now.pop_all())
        yield state


@contextmanager
def present_state(replay: Any) -> Iterator[dict[str, Any]]:
    """Context manager for the state as it is, rows not copied; others wait until the body, which changes nothing, ends.

    Rows and priorities may be views: what is to stay after the body must be copied.
    """
    with replay.unchanged():
        yield _state_of(replay) | {"storage": replay._storage.state_dict()}


def restore_state(replay: Any, state: dict[str, Any]) -> None:
    """Restores what :func:`read_state` returned, into a buffer of the same capacity, parts and tables.

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
            fitting = (batch for batch in batches if batch.result()[0].shape[0] == replay._batch_size)
            replay._prefetch_queue.extend(fitting)


def _state_of(replay: Any) -> dict[str, Any]:
    """Returns the state of all parts but the storage; call it while the buffer is unchanged."""
    return {
        "built_from": _parts_of(replay),
        "length": len(replay),
        "writer": _own(replay._writer),
        "sampler": _own(replay._sampler),
        "transform": _copied(dict(replay._transform.state_dict())),
        "episodes": None if replay._episodes is None else replay._episodes.state_dict(),
        "feedback": replay._feedback.state_dict(),
        "prefetched": [
            {"data": data.to_dict(), "batch_size": list(data.batch_size), "info": info}
            # a draw that failed is repeated, and fails, in the buffer that loads this
            for data, info in (future.result() for future in replay._prefetch_queue if future.exception() is None)
        ],
    }


def _own(part: Any) -> dict[str, Any]:
    """Returns the state of a part; copied if it is TorchRL's, which returns the tensors that it writes into."""
    state = part.state_dict()
    return state if type(part).__module__.startswith("lightning_replay.") else _copied(state)


_Restoration = tuple[Callable[[], Any], Callable[[Any], Any], Any]  # reads a state, loads one, and the one to load


def _restorations(replay: Any, state: dict[str, Any]) -> list[_Restoration]:
    """Returns what is to be loaded, in order; the rows last, so that nothing is refused after them."""
    episodes, storage, transform = replay._episodes, replay._storage, replay._transform
    parts: list[_Restoration] = [
        (part.state_dict, part.load_state_dict, state[name])
        for name, part in (("sampler", replay._sampler), ("writer", replay._writer), ("feedback", replay._feedback))
    ]
    parts.append((lambda: _copied(dict(transform.state_dict())), transform.load_state_dict, state["transform"]))
    if episodes is not None and state["episodes"] is not None:
        parts.append((episodes.state_dict, lambda saved: episodes.load_state_dict(saved, storage), state["episodes"]))
    parts.append((lambda: None, storage.load_state_dict, state["storage"]))
    return parts


def _restore_all(parts: list[_Restoration]) -> None:
    """Loads all states, or none: if one is refused, those loaded before are reverted."""
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


def _parts_of(replay: Any) -> dict[str, Any]:
    """Returns names and sizes of a buffer's parts, which must be the same where its state is loaded."""
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
    if isinstance(tables, Tables):  # in the order of their numbers
        parts["tables"] = [[name, int(most)] for name, most in zip(tables.names, tables.capacity, strict=True)]
    return parts


def _refuse_other_parts(saved: dict[str, Any], present: dict[str, Any]) -> None:
    different = [
        f"{name} {saved.get(name)}, here {present[name]}" for name in present if saved.get(name) != present[name]
    ]
    if different:
        raise ValueError(
            f"the saved buffer has {'; '.join(different)}. Nothing was loaded; build the buffer with the options of "
            "the saved one, or let load_replay build it"
        )


def _ready(batch: dict[str, Any]) -> Future[Any]:
    """Returns a prefetched batch in the form of the queue."""
    ready: Future[Any] = Future()
    ready.set_result((TensorDict(batch["data"], batch["batch_size"]), dict(batch["info"])))
    return ready


def _copied(state: Any) -> Any:
    """Returns a state with copies of its tensors."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        copied = type(state)((key, _copied(value)) for key, value in state.items())
        if hasattr(state, "_metadata"):  # of a TensorDict's state
            copied._metadata = state._metadata  # type: ignore[attr-defined]
        return copied
    return type(state)(_copied(value) for value in state) if isinstance(state, list | tuple) else state


def _nbytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(_nbytes, values))
