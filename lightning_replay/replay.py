# SPDX-License-Identifier: Apache-2.0
"""TorchRL's replay buffer with packed rows, generations and feedback that reaches the right row."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler, Storage, Writer
from torchrl.envs import Transform

from lightning_replay.episode_tracker import EpisodeTracker
from lightning_replay.feedback import Feedback
from lightning_replay.recorded import recorded
from lightning_replay.replay_state import read_state, restore_state
from lightning_replay.samplers.seeded import Seeded
from lightning_replay.samplers.uniform import UniformSampler
from lightning_replay.storage import PackedStorage, stored_slots
from lightning_replay.writers.first_in_first_out import FirstInFirstOutWriter

logger = logging.getLogger(__name__)


@recorded
class Replay(TensorDictReplayBuffer):
    """A writer, a sampler and a transform over one storage: every replay method is a choice of the three.

    :meth:`extend` stores transitions, :meth:`sample` draws a batch, :meth:`update_priority` returns TD errors to the
    rows they belong to. A TorchRL ``TensorDictReplayBuffer``: transforms, prefetching and ``set_rng`` work, and it
    can be handed to TorchRL's collectors. The functions in :mod:`lightning_replay.recipes` build the published ones.

    Args:
        storage: usually :class:`~lightning_replay.storage.PackedStorage`.
        sampler: which rows; uniform by default.
        writer: where rows go and which leave; first in, first out by default.
        transform: what happens to a batch once it is drawn (and, inversely, to rows before they are stored).
        batch_size: rows per batch.
        n_steps: rewards summed into one return, formed when a row is drawn; 1 leaves rows as they are.
        discount: γ of that return.
        priority_key: the column from which :meth:`update_tensordict_priority` reads TD errors.
        prefetch: batches drawn ahead in threads. Their priorities are as old as they have waited.
        seed: of sampler and transform where they were built without one; ``None`` leaves them as they are.

    Sampled keys:
        index: int64 ``[B]``, or ``[B, 2]`` for samplers of pairs.
        generation: int64 ``[B]`` (``[B, 2]`` when both of a pair get feedback), how often the slot had been written.
        priority_weight: float32 ``[B]``, with a prioritized sampler.
        discount, steps_to_next_obs: ``[B, 1]``, with ``n_steps`` above 1.

    Raises:
        ValueError: ``batch_size`` is not positive or above the capacity.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> replay = Replay(storage=PackedStorage(capacity=100), batch_size=4, seed=0)
        >>> index = replay.extend(TensorDict({"observation": torch.randn(10, 3)}, [10]))
        >>> replay.sample()["observation"].shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        *,
        storage: Storage,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        transform: Transform | None = None,
        batch_size: int = 256,
        n_steps: int = 1,
        discount: float = 0.99,
        priority_key: str = "td_error",
        prefetch: int | None = None,
        seed: int | None = None,
    ) -> None:
        if batch_size <= 0:
            raise ValueError(f"batch_size must be a positive number of transitions; got {batch_size}")
        if storage.max_size < batch_size:
            raise ValueError(
                f"capacity {storage.max_size} is below batch_size {batch_size}; "
                "raise the capacity or lower the batch size"
            )
        episodes = EpisodeTracker(n_steps, discount)
        self._episodes = episodes if n_steps > 1 else None
        self._feedback = Feedback()
        super().__init__(
            storage=storage,
            sampler=UniformSampler() if sampler is None else sampler,
            writer=FirstInFirstOutWriter() if writer is None else writer,
            transform=transform,
            batch_size=batch_size,
            priority_key=priority_key,
            prefetch=prefetch,
        )
        if seed is not None:
            self.seed(seed)

    @property
    def capacity(self) -> int:
        """Most transitions kept."""
        return self._storage.max_size

    def __len__(self) -> int:
        held = getattr(self._storage, "num_held", None)
        return len(self._storage) if held is None else held

    @property
    def nbytes(self) -> int:
        """Bytes of rows, links and of what sampler and writer keep."""
        parts = (self._storage, self._sampler, self._writer, self._episodes)
        return sum(getattr(part, "nbytes", 0) for part in parts)

    @property
    def is_prioritized(self) -> bool:
        """Whether the sampler learns from TD errors."""
        return isinstance(self._sampler, PrioritizedSampler) and getattr(self._sampler, "uses_priorities", True)

    @property
    def takes_feedback(self) -> bool:
        """Whether the sampler or the writer learns from :meth:`update_priority`."""
        return self.is_prioritized or getattr(self._writer, "learns", False)

    @property
    def awaits_priorities(self) -> bool:
        """Whether something here takes feedback and has had no :meth:`update_priority` since the last draw."""
        return self.takes_feedback and self._feedback.draws_since_update > 0

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """Stores transitions; the rows are copied.

        Args:
            tensordicts: TensorDict ``[N]``, rows of one trajectory in time order.
            update_priority: whether a column ``priority_key`` among them sets their priorities; yes by default.

        Returns:
            int64, their slots; of those that entered, where the writer refuses some.

        Raises:
            TypeError: not a TensorDict.
            ValueError: an empty batch, rows that do not fit the stored columns, or TD errors among them that are NaN or
                infinite; nothing is stored then.
        """
        if not isinstance(tensordicts, TensorDictBase):
            raise TypeError(f"extend takes a TensorDict of transitions; got {type(tensordicts).__name__}")
        if 0 in tensordicts.shape:  # before a transform says so in its own words, or keeps it
            raise _wrong_shape(tensordicts)
        if len(self._transform.transforms):
            tensordicts = self._transform.inv(tensordicts)
            if tensordicts is None:
                return torch.zeros(0, dtype=torch.int64)
        try:
            return self._store(tensordicts, update_priority is not False)
        except Exception:  # whatever a function raises that was given to writer or sampler
            self._undo()
            raise

    def flush(self, trajectories: Iterable[int] | None = None) -> Tensor:
        """Stores the steps that a transform holds back for those that follow, with what there is of them.

        For n-step transitions that are formed before they are stored, when collecting stops or episodes break off.

        Args:
            trajectories: ids of the episodes that broke off; ``None`` for all.

        Returns:
            int64, slots of the rows that entered.
        """
        slots = [torch.zeros(0, dtype=torch.int64, device=self._storage.device)]
        for transform in self._transform.transforms:
            formed = transform.flush(trajectories) if hasattr(transform, "flush") else None
            if formed is not None:
                try:
                    slots.append(self._store(formed, takes_priorities=True))
                except Exception:
                    self._undo()
                    raise
        return torch.cat(slots)

    def _undo(self) -> None:
        for transform in self._transform.transforms:
            if hasattr(transform, "undo"):
                transform.undo()

    def _store(self, tensordicts: TensorDictBase, takes_priorities: bool) -> Tensor:
        if tensordicts.ndim != 1 or tensordicts.shape[0] == 0:
            raise _wrong_shape(tensordicts)
        check_rows = getattr(self._sampler, "check_rows", None)
        first_rows = len(self._storage) == 0
        takes_priorities = (
            takes_priorities and self.is_prioritized and tensordicts.get(self.priority_key, None) is not None
        )
        if takes_priorities and hasattr(self._writer, "staying"):
            tensordicts = self._writer.staying(tensordicts)  # whose priorities they are must be known
        td_error = tensordicts.get(self.priority_key) if takes_priorities else None
        priority = None if td_error is None else self._feedback.given_priority(td_error, len(tensordicts))
        with self._replay_lock, self._write_lock:
            if check_rows is not None:
                check_rows(tensordicts)
            if self._episodes is not None:
                self._episodes.check_rows(tensordicts)
            index = self._writer.extend(tensordicts)
            if len(index):
                self._sampler.extend(index)
            if priority is not None and len(index):
                entered = getattr(self._writer, "entered", slice(-len(index), None))
                self._sampler.update_priority(index, priority[entered], storage=self._storage)
        if first_rows:
            logger.info("replay buffer of capacity %d takes %s bytes", self.capacity, f"{self.nbytes:,}")
        return index

    def add(self, data: TensorDictBase) -> Tensor:
        """Stores one transition of batch size ``[]``; see :meth:`extend`."""
        return self.extend(data.unsqueeze(0))

    def mark_update(self, index: Tensor | int) -> None:
        """Called by the writer when slots were written: sampler and episodes learn of the new rows."""
        index = torch.as_tensor(index).reshape(-1)
        if self._episodes is not None:
            self._episodes.mark_update(index, self._storage)
        self._sampler.mark_update(index, storage=self._storage)

    def mark_released(self, index: Tensor) -> None:
        """Called by the storage when rows left without being overwritten: sampler and episodes learn of it."""
        for follower in (self._episodes, self._sampler):
            if follower is not None and hasattr(follower, "mark_released"):
                follower.mark_released(index)

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Draws a batch.

        Args:
            batch_size: rows, when other than the buffer's own; such a batch is drawn now, not taken from the
                prefetched ones.
            return_info: also return the sampler's information as a dictionary.
            include_info: TorchRL's deprecated argument, ignored.

        Returns:
            TensorDict ``[B]``; leaves are copies of the stored rows.

        Raises:
            RuntimeError: the buffer is empty.
            ValueError: ``batch_size`` is not positive.
        """
        if batch_size is None:
            batch_size = self._batch_size
        elif batch_size < 1:
            raise ValueError(f"batch_size must be a positive number of transitions; got {batch_size}")
        if self._prefetch and batch_size == self._batch_size:
            data, info = TensorDictReplayBuffer.sample(self, batch_size, return_info=True)
        else:
            data, info = self._sample(batch_size)
        self._feedback.draws_since_update += 1
        return (data, info) if return_info else data

    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        with self._replay_lock, self._write_lock:
            index, info = self._sampler.sample(self._storage, batch_size)
            if isinstance(index, tuple):  # TorchRL's slices
                index = index[0]
            elif self._is_plain:
                return self._gather(index, info), info
            if isinstance(self._storage, PackedStorage):
                data = self._storage.get(index, extra={"index": index})
            else:
                data = self._collate_fn(self._storage.get(index))
                data = (data.copy() if data.is_locked else data).set("index", index)
            if self._episodes is not None:
                episodes = self._episodes
                data = episodes.draw(data, index, self._storage, episodes.n_steps, episodes.discount)
        generation = data.get("generation", None)
        for transform in self._transform.transforms:
            data = transform(data)
        self._feedback.last_index = info["index"] = index
        if generation is not None:
            both = getattr(self._sampler, "update_partners", False)
            info["generation"] = generation if both else data.get("generation")
        for key, value in info.items():
            if data.get(key, None) is not value:
                data.set(key, value)
        return data, info

    @property
    def _is_plain(self) -> bool:
        """Whether a batch is just rows: packed, single, and neither summed nor transformed."""
        return (
            self._episodes is None and not len(self._transform.transforms) and isinstance(self._storage, PackedStorage)
        )

    def _gather(self, index: Tensor, info: dict[str, Any]) -> TensorDictBase:
        info["index"] = self._feedback.last_index = index
        data = self._storage.get(index, extra=info)
        info["generation"] = data.get("generation")
        return data

    def update_priority(
        self, index: Tensor, td_error: Tensor, *, generation: Tensor | None = None, **signals: Any
    ) -> None:
        """Returns TD errors to the rows they belong to; a sampler without priorities ignores them.

        Args:
            index: int64 ``[B]`` or ``[B, 2]``, the batch's ``index``.
            td_error: signed, ``[B]`` or ``[B, 1]``; the magnitude becomes the sampler's priority.
            generation: the batch's ``generation``; rows whose slot was written or emptied since are dropped and
                counted.
            signals: what a :class:`~lightning_replay.writers.RetentionWriter` learns from besides: ``action_values``
                ``[B, A]`` with ``action``, and ``surprise`` ``[B]`` in place of the squared TD error. Other signals are
                ignored, and all of them with other writers.

        Raises:
            ValueError: NaN or infinite TD errors, or another number of them than of rows; signals that the writer
                refuses. Nothing is changed.
            IndexError: an index that is not stored; nothing is changed.
        """
        self._feedback.draws_since_update = 0
        if not self.takes_feedback:
            return
        with self._replay_lock, self._write_lock:
            learns = getattr(self._writer, "learns", False)
            factors = self._writer.read_feedback(len(index), td_error, signals) if learns else None
            # On a GPU a slot out of range ends the process, so it is looked for before anything is read there.
            source = getattr(self._sampler, "first", self._sampler)
            device = self._storage.device  # None where TorchRL's storage has not been told
            on_cpu = device is None or device.type == "cpu"
            sampler_checks = self.is_prioritized and isinstance(source, Seeded) and on_cpu
            index, magnitude = self._feedback.check(
                index, td_error, generation, self._storage, sampler_checks=sampler_checks
            )
            if self.is_prioritized:
                try:
                    self._sampler.update_priority(index, magnitude, storage=self._storage)
                except (ValueError, IndexError):
                    self._feedback.check_values(index, magnitude, len(self._storage))  # names the TD errors refused
                    raise
            if factors is not None:
                self._writer.update_priority(index, factors, both=getattr(self._sampler, "update_partners", False))
            self._feedback.received += index.shape[0]

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Returns the TD errors in ``data[priority_key]`` to the rows of ``data["index"]``."""
        if self.takes_feedback:
            self.update_priority(
                data.get("index"), data.get(self.priority_key), generation=data.get("generation", None)
            )

    def follow_episodes(self, episodes: EpisodeTracker) -> None:
        """Forms n-step rows along ``episodes`` from the next draw on, after linking the stored rows, oldest first.

        For a caller that learns the length of its returns only when it draws; otherwise give ``n_steps`` when building.

        Raises:
            ValueError: rows are stored, and the writer does not know their order.
        """
        with self._replay_lock, self._write_lock:
            stored = stored_slots(self._storage).to(self._storage.device)
            if len(stored):
                age_of = getattr(self._writer, "age_of", None)
                if age_of is None:
                    raise ValueError(
                        f"{type(self._writer).__name__} does not know the order of its rows, along which returns over "
                        "several steps are formed; FirstInFirstOutWriter does"
                    )
                oldest_first = age_of(stored).argsort(descending=True)
                episodes.mark_update(stored[oldest_first], self._storage)
            self._episodes = episodes

    def truncate(self, index: Tensor, generation: Tensor) -> None:
        """Closes interrupted episodes: marks stored rows truncated and done, where the slots still hold them.

        Args:
            index: int64 ``[N]``, the newest row of each interrupted episode.
            generation: int64 ``[N]``, of these rows.
        """
        assert isinstance(self._storage, PackedStorage), "truncate needs a PackedStorage"
        index = index[self._storage.generation_of(index) == generation]
        if len(index):
            for key in ("truncated", "done"):
                self._storage.all_rows.get(("next", key))[index] = True
            self.cut(index)

    def cut(self, index: Tensor) -> None:
        """Tells sampler and episodes that nothing follows the rows in these slots; writers call it."""
        for follower in (self._episodes, self._sampler):
            if follower is not None and hasattr(follower, "cut"):
                follower.cut(index)

    def interrupt(self, trajectories: Iterable[int | None]) -> None:
        """Tells sampler and episodes that what comes next of these trajectories follows no stored row."""
        for follower in (self._episodes, self._sampler):
            if follower is not None and hasattr(follower, "interrupt"):
                follower.interrupt(trajectories)

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Tells schedules the time: environment steps collected and updates made, since the start of training."""
        for part in (self._sampler, self._writer):
            if hasattr(part, "advance"):
                part.advance(env_steps=env_steps, updates=updates)

    def seed(self, seed: int) -> None:
        """Starts the draws of sampler, transforms and writer anew from ``seed``."""
        for offset, part in enumerate([self._sampler, *self._transform, self._writer]):
            if hasattr(part, "reseed"):
                part.reseed(seed + offset)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets every transition, the prefetched ones too; the slots' generations go on."""
        with self._futures_lock:
            self._prefetch_queue.clear()
            with self._replay_lock, self._write_lock:
                super().empty(empty_write_count)
        self._feedback.forget()
        for follower in (self._episodes, *self._transform):
            if hasattr(follower, "clear"):
                follower.clear()

    def stats(self) -> dict[str, Any]:
        """What the buffer holds: TorchRL's counters, bytes, ages of the last batch (in transitions), late updates.

        Where frames are stored once also ``frames_held``, ``frame_capacity``, ``frame_bytes`` and
        ``frames_per_transition``, and ``bytes_per_transition`` is by the transitions held, else by the capacity; of a
        :class:`~lightning_replay.writers.RetentionWriter` what its ``stats`` says.
        """
        stats = super().stats()
        age_of = getattr(self._writer, "age_of", None)
        stats.update(self._feedback.stats(age_of))
        if hasattr(self._writer, "stats"):
            stats.update(self._writer.stats())
        stats["nbytes"] = self.nbytes
        has_frames = hasattr(self._storage, "frames_held")  # their bytes are fixed by what is held, not by the capacity
        stats["bytes_per_transition"] = self.nbytes / (max(self._storage.num_held, 1) if has_frames else self.capacity)
        if has_frames:
            stats.update(self._storage.stats())
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next draws: rows, links, priorities, generators, counters, prefetched batches."""
        return read_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave, from a buffer built with the same options."""
        restore_state(self, state_dict)

    def save(self, path: str | Path, *, previous: str | Path | None = None) -> None:
        """Saves the buffer into the directory ``path``, sharing what has not changed with the save in ``previous``.

        See :func:`lightning_replay.save_replay`.
        """
        from lightning_replay.checkpoint import save_replay

        save_replay(self, path, previous=previous)

    def load(self, path: str | Path) -> None:
        """Restores a saved buffer into this one, which must have been built with the same options."""
        from lightning_replay.checkpoint import load_into

        load_into(self, path)

    dumps = dump = save
    loads = load


def _wrong_shape(rows: TensorDictBase) -> ValueError:
    return ValueError(
        f"extend takes transitions of batch size [N] with N >= 1; got {list(rows.shape)}. Flatten time and "
        "environments first (reshape(-1)), or call add for a single transition"
    )
