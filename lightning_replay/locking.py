# SPDX-License-Identifier: Apache-2.0
"""Locks of a replay buffer, its prefetching thread, and both in forked processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import TensorDictReplayBuffer

from lightning_replay.episodes.tracker import EpisodeTracker
from lightning_replay.late_updates import Feedback
from lightning_replay.storage import forking


class LockedReplay(TensorDictReplayBuffer):
    """A replay buffer that one thread changes at a time, and whose locks a forked process replaces.

    Whatever changes it waits for the batches being drawn ahead (:meth:`_wait_for_draws`, without locks), then holds
    TorchRL's ``_replay_lock`` and ``_write_lock``.
    """

    _episodes: EpisodeTracker | None
    _feedback: Feedback

    def _begin_life(self) -> None:
        """Sets the attributes of this object in this process: the prefetching thread and what a fork changes."""
        if self._prefetch_cap:
            # One thread: batches are drawn in the order in which they are handed out.
            self._prefetch_executor = ThreadPoolExecutor(max_workers=1)
        self._refusal: str | None = None
        forking.register(self)

    def after_fork(self) -> None:
        """Replaces locks and thread in a forked process, which draws anew the batches drawn ahead."""
        if forking.is_held_elsewhere(self._replay_lock):
            self._refusal = (
                f"this process was forked while another thread used this {type(self).__name__}, which may be "
                "half-changed here. Fork when nobody uses it, or build a buffer in this process"
            )
        self._replay_lock, self._futures_lock = threading.RLock(), threading.RLock()
        self._prefetch_queue.clear()  # some may be drawn by the thread, which the child has not
        if self._prefetch_cap:
            self._prefetch_executor = ThreadPoolExecutor(max_workers=1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_life()

    def _next_prefetched(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        """Returns the oldest prefetched batch and requests others.

        One thread draws them in order, and changes of the buffer wait for it: a batch is that of the moment at which it
        was requested, whatever the threads' timing.
        """
        with self._futures_lock:
            queue, sampler = self._prefetch_queue, self._sampler
            result = queue.popleft().result() if queue else self._sample(batch_size)
            while len(queue) < min(sampler._remaining_batches, self._prefetch_cap) and not sampler.ran_out:
                queue.append(self._prefetch_executor.submit(self._sample, batch_size))
            return result

    def _wait_for_draws(self) -> None:
        """Waits for the batches being drawn ahead; call it before the buffer is changed, without holding its locks."""
        with self._futures_lock:
            ahead = tuple(self._prefetch_queue)
        wait(ahead)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Keeps other threads from writing, drawing, updating and drawing ahead while the body runs."""
        with self._futures_lock:
            self._wait_for_draws()
            with self._replay_lock, self._write_lock, torch.inference_mode(False):
                self._check_usable()
                yield

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise RuntimeError(self._refusal)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Locks the buffer for changes in the body; methods called for every row lock without this context manager."""
        if self._prefetch_queue:
            self._wait_for_draws()
        with self._replay_lock, self._write_lock, torch.inference_mode(False):
            self._check_usable()
            yield
