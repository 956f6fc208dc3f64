# SPDX-License-Identifier: Apache-2.0
"""Batches that a thread draws ahead of the training loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from torchrl.data.replay_buffers import Sampler

from lightning_replay.torchrl_compat import batches_left

B = TypeVar("B")


class Prefetch:
    """Draws batches ahead in one thread, and hands them out in the order in which they were drawn.

    A change of the replay waits for the draws on their way. A batch is therefore one of the moment at which it was
    requested, whatever the timing of the threads.

    Args:
        queue: Batches that are drawn or on their way, the oldest first.
        lock: Lock of the queue.
        most: Number of batches that are drawn ahead. No thread is started for 0.
    """

    def __init__(self, queue: deque[Future[Any]], lock: Any, most: int) -> None:
        self.queue: deque[Future[Any]] = queue
        self.most: int = most
        # With one thread, batches are drawn in the order in which they are handed out.
        self.executor: ThreadPoolExecutor | None = ThreadPoolExecutor(max_workers=1) if most else None
        self._lock = lock

    def next(self, draw: Callable[[], B], sampler: Sampler) -> B:
        """Returns the oldest batch that was drawn ahead, or draws one, and requests the next ones."""
        assert self.executor is not None
        with self._lock:
            batch: B = self.queue.popleft().result() if self.queue else draw()
            while len(self.queue) < min(batches_left(sampler), self.most) and not sampler.ran_out:
                self.queue.append(self.executor.submit(draw))
            return batch

    def wait(self) -> None:
        """Waits for the draws on their way. Call it before any lock that the thread needs is taken."""
        with self._lock:
            ahead = tuple(self.queue)
        wait(ahead)

    def batches(self) -> list[Any]:
        """Returns the batches that were drawn ahead.

        Failed draws are left out. They are drawn again after a load, and fail there.
        """
        return [future.result() for future in self.queue if future.exception() is None]

    def replace(self, batches: list[Any]) -> None:
        """Replaces the batches that were drawn ahead. Without a thread, nothing would take them from the queue."""
        for former in self.queue:
            former.cancel()
        self.queue.clear()
        for batch in batches if self.most else ():
            future: Future[Any] = Future()
            future.set_result(batch)
            self.queue.append(future)
