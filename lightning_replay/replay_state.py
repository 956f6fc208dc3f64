# SPDX-License-Identifier: Apache-2.0
"""Everything that decides the next draws of a replay buffer, as tensors and plain values."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers import Sampler

if TYPE_CHECKING:
    from lightning_replay.replay import Replay
    from lightning_replay.writers.retention_rules import RetentionRule


def read_state(replay: Replay) -> dict[str, Any]:
    """Rows, episodes, priorities, generators, counters and the batches drawn ahead."""
    with replay._futures_lock:
        # First the batches drawn ahead: their threads need the lock below, and their draws belong to the state.
        prefetched = [_plain(*future.result()) for future in replay._prefetch_queue]
        with replay._replay_lock:
            return {
                "built_from": _parts_of(replay),
                "storage": replay._storage.state_dict(),
                "writer": replay._writer.state_dict(),
                "sampler": replay._sampler.state_dict(),
                "transform": dict(replay._transform.state_dict()),
                "episodes": None if replay._episodes is None else replay._episodes.state_dict(),
                "feedback": replay._feedback.state_dict(),
                "prefetched": prefetched,
            }


def restore_state(replay: Replay, state: dict[str, Any]) -> None:
    """Puts what :func:`read_state` read into a buffer built with the same options.

    Raises:
        ValueError: the buffer is built from other parts; nothing is changed then.
    """
    _refuse_other_parts(state["built_from"], _parts_of(replay))
    with replay._futures_lock:
        for future in replay._prefetch_queue:
            future.cancel()
        replay._prefetch_queue.clear()
        with replay._replay_lock:
            _load_sampler(replay._sampler, state["sampler"])
            replay._storage.load_state_dict(state["storage"])
            replay._writer.load_state_dict(state["writer"])
            replay._transform.load_state_dict(state["transform"])
            if replay._episodes is not None and state["episodes"] is not None:
                replay._episodes.load_state_dict(state["episodes"], replay._storage)
            replay._feedback.load_state_dict(state["feedback"])
        for batch in state["prefetched"]:
            ready: Future[Any] = Future()
            ready.set_result((TensorDict(batch["data"], batch["batch_size"]), batch["info"]))
            replay._prefetch_queue.append(ready)


def _parts_of(replay: Replay) -> dict[str, Any]:
    """What a buffer is built from, in names: the saved state of one part means nothing to another."""
    sampler = [type(replay._sampler).__name__]
    first = getattr(replay._sampler, "first", None)
    tables = getattr(replay._storage, "tables", None)
    parts = {
        "capacity": replay.capacity,
        "storage": type(replay._storage).__name__,
        "writer": type(replay._writer).__name__,
        "sampler": sampler if first is None else [*sampler, type(first).__name__],
        "transforms": [type(transform).__name__ for transform in replay._transform.transforms],
        "n-step links": replay._episodes is not None,
    }
    rule: RetentionRule | None = getattr(replay._writer, "rule", None)
    if rule is not None:
        parts["rule"] = type(rule).__name__ + (" with a schedule" if rule.schedule is not None else "")
    if hasattr(replay._storage, "frame_stack"):
        names = ("frame_stack", "image_key", "frame_capacity")
        parts["frames"] = {name: _plain_option(getattr(replay._storage, name)) for name in names}
    if tables is not None:  # in order, which numbers them
        parts["tables"] = [[name, int(most)] for name, most in zip(tables.names, tables.capacity, strict=True)]
    return parts


def _plain_option(value: int | tuple[str, ...]) -> int | list[str]:
    return value if isinstance(value, int) else list(value)


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


def _load_sampler(sampler: Sampler, state: dict[str, Any]) -> None:
    """First of all parts, and as it was before when it refuses the state: it has options that names do not tell."""
    before = sampler.state_dict()
    try:
        sampler.load_state_dict(state)
    except Exception:
        sampler.load_state_dict(before)
        raise


def _plain(data: TensorDictBase, info: dict[str, Any]) -> dict[str, Any]:
    return {"data": data.to_dict(), "batch_size": list(data.batch_size), "info": info}
