# SPDX-License-Identifier: Apache-2.0
"""Everything that decides the next draws of a replay buffer, as tensors and plain values."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict, TensorDictBase

if TYPE_CHECKING:
    from lightning_replay.replay import Replay


def read_state(replay: Replay) -> dict[str, Any]:
    """Rows, episodes, priorities, generators, counters and the batches drawn ahead."""
    with replay._futures_lock:
        # First the batches drawn ahead: their threads need the lock below, and their draws belong to the state.
        prefetched = [_plain(*future.result()) for future in replay._prefetch_queue]
        with replay._replay_lock:
            return {
                "storage": replay._storage.state_dict(),
                "writer": replay._writer.state_dict(),
                "sampler": replay._sampler.state_dict(),
                "transform": dict(replay._transform.state_dict()),
                "episodes": None if replay._episodes is None else replay._episodes.state_dict(),
                "feedback": replay._feedback.state_dict(),
                "prefetched": prefetched,
            }


def restore_state(replay: Replay, state: dict[str, Any]) -> None:
    """Puts what :func:`read_state` read into a buffer built with the same options."""
    with replay._futures_lock:
        for future in replay._prefetch_queue:
            future.cancel()
        replay._prefetch_queue.clear()
        with replay._replay_lock:
            replay._storage.load_state_dict(state["storage"])
            replay._writer.load_state_dict(state["writer"])
            replay._sampler.load_state_dict(state["sampler"])
            replay._transform.load_state_dict(state["transform"])
            if replay._episodes is not None and state["episodes"] is not None:
                replay._episodes.load_state_dict(state["episodes"], replay._storage)
            replay._feedback.load_state_dict(state["feedback"])
        for batch in state["prefetched"]:
            ready: Future[Any] = Future()
            ready.set_result((TensorDict(batch["data"], batch["batch_size"]), batch["info"]))
            replay._prefetch_queue.append(ready)


def _plain(data: TensorDictBase, info: dict[str, Any]) -> dict[str, Any]:
    return {"data": data.to_dict(), "batch_size": list(data.batch_size), "info": info}
