# SPDX-License-Identifier: Apache-2.0
"""What a sampler, a writer and a transform of a :class:`~lightning_replay.Replay` may define.

Longer than other files because it lists everything that a buffer calls of its parts.

A part is one of TorchRL's and works in TorchRL's buffers too. The base classes here add what a ``Replay`` calls
besides, every method with a default that does nothing, so that a part defines only what it needs. TorchRL's own parts,
which define none of it, get the defaults from :func:`declared_sampler` and :func:`declared_writer`.

The life of a row: the transforms' ``inv`` sees it first, ``check_rows`` of the sampler may refuse it, the writer's
``insert`` stores it and calls ``mark_update`` of the buffer, from which the sampler's ``mark_update`` gets its slot.
``sample`` draws slots, the storage is read, the transforms are called in order. ``update_priority`` brings TD errors
back to sampler and writer. A row leaves by being overwritten (``mark_update`` again) or released (``on_evict``).

Shapes: N rows given, n rows stored, B rows of a batch; slots are int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, RoundRobinWriter, Sampler, Writer
from torchrl.envs import Transform

from lightning_replay.saving import load_state, write_state
from lightning_replay.saving.spec import recorded
from lightning_replay.seeded import Seeded

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
    "declared_sampler",
    "declared_writer",
    "recorded",
]


class Insertion(NamedTuple):
    """What a writer stored of the rows it was given.

    Attributes:
        slots: int64 ``[n]``, in the order of the rows.
        rows: which of the given rows they hold, an index into a column of these: int64 ``[n]`` ascending, or a slice.
    """

    slots: Tensor
    rows: Tensor | slice


class Drawing:
    """What every part that draws from a generator offers; see :class:`~lightning_replay.seeded.Seeded`."""

    def reseed(self, seed: int) -> None:
        """Starts the part's generator anew; called by ``Replay.seed``."""

    def draw_state(self) -> Any:
        """Returns what one draw changes; called before a draw that may be refused."""
        return None

    def undo_draw(self, state: Any) -> None:
        """Restores what :meth:`draw_state` returned, after a draw that was refused."""

    def generator_state(self) -> Tensor | None:
        """Returns the state of the part's generator, uint8; ``None`` where it has none."""
        return None


class BufferHooks:
    """What storages and writers of this library call of their buffers beside TorchRL's ``mark_update``."""

    def on_evict(self, index: Tensor) -> None:
        """Called by the storage with slots ``[n]`` whose rows left without being overwritten."""

    def cut(self, index: Tensor) -> None:
        """Called by the writer with slots ``[n]`` of rows that nothing follows."""

    def break_episodes(self, trajectories: Iterable[int | None]) -> None:
        """Called by the writer with trajectories of which steps were left out: what comes next follows no row."""


class SamplerHooks(Drawing):
    """What a ``Replay`` reads and calls of a sampler beside TorchRL's methods; nothing happens by default."""

    uses_priorities: bool = False  #: Whether TD errors change what is drawn: ``update_priority`` is called if so.
    checks_priorities: bool = False  #: Whether ``update_priority`` refuses NaN and slots that do not exist by itself.
    update_partners: bool = False  #: Of pairs, whether the TD error belongs to both rows or to the first alone.
    draws_from_tables: bool = False  #: Whether rows are drawn from the tables that a writer keeps.
    draws_pairs: bool = False  #: Whether an index is ``[B, 2]``.
    reads_columns: bool = False  #: Whether it reads columns of stored rows, which a storage of tensors has.
    num_slots: int | None = None  #: Slots the sampler has room for; ``None`` where it fits every storage.
    rows_drawn: np.ndarray = np.zeros(0, dtype=np.int64)  #: Rows drawn so far from each table, int64 ``[L]``.

    @property
    def base_sampler(self) -> Any:
        """The sampler that priorities, tables and schedules belong to: itself, of pairs that of the first rows."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of what the sampler keeps."""
        return 0

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses new rows, TensorDict ``[N]``, by raising ``ValueError``; called before anything is stored."""

    def check_priority(self, priority: Tensor) -> None:
        """Refuses priorities given with new rows, float32 ``[N]``, by raising ``ValueError``; called before storing."""

    def on_evict(self, index: Tensor) -> None:
        """Forgets rows, slots ``[n]``, that left without being overwritten; called by the storage."""

    def cut(self, index: Tensor) -> None:
        """Ends the episodes whose newest rows are in the slots ``[n]``: nothing follows these rows."""

    def break_episodes(self, trajectories: Iterable[int | None]) -> None:
        """Called when steps of these trajectories were left out: what comes next of them follows no stored row."""

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules, in environment steps and updates since the start of training."""


class WriterHooks(Drawing):
    """What a ``Replay`` reads and calls of a writer beside TorchRL's methods; nothing happens by default."""

    needs_feedback: bool = False  #: Whether ``update_priority`` of the buffer changes what is kept.
    signals: tuple[str, ...] = ()  #: Further names that ``Replay.update_priority`` takes for this writer.
    checks_rows: bool = False  #: Whether :meth:`insert` has the storage check all rows before it changes anything.
    may_refuse: bool = False  #: Whether rows are left out that a storage has room for.
    keeps_tables: bool = False  #: Whether slots are held by :class:`~lightning_replay.tables.tables.Tables`.
    keeps_order: bool = False  #: Whether slots are in order of time, as those of a ring.
    needs_initial_surprise: bool = False  #: Whether it lacks a function for the surprise of new rows.

    @property
    def nbytes(self) -> int:
        """Bytes of what the writer keeps."""
        return 0

    def insert(self, data: TensorDictBase) -> Insertion:
        """Stores rows, TensorDict ``[N]``, oldest first; called by ``Replay.extend``."""
        raise NotImplementedError

    def insert_nothing(self) -> None:
        """Called in place of :meth:`insert` where transforms keep all rows back."""

    def age_of(self, index: Tensor) -> Tensor | None:
        """Returns how many rows were given after those in the slots, int64; ``None`` where no order is kept."""
        return None

    def set_initial_surprise(self, measure: Any) -> None:
        """Takes a function, TensorDict ``[N]`` to ``[N]``; called where :attr:`needs_initial_surprise`."""

    def cut(self, index: Tensor) -> None:
        """Ends the episodes whose newest rows are in the slots ``[n]``: nothing follows these rows."""

    def read_feedback(self, count: int, td_error: Tensor | None, signals: Mapping[str, Any]) -> Any:
        """Returns feedback for the B = ``count`` rows of a batch as :meth:`update_priority` takes it; changes nothing.

        Raises:
            ValueError: feedback that the writer refuses; no part has been changed then.
        """
        return None

    def update_priority(self, index: Tensor, feedback: Any, *, both: bool = False) -> None:
        """Learns from what :meth:`read_feedback` returned.

        Args:
            index: slots ``[B]`` or ``[B, 2]``; -1 where the row has left.
            feedback: of the B rows.
            both: of pairs, the second row as well.
        """

    def event_shares(self) -> dict[str, float]:
        """Returns the share of steps that were events, by table."""
        return {}

    def stats(self) -> dict[str, Any]:
        """Returns what ``Replay.stats`` reports of this writer."""
        return {}

    def build_options(self) -> dict[str, Any]:
        """Returns what a saved state of this writer presumes beside its class: names by option."""
        return {}

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of schedules, in environment steps and updates since the start of training."""


class ReplayTransform(Drawing, Transform):
    """Changes batches, by TorchRL's ``forward``, and rows before they are stored, by TorchRL's ``_inv_call``."""

    delays_rows: bool = False  #: Whether rows are kept back in :attr:`pending` until others follow.
    n_steps: int = 1  #: Rewards in a return that it forms.
    discount: float = 1.0  #: γ of these returns.
    pending: Any = None  #: What is kept back; ``Replay`` sets it to what it was where rows are refused.

    def flush(self, trajectories: Iterable[int] | None = None) -> TensorDictBase | None:
        """Returns the rows kept back, TensorDict ``[n]``, of these trajectories or all; ``None`` if there are none."""
        return None

    def clear(self) -> None:
        """Forgets the rows kept back; called when the buffer is emptied."""


class _Saved:
    """A part that is written to a directory by itself, as TorchRL's buffers do it."""

    def dumps(self, path: str | Path) -> None:
        """Writes ``state_dict()`` into the directory ``path``."""
        write_state(path, self.state_dict(), of=type(self).__name__)  # type: ignore[attr-defined]

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        load_state(path, self.load_state_dict)  # type: ignore[attr-defined]


class ReplaySampler(_Saved, SamplerHooks, Sampler):
    """Draws slots; base class of the samplers of this library.

    A subclass defines TorchRL's ``sample(storage, batch_size)``, which returns slots ``[B]`` (pairs: ``[B, 2]``) and a
    dictionary of further columns ``[B, ...]`` for the batch, and of the inherited methods those that it needs.
    ``state_dict`` and ``load_state_dict`` hold all that decides the next draws.
    """


class ReplayWriter(_Saved, WriterHooks, Writer):
    """Stores rows and chooses which ones leave; base class of the writers of this library.

    A subclass defines TorchRL's ``extend(data)`` for rows ``[N]``, which writes into ``self._storage``, calls
    ``mark_update(index)`` of the buffers in ``self._storage._attached_entities`` and returns the slots ``[n]``. One
    that may store others than the last n rows defines :meth:`insert`, and ``extend`` returns its slots.

    Raises:
        TypeError: when a subclass overrides ``extend`` of a writer that stores rows by :meth:`insert`, but not the
            latter, which ``Replay`` calls.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "extend" in vars(cls) and "insert" not in vars(cls) and cls.insert is not ReplayWriter.insert:
            raise TypeError(
                f"{cls.__name__} overrides extend, and {cls.__mro__[1].__name__} stores rows by insert(data), which "
                "returns their slots and which of the rows they are (lightning_replay.parts.Insertion). Override "
                "insert; extend calls it"
            )

    def insert(self, data: TensorDictBase) -> Insertion:
        """Stores rows, TensorDict ``[N]``, oldest first; called by ``Replay.extend``."""
        return _last_rows(self.extend(data), data.shape[0])

    def add(self, data: TensorDictBase) -> Any:
        """Stores one row, a TensorDict of batch size ``[]``; returns its slot, -1 where it was refused."""
        index = self.extend(data.unsqueeze(0))
        return int(index) if index.numel() else -1


class _TorchRLSampler(SamplerHooks):
    """A sampler of TorchRL, or of somebody else, that defines none of the names above."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.uses_priorities = isinstance(sampler, PrioritizedSampler)
        self.num_slots = getattr(sampler, "_max_capacity", None)

    @property
    def base_sampler(self) -> Sampler:
        return self._sampler


class _TorchRLWriter(WriterHooks):
    """A writer of TorchRL, or of somebody else, that defines none of the names above."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.checks_rows = True  # it may write columns of its own into them
        self.keeps_order = isinstance(writer, RoundRobinWriter)

    def insert(self, data: TensorDictBase) -> Insertion:
        return _last_rows(self._writer.extend(data), data.shape[0])

    def age_of(self, index: Tensor) -> Tensor | None:
        if not isinstance(self._writer, RoundRobinWriter):
            return None
        return (self._writer._cursor - 1 - index) % self._writer._storage.max_size


def declared_sampler(sampler: Sampler) -> SamplerHooks:
    """Returns what a ``Replay`` calls of a sampler: a :class:`ReplaySampler` itself, or the defaults for TorchRL's."""
    return sampler if isinstance(sampler, SamplerHooks) else _TorchRLSampler(sampler)


def declared_writer(writer: Writer) -> WriterHooks:
    """Returns what a ``Replay`` calls of a writer: a :class:`ReplayWriter` itself, or the defaults for TorchRL's."""
    return writer if isinstance(writer, WriterHooks) else _TorchRLWriter(writer)


def _last_rows(index: Tensor, count: int) -> Insertion:
    return Insertion(index, slice(count - index.numel(), count))
