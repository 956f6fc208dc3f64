# SPDX-License-Identifier: Apache-2.0
"""Runs inside a peer's environment: times the peer's buffer on request. Imports nothing of ours."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

OBSERVATION, ACTION = 17, 6
Work = Callable[[], object]


def columns(rows: int) -> dict[str, np.ndarray]:
    """Random HalfCheetah-shaped rows."""
    rng = np.random.default_rng(0)
    return {
        "obs": rng.standard_normal((rows, OBSERVATION), dtype=np.float32),
        "act": rng.random((rows, ACTION), dtype=np.float32),
        "rew": rng.standard_normal((rows, 1), dtype=np.float32),
        "next_obs": rng.standard_normal((rows, OBSERVATION), dtype=np.float32),
        "done": np.zeros((rows, 1), dtype=np.float32),
    }


class Cpprb:
    """cpprb's buffers."""

    def build(self, kind: str, rows: int) -> Any:
        """A full buffer."""
        import cpprb

        shapes = {"obs": OBSERVATION, "act": ACTION, "rew": 1, "next_obs": OBSERVATION, "done": 1}
        layout = {name: {"shape": width, "dtype": np.float32} for name, width in shapes.items()}
        if kind == "prioritized":
            buffer = cpprb.PrioritizedReplayBuffer(rows, layout, alpha=0.6)
        else:
            buffer = cpprb.ReplayBuffer(rows, layout)
        for _ in range(0, rows, 50_000):
            buffer.add(**columns(min(rows, 50_000)))
        if kind == "prioritized":
            buffer.update_priorities(np.arange(rows), np.random.default_rng(0).random(rows) + 0.01)
        return buffer

    def work(self, name: str, buffer: Any, batch_size: int) -> Work:
        """One call of the piece of work."""
        rng = np.random.default_rng(1)
        if name == "uniform":
            return lambda: buffer.sample(batch_size)
        if name == "prioritized":

            def feedback() -> None:
                batch = buffer.sample(batch_size, beta=0.4)
                buffer.update_priorities(batch["indexes"], np.abs(rng.standard_normal(batch_size)))

            return feedback
        new = columns(batch_size)
        return lambda: buffer.add(**new)


class Tianshou:
    """tianshou's buffers."""

    def build(self, kind: str, rows: int) -> Any:
        """A full buffer, its rows set at once."""
        from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

        values = columns(rows)
        flags = np.zeros(rows, dtype=bool)
        batch = Batch(
            obs=values["obs"],
            act=values["act"],
            rew=values["rew"][:, 0],
            terminated=flags,
            truncated=flags.copy(),
            done=flags.copy(),
            obs_next=values["next_obs"],
            info=Batch(),
        )
        buffer = PrioritizedReplayBuffer(rows, alpha=0.6, beta=0.4) if kind == "prioritized" else ReplayBuffer(rows)
        buffer.set_batch(batch)
        buffer._size = rows
        if kind == "prioritized":
            buffer.init_weight(np.arange(rows))
            buffer.update_weight(np.arange(rows), np.random.default_rng(0).random(rows) + 0.01)
        return buffer

    def work(self, name: str, buffer: Any, batch_size: int) -> Work:
        """One call of the piece of work."""
        if name == "uniform":
            return lambda: buffer.sample(batch_size)
        if name != "prioritized":
            raise ValueError(f"{name} is not timed with tianshou; accepted are uniform and prioritized")
        rng = np.random.default_rng(1)

        def feedback() -> None:
            _, index = buffer.sample(batch_size)
            buffer.update_weight(index, np.abs(rng.standard_normal(batch_size)))

        return feedback


def median_microseconds(work: Work, calls: int) -> float:
    """The same measure as in the calling process."""
    durations = []
    for _ in range(calls):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations) * 1e6


def main() -> None:
    """Answers requests until the pipe closes."""
    peer = {"cpprb": Cpprb, "tianshou": Tianshou}[sys.argv[1]]()
    answers, sys.stdout = sys.stdout, sys.stderr
    kept: tuple[object, Any] = (None, None)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            microseconds = 0.0
            if request["work"] != "ready":
                kind = "uniform" if request["work"] in ("uniform", "insert") else "prioritized"
                if kept[0] != (kind, request["rows"]):
                    kept = (None, None)  # the old buffer goes before the new one comes
                    kept = ((kind, request["rows"]), peer.build(kind, request["rows"]))
                name = "insert" if request["work"].startswith("insert") else request["work"]
                microseconds = median_microseconds(peer.work(name, kept[1], request["batch_size"]), request["calls"])
            answer = {"microseconds": microseconds}
        except Exception as error:  # whatever the peer raises is the reason it is missing
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
