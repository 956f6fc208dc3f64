# SPDX-License-Identifier: Apache-2.0
"""Base classes of the samplers, writers and transforms of a :class:`~lightning_replay.Replay`, and their state.

A part is one of TorchRL's and works in TorchRL's buffers too. The base classes here add what a ``Replay`` calls
besides, every method with a default that does nothing, so that a part defines only what it needs. TorchRL's own parts
get the defaults from :mod:`lightning_replay.parts`.

The life of a row is described at :class:`~lightning_replay.Replay`. Of a sampler it calls ``check_rows``, which may
refuse new rows, ``mark_update`` with the slots of stored rows, ``sample``, ``set_priorities``, and ``on_evict`` with
slots that are released. Of a writer it calls ``insert``, and ``update_priority`` if it accepts feedback.

Shapes: N rows given, n rows stored, B rows of a batch. Slots are int64.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import Module
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RoundRobinWriter,
    Sampler,
    Storage,
    TensorDictReplayBuffer,
    Writer,
)
from torchrl.envs import Transform

from lightning_replay.deferred_checks import DeferredChecks
from lightning_replay.jit import BreaksGraphs
from lightning_replay.saving import load_state, write_state
from lightning_replay.saving.spec import rebuildable
from lightning_replay.state import SeededStateful
from lightning_replay.torchrl_compat import attached_buffers, most_priorities, next_slot, storage_of, writer_of

__all__ = [
    "BufferHooks",
    "Insertion",
    "ReplaySampler",
    "ReplayTransform",
    "ReplayWriter",
    "SeededStateful",
    "WriterHooks",
    "rebuildable",
]


@dataclass(frozen=True, eq=False)
class GroupTotals:
    """What the rows of one replay add up to, by group: the rows that are drawn from with a separate share.

    A uniform or prioritized sampler has one group, a sampler of tables one for each table.

    Attributes:
        names: of the groups, the same in all replays that a draw is divided over.
        mass: float64 ``[G]``, the sum of what rows are drawn in proportion to, or their number if all are alike.
        rows: int64 ``[G]``, the number of rows.
        smallest: float64 ``[G]``, the smallest positive term of ``mass``, infinity if there is none.
        max_priority: the largest priority given so far, before any exponent, not positive if there was none.
    """

    names: list[str]
    mass: np.ndarray
    rows: np.ndarray
    smallest: np.ndarray
    max_priority: float = -1.0

    @classmethod
    def alike(cls, rows: int | np.ndarray, names: Sequence[str] = ("rows",)) -> GroupTotals:
        """Returns the totals of groups in which each row is equally likely.

        Args:
            rows: of each group, int64 ``[G]``, or of the only one.
            names: of the groups.

        Example:
            >>> GroupTotals.alike(3)
            GroupTotals(names=['rows'], mass=array([3.]), rows=array([3]), smallest=array([1.]), max_priority=-1.0)
        """
        count = np.array(rows, dtype=np.int64, ndmin=1)  # a copy
        return cls([*names], count.astype(np.float64), count, np.where(count > 0, 1.0, np.inf))

    @classmethod
    def summed(cls, totals: Sequence[GroupTotals]) -> GroupTotals:
        """Returns the totals of the rows of all these replays, at least one."""
        return cls(
            totals[0].names,
            np.sum([one.mass for one in totals], axis=0),
            np.sum([one.rows for one in totals], axis=0),
            np.min([one.smallest for one in totals], axis=0),
            max(one.max_priority for one in totals),
        )


@dataclass(frozen=True, eq=False)
class ShardRequest:
    """The rows of a batch that one replay draws, made by :class:`~lightning_replay.divided_draws.Divider`.

    Attributes:
        groups: int64 ``[n]``, the group of each row, ascending.
        points: float64 ``[n]`` in [0, 1), the place of each row in the mass of the group in this replay: row i is drawn
            with its part of that mass, whatever has changed since the draw was divided.
        shares: float64 ``[G]``, how likely a row of the batch is of each group.
        fractions: float64 ``[G]``, the part of each group's mass that this replay had when the draw was divided.
        rows: int64 ``[G]``, rows of each group in all replays at that time.
    """

    groups: np.ndarray
    points: np.ndarray
    shares: np.ndarray
    fractions: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True, eq=False)
class ShardDraw:
    """What a replay returns beside the rows of a :class:`ShardRequest`, in the same order.

    Attributes:
        probability: float64 ``[n]``, of each row in a draw from its group in this replay.
        totals: of the replay at the draw.
        correction: float64 ``[n]``, what the sampler multiplies the weights of these rows by, or ``None`` if nothing.
    """

    probability: np.ndarray
    totals: GroupTotals
    correction: np.ndarray | None = None


_NO_SLOTS = torch.zeros(0, dtype=torch.int64, device="cpu")


class Insertion(NamedTuple):
    """The rows that a writer stored.

    Attributes:
        slots: int64 ``[n]``, in the order of the rows.
        rows: index of these rows into a column of the given rows: int64 ``[n]`` ascending, or a slice.
        evicted: int64 ``[m]``, of a writer that chooses the rows that leave, the slots of the rows that were stored
            before and left. To mirror a buffer, drop them first, because ``slots`` may hold new rows in their place.
    """

    slots: Tensor = _NO_SLOTS
    rows: Tensor | slice = slice(0, 0)
    evicted: Tensor = _NO_SLOTS


class BufferHooks:
    """A buffer that storages and writers of this library inform of evicted rows and ended episodes."""

    def on_evict(self, index: Tensor) -> None:
        """Removes rows, slots ``[n]``, that left without being overwritten. Called by the storage."""

    def on_episode_end(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        """Ends the episodes with the newest rows ``slots``, int64 ``[n]``, and the episodes that run in
        ``trajectories``.

        Nothing follows their stored rows. The writer calls it if it leaves rows out.

        :meta private:
        """


class _Home(weakref.ref[Any]):
    """The storage of a part. Copies and pickles of the part have none, because they may come to another storage."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def check_home(storage: Storage, *parts: Any) -> None:
    """Refuses samplers and writers that know the rows of another storage. Raises ``ValueError``."""
    for part in parts:
        if _has_other_home(part, storage):
            # A buffer that nothing uses any more refers to itself through its storage, which its writer keeps too.
            keeps_it = isinstance(part, Writer) and storage_of(part) is part._home()
            if keeps_it:
                part._storage = None
            gc.collect()
            if keeps_it:
                part._storage = part._home()
        if _has_other_home(part, storage):
            name = type(part).__name__
            raise ValueError(
                f"the {name} belongs to another buffer, and knows the slots of the rows that are stored there; build "
                f"one {name} for each buffer"
            )


def _has_other_home(part: Any, storage: Storage) -> bool:
    home = vars(part).get("_home")  # The part may be one of TorchRL.
    return home is not None and home() is not None and home() is not storage


def set_home(storage: Storage, *parts: Any) -> None:
    """Notes the storage whose rows the parts know, which they do not keep alive."""
    for part in parts:
        part._home = _Home(storage)


def check_slots(storage: Storage, sampler: Sampler) -> None:
    """Refuses a sampler with fewer slots than the storage. Raises ``ValueError``."""
    slots = as_replay_sampler(sampler).num_slots
    if slots is not None and slots < storage.max_size:
        raise ValueError(
            f"capacity of {type(unwrap(sampler)).__name__} is {slots} and that of the storage {storage.max_size}; "
            f"build the sampler with capacity={storage.max_size}"
        )


def enter_torchrls(storage: Storage, *parts: Any) -> None:
    """Checks the parts of a buffer of TorchRL, which checks none, and notes their storage."""
    check_home(storage, *parts)
    for part in parts:
        if isinstance(part, Sampler) and storage.max_size < 2**62:  # A list without a size has a very large one.
            check_slots(storage, part)
    set_home(storage, *parts)


class PartHooks(SeededStateful, BreaksGraphs):
    """What samplers and writers have in common."""

    check_continuity: Any = False  #: Whether a row follows another only if it starts with the observation of its end.
    _home: _Home | None = None  # Set by set_home.

    @property
    def nbytes(self) -> int:
        """Bytes of what the part keeps."""
        return 0

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules, in environment steps and updates since the start of training."""

    def dumps(self, path: str | Path) -> None:
        """Writes ``state_dict()`` into ``path``, a directory or a URL of fsspec."""
        write_state(path, self.state_dict(), of=type(self).__name__)

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        load_state(path, self.load_state_dict)


class ReplaySampler(PartHooks, Sampler):
    """Draws slots. It is the base class of the samplers of this library.

    A subclass defines TorchRL's ``sample(storage, batch_size)``, which returns slots ``[B]`` (pairs: ``[B, 2]``) and a
    dictionary of further columns ``[B, ...]`` for the batch, on the CPU. It also defines the methods below that it
    needs. They have no effect by default. All that decides the next draws belongs to the state: name it in
    :attr:`saved_attributes`, or define ``state_dict`` and ``load_state_dict``.
    """

    uses_priorities: bool = False  #: Whether TD errors change what is drawn; :meth:`set_priorities` is called if so.
    update_partners: bool = False  #: Of pairs, whether the TD error belongs to both rows or to the first alone.
    sequence_length: int | None = None  #: Steps of each sequence that it draws; ``None`` where it draws rows or pairs.
    burn_in: int = 0  #: Steps at the start of each sequence that only warm up a recurrent state.
    num_slots: int | None = None  #: Most slots of the storage; ``None`` where it fits every storage.
    base_sampler: Sampler | None = None  #: The wrapped sampler; ``None`` for a sampler that draws rows itself.
    replace: bool = True  #: Whether a batch may contain a row several times.
    age: Any = None  #: Formula by which rows become less likely as they age, or ``None``.
    #: Name of the class whose states it loads and returns, if this is not its own class.
    #:
    #: :meta private:
    has_state_of: str | None = None
    #: Rows drawn so far from each table, ``[T]``, empty before any.
    #:
    #: :meta private:
    rows_drawn: Sequence[int] | np.ndarray = ()
    #: Device on which slots are drawn, which is the device of the rows. ``None`` draws them on the CPU.
    draw_device: torch.device | None = None
    _ages: Any = None  # This is a RowAges if draws depend on the ages of rows.
    _draws_from_tables: bool = False  # whether rows are drawn from the tables that a writer keeps
    _reads_columns: bool = False  # whether it reads columns of stored rows, which a storage of tensors has

    def check_storage(self, storage: Any, writer: Any) -> None:
        """Refuses a storage or a writer that it does not work with by raising. Called when a ``Replay`` is built."""

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses new rows, TensorDict ``[N]``, by raising ``ValueError``. Called before anything is stored."""
        if self._ages is not None:
            self._ages.check_rows(rows)

    @property
    def reads_versions(self) -> bool:
        """Whether each new row needs a version.

        :meta private:
        """
        return self._ages is not None and self._ages.age.version_key is not None

    def check_priority(self, priority: Tensor) -> None:
        """Refuses priorities given with new rows, float32 ``[N]``, by raising ``ValueError``. Called before storing."""

    def awaits_rows(self, storage: Any) -> bool:
        """Returns whether nothing can be drawn yet although rows are stored. A mixed replay draws elsewhere then.

        :meta private:
        """
        return False

    def defer_reads(self, checks: DeferredChecks) -> None:
        """Registers numbers on :attr:`draw_device` that are read with the refusals, none by default.

        :meta private:
        """

    def on_evict(self, index: Tensor) -> None:
        """Removes rows, slots ``[n]``, that left without being overwritten."""

    def on_append(self, tables: Any, numbers: Iterable[int], slots: np.ndarray, are_new: bool) -> None:
        """Adds entries that a writer appended to its tables, after ``mark_update`` for new rows.

        Args:
            tables: Tables of the writer.
            numbers: Numbers of the tables that may refer to the rows.
            slots: Slots of the rows, int64 ``[n]``.
            are_new: Whether the rows were just written, and not stored before.

        :meta private:
        """

    def on_leave(self, table: int, places: np.ndarray) -> None:
        """Removes entries that left a table before it was full, at these places in its ring, int64 ``[n]``.

        :meta private:
        """

    def end_episodes(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        """Ends episodes whose newest rows are in the slots ``[n]``, and episodes that run in ``trajectories``."""

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Any) -> None:
        """Sets priorities. Called if :attr:`uses_priorities`, with TD errors that were checked.

        Args:
            slots: int64 ``[B]``, of pairs ``[B, 2]``, -1 if the row has left. Of several for one the last counts.
            magnitudes: float32 ``[B]``, finite, from 0 on.
            storage: of the rows.
        """

    # Draws slots [B] at random points, float64 [B] in [0, 1), of ``count`` rows, with further columns [B]. It is tensor
    # code alone, which CUDA graphs capture and torch.compile compiles. ``count`` and ``beta`` are scalars.
    _draw_there: Any = None

    def set_priorities_there(self, slots: Tensor, td_error: Tensor, is_fresh: Tensor) -> Tensor:
        """Sets priorities without a wait for :attr:`draw_device`. Called in place of :meth:`set_priorities`.

        Args:
            slots: int64 ``[n]`` on the device, all below the capacity. Of several for one the last counts.
            td_error: Signed TD errors ``[n]``, not checked.
            is_fresh: bool ``[n]``. The other rows have left, and are skipped.

        Returns:
            bool ``[n]``, whether each TD error can be a priority. The others are skipped.

        :meta private:
        """
        raise NotImplementedError

    def feedback_of_rows(
        self, index: Tensor, td_error: Tensor | None, generation: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the feedback for a batch of sequences, ``[B, T]`` each, as such for rows, ``[n]`` each.

        :meta private:
        """
        return index, td_error, generation

    # Sets priorities by the arrays of a batch on the CPU: slots, errors, generations given, generations stored and the
    # length of the storage. Returns how many rows are stale, or None, nothing changed, if another way must do it.
    # Saves two thirds of an update of 256 rows. Called if the sampler's class is exact, see fast_path.
    _update_matching: Any = None

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """TorchRL's name of :meth:`set_priorities`, which its buffers call. A writer that learns gets them too.

        TorchRL's buffers pass signed values that nothing checked.
        """
        refuse_batch(index)
        if self.uses_priorities:
            self.set_priorities(index, priority, storage)
        self.pass_on(index, priority, storage)

    def pass_on(self, index: Any, priority: Any, storage: Any) -> None:
        """Passes TD errors to the writer of TorchRL's buffers that draw by this sampler, and pass them only to it.

        :meta private:
        """
        for buffer in () if storage is None else attached_buffers(storage):
            writer: Any = writer_of(buffer)
            learns = isinstance(writer, ReplayWriter) and writer.needs_feedback
            if learns and buffer.sampler is self and not isinstance(buffer, BufferHooks):
                writer.take_td_errors(index, priority, both=self.update_partners)

    def priority_of(self, index: Tensor) -> Tensor | None:
        """Returns the priorities of rows before any exponent, float32 ``[n]``, or ``None`` if there are none."""
        return None

    def raise_max_priority(self, priority: float) -> None:
        """Raises the largest priority so far, which new rows get, to that of other replays."""

    def group_totals(self, storage: Any) -> GroupTotals:
        """Returns what the stored rows add up to, by group. See :mod:`lightning_replay.divided_draws`."""
        raise NotImplementedError(f"{type(self).__name__} lacks group_totals(storage); define it with sample_shard")

    def sample_shard(self, storage: Any, part: ShardRequest) -> tuple[Tensor, dict[str, Any], ShardDraw]:
        """Draws the rows at the points of a draw that is divided over several replays.

        Returns:
            Slots, int64 ``[n]`` (pairs: ``[n, 2]``), and further columns ``[n, ...]``, as ``sample`` returns them but
            for the weights, and the probabilities of the rows.
        """
        raise NotImplementedError

    def rows_of_groups(self, batch_size: int, totals: GroupTotals) -> tuple[np.ndarray, np.ndarray]:
        """Divides a batch over the groups, from the sums over all replays. Called on a sampler without rows.

        Returns:
            Rows of each group, int64 ``[G]``, ``batch_size`` together, by default all of the first group, the only one
            of most samplers, and how likely a row of the batch is of each, float64 ``[G]``.
        """
        rows = np.zeros(len(totals.names), dtype=np.int64)
        rows[0] = batch_size
        return rows, rows / batch_size

    def weigh(self, part: ShardRequest, drawn: ShardDraw) -> dict[str, np.ndarray]:
        """Returns the columns ``[B]`` of a batch that depend on all replays, such as ``priority_weight``, none here.

        Counts a draw if a schedule follows the draws. Called on a sampler without rows.

        Args:
            part: all rows of the batch, one replay after the other.
            drawn: the probabilities of the rows in draws from their groups in all replays, as they were really drawn.
                ``totals`` are of all replays, with a mass of 1, so that ``smallest`` is the smallest such probability.
        """
        return {}

    def stats(self) -> dict[str, float]:
        """Returns statistics for :meth:`Replay.stats <lightning_replay.replay.Replay.stats>`, none here."""
        return {}


class WriterHooks(PartHooks):
    """Attributes and methods of a writer in addition to TorchRL's. The methods have no effect by default."""

    needs_feedback: bool = False  #: Whether ``update_priority`` of the buffer changes what is kept.
    signals: tuple[str, ...] = ()  #: Further names that ``Replay.update_priority`` accepts for this writer.
    #: Whether a row follows another only if it starts with the observation of its end.
    #:
    #: :meta private:
    compares_rows: bool = False
    may_refuse: bool = False  #: Whether rows may be left out although the storage is not full.
    #: The tables that the writer keeps, see ``lightning_replay.tables``, or ``None`` for a writer without tables.
    tables: Any = None
    #: Function for the surprise of new rows, TensorDict ``[N]`` to ``[N]``, or ``None`` if there is none.
    initial_surprise: Callable[[TensorDictBase], Tensor] | None = None
    #: Generations and occupancy of a storage of TorchRL, which keeps neither, or ``None`` if the storage does.
    #:
    #: :meta private:
    rows_beside: Any = None

    @property
    def needs_initial_surprise(self) -> bool:
        """Whether the writer lacks :attr:`initial_surprise`.

        :meta private:
        """
        return False

    def insert(self, data: TensorDictBase) -> Insertion:
        """Stores rows, TensorDict ``[N]``, oldest first. Called by ``Replay.extend``."""
        raise NotImplementedError(f"{type(self).__name__} defines no insert(data), which stores rows")

    def age_of(self, index: Tensor) -> Tensor | None:
        """Returns how many rows were given after those in the slots, int64, or ``None`` if no order is kept."""
        return None

    def end_episodes(self, slots: Tensor) -> None:
        """Ends the episodes whose newest rows are in the slots ``[n]``: nothing follows these rows."""

    def read_feedback(self, count: int, td_error: Tensor | None, signals: Mapping[str, Any]) -> Any:
        """Returns feedback for the B = ``count`` rows of a batch for :meth:`update_priority`. Changes nothing.

        Raises:
            ValueError: feedback that the writer refuses. No part has been changed then.
        """
        return None

    def update_priority(self, index: Tensor, feedback: Any, *, both: bool = False) -> None:
        """Passes feedback to what decides which rows stay.

        Args:
            index: slots ``[B]`` or ``[B, 2]``, -1 if the row has left.
            feedback: of the B rows, as :meth:`read_feedback` returned it.
            both: of pairs, whether the second row gets it as well.
        """

    def stats(self) -> dict[str, Any]:
        """Returns the entries of this writer in ``Replay.stats``."""
        return {}


class ReplayTransform(SeededStateful, Transform):
    """Changes batches, by TorchRL's ``forward``, and rows before they are stored, by TorchRL's ``_inv_call``.

    A batch has the further columns of its sampler, ``index`` and ``generation`` before it is changed. A transform that
    reads other stored rows defines :meth:`forward_drawn`. Rows that are read by ``replay[...]`` are not changed.
    """

    follows_episodes: bool = False  #: Whether the buffer follows episodes for :meth:`forward_drawn`.

    state_dict: Any = Module.state_dict  # which holds the extra state
    load_state_dict: Any = Module.load_state_dict
    get_extra_state: Any = SeededStateful._read_attributes
    set_extra_state: Any = SeededStateful._restore_attributes
    #: γ of potentials by which it changes rewards, if it does.
    #:
    #: :meta private:
    shaping_discount: float | None = None
    draws_there: bool = False  #: Whether it changes batches without a wait where slots are drawn on a device.
    takes_sequences: bool = True  #: Whether it leaves steps of a sequence in their order, each as it is.
    # Returns what forward makes of the pairs of rows in the slots [B, 2] of a PackedStorage. Called if the transform's
    # own class is exact, see lightning_replay.fast_path.
    _mix_stored: Any = None

    def check_buffer(self, replay: Any) -> None:
        """Refuses a ``Replay`` whose parts it does not work with by raising. Called when these are put together."""

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules, in environment steps and updates since the start of training."""

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses the first rows, TensorDict ``[N]``, by raising ``ValueError``. Later ones have their columns.

        Called before anything is stored, and with a stored row when the transform comes to a filled buffer.
        """

    def forward_drawn(self, batch: TensorDictBase, index: Tensor, storage: Any, episodes: Any) -> TensorDictBase:
        """Changes a drawn batch. Called by ``Replay`` in place of ``forward``, by which it is done by default.

        Args:
            batch: TensorDict ``[B]``, complete, with returns over several steps, of pairs ``[B, 2]``.
            index: int64 of the same shape, the slots of its rows.
            storage: of the rows. :func:`lightning_replay.storage.read_columns` reads columns of any.
            episodes: an :class:`~lightning_replay.episodes.returns.EpisodeTracker`, whose ``links``
                (:class:`~lightning_replay.episodes.links.EpisodeLinks`) lead along the episodes of stored rows, and
                whose ``n_steps`` and ``discount`` belong to the returns, or ``None`` if neither the buffer nor
                :attr:`follows_episodes` needs one.
        """
        return self(batch)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not destination[f"{prefix}_extra_state"]:  # most transforms have no state, and no entry in a save
            del destination[f"{prefix}_extra_state"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *given: Any) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", {})
        super()._load_from_state_dict(state_dict, prefix, *given)


class ReplayWriter(WriterHooks, Writer):
    """Stores rows and chooses which ones leave. It is the base class of the writers of this library.

    A subclass defines :meth:`insert`, for which :func:`lightning_replay.writers.write_rows` writes rows into the
    storage. TorchRL's ``extend`` and ``add`` call it. A subclass that overrides ``extend`` alone, which ``Replay`` does
    not call, is a ``TypeError``. All that decides which rows stay belongs to the state. See :class:`ReplaySampler`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "extend" in vars(cls) and not {"insert", "_insert_columns"} & vars(cls).keys():
            raise TypeError(
                f"{cls.__name__} overrides extend, and {cls.__mro__[1].__name__} stores rows by insert(data), which "
                "returns their slots and which of the rows they are (lightning_replay.parts.Insertion). Override "
                "insert; extend calls it"
            )

    # The slots of the last rows and their column of priorities, or the slot of a single row, while TorchRL's buffer may
    # give them their first priorities.
    _entering: Any = None

    @property
    def tracks_generations(self) -> bool:
        """Whether batches of TorchRL's buffers have ``index_generation``, as for TorchRL's writers that count them.

        :meta private:
        """
        return self.rows_beside is not None

    def generations_of(self, index: Any) -> Tensor:
        """Returns how often each slot was written or emptied, int64, -1 if the writer does not count it."""
        return super().generations_of(index) if self.rows_beside is None else self.rows_beside.generation_of(index)

    def register_storage(self, storage: Storage) -> None:
        """Attaches a storage. Raises ``TypeError`` if the writer needs feedback and the buffer passes none to it.

        :meta private:
        """
        for buffer in attached_buffers(storage):
            self.check_buffer(buffer)
            if not isinstance(buffer, BufferHooks):
                enter_torchrls(buffer.storage, self, buffer.sampler)
        super().register_storage(storage)

    def check_buffer(self, buffer: Any) -> None:
        """Refuses a buffer by raising, if the writer needs TD errors and the buffer does not pass them on.

        Called when the writer comes to the buffer, and by ``extend`` and ``add``: another sampler may have come since.

        :meta private:
        """
        # TorchRL's buffers of TensorDicts pass the TD errors of a batch to samplers of this class alone.
        kind = PrioritizedSampler if isinstance(buffer, TensorDictReplayBuffer) else Sampler
        passes = isinstance(buffer.sampler, ReplaySampler) and isinstance(buffer.sampler, kind)
        if self.needs_feedback and not passes and not isinstance(buffer, BufferHooks):
            raise TypeError(
                f"{type(self).__name__} decides by the TD errors of drawn rows which rows stay, and a "
                f"{type(buffer).__name__} with the {type(buffer.sampler).__name__} of "
                f"{type(buffer.sampler).__module__.partition('.')[0]} passes it none; use lightning_replay.Replay("
                "storage=..., writer=..., ...), or a TensorDictReplayBuffer with the PrioritizedSampler of "
                "lightning_replay.samplers, which draws uniformly with priority_exponent=0"
            )

    def insert(self, data: TensorDictBase) -> Insertion:
        """Stores rows, TensorDict ``[N]``, oldest first. Called by ``Replay.extend``."""
        return self._insert_columns(self._storage.checked_values(data), data)

    def _insert_columns(self, columns: Sequence[Tensor | np.ndarray], rows: Any) -> Insertion:
        # Stores rows that a PackedStorage has read and checked, columns [N, ...] in the order of its row_columns. Rows
        # are the same as they were given, see as_rows. The writers of this library define it in place of insert, and
        # are exact (lightning_replay.fast_path): a TensorDict of one row takes longer to build than the row to store.
        return super().insert(rows)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Stores rows ``[N]``, oldest first, and returns their slots, int64 ``[N]``, -1 for rows that are not kept."""
        if isinstance(data, TensorDictBase) and (data.ndim != 1 or not len(data)):
            raise wrong_shape(data)
        for buffer in attached_buffers(self._storage):
            self.check_buffer(buffer)
        inserted = self.insert(data)
        # TorchRL's buffers of TensorDicts write a slot into each given row.
        slots = inserted.slots.new_full((data.shape[0],), -1)
        slots[inserted.rows] = inserted.slots
        # They then give the rows their column of priorities, if there is one, and a single row TorchRL's default.
        keys = {getattr(buffer, "priority_key", None) for buffer in attached_buffers(self._storage)} - {None}
        columns = [column for key in keys if (column := data.get(key, None)) is not None]
        self._entering = (slots, columns[0]) if columns else None
        return slots

    def add(self, data: TensorDictBase) -> int:
        """Stores one row, a TensorDict of batch size ``[]``, and returns its slot, -1 if it was refused."""
        slot = int(self.extend(data.unsqueeze(0)))
        if any(isinstance(buffer, TensorDictReplayBuffer) for buffer in attached_buffers(self._storage)):
            self._entering = slot
        return slot

    def take_td_errors(self, index: Any, td_error: Any, *, both: bool) -> None:
        """Reads the TD errors that a buffer of TorchRL passed to its sampler, as ``Replay.update_priority`` does.

        :meta private:
        """
        entering, self._entering = self._entering, None
        if _are_first_priorities(entering, index, td_error):
            return  # The first priorities of new rows are the sampler's.
        slots = torch.atleast_1d(torch.as_tensor(index, device="cpu"))
        errors = torch.as_tensor(td_error, device="cpu").detach().reshape(-1).expand(len(slots))
        is_kept = slots.reshape(len(slots), -1)[:, 0] >= 0
        if is_kept.any():
            self._learn(slots[is_kept], errors[is_kept], both)

    def _learn(self, slots: Tensor, td_error: Tensor, both: bool) -> None:
        self.update_priority(slots, self.read_feedback(len(slots), td_error, {}), both=both)


def wrong_shape(rows: TensorDictBase) -> ValueError:
    """Returns the error of rows that are no TensorDict ``[N]`` with at least one row."""
    return ValueError(
        f"extend takes transitions of batch size [N] with N >= 1; got {list(rows.shape)}. Flatten time and "
        "environments first (reshape(-1)), build columns as TensorDict(..., batch_size=[N]), or call add for a single "
        "transition. Rows padded by split_trajs are taken as they are with their mask, ('collector', 'mask')"
    )


def _are_first_priorities(entering: Any, index: Any, td_error: Any) -> bool:
    if type(entering) is int:
        return isinstance(index, Tensor) and not index.ndim
    if entering is None or index is not entering[0]:
        return False
    # With update_priority=False, TorchRL passes nothing, and later TD errors may come with the same slots.
    first, given = (torch.as_tensor(values, device="cpu").double().reshape(-1) for values in (entering[1], td_error))
    return torch.equal(first, given)


def refuse_batch(index: Any) -> None:
    """Refuses a batch in place of the slots of its rows, as ``Replay.update_priority`` alone takes it."""
    if isinstance(index, TensorDictBase):
        raise TypeError(
            "update_priority of TorchRL's buffers takes slots, and a TensorDict was given; call "
            "update_priority(batch['index'], td_error.abs()), or write magnitudes to the column 'td_error' of the "
            "batch and call update_tensordict_priority(batch). No priority was changed"
        )


class _TorchRLSampler(ReplaySampler):
    """A sampler, TorchRL's or another, that is no :class:`ReplaySampler`."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.uses_priorities = isinstance(sampler, PrioritizedSampler)
        self.num_slots = most_priorities(sampler)

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        return self._sampler.sample(storage, batch_size)

    def _empty(self) -> None:
        self._sampler._empty()

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Any) -> None:
        self._sampler.update_priority(slots, magnitudes, storage=storage)


class _TorchRLWriter(WriterHooks):
    """A writer, TorchRL's or another, that is no :class:`WriterHooks`."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def insert(self, data: TensorDictBase) -> Insertion:
        index = self._writer.extend(data).cpu()
        return Insertion(index, slice(len(data) - index.numel(), len(data)))

    def age_of(self, index: Tensor) -> Tensor | None:
        if not isinstance(self._writer, RoundRobinWriter):
            return None
        return (next_slot(self._writer) - 1 - index) % storage_of(self._writer).max_size


def without_tables(sampler: str) -> TypeError:
    """Returns the error for a sampler of tables whose writer keeps none. ``sampler`` is the name of its class."""
    return TypeError(f"{sampler} draws from tables, the writer keeps none; give an EventTableWriter or TaskTableWriter")


def without_columns(reader: str, storage: Storage) -> TypeError:
    """Returns the error for a part that reads columns from a storage that has none."""
    return TypeError(
        f"{reader} reads columns of rows, and a {type(storage).__name__} has none; use PackedStorage or "
        "LazyTensorStorage"
    )


def as_replay_sampler(sampler: Sampler) -> ReplaySampler:
    """Returns a :class:`ReplaySampler` itself, and an adapter for another sampler."""
    return sampler if isinstance(sampler, ReplaySampler) else _TorchRLSampler(sampler)


def unwrap(sampler: Any) -> Any:
    """Returns the sampler that draws the first rows of pairs, and a sampler of rows itself."""
    first = as_replay_sampler(sampler).base_sampler
    return sampler if first is None else first


def as_replay_writer(writer: Writer) -> WriterHooks:
    """Returns a :class:`ReplayWriter` itself, and an adapter for another writer."""
    return writer if isinstance(writer, WriterHooks) else _TorchRLWriter(writer)
