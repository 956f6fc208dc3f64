# SPDX-License-Identifier: Apache-2.0
"""TorchRL's replay buffer with packed rows, generations and feedback that reaches the right row."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor, nn
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import Sampler, Storage, TensorStorage, Writer
from torchrl.envs import Transform

from lightning_replay.deferred_checks import DeferredChecks
from lightning_replay.divided_draws import check_divisible
from lightning_replay.episode_ends import EpisodeEnds
from lightning_replay.episodes.links import with_real_ends
from lightning_replay.episodes.returns import EpisodeTracker
from lightning_replay.episodes.running import held_slots, slots_by_age
from lightning_replay.fast_path import has_fast_path
from lightning_replay.feedback import (
    NOT_FINITE,
    Feedback,
    Judged,
    magnitudes,
    match_td_errors,
    match_there,
    one_each,
    own_td_error,
    parse_td_errors,
    td_error_of,
    update_matching,
)
from lightning_replay.forking import ForkGuard
from lightning_replay.options import (
    check_kind,
    checked_count,
    checked_flag,
    checked_number,
    checked_seed,
)
from lightning_replay.parts import (
    BufferHooks,
    GroupTotals,
    Insertion,
    ReplayTransform,
    ShardDraw,
    ShardRequest,
    WriterHooks,
    check_home,
    check_slots,
    set_home,
    unwrap,
    wrong_shape,
)
from lightning_replay.prefetch import Prefetch
from lightning_replay.replay_parts import ReplayParts, check_parts, generator_of_torchrl
from lightning_replay.samplers.uniform import UniformSampler
from lightning_replay.saves import SavedParts, frozen_state, read_replay, read_state, restore_state, save_replay
from lightning_replay.saving.spec import rebuildable
from lightning_replay.saving.states import refusing_other_states
from lightning_replay.storage.columns import (
    Column,
    ContradictingFlags,
    TransitionCheck,
    as_rows,
    as_tensor,
    normalized,
    rows_of_columns,
)
from lightning_replay.storage.packed import occupancy_of
from lightning_replay.training_replay import TrainingReplay
from lightning_replay.writers.first_in_first_out import FirstInFirstOutWriter

if TYPE_CHECKING:
    from lightning_replay.static_draws import StaticDraws
    from lightning_replay.tables.tables import Tables

logger: logging.Logger = logging.getLogger(__name__)

#: Feedback of ``update_priority`` beside TD errors.
SIGNALS = ("action_values", "action", "surprise")


@rebuildable
class Replay(BufferHooks, TensorDictReplayBuffer, TrainingReplay):
    """A writer, a sampler and a transform over one storage: every replay method is a choice of the three.

    :meth:`extend` stores transitions, :meth:`sample` draws a batch, :meth:`update_priority` returns TD errors to their
    rows. A TorchRL ``TensorDictReplayBuffer``: transforms, prefetching and ``set_rng`` work, and TorchRL's collectors
    take it. The functions in :mod:`lightning_replay.recipes` build the published methods.

    The life of a row: :meth:`extend` checks it and passes it through the inverse of the transforms. The writer chooses
    its slot. The storage packs its columns there, counts one more generation of the slot, and the sampler and the
    episodes are informed of it. :meth:`sample` lets the sampler draw slots, gathers their rows (with ``n_steps``, sums
    rewards along the episode) and applies the transforms. The batch holds ``index`` and ``generation`` of its rows.
    :meth:`update_priority` drops the TD errors of rows whose slot has another generation by now. The sampler makes
    priorities of the others, and the writer may decide by them which rows stay. A row leaves when the writer overwrites
    its slot or the storage releases it, and :meth:`end_episodes` marks a newest row that nothing will follow.
    :meth:`save` writes rows, priorities, generators, and generations. A loaded buffer then goes on with the same draws,
    and a TD error that was on its way finds its row or is dropped.

    Args:
        storage: usually :class:`~lightning_replay.storage.PackedStorage`.
        sampler: which rows, uniform by default.
        writer: chooses the slots of new rows and the rows that leave, first in, first out by default.
        transform: what happens to a batch once it is drawn (and, inversely, to rows before they are stored).
        batch_size: rows per batch, by default 256, or the capacity if it is smaller.
        n_steps: rewards summed into one return, formed when a row is drawn. 1 leaves rows as they are.
        discount: γ of that return.
        priority_key: the column of a batch from which :meth:`update_priority` reads TD errors that it is not given.
        prefetch: batches drawn ahead in a thread. Their priorities are as old as they have waited.
        check_finite: refuse NaN and infinity in rewards and observations, see
            :class:`~lightning_replay.storage.columns.TransitionCheck`. About 5% of the time of an insert of
            64 rows.
        check_every: number of calls between two reads of the errors that a device found, so that no call waits for it.
            The device looks for NaN and infinity in rows and TD errors, and for contradicting flags. A call of
            :meth:`extend` or :meth:`update_priority` raises at most so many calls later, with the number of the wrong
            call. The rows of the wrong call are stored by then, and its priorities are not. ``None`` raises at once.
            If slots are drawn on another device than the CPU, ``None`` is 16. With a number, observations of first and
            last rows are not compared, and no warning is given of them. Rows that TorchRL's trainers mark truncated
            are refused.
        check_continuity: returns over several steps go on to the next row only if that row starts with the observation
            that the row before ended with, bit for bit, see :class:`~lightning_replay.episodes.links.Continuity`. Turn
            it off if observations change between two steps: wrappers that draw noise each time they are read, or that
            normalize stored observations by statistics which move on. Samplers, writers and transforms that follow
            episodes have an option of the same name.
        seed: of sampler, transform and writer. ``None`` leaves their generators as they are.

    Sampled keys:
        index: int64 ``[B]``, ``[B, 2]`` for samplers of pairs, ``[B, T]`` for samplers of sequences, as all columns.
        generation: int64 ``[B]`` (``[B, 2]`` when both of a pair get feedback), how often the slot had been written.
        priority_weight: float32 ``[B]``, with a prioritized sampler.
        discount, steps_to_next_obs: ``[B, 1]``, with ``n_steps`` above 1.

    Raises:
        TypeError: an option of another kind, or parts that do not work together, such as a sampler of tables and a
            writer without.
        ValueError: ``batch_size`` is not positive or above the capacity, a sampler with fewer slots than the storage,
            or TorchRL's ``SliceSampler`` with a writer that keeps no order of time.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from lightning_replay import PackedStorage
        >>> replay = Replay(storage=PackedStorage(capacity=100), batch_size=4, seed=0)
        >>> index = replay.extend(TensorDict({"observation": torch.randn(10, 3)}, [10]))
        >>> replay.sample()["observation"].shape
        torch.Size([4, 3])
    """

    exact: bool = True
    last_insertion: Insertion
    _replay_lock: Any
    _futures_lock: Any
    #: Whether the episodes that ran in loaded files end before the next rows are stored.
    #:
    #: :meta private:
    awaits_new_episodes: bool
    # Refuses the first rows, TensorDict [N], of a side of a MixedReplay, if they do not fit the other side's.
    _check_first: Callable[[TensorDictBase], None] | None = None
    _deferred: DeferredChecks | None
    # Draws for samplers that have no generator: TorchRL's samplers. ``None`` if the sampler is one of this library.
    _torchrl_generator: torch.Generator | None = None

    def __init__(
        self,
        *,
        storage: Storage,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        transform: Transform | None = None,
        batch_size: int | None = None,
        n_steps: int = 1,
        discount: float = 0.99,
        priority_key: str = "td_error",
        prefetch: int | None = None,
        check_finite: bool = True,
        check_every: int | None = None,
        check_continuity: bool = True,
        seed: int | None = None,
    ) -> None:
        ours = "of TorchRL or of this library"
        check_kind("storage", storage, Storage, f"a Storage {ours}")
        check_kind("sampler", sampler, Sampler | None, f"a Sampler {ours}")
        check_kind("writer", writer, Writer | None, f"a Writer {ours}")
        check_kind("transform", transform, Transform | Callable | None, f"a Transform {ours}, or a callable")
        batch_size = given_batch_size(batch_size, storage.max_size)
        if storage.max_size < batch_size:
            raise ValueError(
                f"capacity {storage.max_size} is below batch_size {batch_size}; raise the capacity or lower the batch "
                "size"
            )
        if prefetch is not None:
            prefetch = checked_count("prefetch", prefetch, 0, of="batches")
        seed = checked_seed(seed)
        episodes = EpisodeTracker(n_steps, discount, check_continuity)  # which checks all three
        self._episodes, self._checks_continuity = episodes if n_steps > 1 else None, check_continuity
        self._ends = EpisodeEnds(check_continuity)
        self._forms_returns = n_steps > 1  # otherwise episodes are followed for transforms alone
        self._feedback = Feedback()
        self.awaits_new_episodes = False
        self._row_check = TransitionCheck(checked_flag("check_finite", check_finite))
        self._check_every = None if check_every is None else checked_count("check_every", check_every, of="calls")
        sampler = UniformSampler() if sampler is None else sampler
        writer = FirstInFirstOutWriter() if writer is None else writer
        check_parts(storage, sampler, writer, n_steps)
        super().__init__(
            storage=storage,
            sampler=sampler,
            writer=writer,
            transform=transform,
            batch_size=batch_size,
            priority_key=priority_key,
            prefetch=prefetch,
        )
        self._begin_life()
        if seed is not None:
            self.seed(seed)

    @property
    def awaits_priorities(self) -> bool:
        """Whether something here takes feedback and has had no :meth:`update_priority` since the last draw.

        :meta private:
        """
        return self.takes_feedback and self._feedback.draws_since_update > 0

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """Stores transitions. The rows are copied.

        Args:
            tensordicts: TensorDict ``[N]``, rows of one trajectory in time order. ``("next", "done")`` is derived from
                ``terminated`` and ``truncated`` if it is absent. Rewards and flags ``[N]`` are stored as ``[N, 1]``.
                Columns of a batch that was drawn, such as ``index`` and ``priority_weight``, are left out.
                Rows whose bool column ``("collector", "mask")`` or ``mask`` is false are padding and left out. With it,
                trajectories ``[N, T]`` are taken as well.
            update_priority: whether a column ``priority_key`` among them sets their priorities, yes by default.

        Returns:
            int64, their slots, only of rows that entered if the writer refuses some.

        Raises:
            TypeError: not a TensorDict, or a ``trajectory`` that is not of an integer dtype.
            ValueError: an empty batch, rows that do not fit the stored columns or lack what a part of the buffer needs,
                returns over several steps if the buffer or a transform forms such returns, rows that are terminated
                or truncated but not done, flags of ends that are not bool, NaN or infinite rewards, observations or
                TD errors (rows that are all truncated, as TorchRL's trainers give them, are done if no row continues
                them), or 64 rows that follow others, none of which continues the other, if a part needs such rows and
                checks continuity.
                Nothing is changed then, whichever part refuses.
            RuntimeError: rows on disk that belong to the process that this one was forked from.
        """
        if not isinstance(tensordicts, TensorDictBase):
            raise TypeError(
                f"extend takes a TensorDict of transitions; got {type(tensordicts).__name__}. Wrap columns [N, ...] as "
                "TensorDict({'observation': ..., 'action': ..., 'next': {...}}, batch_size=[N]), and join several "
                "TensorDicts with torch.stack or torch.cat"
            )
        return self._enter(tensordicts, update_priority is not False)

    def extend_columns(self, columns: Mapping[NestedKey, Tensor | np.ndarray]) -> Tensor:
        """Stores transitions given column by column, with the result of :meth:`extend`.

        For a few rows, building and reading a TensorDict takes longer than storing them. None is built for rows on the
        CPU that follow others into a :class:`~lightning_replay.storage.PackedStorage`. For such rows, one is built only
        if a transform, a sampler that checks rows, a called condition, or your own writer reads them.

        Args:
            columns: arrays or tensors ``[N, ...]``, all with the same N, by key: a name, or for a nested column a tuple
                of names such as ``("next", "reward")``. Dtypes and shapes equal the stored columns, as for
                :meth:`extend`. A reward is float32 if the first ones were. They are copied.

        Returns:
            int64, their slots, as :meth:`extend`.

        Raises:
            TypeError: no mapping, a key that is no name, or a value that is neither an array of numbers nor a tensor.
            ValueError: columns of several lengths, a name that is both a column and a branch, or rows that
                :meth:`extend` refuses. Nothing is changed.

        Example:
            >>> from lightning_replay import PackedStorage
            >>> replay = Replay(storage=PackedStorage(capacity=100), batch_size=4, seed=0)
            >>> reward = np.ones((1, 1), dtype=np.float32)
            >>> columns = {"observation": np.zeros((1, 3), dtype=np.float32), ("next", "reward"): reward}
            >>> replay.extend_columns(columns), replay.extend_columns(columns)
            (tensor([0]), tensor([1]))
        """
        if self._takes_columns and (type(columns) is dict or isinstance(columns, Mapping)):
            return self._enter(columns, True)
        return self.extend(rows_of_columns(columns))

    def _enter(self, rows: Any, takes_priorities: bool) -> Tensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # what is kept of the rows is written to later
                return self._enter(rows, takes_priorities)
        # Batches on their way were requested before these rows. They are waited for before the lock is taken, which the
        # thread that draws them needs.
        if self._prefetch_queue:
            self._ahead.wait()
        ragged = self.parts.ragged
        if ragged is None:
            return self._enter_dense(rows, takes_priorities)
        with self._replay_lock, self._write_lock, ragged.flattened(as_rows(rows)) as flat:
            return self._enter_dense(flat, takes_priorities)

    def _enter_dense(self, rows: Any, takes_priorities: bool) -> Tensor:
        try:
            with self._replay_lock, self._write_lock:
                self.fork_guard.check()
                if self._deferred is not None:
                    self._deferred.begin("extend")
                # The environments that played the episodes of a save are gone. Until the first new rows, contents and
                # draws are as they were saved.
                if self.awaits_new_episodes:
                    self.awaits_new_episodes = False
                    self.end_episodes()
                # The usual way: the storage reads rows that have the columns of those stored, and no TensorDict is
                # built or copied.
                parts = self.parts
                if self._packed is not None and not (parts.has_transforms and parts.changes_rows):
                    columns = self._packed.read(rows)
                    if columns is not None:  # rows like those stored, which need no preparation
                        rows = self._packed.whole_rows(rows, columns)
                        beginnings = self._ends.beginnings.after(columns, self._packed.row_columns)
                        slots = self._store(rows, columns, takes_priorities)
                        self._ends.keep(beginnings)
                        return slots
                return self._prepare_and_store(as_rows(rows), takes_priorities)
        # TorchRL's trainers mark every row of a batch truncated. What was kept of the rows is undone by now. They are
        # stored with the ends of their episodes alone.
        except ContradictingFlags:
            ended = with_real_ends(as_rows(rows))
            if ended is None:
                raise
            self._ends.beginnings.is_silent = True  # the ends of batches are no ends of episodes
        return self._enter_dense(ended, takes_priorities)

    def _prepare_and_store(self, rows: TensorDictBase, takes_priorities: bool) -> Tensor:
        if 0 in rows.shape:  # before a transform refuses it in its own words, or keeps it
            raise wrong_shape(rows)
        rows = normalized(rows)
        columns = _columns_of(rows)
        beginnings = self._ends.beginnings.after([*columns.values()], columns)
        slots = self._transform_and_store(rows, takes_priorities)
        self._ends.keep(beginnings)
        return slots

    def _transform_and_store(self, rows: TensorDictBase, takes_priorities: bool) -> Tensor:
        with self.parts.undone_if_refused():
            if self.parts.has_transforms and 0 not in rows.shape:  # all may have been padding
                # Rows that wait in a transform reach the storage later, when a refusal could not name the call.
                if self.parts.delaying:
                    self._row_check(_columns_of(rows))
                if not len(self._storage):
                    self.parts.refuse_returns(rows)
                rows = self._transform.inv(rows)
            if rows is None or 0 in rows.shape:  # transforms keep all back, or all are padding
                self.last_insertion = Insertion()
                return self.last_insertion.slots.clone()
            return self._check_and_store(rows, takes_priorities)

    def store_pending(self, trajectories: Iterable[int] | None = None) -> Tensor:
        """Stores the rows that a transform keeps back until their returns are complete, with shorter returns.

        Args:
            trajectories: Ids of the episodes that broke off, or ``None`` for all.

        Returns:
            Slots of the rows that entered, int64 ``[n]``.

        :meta private:
        """
        slots = [torch.zeros(0, dtype=torch.int64, device="cpu")]
        with self._changing():
            for transform in self.parts.delaying:
                with self.parts.undone_if_refused():
                    formed = transform.form_pending(trajectories)
                    if formed is not None:
                        slots.append(self._check_and_store(formed, takes_priorities=True))
        return torch.cat(slots)

    def _check_and_store(self, rows: TensorDictBase, takes_priorities: bool) -> Tensor:
        if rows.ndim != 1 or rows.shape[0] == 0:
            raise wrong_shape(rows)
        first_rows, columns = len(self._storage) == 0, None
        if first_rows:
            if self._check_first is not None:
                self._check_first(rows)
            for transform in self.parts.own_transforms:
                transform.check_rows(rows)
        # A PackedStorage checks rows itself, when it reads them.
        if self._packed is None:
            self._row_check(_columns_of(rows))
        elif isinstance(self._writer, WriterHooks):  # TorchRL's may add columns of their own
            columns = self._packed.checked_values(rows)
        index = self._store(rows, columns, takes_priorities)
        if first_rows:
            self._share_generator()
            logger.info("replay buffer of capacity %d takes %s bytes", self.capacity, f"{self.nbytes:,}")
        return index

    def _store(self, rows: Any, columns: Sequence[Column] | None, takes_priorities: bool) -> Tensor:
        # Rows are a TensorDict [N], or columns by key if the storage has read these. It reads none for TorchRL's
        # storages and writers. Whatever may refuse rows comes before the writer writes.
        parts = self.parts
        sampler = parts.sampler
        priority = None
        if sampler.uses_priorities and takes_priorities:
            if columns is None or self._storage.has_column(self.priority_key):
                rows = as_rows(rows)
                priority = rows.get(self.priority_key, None)
            if priority is not None and parts.draws_there:
                priority = self._priorities_there(priority, rows.shape[0])
            elif priority is not None:
                refused = f"Nothing was stored; leave {self.priority_key!r} out, or pass update_priority=False"
                priority = magnitudes(priority, rows.shape[0], refused)
                # Before the writer writes: a priority that is refused later would leave the row without one.
                sampler.check_priority(priority)
        if parts.checks_rows:
            sampler.check_rows(as_rows(rows))
        # Only the first rows are checked: later ones have their columns.
        if self._episodes is not None and self._episodes.links is None:
            self._episodes.check_rows(as_rows(rows))
        # From here on only the writer may refuse, before it writes. It calls mark_update for the slots that it wrote:
        # the sampler has the rows and the episodes are linked when it returns.
        if columns is not None and parts.insert_columns is not None:
            inserted = parts.insert_columns(columns, rows)
        else:
            inserted = parts.writer.insert(as_rows(rows))
        self.last_insertion = inserted
        index = inserted.slots
        if index.numel():
            self._sampler.extend(index)
            # After mark_update, which gave the new rows the largest priority so far.
            if priority is not None and parts.draws_there:
                self._set_there("extend", index, priority[inserted.rows], torch.ones_like(index, dtype=torch.bool))
            elif priority is not None:
                sampler.set_priorities(index, priority[inserted.rows], self._storage)
        if self._episodes is not None:
            self._episodes.warn()
        return index

    def add(self, data: TensorDictBase) -> Tensor:
        """Stores one transition, of batch size ``[]``. See :meth:`extend`."""
        if not isinstance(data, TensorDictBase) or data.batch_dims:
            given = list(data.shape) if isinstance(data, TensorDictBase) else type(data).__name__
            raise (ValueError if isinstance(data, TensorDictBase) else TypeError)(
                f"add takes one transition, a TensorDict of batch size []; got {given}. Call extend for several"
            )
        return self.extend(data.unsqueeze(0))

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        out: TensorDictBase | None = None,
    ) -> Any:
        """Draws a batch.

        Args:
            batch_size: rows, when other than the buffer's own. Such a batch is drawn now, not taken from the
                prefetched ones.
            return_info: also return the sampler's information as a dictionary.
            include_info: TorchRL's deprecated argument, ignored.
            out: batch that was returned before. The new batch is copied into its tensors, so that a CUDA graph finds
                it at the same place, and ``out`` is returned.

        Returns:
            TensorDict ``[B]``, of sequences ``[B, T]``. Leaves are copies of the stored rows.

        Raises:
            RuntimeError: the buffer is empty.
            ValueError: ``batch_size`` is not positive, ``out`` of another shape or with other columns, or slices of
                rows in which several episodes are interleaved. A draw that fails may have used random numbers.
        """
        self.fork_guard.check()
        if batch_size is None:
            batch_size = self._batch_size
        elif batch_size != self._batch_size:
            batch_size = checked_count("batch_size", batch_size, of="transitions")
        # Only batches of the buffer's own size are drawn ahead.
        if self._prefetch and batch_size == self._batch_size:
            data, info = self._ahead.next(partial(self._sample, batch_size), self._sampler)
        else:
            if self._prefetch_queue:
                self._ahead.wait()
            data, info = self._sample(batch_size)
        # For the ages in stats, and for awaits_priorities.
        self._feedback.last_index = info["index"]
        self._feedback.draws_since_update += 1
        if return_info and "generation" not in info and data.get("generation", None) is not None:
            info["generation"] = data.get("generation")
        if out is not None:
            data = copied_into(out, data)
        return (data, info) if return_info else data

    def static_draws(self, batch_size: int | None = None) -> StaticDraws:
        """Returns draws into static memory, for CUDA graphs and ``torch.compile``.

        Args:
            batch_size: number of rows of each batch, by default the buffer's own.

        Raises:
            RuntimeError: the buffer is empty, so that it has no columns.
            ValueError: the buffer has a transform, or draws slots on the CPU, or sequences, or ``batch_size`` is not
                positive.
        """
        size = self._batch_size if batch_size is None else checked_count("batch_size", batch_size, of="transitions")
        from lightning_replay.static_draws import StaticDraws  # Few loops capture or compile a step.

        with self._changing():
            return StaticDraws(self.parts, self._episodes, self._feedback, self._deferred, size)

    def sample_shard(self, part: ShardRequest) -> tuple[TensorDictBase, ShardDraw]:
        """Draws the rows of a batch that is divided over several replays. See :mod:`lightning_replay.divided_draws`.

        Args:
            part: of n rows, what :meth:`Divider.divide <lightning_replay.divided_draws.Divider.divide>` returned for
                this replay.

        Returns:
            A TensorDict ``[n]`` as :meth:`sample` returns it, without weights, and what the divider needs for them.

        Raises:
            TypeError: draws of the sampler cannot be divided.
            ValueError: the part has no rows.
            RuntimeError: there is nothing to draw from.
        """
        self.fork_guard.check()
        check_kind("part", part, ShardRequest, "what Divider.divide returned for this replay")
        if not len(part):
            raise ValueError("the part has no rows; call group_totals() alone of a replay of which none are drawn")
        check_divisible(self._sampler)
        if self._prefetch_queue:
            self._ahead.wait()
        reply: Any = None

        def draw() -> tuple[Tensor, dict[str, Any]]:
            nonlocal reply
            index, info, reply = self.parts.sampler.sample_shard(self._storage, part)
            return index, info

        data, info = self._sample(len(part), draw)
        self._feedback.last_index = info["index"]
        self._feedback.draws_since_update += 1
        return data, reply

    def _sample(
        self, batch_size: int, draw: Callable[[], tuple[Tensor, dict[str, Any]]] | None = None
    ) -> tuple[TensorDictBase, dict[str, Any]]:
        # By ``draw`` if the sampler is to draw a part of a batch, see sample_shard.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._sample(batch_size, draw)
        with self._replay_lock, self._write_lock:
            storage = self._storage
            packed = self._packed
            parts = self.parts
            # Interleaved episodes in a ring are refused here, because TorchRL's slices would join them.
            if parts.cuts_ring:
                self._ends.check_slices(self._sampler, storage, self._writer, batch_size)
            # The sampler chooses the slots and gives their weights. It reads no row unless its method needs it.
            index, info = self._sampler.sample(storage, batch_size) if draw is None else draw()
            is_slices = isinstance(index, tuple)  # of TorchRL, never of a sampler of this library
            if is_slices:
                index = index[0]
            elif type(index) is not Tensor or index.dtype is not torch.int64 or index.shape != (batch_size,):
                parts.check_draw(index, batch_size)
            shown = [*info] if index.ndim == 1 else []  # those of pairs fit once a transform has made one row of two
            info["index"] = index
            if parts.device is not None:  # one copy of each column, for which nothing waits
                info = {key: value.to(parts.device, non_blocking=True) for key, value in info.items()}
                index = info["index"] if parts.draws_there else index.cpu()  # as most samplers draw
            if packed is not None and not self._forms_returns and not parts.has_transforms and not is_slices:
                # A batch that is just rows. The storage adds ``generation``, a stored column.
                return storage.get(info["index"], extra=info), info
            # Rows are complete, with their returns over n steps, before a transform changes them.
            data, generation, transforms = self._read(index, info["index"])
            for key in shown:
                data.set(key, info[key])
            for transform in transforms:
                if isinstance(transform, ReplayTransform):
                    data = transform.forward_drawn(data, index, storage, self._episodes)
                else:
                    data = transform(data)
            if generation is not None:
                info["generation"] = generation if self.parts.sampler.update_partners else data.get("generation")
            for key, value in info.items():
                # Set again only what a transform has removed, and index and generation also if it replaced them.
                present = data.get(key, None)
                if present is not value and (present is None or key not in shown):
                    data.set(key, value if value.ndim >= data.ndim else expand_as_right(value, data))
            return data, info

    def __getitem__(self, index: Any) -> Any:
        """Returns stored rows as they are, transforms not applied, or a column of all by its key."""
        takes_all = isinstance(self._storage, TensorStorage)  # others read True and False as 1 and 0
        # A key, or an index of several dimensions.
        if isinstance(index, tuple | str) or not (takes_all or isinstance(index, int | np.integer | slice)):
            return self[:][index]
        with self._replay_lock:
            rows = self._storage[index.cpu().numpy() if isinstance(index, Tensor) else index]
        return rows if isinstance(index, int | np.integer) else self._collate_fn(rows)

    def _read(self, index: Tensor, there: Tensor) -> tuple[TensorDictBase, Tensor | None, list[Transform]]:
        # The rows that were drawn, in slots that lie with the rows too, their generations, and the transforms that are
        # still to be applied.
        packed = self._packed
        transforms = [*self.parts.transforms]
        episodes = self._episodes if self._forms_returns else None
        first: Any = transforms[0] if transforms and index.ndim == 2 else None
        # Pairs are mixed as they are gathered: both rows of each would be copied and laid out otherwise.
        mixes = has_fast_path(first) and isinstance(first, ReplayTransform) and first._mix_stored is not None
        if packed is not None and mixes and has_fast_path(packed) and episodes is None:
            data = first._mix_stored(packed, there)
            both = self.parts.sampler.update_partners
            generation = packed.generation_of(index).to(there.device) if both else data.get("generation")
            return data, generation, transforms[1:]
        if packed is not None:
            data = packed.get(there, extra={"index": there})
        else:
            data = self._collate_fn(self._storage.get(there))
            # TorchRL's memory-mapped rows are locked.
            data = (data.copy() if data.is_locked else data).set("index", there)
            if self.parts.writer.rows_beside is not None:
                data.set("generation", self.parts.writer.rows_beside.generation_of(there))
        if episodes is not None:
            data = episodes.draw(data, index, self._storage)
        return data, data.get("generation", None), transforms

    def update_priority(
        self,
        index: Tensor | TensorDictBase,
        td_error: Tensor | None = None,
        *,
        generation: Tensor | None = None,
        **signals: Any,
    ) -> None:
        """Returns TD errors to the rows they belong to. A sampler without priorities ignores them.

        Args:
            index: the batch that was drawn, whose ``index`` and ``generation`` are used, or the ``index`` alone, int64
                ``[B]`` or ``[B, 2]``, of sequences ``[B, T]``.
            td_error: signed, ``[B]`` or ``[B, 1]``, of sequences ``[B, T]``, see
                :class:`~lightning_replay.samplers.SequenceSampler`. The magnitude becomes the sampler's priority. Of a
                batch without it and without ``signals`` the column ``priority_key`` is read. May be left out if only
                the writer takes feedback and ``signals`` hold all of it. TorchRL's name ``priority`` is accepted.
            generation: with an index alone, the batch's ``generation``. Rows whose slot was written or emptied since
                are dropped and counted. Without it they are only dropped if the slot is empty.
            signals: further feedback for a :class:`~lightning_replay.writers.RetentionWriter`: ``action_values``
                ``[B, A]`` with ``action``, and ``surprise`` ``[B]`` in place of the squared TD error. Other writers
                ignore them.

        Raises:
            TypeError: a signal of another name, complex TD errors, a batch without ``index``, or an ``index`` or a
                ``generation`` that is no tensor, or a ``generation`` that is not of an integer dtype.
            ValueError: NaN or infinite TD errors, another number of them than of rows, none if they are needed, or
                signals that the writer refuses. Nothing is changed.
            IndexError: an index that is not stored. Nothing is changed.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.update_priority(index, td_error, generation=generation, **signals)
        parts = self.parts
        writer = parts.writer
        sampler = parts.sampler
        if signals:
            td_error = td_error_of(td_error, signals, self.signals)
        td_error = own_td_error(index, td_error, signals, self.priority_key)
        # Nobody uses the TD errors of a uniform buffer: they are read, so that an error in a loop shows, and dropped.
        needs_feedback, is_prioritized = writer.needs_feedback, sampler.uses_priorities
        if needs_feedback or not is_prioritized:
            index, td_error, generation = parse_td_errors(index, td_error, generation)
            if not needs_feedback:
                self._feedback.draws_since_update = 0
                return
        if self._prefetch_queue:
            self._ahead.wait()
        with self._replay_lock, self._write_lock:
            self.fork_guard.check()
            if parts.draws_there:
                self._update_there(index, td_error, generation)
                return
            # A sampler on the CPU compares generations in the same pass in which it sets priorities. Not if the writer
            # also needs the slots of the rows that are left.
            if parts.update_matching is not None and not needs_feedback:
                num_stale = update_matching(index, td_error, generation, self._storage, parts.update_matching)
                if num_stale is not None:
                    self._feedback.count(len(index), num_stale)
                    return
            feedback, (slots, magnitudes, stale) = self.read_feedback(index, td_error, generation, **signals)
            if is_prioritized:
                sampler.set_priorities(slots, magnitudes, self._storage)
            if needs_feedback:
                writer.update_priority(slots, feedback, both=sampler.update_partners)
            self._feedback.count(len(slots), stale)

    def _update_there(self, index: Any, td_error: Any, generation: Any) -> None:
        if td_error is None:
            self.read_feedback(index, td_error, generation)  # which refuses it
        if self._deferred is not None:
            self._deferred.begin("update_priority")
        index, td_error, generation = parse_td_errors(index, td_error, generation)
        if self.sequence_length is not None:
            index, td_error, generation = self.parts.sampler.feedback_of_rows(index, td_error, generation)
        slots, errors, is_fresh = match_there(index, td_error, generation, self._storage)
        if self._deferred is None:
            magnitudes(errors, len(slots), "No priority was changed")
        self._set_there("update_priority", slots, errors, is_fresh)
        self._feedback.stale_on(slots.device).add_((~is_fresh).sum())
        self._feedback.count(len(slots), 0)

    def _priorities_there(self, td_error: Tensor, count: int) -> Tensor:
        # TD errors [count] of new rows, on the device. NaN and infinity are refused here, or later by _set_there.
        if self._deferred is None:
            magnitudes(td_error, count, "Nothing was stored")
        elif td_error.numel() != count:
            raise one_each(td_error, count, "Nothing was stored")
        return td_error.reshape(-1).to(self.parts.sampler.draw_device)

    def _set_there(self, method: str, slots: Tensor, td_error: Tensor, is_fresh: Tensor) -> None:
        is_sound = self.parts.sampler.set_priorities_there(slots, td_error, is_fresh)
        if self._deferred is not None:
            self._deferred.note(method, [NOT_FINITE.format(method)], is_sound.all())

    def read_feedback(self, index: Any, td_error: Any, generation: Any, **signals: Any) -> tuple[Any, Judged]:
        # What writer and sampler get. Both are checked before anything is changed: a refusal leaves all as it is.
        writer = self.parts.writer
        sampler = self.parts.sampler
        if td_error is None and sampler.uses_priorities:
            raise ValueError(
                f"td_error is None, and {type(self._sampler).__name__} draws by TD errors; give one for each row "
                f"of the batch, or write them to its column {self.priority_key!r}. No priority was changed"
            )
        feedback = writer.read_feedback(len(index), td_error, signals) if writer.needs_feedback else None
        if self.sequence_length is not None and sampler.uses_priorities:
            given = parse_td_errors(index, td_error, generation)
            parts: Any = [None if one is None else one.cpu() for one in given]
            index, td_error, generation = sampler.feedback_of_rows(*parts)
        return feedback, match_td_errors(index, td_error, generation, self._storage)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Returns the TD errors in ``data[priority_key]`` to the rows of ``data["index"]``."""
        if self.takes_feedback:
            self.update_priority(data, data.get(self.priority_key, None))

    def empty(self, empty_write_count: bool = True) -> None:
        """Removes every transition, the prefetched ones too. The slots' generations continue."""
        with self.locked():
            if self._packed is not None:
                self._packed.check_writable()
            # Batches drawn ahead are of rows that leave now.
            self._prefetch_queue.clear()
            super().empty(empty_write_count)
            self.awaits_new_episodes = False
            self._feedback.forget()
            self.last_insertion = Insertion()
            self._ends.restart()
            if self._episodes is not None:
                self._episodes.clear()
            for transform in self.parts.delaying:
                transform.clear()

    def stats(self) -> dict[str, Any]:
        """Returns TorchRL's counters, bytes, ages of the last batch (in transitions), and counts of updates.

        Also the statistics of storage, sampler, and writer. If frames are stored once, ``bytes_per_transition`` is by
        the transitions held, else by the capacity.
        """
        rows = self.capacity if self._packed is None else self._packed.rows_in_memory
        stats = {
            **super().stats(),
            **self._feedback.stats(self.parts.writer.age_of),
            **self.parts.writer.stats(),
            **self.parts.sampler.stats(),
            "nbytes": self.nbytes,
            "bytes_per_transition": self.nbytes / rows,
        }
        return stats if self._packed is None else stats | self._packed.stats()

    def oldest_first(self) -> Tensor:
        """Returns the slots of the stored rows, int64 ``[N]``, in the order in which they were given.

        :meta private:
        """
        in_order = slots_by_age(self._storage, self.parts.writer)
        if in_order is None:
            raise ValueError(
                f"{type(self._writer).__name__} keeps no order of its rows; define age_of as "
                "lightning_replay.parts.ReplayWriter has it, or use a writer of lightning_replay.writers"
            )
        return in_order

    def follow_episodes(self, episodes: EpisodeTracker) -> None:
        """Forms n-step rows along ``episodes`` from the next draw on, after linking the stored rows, oldest first.

        For a caller that gets the length of its returns only when it draws. Otherwise, give ``n_steps`` when building.

        :meta private:
        """
        with self._replay_lock, self._write_lock:
            self._follow(episodes)
            self._forms_returns = True

    def _follow(self, episodes: EpisodeTracker) -> None:
        episodes.check_continuity = self._checks_continuity
        self._place_episodes(episodes)
        if self._episodes is not None:  # for transforms alone: the links are the same
            episodes.links = self._episodes.links
        elif len(self._storage):
            in_order = self.oldest_first()
            episodes.check_rows(self._storage.get(in_order[:1]))
            episodes.mark_update(in_order, self._storage)
        self._episodes = episodes
        self._ends.follow(episodes)

    def end_episodes(
        self,
        trajectories: Iterable[int] | None = None,
        *,
        slots: Tensor | None = None,
        generation: Tensor | None = None,
    ) -> Tensor:
        """Ends running episodes whose environments were closed, reset or lost: nothing follows their stored rows.

        Steps that a transform keeps back are stored first. Then the newest row of each episode is marked truncated and
        done. If that may not be the last step of its episode (a writer that refuses rows or keeps no order, returns
        formed before they are stored), and in a storage of TorchRL's, it is not marked. Only later rows are then kept
        apart from it. Reads all rows once, O(N), unless ``slots`` are given.

        Args:
            trajectories: Ids of the episodes, if rows have them, or ``None`` for all that run.
            slots: Slots of the newest rows of the episodes, int64 ``[n]``, in place of ``trajectories``, for a
                :class:`~lightning_replay.storage.PackedStorage`.
            generation: Generations of these rows, int64 ``[n]``. Rows that have left are skipped.

        Returns:
            Slots of the rows that were stored by this call, int64.

        Raises:
            ValueError: ``slots`` are given without ``generation``. No episode is ended.
        """
        if slots is not None:
            if generation is None:
                raise ValueError(
                    "end_episodes got slots and no generation; give generation= of the batch that names these slots"
                )
            with self._changing():
                self._ends.end_slots(slots, generation)
            return slots[:0]
        named = None if trajectories is None else list(trajectories)
        stored = self.store_pending(named)
        with self._changing():
            self.awaits_new_episodes &= named is not None
            self._ends.end_running(named)
        return stored

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, from a buffer of the same capacity, parts, tables and tasks.

        Other options keep this buffer's values. The log names exponents, offsets and schedules that differ. The state
        of another buffer is a ``ValueError``, and nothing is changed.
        """
        restore_state(self, state_dict)
        self._share_generator()  # Those of pairs may have been one generator, given by set_rng.
        self.last_insertion = Insertion()
        self.awaits_new_episodes = False
        self._ends.restart()

    def load(self, path: str | Path, *, end_episodes: bool = True) -> None:
        """Restores a saved buffer into this one, which must have been built with the same options. Imports nothing.

        Episodes that ran when it was saved end before the next rows are stored, as by :meth:`end_episodes`.

        Args:
            path: a directory or URL that :meth:`save` wrote to.
            end_episodes: ``False`` continues them, if the environments were restored with the buffer.

        Raises:
            FileNotFoundError, DamagedFileError, ValueError: as :func:`lightning_replay.load_replay`. Nothing is loaded.
        """
        ends = checked_flag("end_episodes", end_episodes)
        _, state = read_replay(path)
        with refusing_other_states(path):
            self.load_state_dict(state)
        self.awaits_new_episodes = ends

    def _begin_life(self) -> None:
        self.fork_guard: ForkGuard = ForkGuard(self)
        self._start_prefetch()
        self._attach_parts()

    def _start_prefetch(self) -> None:
        self._ahead = Prefetch(self._prefetch_queue, self._futures_lock, self._prefetch_cap)
        self._prefetch_executor = self._ahead.executor  # which TorchRL shuts down

    def after_fork(self) -> None:
        """Replaces locks and thread in a forked process, which draws the batches again that were drawn ahead.

        :meta private:
        """
        self._replay_lock = self.fork_guard.renew(self._replay_lock)
        self._futures_lock = threading.RLock()
        self._prefetch_queue.clear()  # The thread of the parent, which may be drawing some, is not in this process.
        self._start_prefetch()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["fork_guard"], state["_ahead"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_life()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other threads from writing, drawing, updating and drawing ahead while the body runs."""
        with self._futures_lock, self._changing():
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        # Methods that are called for every row take the locks themselves, without this context manager.
        if self._prefetch_queue:
            self._ahead.wait()
        with self._replay_lock, self._write_lock, torch.inference_mode(False):
            self.fork_guard.check()
            yield

    def _attach_parts(self) -> None:
        self.parts: ReplayParts = ReplayParts(self._storage, self._sampler, self._writer, self._transform)
        self._packed = self.parts.packed
        self._defer_checks()
        if self._packed is not None:
            self._packed.check_rows_by(self._row_check)
        self.sequence_length: int | None = self.parts.sampler.sequence_length
        self.burn_in: int = self.parts.sampler.burn_in
        self._takes_columns = has_fast_path(self)
        self.last_insertion = Insertion()
        self._share_generator()
        self._ends.attach(self.parts, self._episodes)
        self._attach_transforms()
        set_home(self._storage, self._sampler, unwrap(self._sampler), self._writer)

    def _defer_checks(self) -> None:
        device = self.parts.sampler.draw_device
        every = self._check_every
        if every is not None and device is None:
            raise ValueError(
                f"check_every is {every}, and slots are drawn on the CPU, which waits for the rows; leave it out, or "
                "draw on their device (draws_on='device')"
            )
        if every is None and device is not None and device.type != "cpu":
            every = 16
        self._deferred = None if every is None or device is None else DeferredChecks(every, device)
        self._row_check.deferred = self._deferred
        if self._packed is not None:
            self._packed.defer_reads(self._deferred)
            self._packed.keep_generations(there=device is not None)
        if self._deferred is not None:
            self.parts.sampler.defer_reads(self._deferred)
        if self._episodes is not None:
            self._place_episodes(self._episodes)

    def _place_episodes(self, episodes: EpisodeTracker) -> None:
        episodes.move_to(self.parts.sampler.draw_device)
        if self._deferred is not None:
            episodes.defer_reads(self._deferred)

    def _share_generator(self) -> None:
        self._torchrl_generator = generator_of_torchrl(self._sampler, self._storage, self._torchrl_generator)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Gives one generator to all parts, as TorchRL's buffers do. With ``None``, each part keeps its generator."""
        super().set_rng(generator)
        self._share_generator()

    def _attach_transforms(self) -> None:
        own = self.parts.checked_transforms(self)
        if self._episodes is None and any(transform.follows_episodes for transform in own):
            self._follow(EpisodeTracker(1, 1.0))
        self.parts.own_transforms = own
        self._ends.begin()

    def append_transform(self, transform: Any, *, invert: bool = False) -> Replay:
        """Appends a transform, which is applied last. Nothing is changed if it does not fit the buffer."""
        with self._with_more_transforms():
            super().append_transform(transform, invert=invert)
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Replay:
        """Inserts a transform before the one at ``index``. Nothing is changed if it does not fit the buffer."""
        with self._with_more_transforms():
            super().insert_transform(index, transform, invert=invert)
        return self

    @contextmanager
    def _with_more_transforms(self) -> Iterator[None]:
        with self._changing():
            before = [*self.parts.transforms]
            try:
                yield
                if len(self._storage):
                    row = self._storage.get(held_slots(self._storage)[:1])
                    for transform in self.parts.transforms:
                        if isinstance(transform, ReplayTransform) and transform not in before:
                            transform.check_rows(row)
                self._attach_transforms()
            except BaseException:
                self._transform.transforms = nn.ModuleList(before)
                raise

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the sampler, and returns the previous one."""
        check_home(self._storage, sampler, unwrap(sampler))
        check_slots(self._storage, sampler)
        before = super().set_sampler(sampler)
        try:
            self._attach_parts()
        except BaseException:  # a transform refuses the sampler
            super().set_sampler(before)
            self._attach_parts()
            raise
        in_order = slots_by_age(self._storage, self.parts.writer) if self._ends.cuts_slices and len(self) else None
        if in_order is not None:
            self._ends.mark_broken(in_order[1:])
        return before

    def set_writer(self, writer: Writer) -> Writer:
        """Replaces the writer of a replay without rows, and returns the previous one."""
        self._check_without_rows("set_writer")
        check_home(self._storage, writer)
        before = super().set_writer(writer)
        self._attach_parts()
        return before

    def set_storage(self, storage: Storage, collate_fn: Callable[..., Any] | None = None) -> Storage:
        """Replaces the storage of a replay without rows, and returns the previous one."""
        self._check_without_rows("set_storage")
        before = super().set_storage(storage, collate_fn)
        set_home(storage, self._writer)
        self._writer.register_storage(storage)  # TorchRL leaves the writer with the previous storage.
        self._attach_parts()
        return before

    def _check_without_rows(self, method: str) -> None:
        if len(self):
            raise RuntimeError(
                f"{method} would lose the {len(self)} rows of this replay. Call it before the first rows, or build "
                "another Replay and extend it with replay[:]"
            )

    @property
    def capacity(self) -> int:
        """Most transitions kept."""
        return self._storage.max_size

    def __len__(self) -> int:
        return occupancy_of(self._storage).count if self._packed is None else self._packed.num_stored

    @property
    def nbytes(self) -> int:
        """Bytes of rows and links, and of what sampler and writer keep."""
        return self.parts.nbytes + (0 if self._episodes is None else self._episodes.nbytes)

    @property
    def tables(self) -> Tables | None:
        """The tables that the writer keeps, or ``None`` for other writers."""
        tables: Tables | None = self.parts.writer.tables
        return tables

    @property
    def returns(self) -> list[tuple[int, float]]:
        """Length and discount of the returns that are formed, at the draw or before rows are stored.

        The length is above 1, and 1 for rewards that are shaped by a potential.
        """
        return self.parts.returns(self._episodes)

    @property
    def is_prioritized(self) -> bool:
        """Whether TD errors change what the sampler draws.

        :meta private:
        """
        return self.parts.sampler.uses_priorities

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the signals that :meth:`update_priority` takes."""
        return (*SIGNALS, *self.parts.writer.signals)

    @property
    def sampler_name(self) -> str:
        """Name of the class of the sampler.

        :meta private:
        """
        return type(self._sampler).__name__

    @property
    def needs_consecutive_rows(self) -> bool:
        """Whether the sampler cuts slices out of rows that lie side by side.

        :meta private:
        """
        return self.parts.cuts_slices

    @property
    def needs_initial_surprise(self) -> bool:
        """Whether the writer lacks a function for the surprise of new rows.

        :meta private:
        """
        return self.parts.writer.needs_initial_surprise

    def set_initial_surprise(self, measure: Callable[[TensorDictBase], Tensor] | None) -> None:
        """Sets the writer's function for the surprise of new rows. ``None`` removes it.

        :meta private:
        """
        self.parts.writer.initial_surprise = measure

    def generator_fingerprint(self) -> bytes:
        """Returns the state of the sampler's generator, which is equal while nothing is drawn.

        :meta private:
        """
        generator = self._torchrl_generator or self.parts.sampler._generator
        return b"" if generator is None else generator.get_state().numpy().tobytes()

    @property
    def takes_feedback(self) -> bool:
        """Whether :meth:`update_priority` changes what is drawn or kept.

        :meta private:
        """
        return self.parts.sampler.uses_priorities or self.parts.writer.needs_feedback

    def mark_update(self, index: Tensor | int) -> None:
        """Informs sampler and episodes of rows just written to these slots. The writer calls it."""
        if not isinstance(index, Tensor) or index.ndim != 1:
            index = as_tensor(index).reshape(-1)
        if not index.is_cpu and not self.parts.draws_there:  # as TorchRL's writers give slots
            index = index.cpu()
        self._ends.mark_broken(index)
        if self._episodes is not None:
            self._episodes.mark_update(index, self._storage)
        # Last: a sampler of episodes may read the ends that were marked above.
        self._sampler.mark_update(index, storage=self._storage)

    def on_evict(self, index: Tensor) -> None:
        """Removes rows that left without being overwritten from sampler and episodes. The storage calls it."""
        if self._episodes is not None:
            self._episodes.on_evict(index)
        self.parts.sampler.on_evict(index)

    def on_episode_end(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        self._ends.announce(slots, trajectories)

    def successors(self, index: Tensor) -> Tensor | None:
        """Returns the slots of the next steps of rows ``[n]``, -1 if none is stored.

        ``None`` if episodes are not followed: with ``n_steps=1`` and without a transform that needs them.
        """
        links = None if self._episodes is None else self._episodes.links
        return None if links is None else links.successor[index.to(links.successor.device)]

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules: environment steps collected and updates made, since the start of training."""
        for name, reading in (("env_steps", env_steps), ("updates", updates)):
            if reading is not None and (type(reading) is not int or reading < 0):
                checked_count(name, reading, 0)
        if self._prefetch_queue:
            self._ahead.wait()
        with self._replay_lock, self._write_lock:  # before every update of an agent, so without _changing
            self.fork_guard.check()
            self.parts.advance(env_steps, updates)

    def group_totals(self) -> GroupTotals:
        """Returns what the stored rows add up to, for a :class:`~lightning_replay.divided_draws.Divider`."""
        with self._changing():  # a sampler may read rows that were stored before it was attached
            check_divisible(self._sampler)
            return self.parts.sampler.group_totals(self._storage)

    def raise_max_priority(self, priority: float) -> None:
        """Raises the largest priority so far, before any exponent, which new rows get, to that of other replays."""
        priority = checked_number("priority", priority, 0.0)
        with self._changing():
            self.parts.sampler.raise_max_priority(priority)

    def seed(self, seed: int) -> None:
        """Restarts the draws of sampler, transforms and writer from ``seed``."""
        checked_seed(seed)
        with self._changing():
            if self._torchrl_generator is not None:
                self._torchrl_generator.manual_seed(seed)
            self.parts.seed(seed)

    @property
    def saved_parts(self) -> SavedParts:
        """The objects whose states a save holds.

        :meta private:
        """
        return SavedParts(
            storage=self._storage,
            sampler=self._sampler,
            writer=self._writer,
            transform=self._transform,
            episodes=self._episodes,
            feedback=self._feedback,
            generator=self._torchrl_generator,
            prefetch=self._ahead,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of all that decides the next draws: rows, priorities, generators, batches drawn ahead."""
        return read_state(self)

    @property
    def entered(self) -> Replay:
        """The replay itself, which new rows enter."""
        return self

    @property
    def has_snapshots(self) -> bool:
        """Whether rows are written while a save reads them as they were, as in a ``PackedStorage``.

        :meta private:
        """
        return self._packed is not None

    def frozen_state(self) -> AbstractContextManager[dict[str, Any]]:
        return frozen_state(self)

    def save(self, path: str | Path, *, previous: str | Path | None = None) -> None:
        """Saves the buffer into a directory. See :func:`lightning_replay.save_replay`."""
        save_replay(self, path, previous=previous)

    dumps: Any = save  # TorchRL's names
    loads: Any = load


def _columns_of(rows: TensorDictBase) -> dict[tuple[str, ...], Tensor]:
    columns = {key: value for key, value in rows.items(True, True) if isinstance(value, Tensor)}
    return {(key,) if isinstance(key, str) else key: value for key, value in columns.items()}


def copied_into(out: TensorDictBase, batch: TensorDictBase) -> TensorDictBase:
    """Copies a batch into the tensors of ``out``, and returns ``out``."""
    check_kind("out", out, TensorDictBase, "a batch that sample returned")
    kinds = [{key: (v.dtype, v.device, tuple(v.shape)) for key, v in one.items(True, True)} for one in (out, batch)]
    if kinds[0] != kinds[1]:
        different = sorted(map(str, kinds[0].items() ^ kinds[1].items()))
        raise ValueError(
            f"out is not a batch like the one that was drawn, {list(batch.shape)}; they differ in {different[:4]}. "
            "Give a batch that sample of this buffer returned for the same batch_size"
        )
    for key, value in batch.items(True, True):
        out.get(key).copy_(value, non_blocking=True)
    return out


def given_batch_size(batch_size: int | None, capacity: int) -> int:
    return min(256, capacity) if batch_size is None else checked_count("batch_size", batch_size, of="transitions")
