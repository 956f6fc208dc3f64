# SPDX-License-Identifier: Apache-2.0
"""TorchRL's replay buffer with packed rows, generations and feedback that reaches the right row.

Longer than other files because it has the ways of a row in, of a batch out, of a TD error back and of an episode's end,
which change sampler, writer, storage and episodes together or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import RoundRobinWriter, Sampler, SliceSampler, Storage, Writer
from torchrl.envs import MultiStepTransform, Transform

from lightning_replay.argument_names import method_for
from lightning_replay.assembled import AssembledReplay, check_parts
from lightning_replay.declared import declared_sampler
from lightning_replay.divided_draws import DrawPart, PartDraw, SamplerOfPart
from lightning_replay.episodes.links import with_real_ends
from lightning_replay.episodes.n_step import refuse_formed
from lightning_replay.episodes.running import newest_running, slots_by_age, stored_trajectories
from lightning_replay.episodes.tracker import EpisodeTracker
from lightning_replay.late_updates import Feedback
from lightning_replay.parts import Drawing, Insertion, ReplayTransform, SamplerHooks, WriterHooks
from lightning_replay.priority_updates import (
    check_values,
    given_priority,
    real_numbers,
    row_generations,
    row_numbers,
    td_error_of,
)
from lightning_replay.samplers.slices import SliceCheck
from lightning_replay.samplers.uniform import UniformSampler
from lightning_replay.saving.spec import recorded
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.storage.rows_of_columns import as_rows, rows_of_columns
from lightning_replay.storage.transition_check import (
    Column,
    ContradictingFlags,
    TransitionCheck,
    normalized,
)
from lightning_replay.training_replay import TrainingReplay
from lightning_replay.validation import check_callable, checked_count, checked_flag, checked_seed, did_you_mean
from lightning_replay.writers.first_in_first_out import FirstInFirstOutWriter

logger: logging.Logger = logging.getLogger(__name__)

# What rows may change although they are refused: what transforms keep back, and whether they fix a storage's columns.
_EntryState = tuple[list[tuple[ReplayTransform, Any]], bool]

#: Feedback of ``update_priority`` beside TD errors.
SIGNALS = ("action_values", "action", "surprise")


@recorded
class Replay(AssembledReplay, TrainingReplay):
    """A writer, a sampler and a transform over one storage: every replay method is a choice of the three.

    :meth:`extend` stores transitions, :meth:`sample` draws a batch, :meth:`update_priority` returns TD errors to their
    rows. A TorchRL ``TensorDictReplayBuffer``: transforms, prefetching and ``set_rng`` work, and TorchRL's collectors
    take it. The functions in :mod:`lightning_replay.recipes` build the published methods.

    Args:
        storage: usually :class:`~lightning_replay.storage.PackedStorage`.
        sampler: which rows; uniform by default.
        writer: where rows go and which leave; first in, first out by default.
        transform: what happens to a batch once it is drawn (and, inversely, to rows before they are stored).
        batch_size: rows per batch; by default 256, or the capacity where it is smaller.
        n_steps: rewards summed into one return, formed when a row is drawn; 1 leaves rows as they are.
        discount: γ of that return.
        priority_key: the column from which :meth:`update_tensordict_priority` reads TD errors.
        prefetch: batches drawn ahead in a thread. Their priorities are as old as they have waited.
        check_finite: refuse NaN and infinity in rewards and observations, see
            :class:`~lightning_replay.storage.transition_check.TransitionCheck`. About 5 % of the time of an insert of
            64 rows.
        check_continuity: returns over several steps go on to the next row only if that row starts with the observation
            that the row before ended with, bit for bit, see :class:`~lightning_replay.episodes.links.Continuity`. Turn
            it off where observations change between two steps: wrappers that draw noise each time they are read, or
            that normalize stored observations by statistics which move on. Samplers, writers and transforms that follow
            episodes have an option of the same name.
        seed: of sampler, transform and writer; ``None`` leaves their generators as they are.

    Sampled keys:
        index: int64 ``[B]``, or ``[B, 2]`` for samplers of pairs.
        generation: int64 ``[B]`` (``[B, 2]`` when both of a pair get feedback), how often the slot had been written.
        priority_weight: float32 ``[B]``, with a prioritized sampler.
        discount, steps_to_next_obs: ``[B, 1]``, with ``n_steps`` above 1.

    Raises:
        TypeError: an option of another kind; parts that do not work together, such as a sampler of tables and a writer
            without.
        ValueError: ``batch_size`` is not positive or above the capacity; a sampler with fewer slots than the storage;
            TorchRL's ``SliceSampler`` with a writer that keeps no order of time.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from lightning_replay import PackedStorage
        >>> replay = Replay(storage=PackedStorage(capacity=100), batch_size=4, seed=0)
        >>> index = replay.extend(TensorDict({"observation": torch.randn(10, 3)}, [10]))
        >>> replay.sample()["observation"].shape
        torch.Size([4, 3])
    """

    last_insertion: Insertion
    awaits_new_episodes: bool  #: Whether the episodes that ran in loaded files end before the next rows are stored.

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
        check_continuity: bool = True,
        seed: int | None = None,
    ) -> None:
        kinds = {"storage": (storage, Storage), "sampler": (sampler, Sampler), "writer": (writer, Writer)}
        for name, (part, kind) in kinds.items():
            if not isinstance(part, kind) and not (part is None and name != "storage"):
                raise TypeError(f"{name} is {part!r}; it must be a {kind.__name__} of TorchRL or of this library")
        if transform is not None and not isinstance(transform, Transform):
            check_callable("transform", transform, "a Transform of TorchRL or of this library, or a callable")
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
        self._feedback = Feedback()
        self.awaits_new_episodes = False
        self._row_check = TransitionCheck(checked_flag("check_finite", check_finite))
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

    if not TYPE_CHECKING:  # which would then take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Raises for a name that is missing; for one of another library the error names ours."""
            ours = method_for(name)
            if ours is None:
                return object.__getattribute__(self, name)  # raises the original error
            raise AttributeError(f"{type(self).__name__} has no {name!r}; {ours}", name=name, obj=self)

    @property
    def awaits_priorities(self) -> bool:
        """Whether something here takes feedback and has had no :meth:`update_priority` since the last draw."""
        return self.takes_feedback and self._feedback.draws_since_update > 0

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """Stores transitions; the rows are copied.

        Args:
            tensordicts: TensorDict ``[N]``, rows of one trajectory in time order. ``("next", "done")`` is derived from
                ``terminated`` and ``truncated`` where it is absent; rewards and flags ``[N]`` are stored as ``[N, 1]``.
                Rows for which a bool column ``("collector", "mask")`` or ``mask`` of one entry each is false are
                padding and left out; with it, trajectories ``[N, T]`` are taken as well.
            update_priority: whether a column ``priority_key`` among them sets their priorities; yes by default.

        Returns:
            int64, their slots; of those that entered, where the writer refuses some.

        Raises:
            TypeError: not a TensorDict; a ``trajectory`` that is not of an integer dtype.
            ValueError: an empty batch, rows that do not fit the stored columns or lack what a part of the buffer needs,
                returns over several steps where the buffer or a transform forms such returns, rows that are terminated
                or truncated but not done, NaN or infinite rewards, observations or TD errors (rows that are all
                truncated, as TorchRL's trainers give them, are done where no row continues them). Nothing is changed
                then, whichever part refuses.
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
        CPU that follow others into a :class:`~lightning_replay.storage.PackedStorage`, unless a transform, a sampler
        that checks rows, a called condition or a writer of your own reads them.

        Args:
            columns: arrays or tensors ``[N, ...]``, all with the same N, by key: a name, or for a nested column a tuple
                of names such as ``("next", "reward")``. Dtypes and shapes are those of the stored columns, as for
                :meth:`extend`; a reward is float32 where the first ones were. They are copied.

        Returns:
            int64, their slots, as :meth:`extend`.

        Raises:
            TypeError: no mapping, a key that is no name, or a value that is neither an array of numbers nor a tensor.
            ValueError: columns of several lengths, a name that is both a column and a branch, or rows that
                :meth:`extend` refuses. Nothing is changed.

        Example:
            >>> replay = Replay(storage=PackedStorage(capacity=100), batch_size=4, seed=0)
            >>> reward = np.ones((1, 1), dtype=np.float32)
            >>> columns = {"observation": np.zeros((1, 3), dtype=np.float32), ("next", "reward"): reward}
            >>> replay.extend_columns(columns), replay.extend_columns(columns)
            (tensor([0]), tensor([1]))
        """
        if type(self).extend is Replay.extend and (type(columns) is dict or isinstance(columns, Mapping)):
            return self._enter(columns, True)
        return self.extend(rows_of_columns(columns))

    def _attach_parts(self) -> None:
        super()._attach_parts()
        self._checks_rows = type(self._sampler_hooks).check_rows is not SamplerHooks.check_rows

    def _enter(self, rows: Any, takes_priorities: bool) -> Tensor:
        """Stores rows, a TensorDict or columns by key; see :meth:`extend`."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # what is kept of the rows is written to later
                return self._enter(rows, takes_priorities)
        if self._prefetch_queue:
            self._wait_for_draws()
        try:
            with self._replay_lock, self._write_lock:
                if self._refusal is not None:
                    self._check_usable()
                if self.awaits_new_episodes:
                    self._end_saved_episodes()
                if self._packed is not None and not (self._has_transforms and self._changes_rows):
                    columns = self._packed.read(rows)
                    if columns is not None:  # rows like those stored, which need no preparation
                        return self._store(rows, columns, takes_priorities)
                return self._prepare_and_store(as_rows(rows), takes_priorities)
        except ContradictingFlags:
            ended = with_real_ends(as_rows(rows))
            if ended is None:
                raise
        return self._enter(ended, takes_priorities)

    def _prepare_and_store(self, rows: TensorDictBase, takes_priorities: bool) -> Tensor:
        """Stores rows, without padding and with all flags, as the transforms change them."""
        if 0 in rows.shape:  # before a transform refuses it in its own words, or keeps it
            raise wrong_shape(rows)
        rows = normalized(rows)
        before = self._entry_state()
        try:
            if self._has_transforms and 0 not in rows.shape:
                if before[0]:  # steps that do not reach the storage yet
                    self._check_columns(rows)
                if not len(self._storage):
                    for one in self._transforms:
                        refuse_formed(rows, one.n_steps if isinstance(one, MultiStepTransform) else 1)
                rows = self._transform.inv(rows)
            if rows is None or 0 in rows.shape:  # transforms keep all back, or all are padding
                self._writer_hooks.insert_nothing()
                return torch.zeros(0, dtype=torch.int64, device="cpu")
            return self._check_and_store(rows, takes_priorities)
        except BaseException:  # whatever a function raises that was given to writer, sampler or transform
            self._undo_entry(before)
            raise

    def flush(self, trajectories: Iterable[int] | None = None) -> Tensor:
        """Flushes partial n-step transitions, formed before they are stored, when collecting or episodes break off.

        Args:
            trajectories: ids of the episodes that broke off; ``None`` for all.

        Returns:
            int64, slots of the rows that entered.
        """
        slots = [torch.zeros(0, dtype=torch.int64, device=self._storage.device)]
        with self._changing():
            for transform in (one for one in self._own_transforms() if one.delays_rows):
                before = self._entry_state()
                try:
                    formed = transform.flush(trajectories)
                    if formed is not None:
                        slots.append(self._check_and_store(formed, takes_priorities=True))
                except BaseException:
                    self._undo_entry(before)
                    raise
        return torch.cat(slots)

    def _entry_state(self) -> _EntryState:
        is_first = self._packed is not None and not self._packed.has_columns
        return [(one, one.pending) for one in self._own_transforms() if one.delays_rows], is_first

    def _undo_entry(self, before: _EntryState) -> None:
        pending, is_first = before
        for transform, kept in pending:
            transform.pending = kept
        if is_first:
            self._storage.undo_entry()

    def _check_columns(self, rows: TensorDictBase) -> None:
        columns = {key: value for key, value in rows.items(True, True) if isinstance(value, Tensor)}
        self._row_check({(key,) if isinstance(key, str) else key: value for key, value in columns.items()})

    def _check_and_store(self, rows: TensorDictBase, takes_priorities: bool) -> Tensor:
        """Stores rows that have passed the transforms and that the storage has not read yet."""
        if rows.ndim != 1 or rows.shape[0] == 0:
            raise wrong_shape(rows)
        first_rows, columns = len(self._storage) == 0, None
        if self._packed is None:
            self._check_columns(rows)
        elif isinstance(self._writer, WriterHooks):  # TorchRL's may add columns of their own
            columns = self._packed.checked_values(rows)
        if first_rows and len(self._transforms):
            self._try_transforms(rows)
        index = self._store(rows, columns, takes_priorities)
        if first_rows:
            logger.info("replay buffer of capacity %d takes %s bytes", self.capacity, f"{self.nbytes:,}")
        return index

    def _store(self, rows: Any, columns: Sequence[Column] | None, takes_priorities: bool) -> Tensor:
        """Stores checked rows; whatever may refuse them comes before the writer writes.

        Args:
            rows: TensorDict ``[N]``, or columns by key where the storage has read these.
            columns: what the storage read; ``None`` for TorchRL's storages and writers.
            takes_priorities: whether a column ``priority_key`` sets priorities.
        """
        sampler, writer, priority = self._sampler_hooks, self._writer_hooks, None
        if sampler.uses_priorities and takes_priorities:
            if columns is None or self._storage.has_column(self.priority_key):
                rows = as_rows(rows)
                priority = rows.get(self.priority_key, None)
            if priority is not None:
                priority = given_priority(priority, rows.shape[0])
                sampler.check_priority(priority)
        if self._checks_rows:
            sampler.check_rows(as_rows(rows))
        if self._episodes is not None and self._episodes.links is None:
            self._episodes.check_rows(as_rows(rows))
        if columns is not None and writer.takes_columns:
            inserted = writer.insert_columns(columns, rows)
        else:
            inserted = writer.insert(as_rows(rows))
        self.last_insertion, index = inserted, inserted.slots
        if index.numel():
            self._sampler.extend(index)
            if priority is not None:
                self._sampler.update_priority(index, priority[inserted.rows], storage=self._storage)
        if self._episodes is not None:
            self._episodes.warn()
        return index

    def _try_transforms(self, rows: TensorDictBase) -> None:
        """Refuses first rows that this library's transforms cannot turn into a batch."""
        batch = rows[:1].clone()
        if self._sampler_hooks.draws_pairs:
            batch = torch.stack((batch, batch), 1)
        before = _draw_states(self._transforms)
        try:
            for transform in self._transforms:
                if not type(transform).__module__.startswith("lightning_replay."):
                    break  # a user's or TorchRL's may need columns of the sampler, and make what the next ones need
                batch = transform(batch)
        finally:
            _undo_draws(before)

    def add(self, data: TensorDictBase) -> Tensor:
        """Stores one transition of batch size ``[]``; see :meth:`extend`."""
        if not isinstance(data, TensorDictBase):
            raise TypeError(f"add takes one transition, a TensorDict of batch size []; got {type(data).__name__}")
        if data.batch_dims:
            raise ValueError(
                f"add takes one transition, of batch size []; got {list(data.shape)}. Call extend for several"
            )
        return self.extend(data.unsqueeze(0))

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
            ValueError: ``batch_size`` is not positive; slices of rows in which several episodes are interleaved.
        """
        if self._refusal is not None:
            self._check_usable()
        if batch_size is None:
            batch_size = self._batch_size
        elif batch_size != self._batch_size:
            batch_size = checked_count("batch_size", batch_size, of="transitions")
        if self._prefetch and batch_size == self._batch_size:
            data, info = self._next_prefetched(batch_size)
        else:
            if self._prefetch_queue:
                self._wait_for_draws()
            data, info = self._sample(batch_size)
        self._feedback.last_index = info["index"]
        self._feedback.draws_since_update += 1
        if return_info and "generation" not in info and data.get("generation", None) is not None:
            info["generation"] = data.get("generation")
        return (data, info) if return_info else data

    def sample_part(self, part: DrawPart) -> tuple[TensorDictBase, PartDraw]:
        """Draws the rows of a batch that is divided over several replays; see :mod:`lightning_replay.divided_draws`.

        Args:
            part: of n rows, what :meth:`Divider.divide <lightning_replay.divided_draws.Divider.divide>` returned for
                this replay.

        Returns:
            A TensorDict ``[n]`` as :meth:`sample` returns it, without weights, and what the divider needs for them.

        Raises:
            TypeError: draws of the sampler cannot be divided.
            ValueError: the part has no rows.
            RuntimeError: there is nothing to draw from. Nothing is changed then.
        """
        if self._refusal is not None:
            self._check_usable()
        sampler = SamplerOfPart(self._sampler_hooks, part)
        if self._prefetch_queue:
            self._wait_for_draws()
        data, info = self._sample(len(part), sampler)
        self._feedback.last_index = info["index"]
        self._feedback.draws_since_update += 1
        return data, sampler.reply

    def _sample(self, batch_size: int, sampler: Any = None) -> tuple[TensorDictBase, dict[str, Any]]:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._sample(batch_size, sampler)
        with self._replay_lock, self._write_lock:
            storage, packed, episodes = self._storage, self._packed, self._episodes
            sampler = self._sampler if sampler is None else sampler
            # A batch that is just rows: packed, single, neither summed nor transformed.
            is_plain = packed is not None and episodes is None and not self._has_transforms
            before: list[tuple[Drawing, Any]] = []
            if not (is_plain and self._sampler_hooks.refuses_unchanged):
                if isinstance(sampler, SliceSampler) and isinstance(self._writer, RoundRobinWriter):
                    self._check_slices(sampler, storage, self._writer, batch_size)
                before = _draw_states([sampler, *self._transforms])
            try:
                index, info = sampler.sample(storage, batch_size)
                if self._checks_draws and not isinstance(index, tuple):
                    self._check_draw(index, batch_size)
                if isinstance(index, tuple):  # TorchRL's slices
                    index = index[0]
                elif is_plain:
                    info["index"] = index
                    return storage.get(index, extra=info), info
                data, generation, transforms = self._read(index)
                for transform in transforms:
                    data = transform(data)
                info["index"] = index
                if generation is not None:
                    info["generation"] = generation if self._sampler_hooks.update_partners else data.get("generation")
                for key, value in info.items():
                    if data.get(key, None) is not value:
                        data.set(key, value)
                return data, info
            except BaseException:  # a draw that fails is none: the next one is what it would have been
                _undo_draws(before)
                raise

    def _read(self, index: Tensor) -> tuple[TensorDictBase, Tensor | None, list[Transform]]:
        """Returns the rows that were drawn, their generations, and the transforms that are still to be applied."""
        packed, episodes, transforms = self._packed, self._episodes, [*self._transforms]
        first: Any = transforms[0] if transforms and self._sampler_hooks.draws_pairs else None
        mixes = isinstance(first, ReplayTransform) and first.mixes_stored
        if mixes and type(packed) is PackedStorage and episodes is None:
            data = first.mix_stored(packed, index)
            both = self._sampler_hooks.update_partners
            return data, packed.generation_of(index) if both else data.get("generation"), transforms[1:]
        if packed is not None:
            data = packed.get(index, extra={"index": index})
        else:
            data = self._collate_fn(self._storage.get(index))
            data = (data.copy() if data.is_locked else data).set("index", index)
        if episodes is not None:
            data = episodes.draw(data, index, self._storage)
        return data, data.get("generation", None), transforms

    def _check_draw(self, index: Any, batch_size: int) -> None:
        """Refuses what a user's sampler drew where it is not slots."""
        shape = (batch_size, 2) if self._sampler_hooks.draws_pairs else (batch_size,)
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.shape != shape:
            got = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
            raise ValueError(
                f"sample of {type(self._sampler).__name__} returned {got}, and a batch needs slots, int64 {list(shape)}"
                " (pairs, [B, 2], of a sampler with draws_pairs = True)"
            )

    def update_priority(
        self,
        index: Tensor | TensorDictBase,
        td_error: Tensor | None = None,
        *,
        generation: Tensor | None = None,
        **signals: Any,
    ) -> None:
        """Returns TD errors to the rows they belong to; a sampler without priorities ignores them.

        Args:
            index: the batch that was drawn, whose ``index`` and ``generation`` are used; or the ``index`` alone, int64
                ``[B]`` or ``[B, 2]``.
            td_error: signed, ``[B]`` or ``[B, 1]``; the magnitude becomes the sampler's priority. May be left out where
                only the writer takes feedback and ``signals`` hold all of it. TorchRL's name ``priority`` is accepted.
            generation: with an index alone, the batch's ``generation``. Rows whose slot was written or emptied since
                are dropped and counted; without it they are only dropped if the slot is empty.
            signals: further feedback for a :class:`~lightning_replay.writers.RetentionWriter`: ``action_values``
                ``[B, A]`` with ``action``, and ``surprise`` ``[B]`` in place of the squared TD error. Other writers
                ignore them.

        Raises:
            TypeError: a signal of another name; complex TD errors; a batch without ``index``; an ``index`` or a
                ``generation`` that is no tensor, or a ``generation`` that is not of an integer dtype.
            ValueError: NaN or infinite TD errors, another number of them than of rows, none where they are needed;
                signals that the writer refuses. Nothing is changed.
            IndexError: an index that is not stored; nothing is changed.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.update_priority(index, td_error, generation=generation, **signals)
        if self._takes_batches and not signals and self._update_directly(index, td_error, generation):
            return
        td_error = td_error_of(td_error, signals)
        if isinstance(index, TensorDictBase):
            batch, index = index, index.get("index", None)
            if index is None:
                raise TypeError(
                    f"update_priority got a batch without 'index'; it has {sorted(map(str, batch.keys()))}. Give the "
                    "batch that sample() returned"
                )
            generation = batch.get("generation", None) if generation is None else generation
        index = row_numbers("index", index, "the batch that was drawn, or its 'index', int64 [B] or [B, 2]")
        if generation is not None:
            generation = row_generations(generation)
        for name in signals:
            known = (*SIGNALS, *self._writer_hooks.signals)
            if name not in known:
                raise TypeError(
                    f"update_priority got the signal {name!r}; the signals are {', '.join(dict.fromkeys(known))}"
                    f"{did_you_mean(name, known)}"
                )
        if td_error is not None:
            td_error = real_numbers("td_error", td_error, "No priority was changed")
        writer, sampler = self._writer_hooks, self._sampler_hooks
        needs_feedback, is_prioritized = writer.needs_feedback, sampler.uses_priorities
        if not needs_feedback and not is_prioritized:
            self._feedback.draws_since_update = 0
            return
        if self._prefetch_queue:
            self._wait_for_draws()
        with self._replay_lock, self._write_lock:
            if self._refusal is not None:
                self._check_usable()
            if td_error is None and is_prioritized:
                raise ValueError(
                    f"td_error is None, and {type(self._sampler).__name__} draws by TD errors; give one for each row "
                    "of the batch. No priority was changed"
                )
            feedback = writer.read_feedback(len(index), td_error, signals) if needs_feedback else None
            # On a GPU a slot out of range ends the process, so slots are checked before anything is read there.
            device = self._storage.device  # None where TorchRL's storage was given none
            on_cpu = device is None or device.type == "cpu"
            sampler_checks = is_prioritized and sampler.checks_priorities and on_cpu
            checked = self._feedback.check(index, td_error, generation, self._storage, sampler_checks=sampler_checks)
            if is_prioritized:
                try:
                    self._sampler.update_priority(checked.index, checked.magnitude, storage=self._storage)
                except (ValueError, IndexError):
                    check_values(checked.index, checked.magnitude, len(self._storage))  # names what
                    raise
            if needs_feedback:
                writer.update_priority(checked.index, feedback, both=sampler.update_partners)
            self._feedback.count(len(checked.index), checked.num_late)

    def _update_directly(self, index: Any, td_error: Any, generation: Any) -> bool:
        """Returns TD errors of a batch as it was drawn in one pass; ``False``, nothing changed, for anything else."""
        if isinstance(index, TensorDictBase):
            generation = index.get("generation", None) if generation is None else generation
            index = index.get("index", None)
        if self._prefetch_queue:
            self._wait_for_draws()
        with self._replay_lock, self._write_lock:
            if self._refusal is not None:
                self._check_usable()
            late = self._sampler_hooks.update_held(index, td_error, generation, self._storage)
            if late is not None:
                self._feedback.count(len(index), late)
            return late is not None

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Returns the TD errors in ``data[priority_key]`` to the rows of ``data["index"]``."""
        if self.takes_feedback:
            td_error = data.get(self.priority_key, None)
            if td_error is None and self.is_prioritized:
                raise ValueError(
                    f"the batch has no {self.priority_key!r}, from which priorities are updated; it has "
                    f"{sorted(map(str, data.keys()))}. Write the TD errors there, or call "
                    "update_priority(batch, td_error). No priority was changed"
                )
            self.update_priority(data, td_error)

    def empty(self, empty_write_count: bool = True) -> None:
        """Removes every transition, the prefetched ones too; the slots' generations continue."""
        with self.unchanged():
            if self._packed is not None:
                self._packed.check_writable()
            self._prefetch_queue.clear()
            super().empty(empty_write_count)
            self.awaits_new_episodes = False
            self._feedback.forget()
            self._check_slices = SliceCheck()
            if self._episodes is not None:
                self._episodes.clear()
            for transform in self._own_transforms():
                transform.clear()

    def stats(self) -> dict[str, Any]:
        """Returns TorchRL's counters, bytes, ages of the last batch (in transitions), and counts of updates.

        Where frames are stored once also ``frames_held``, ``frame_capacity``, ``frame_bytes`` and
        ``frames_per_transition``, and ``bytes_per_transition`` is by the transitions held, else by the capacity; of a
        :class:`~lightning_replay.samplers.PrioritizedSampler` and of a
        :class:`~lightning_replay.writers.RetentionWriter` their own ``stats``.
        """
        rows = self.capacity if self._packed is None else self._packed.rows_in_memory
        stats = super().stats() | self._feedback.stats(self._writer_hooks.age_of) | self._writer_hooks.stats()
        stats |= declared_sampler(self._sampler_hooks.base_sampler).stats()
        stats |= {"nbytes": self.nbytes, "bytes_per_transition": self.nbytes / rows}
        return stats if self._packed is None else stats | self._packed.stats()

    def oldest_first(self) -> Tensor:
        """Returns the slots of the stored rows, int64 ``[N]``, in the order in which they were given.

        Raises:
            ValueError: the writer keeps no order of rows.
        """
        in_order = slots_by_age(self._storage, self._writer_hooks)
        if in_order is None:
            raise ValueError(
                f"{type(self._writer).__name__} keeps no order of its rows; define age_of as "
                "lightning_replay.parts.ReplayWriter has it, or use a writer of lightning_replay.writers"
            )
        return in_order

    def follow_episodes(self, episodes: EpisodeTracker) -> None:
        """Forms n-step rows along ``episodes`` from the next draw on, after linking the stored rows, oldest first.

        For a caller that gets the length of its returns only when it draws; otherwise give ``n_steps`` when building.

        Raises:
            ValueError: rows are stored, and the writer keeps no order of them, or their rewards are returns already.
        """
        with self._replay_lock, self._write_lock:
            episodes.check_continuity = self._checks_continuity
            if len(self._storage):
                in_order = self.oldest_first()
                episodes.check_rows(self._storage.get(in_order[:1]))
                episodes.mark_update(in_order, self._storage)
            self._episodes = episodes

    def end_episodes(self, trajectories: Iterable[int] | None = None) -> Tensor:
        """Ends running episodes whose environments were closed, reset or lost: nothing follows their stored rows.

        Steps that a transform keeps back are stored first, as returns over the steps there are. Then the newest row of
        each episode is marked truncated and done, so that returns, pairs and histories end there. Where that may not be
        the last step of its episode (a writer that refuses rows or keeps no order, returns formed before they are
        stored), and in a storage of TorchRL's, it is not marked, and only later rows are kept apart from it. Reads all
        rows once, O(N).

        Args:
            trajectories: ids of the episodes, where rows have them; ``None`` for all that run.

        Returns:
            int64, slots of the rows that were stored by this call.
        """
        packed, writer = self._packed, self._writer_hooks
        named = None if trajectories is None else list(trajectories)
        stored = self.flush(named)
        with self._changing():
            self.awaits_new_episodes &= named is not None
            in_order = None if writer.may_refuse or packed is None else slots_by_age(packed, writer)
            if in_order is None or packed is None:
                self.break_episodes(stored_trajectories(self._storage) if named is None else named)
                return stored
            index, running = newest_running(packed, in_order, named)
            if any(one.delays_rows for one in self._own_transforms()):
                self.break_episodes(running)
            elif len(index):
                self._mark_ends(index)
            writer.cut(index)
        return stored

    def _end_saved_episodes(self) -> None:
        """Ends the episodes that ran when the loaded files were saved: the environments that played them are gone.

        Called before the first rows that come after it; until then contents and draws are those that were saved.
        """
        self.awaits_new_episodes = False
        self.end_episodes()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, from a buffer built with the same options.

        Raises:
            TypeError: no dictionary.
            ValueError: the state of another buffer, or of something else; nothing is changed.
        """
        super().load_state_dict(state_dict)
        self.awaits_new_episodes = False

    def load(self, path: str | Path, *, end_episodes: bool = True) -> None:
        """Restores a saved buffer into this one, which must have been built with the same options; imports nothing.

        Episodes that ran when it was saved end before the next rows are stored, as by :meth:`end_episodes`.

        Args:
            path: a directory that :meth:`save` wrote.
            end_episodes: ``False`` continues them, where the environments were restored with the buffer.

        Raises:
            FileNotFoundError, DamagedFileError, ValueError: as :func:`lightning_replay.load_replay`; nothing is loaded.
        """
        ends = checked_flag("end_episodes", end_episodes)
        super().load(path)
        self.awaits_new_episodes = ends

    def truncate(self, index: Tensor, generation: Tensor) -> None:
        """Marks the newest rows of interrupted episodes truncated and done, where the slots still hold them.

        Args:
            index: int64 ``[N]``, the newest row of each interrupted episode.
            generation: int64 ``[N]``, of these rows.
        """
        assert self._packed is not None, "truncate needs a PackedStorage"
        with self._changing():
            index = index[self._packed.generation_of(index) == generation]
            if len(index):
                self._mark_ends(index)
                self._writer_hooks.cut(index)


def _draw_states(parts: Iterable[Any]) -> list[tuple[Drawing, Any]]:
    """Returns the parts that draw, each with its state."""
    return [(part, part.draw_state()) for part in parts if isinstance(part, Drawing)]


def _undo_draws(before: list[tuple[Drawing, Any]]) -> None:
    for part, state in before:
        part.undo_draw(state)


def given_batch_size(batch_size: int | None, capacity: int) -> int:
    """Returns the batch size that was given; without one 256, or the capacity where it is smaller."""
    return min(256, capacity) if batch_size is None else checked_count("batch_size", batch_size, of="transitions")


def wrong_shape(rows: TensorDictBase) -> ValueError:
    """Returns the error for rows that are not of batch size ``[N]``, or are none."""
    return ValueError(
        f"extend takes transitions of batch size [N] with N >= 1; got {list(rows.shape)}. Flatten time and "
        "environments first (reshape(-1)), build columns as TensorDict(..., batch_size=[N]), or call add for a single "
        "transition. Rows padded by split_trajs are taken as they are with their mask, ('collector', 'mask')"
    )
