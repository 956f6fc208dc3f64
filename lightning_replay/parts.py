# SPDX-License-Identifier: Apache-2.0
"""Base classes of the samplers, writers and transforms of a :class:`~lightning_replay.Replay`, and their state.

A part is one of TorchRL's and works in TorchRL's buffers too. The base classes here add what a ``Replay`` calls
besides, every method with a default that does nothing, so that a part defines only what it needs. TorchRL's own parts
get the defaults from :mod:`lightning_replay.parts`.

The life of a row is described at :class:`~lightning_replay.Replay`. Of a sampler it calls ``check_rows``, which may
refuse new rows, ``mark_update`` with the slots of stored rows, ``sample``, ``set_priorities``, and ``on_evict`` with
slots that are released; of a writer ``insert``, and ``update_priority`` where it takes feedback.

Shapes: N rows given, n rows stored, B rows of a batch; slots are int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import Module
from torchrl.data.replay_buffers import PrioritizedSampler, RoundRobinWriter, Sampler, Writer
from torchrl.envs import Transform

from lightning_replay.saving import load_state, write_state
from lightning_replay.saving.spec import recorded
from lightning_replay.state import PartState, Seeded

__all__ = [
    "BufferHooks",
    "Drawing",
    "Insertion",
    "ReplaySampler",
    "ReplayTransform",
    "ReplayWriter",
    "SamplerHooks",
    "Seeded",
    "WriterHooks",
    "recorded",
]


@dataclass(frozen=True, eq=False)
class GroupTotals:
    """What the rows of one replay add up to, by group: the rows that are drawn from with a share of their own.

    A uniform or prioritized sampler has one group, a sampler of tables one for each table.

    Attributes:
        names: of the groups, the same in all replays that a draw is divided over.
        mass: float64 ``[G]``, the sum of what rows are drawn in proportion to; their number where all are alike.
        rows: int64 ``[G]``, the number of rows.
        smallest: float64 ``[G]``, the smallest positive term of ``mass``; infinity where there is none.
        largest_priority: the largest priority given so far, before any exponent; not positive where there was none.
    """

    names: list[str]
    mass: np.ndarray
    rows: np.ndarray
    smallest: np.ndarray
    largest_priority: float = -1.0

    @classmethod
    def alike(cls, rows: int | np.ndarray, names: Sequence[str] = ("rows",)) -> GroupTotals:
        """Returns the totals of groups in which each row is equally likely.

        Args:
            rows: of each group, int64 ``[G]``, or of the only one.
            names: of the groups.

        Example:
            >>> GroupTotals.alike(3)
            GroupTotals(names=['rows'], mass=array([3.]), rows=array([3]), smallest=array([1.]), largest_priority=-1.0)
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
            max(one.largest_priority for one in totals),
        )


@dataclass(frozen=True, eq=False)
class DrawPart:
    """The rows of a batch that one replay draws; made by :class:`~lightning_replay.divided_draws.Divider`.

    Attributes:
        groups: int64 ``[n]``, the group of each row, ascending.
        points: float64 ``[n]`` in [0, 1), where in the mass of the group in this replay each row lies: row i is drawn
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
class PartDraw:
    """What a replay returns beside the rows of a :class:`DrawPart`, in the same order.

    Attributes:
        probability: float64 ``[n]``, of each row in a draw from its group in this replay.
        totals: of the replay at the draw.
        correction: float64 ``[n]``, what the sampler multiplies the weights of these rows by; ``None`` where nothing.
    """

    probability: np.ndarray
    totals: GroupTotals
    correction: np.ndarray | None = None


class GroupRows(NamedTuple):
    """How a batch is divided over groups."""

    rows: np.ndarray  #: int64 ``[G]``, of each group, the batch size together.
    shares: np.ndarray  #: float64 ``[G]``, how likely a row is of each group, given how the rows were chosen.


@dataclass(frozen=True, eq=False)
class DividedRows:
    """How the rows of a batch were drawn, one replay after the other; a sampler makes their weights of it.

    Attributes:
        group: int64 ``[B]``.
        probability: float64 ``[B]``, of each row in a draw from its group in all replays, as it was really drawn.
        least: float64 ``[G]``, the smallest ``probability`` that a row of each group has; infinity where none can be
            drawn.
        rows: int64 ``[G]``, rows of each group in all replays.
        shares: float64 ``[G]``, how likely a row of the batch is of each group.
        names: of the groups.
        correction: float64 ``[B]``, or ``None`` where there is none.
    """

    group: np.ndarray
    probability: np.ndarray
    least: np.ndarray
    rows: np.ndarray
    shares: np.ndarray
    names: list[str]
    correction: np.ndarray | None


def indivisible(sampler: str) -> TypeError:
    return TypeError(
        f"draws of {sampler} cannot be divided over several replays; use a sampler of lightning_replay.samplers, or "
        "define group_totals(storage) and sample_part(storage, part) in a lightning_replay.parts.ReplaySampler of your "
        "own, or keep all rows in one replay"
    )


_NO_SLOTS = torch.zeros(0, dtype=torch.int64, device="cpu")


class Insertion(NamedTuple):
    """The rows that a writer stored.

    Attributes:
        slots: int64 ``[n]``, in the order of the rows.
        rows: index of these rows into a column of those given: int64 ``[n]`` ascending, or a slice.
        evicted: int64 ``[m]``, of a writer that chooses the rows that leave, the slots of those that were stored before
            and left.
    """

    slots: Tensor = _NO_SLOTS
    rows: Tensor | slice = slice(0, 0)
    evicted: Tensor = _NO_SLOTS


class Drawing(PartState):
    """Methods of a part that draws from a generator; see :class:`~lightning_replay.state.Seeded`."""

    def reseed(self, seed: int) -> None:
        """Restarts the part's generator; called by ``Replay.seed``."""


class EpisodeHooks:
    """Calls about rows and episodes in addition to TorchRL's ``mark_update``, without effect by default."""

    def on_evict(self, index: Tensor) -> None:
        """Removes rows, slots ``[n]``, that left without being overwritten; called by the storage."""

    def cut(self, index: Tensor) -> None:
        """Ends the episodes whose newest rows are in the slots ``[n]``: nothing follows these rows."""

    def break_episodes(self, trajectories: Iterable[int | None]) -> None:
        """Ends the running episodes of these trajectories: their next rows follow no stored row."""


class BufferHooks(EpisodeHooks):
    """A buffer that storages and writers of this library inform of evicted rows and ended episodes."""


class PartHooks(Drawing):
    """Methods of samplers and writers that a ``Replay`` calls."""

    @property
    def nbytes(self) -> int:
        """Bytes of what the part keeps."""
        return 0

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules, in environment steps and updates since the start of training."""


class SamplerHooks(PartHooks, EpisodeHooks):
    """Attributes and methods of a sampler in addition to TorchRL's; the methods have no effect by default."""

    uses_priorities: bool = False  #: Whether TD errors change what is drawn; :meth:`set_priorities` is called if so.
    update_partners: bool = False  #: Of pairs, whether the TD error belongs to both rows or to the first alone.
    draws_from_tables: bool = False  #: Whether rows are drawn from the tables that a writer keeps.
    draws_pairs: bool = False  #: Whether an index is ``[B, 2]``.
    reads_columns: bool = False  #: Whether it reads columns of stored rows, which a storage of tensors has.
    num_slots: int | None = None  #: Most slots of the storage; ``None`` where it fits every storage.
    rows_drawn: np.ndarray = np.zeros(0, dtype=np.int64)  #: Rows drawn so far from each table, int64 ``[L]``.

    @property
    def base_sampler(self) -> Any:
        """The sampler that priorities, tables and schedules belong to; of pairs that of the first rows."""
        return self

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses new rows, TensorDict ``[N]``, by raising ``ValueError``; called before anything is stored."""

    def check_priority(self, priority: Tensor) -> None:
        """Refuses priorities given with new rows, float32 ``[N]``, by raising ``ValueError``; called before storing."""

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Any) -> None:
        """Sets priorities; called where :attr:`uses_priorities`, with TD errors that were checked.

        Args:
            slots: int64 ``[B]``, of pairs ``[B, 2]``; -1 where the row has left. Of several for one the last counts.
            magnitudes: float32 ``[B]``, finite, from 0 on.
            storage: of the rows.
        """

    # Sets priorities by the arrays of a batch on the CPU: slots, errors, generations given, generations stored and the
    # length of the storage. Returns how many rows are late, or None, nothing changed, where another way must do it.
    # Saves two thirds of an update of 256 rows; called where the sampler's own class defines it.
    set_held: Any = None

    def check_divisible(self) -> None:
        """Refuses to have draws divided over several replays, by raising ``TypeError``, where hooks are missing."""
        # A class that overrides sample alone would have its parts drawn as its base class draws.
        drawing = next(base for base in type(self).__mro__ if {"sample", "sample_part"} & vars(base).keys())
        if drawing is SamplerHooks or "sample_part" not in vars(drawing):
            raise indivisible(type(self).__name__)

    def group_totals(self, storage: Any) -> GroupTotals:
        """Returns what the stored rows add up to, by group; see :mod:`lightning_replay.divided_draws`."""
        raise NotImplementedError(f"{type(self).__name__} defines no group_totals(storage); define it with sample_part")

    def sample_part(self, storage: Any, part: DrawPart) -> tuple[Tensor, dict[str, Any], PartDraw]:
        """Draws the rows at the points of a draw that is divided over several replays.

        Returns:
            Slots, int64 ``[n]`` (pairs: ``[n, 2]``), and further columns ``[n, ...]``, as ``sample`` returns them but
            for the weights; and the probabilities of the rows.
        """
        raise NotImplementedError

    def rows_of_groups(self, batch_size: int, totals: GroupTotals) -> GroupRows:
        """Divides a batch over the groups, from the sums over all replays; called on a sampler without rows.

        By default all rows are of the first group, the only one of most samplers.
        """
        rows = np.zeros(len(totals.names), dtype=np.int64)
        rows[0] = batch_size
        return GroupRows(rows, rows / batch_size)

    def weigh(self, drawn: DividedRows) -> dict[str, np.ndarray]:
        """Returns the columns ``[B]`` of a batch that depend on all replays, such as ``priority_weight``; none here.

        Counts a draw where a schedule follows the draws. Called on a sampler without rows.
        """
        return {}

    def stats(self) -> dict[str, float]:
        """Returns statistics for :meth:`Replay.stats <lightning_replay.replay.Replay.stats>`; none here."""
        return {}

    def raise_largest_priority(self, priority: float) -> None:
        """Raises the largest priority so far, which new rows get, to that of other replays."""

    def priority_of(self, index: Tensor) -> Tensor | None:
        """Returns the priorities of rows before any exponent, float32 ``[n]``; ``None`` where there are none."""
        return None


class WriterHooks(PartHooks):
    """Attributes and methods of a writer in addition to TorchRL's; the methods have no effect by default."""

    needs_feedback: bool = False  #: Whether ``update_priority`` of the buffer changes what is kept.
    signals: tuple[str, ...] = ()  #: Further names that ``Replay.update_priority`` accepts for this writer.
    may_refuse: bool = False  #: Whether rows may be left out although the storage is not full.

    def insert(self, data: TensorDictBase) -> Insertion:
        """Stores rows, TensorDict ``[N]``, oldest first; called by ``Replay.extend``."""
        raise NotImplementedError(f"{type(self).__name__} defines no insert(data), which stores rows")

    def age_of(self, index: Tensor) -> Tensor | None:
        """Returns how many rows were given after those in the slots, int64; ``None`` where no order is kept."""
        return None

    def cut(self, index: Tensor) -> None:
        """Ends the episodes whose newest rows are in the slots ``[n]``: nothing follows these rows."""

    def read_feedback(self, count: int, td_error: Tensor | None, signals: Mapping[str, Any]) -> Any:
        """Returns feedback for the B = ``count`` rows of a batch for :meth:`update_priority`; changes nothing.

        Raises:
            ValueError: feedback that the writer refuses; no part has been changed then.
        """
        return None

    def update_priority(self, index: Tensor, feedback: Any, *, both: bool = False) -> None:
        """Passes feedback to what decides which rows stay.

        Args:
            index: slots ``[B]`` or ``[B, 2]``; -1 where the row has left.
            feedback: of the B rows, as :meth:`read_feedback` returned it.
            both: of pairs, whether the second row gets it as well.
        """

    def stats(self) -> dict[str, Any]:
        """Returns the entries of this writer in ``Replay.stats``."""
        return {}


class ReplayTransform(Drawing, Transform):
    """Changes batches, by TorchRL's ``forward``, and rows before they are stored, by TorchRL's ``_inv_call``."""

    delays_rows: bool = False  #: Whether rows are kept back in :attr:`pending` until others follow.
    n_steps: int = 1  #: Rewards in a return that it forms.
    discount: float = 1.0  #: γ of these returns.
    pending: Any = None  #: The rows kept back; ``Replay`` restores it where rows are refused.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        has_state = cls.saved_attributes or issubclass(cls, Seeded)
        if has_state and cls.get_extra_state is Module.get_extra_state:  # what TorchRL saves with a buffer
            kind: Any = cls
            kind.get_extra_state = PartState._read_attributes
            kind.set_extra_state = PartState._restore_attributes

    def mix_stored(self, storage: Any, index: Tensor) -> TensorDictBase:
        """Returns what ``forward`` makes of the stored pairs of rows ``[B, 2]``; called where its own class defines it.

        Args:
            storage: a :class:`~lightning_replay.storage.PackedStorage`.
            index: slots, int64 ``[B, 2]``.
        """
        raise NotImplementedError

    def flush(self, trajectories: Iterable[int] | None = None) -> TensorDictBase | None:
        """Returns the rows kept back, TensorDict ``[n]``, of these trajectories or all; ``None`` if there are none."""
        return None

    def clear(self) -> None:
        """Discards the rows kept back; called when the buffer is emptied."""


def _is_abstract(method: Any) -> bool:
    return getattr(method, "__isabstractmethod__", False)


class _Saved(Drawing):
    """A part with a state, which is saved in a directory of its own, as TorchRL's buffers do it.

    Raises:
        TypeError: when a subclass neither declares ``saved_attributes`` nor defines or inherits ``state_dict``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        of_torchrl, empty = super().state_dict, cls._empty  # type: ignore[misc,attr-defined]
        declares = any("saved_attributes" in vars(base) for base in cls.__mro__ if base is not PartState)
        is_default = cls.state_dict is _Saved.state_dict and _is_abstract(of_torchrl)
        if is_default and not declares and not _is_abstract(empty):  # a class that defines no _empty is a base class
            raise TypeError(
                f"{cls.__name__} declares no state: set saved_attributes to the names of the attributes that decide "
                "what is drawn or kept, or to () if none does; or define state_dict and load_state_dict"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the generator's state and copies of ``saved_attributes``, added to the state of TorchRL's class."""
        return {**(super().state_dict() or {}), **self._read_attributes()}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; raises ``ValueError`` where an entry is missing."""
        self._restore_attributes(state_dict)
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def dumps(self, path: str | Path) -> None:
        """Writes ``state_dict()`` into the directory ``path``."""
        write_state(path, self.state_dict(), of=type(self).__name__)

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        load_state(path, self.load_state_dict)


class ReplaySampler(_Saved, SamplerHooks, Sampler):
    """Draws slots; base class of the samplers of this library.

    A subclass defines TorchRL's ``sample(storage, batch_size)``, which returns slots ``[B]`` (pairs: ``[B, 2]``) and a
    dictionary of further columns ``[B, ...]`` for the batch, and of the inherited methods those that it needs.
    All that decides the next draws belongs to the state: name it in :attr:`saved_attributes`, or define ``state_dict``
    and ``load_state_dict``.
    """

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """TorchRL's name of :meth:`set_priorities`, which its buffers call; ignored without priorities."""
        if self.uses_priorities:
            self.set_priorities(index, priority, storage)


class ReplayWriter(_Saved, WriterHooks, Writer):
    """Stores rows and chooses which ones leave; base class of the writers of this library.

    A subclass defines :meth:`insert`, for which :func:`lightning_replay.writers.write_rows` writes rows into the
    storage. TorchRL's ``extend`` and ``add`` call it; a subclass that overrides ``extend`` alone, which ``Replay`` does
    not call, is a ``TypeError``. All that decides which rows stay belongs to the state; see :class:`ReplaySampler`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "extend" in vars(cls) and not {"insert", "_insert_columns"} & vars(cls).keys():
            raise TypeError(
                f"{cls.__name__} overrides extend, and {cls.__mro__[1].__name__} stores rows by insert(data), which "
                "returns their slots and which of the rows they are (lightning_replay.parts.Insertion). Override "
                "insert; extend calls it"
            )

    def insert(self, data: TensorDictBase) -> Insertion:
        """Stores rows, TensorDict ``[N]``, oldest first; called by ``Replay.extend``."""
        return self._insert_columns(self._storage.checked_values(data), data)

    def _insert_columns(self, columns: Sequence[Tensor | np.ndarray], rows: Any) -> Insertion:
        """Stores N rows from 1 on, given as columns ``[N, ...]`` that a ``PackedStorage`` has read and checked.

        The writers of this library define it in place of :meth:`insert`: a TensorDict of one row takes longer to build
        than the row to store.

        Args:
            columns: in the order of the storage's ``row_columns``.
            rows: the same as they were given, a TensorDict ``[N]`` or columns by key;
                :func:`~lightning_replay.storage.columns.as_rows` returns a TensorDict.
        """
        return super().insert(rows)

    def extend(self, data: TensorDictBase) -> Tensor:
        return self.insert(data).slots

    def add(self, data: TensorDictBase) -> Any:
        """Stores one row, a TensorDict of batch size ``[]``; returns its slot, -1 where it was refused."""
        index = self.extend(data.unsqueeze(0))
        return int(index) if index.numel() else -1


class _TorchRLSampler(SamplerHooks):
    """A sampler, TorchRL's or another, that is no :class:`SamplerHooks`."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.uses_priorities = isinstance(sampler, PrioritizedSampler)
        self.num_slots = getattr(sampler, "_max_capacity", None)

    @property
    def base_sampler(self) -> Sampler:
        return self._sampler

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Any) -> None:
        self._sampler.update_priority(slots, magnitudes, storage=storage)

    def check_divisible(self) -> None:
        raise indivisible(type(self._sampler).__name__)


class _TorchRLWriter(WriterHooks):
    """A writer, TorchRL's or another, that is no :class:`WriterHooks`."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def insert(self, data: TensorDictBase) -> Insertion:
        index, count = self._writer.extend(data), data.shape[0]
        return Insertion(index, slice(count - index.numel(), count))

    def age_of(self, index: Tensor) -> Tensor | None:
        if not isinstance(self._writer, RoundRobinWriter):
            return None
        return (self._writer._cursor - 1 - index) % self._writer._storage.max_size


def declared_sampler(sampler: Sampler) -> SamplerHooks:
    """Returns a :class:`~lightning_replay.parts.ReplaySampler` itself, and an adapter for another sampler."""
    return sampler if isinstance(sampler, SamplerHooks) else _TorchRLSampler(sampler)


def declared_writer(writer: Writer) -> WriterHooks:
    """Returns a :class:`~lightning_replay.parts.ReplayWriter` itself, and an adapter for another writer."""
    return writer if isinstance(writer, WriterHooks) else _TorchRLWriter(writer)
