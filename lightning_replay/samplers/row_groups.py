# SPDX-License-Identifier: Apache-2.0
"""Draws whole groups of rows, such as the answers to one prompt."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import RoundRobinWriter, Storage

from lightning_replay.feedback import flat_index, matching_priority, refusal
from lightning_replay.options import check_kind, checked_count, checked_share
from lightning_replay.parts import GroupTotals, ShardDraw
from lightning_replay.samplers.distinct import checked_replace, first_arrivals
from lightning_replay.samplers.pairs import SamplerWrapper
from lightning_replay.samplers.prioritized import PrioritizedSampler, written_slots
from lightning_replay.samplers.reshuffled import ReshuffledSampler
from lightning_replay.samplers.uniform import UniformSampler
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.occupancy import FirstSlots, KnowsOccupancy, Occupancy, SlotSet
from lightning_replay.storage.packed import PackedStorage, empty_storage, occupancy_of, readable_rows

# Turns of a group that is not fresh any more.
_OLD = 2**62


class Groups(KnowsOccupancy):
    """The groups of a storage, which ``base_sampler`` draws as if each were one row. The names are TorchRL's.

    Group g has the slots ``g * group_size`` to ``(g + 1) * group_size - 1``.
    """

    ndim: int = 1

    def __init__(self, storage: Storage, group_size: int) -> None:
        self._storage = storage
        self._group_size = group_size
        self.max_size: int = storage.max_size // group_size

    @property
    def occupancy(self) -> Occupancy:
        """The groups that are stored: some may have left before they were overwritten."""
        first_rows = torch.arange(0, len(self._storage), self._group_size, device="cpu")
        held = occupancy_of(self._storage).held(first_rows)
        return FirstSlots(len(self)) if held is None else SlotSet.from_state(self.max_size, held.nonzero().flatten())

    def __len__(self) -> int:
        return len(self._storage) // self._group_size

    def get(self, index: object) -> TensorDictBase:
        """Returns the first row of every group, TensorDict ``[len]``."""
        return readable_rows(self._storage)[:: self._group_size]


@rebuildable
class GroupSampler(SamplerWrapper):
    """Draws whole groups of ``group_size`` rows, such as the answers of a policy to one prompt.

    Rows are stored in whole groups, one after the other, in a ring whose capacity is a multiple of ``group_size``. A
    group is stored at once, drawn whole, and evicted whole. The rows of a drawn group lie side by side in the batch, so
    that ``batch["reward"].view(-1, group_size)`` has one group in each row. :func:`lightning_replay.recipes.groups`
    builds the whole buffer.

    ``base_sampler`` draws groups as if each were one row: uniformly, by priority, or by age. The priority of a group is
    the mean of the magnitudes that its rows get. Ages in ``"rows"`` count groups, and the version of a group is that
    of its first row.

    With a ``fresh_share``, the first part of each batch is fresh. Groups that were in no such part come first, the
    newest before the others. If there are none left, the groups that had their turn since the last insertion take turns
    again, and after them the newest of all others. No group is twice in the fresh part. Groups that ``base_sampler``
    cannot draw, because they are older than ``max_age`` or have no priority, are not in it either.

    Args:
        group_size: Number G of rows in a group.
        base_sampler: :class:`UniformSampler` (the default), :class:`PrioritizedSampler`, :class:`RecencySampler`, or
            :class:`ReshuffledSampler`. Its capacity is the number of groups.
        fresh_share: Share of the groups of each batch that is fresh, rounded up to whole groups.
        replace: Whether a batch may contain a group several times. Otherwise groups are drawn one after the other, each
            in proportion to its weight among the groups that are left, and a draw reads the weights of all groups.
        seed: Seed for the sampler's own generator, and for the default ``base_sampler``.

    Sampled keys:
        index: int64 ``[B]``, B a multiple of G.
        is_fresh: bool ``[B]``, with a ``fresh_share``. Fresh rows are first.
        priority_weight: float32 ``[B]``, that of the group, if ``base_sampler`` is prioritized, and 1 in fresh rows. It
            corrects draws with ``replace=True``.

    Raises:
        ValueError: A number of rows, a capacity, or a batch size that is no multiple of G. ``Replay`` stores nothing
            then.
        RuntimeError: at the draw, with ``replace=False``: fewer groups can be drawn than the batch needs.

    Example:
        >>> from tensordict import TensorDict
        >>> from lightning_replay import PackedStorage, Replay
        >>> sampler = GroupSampler(group_size=2, replace=False)
        >>> replay = Replay(storage=PackedStorage(6), sampler=sampler, batch_size=4, seed=0)
        >>> _ = replay.extend(TensorDict({"reward": torch.arange(6.0)}, [6]))
        >>> replay.sample()["reward"].view(-1, 2)
        tensor([[2., 3.],
                [0., 1.]])
    """

    saved_attributes: tuple[str, ...] = ("_turns", "_newest")
    stored_options: tuple[str, ...] = ("group_size",)
    _shown = ("group_size", "fresh_share", "replace")
    num_slots: Any = None  # Checked by check_storage, because base_sampler counts groups.
    _reads_columns: Any = False

    def __init__(
        self,
        group_size: int,
        base_sampler: UniformSampler | PrioritizedSampler | None = None,
        fresh_share: float = 0.0,
        replace: bool = True,
        seed: int | None = None,
    ) -> None:
        self.group_size: int = checked_count("group_size", group_size, of="rows")
        self.fresh_share: float = checked_share("fresh_share", fresh_share)
        self.replace: bool = checked_replace(replace)
        if base_sampler is not None:
            check_kind(
                "base_sampler",
                base_sampler,
                UniformSampler | PrioritizedSampler,
                "a UniformSampler, a PrioritizedSampler, a RecencySampler, or a ReshuffledSampler",
            )
            if base_sampler.draw_device is not None or (isinstance(base_sampler, ReshuffledSampler) and not replace):
                raise ValueError(
                    f"base_sampler is {base_sampler!r}; groups are drawn on the CPU, and replace=False draws by "
                    "weights, which a ReshuffledSampler lacks. Leave out device or replace"
                )
            if not base_sampler.replace:
                raise ValueError(
                    f"base_sampler is {base_sampler!r} with replace=False, and fresh groups are not drawn by it; give "
                    "replace=False to GroupSampler alone"
                )
        super().__init__(base_sampler, UniformSampler, seed)
        self._turns = np.zeros(0, dtype=np.int64)
        self._newest = 0

    def check_storage(self, storage: Storage, writer: Any) -> None:
        """Refuses a storage whose capacity is not that of the groups, and writers that keep no ring of whole groups.

        The rows of a group then leave a storage of sequences together.
        """
        if storage.max_size % self.group_size:
            raise ValueError(
                f"capacity is {storage.max_size} and group_size is {self.group_size}; capacity counts rows, and groups "
                f"are kept whole. Give a multiple of {self.group_size}"
            )
        if isinstance(storage, PackedStorage):
            storage.rows_together = self.group_size
        num_groups = storage.max_size // self.group_size
        if self.base_sampler.num_slots not in (None, num_groups):
            raise ValueError(
                f"base_sampler has the capacity {self.base_sampler.num_slots}, and the storage has {num_groups} groups "
                f"of {self.group_size} rows; build base_sampler with capacity={num_groups}"
            )
        releases = isinstance(storage, PackedStorage) and storage.stores_frames
        if releases or not isinstance(writer, RoundRobinWriter):
            raise TypeError(
                f"a {type(writer).__name__} over a {type(storage).__name__} evicts single rows, and GroupSampler draws "
                "whole groups; use a FirstInFirstOutWriter and a PackedStorage"
            )

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses rows ``[N]`` that are no whole number of groups."""
        if len(rows) % self.group_size:
            raise self._no_whole_groups(len(rows), "Nothing was stored")
        self.base_sampler.check_rows(rows[:: self.group_size])

    def _no_whole_groups(self, rows: int, outcome: str) -> ValueError:
        return ValueError(
            f"{rows} rows are stored at once, and group_size is {self.group_size}; extend takes whole groups, a "
            f"multiple of {self.group_size} rows, the rows of a group side by side. {outcome}"
        )

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Adds the groups in the slots ``index``, int64 ``[n]``. Raises ``ValueError`` if they are no whole groups."""
        slots = written_slots(index, storage, type(self).__name__).cpu()
        inside = torch.arange(len(slots), device="cpu") % self.group_size
        if len(slots) % self.group_size or not torch.equal(slots % self.group_size, inside):
            raise self._no_whole_groups(len(slots), "They were stored, so empty the buffer first")
        new = slots[:: self.group_size] // self.group_size
        self.base_sampler.mark_update(new, storage=self._groups(storage))
        if len(new):
            # Only groups without a turn stay fresh.
            self._turns[self._turns > 0] = _OLD
            self._turns[new] = 0
            self._newest = int(new[-1])

    def on_evict(self, index: Tensor) -> None:
        """Removes evicted groups, whose rows are in the slots int64 ``[n]``, so that they are never drawn."""
        self.base_sampler.on_evict((index // self.group_size).unique())

    def _groups(self, storage: Any) -> Any:
        groups = Groups(storage, self.group_size)
        if len(self._turns) != groups.max_size:
            self._turns = np.full(groups.max_size, _OLD)
        return groups

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` rows, int64 ``[B]``, group after group, with the columns of ``base_sampler``."""
        size = self.group_size
        if batch_size % size:
            raise ValueError(f"batch_size is {batch_size} and group_size is {size}; give a multiple of {size}")
        if not len(storage):
            raise empty_storage()
        groups = self._groups(storage)
        count = batch_size // size
        fresh = torch.zeros(0, dtype=torch.int64, device="cpu")
        if self.fresh_share:
            fresh = self._take_fresh(groups, math.ceil(round(count * self.fresh_share, 9)))
        if self.replace:
            drawn, info = self.base_sampler.sample(groups, count - len(fresh))
        else:
            drawn, info = self._draw_distinct(groups, fresh, count)
        columns = {name: torch.cat((column.new_ones(len(fresh)), column)) for name, column in info.items()}
        if self.fresh_share:
            columns["is_fresh"] = torch.arange(count, device="cpu") < len(fresh)
        first = torch.cat((fresh, drawn)) * size
        index = (first.unsqueeze(1) + torch.arange(size, device="cpu")).flatten()
        return index, {name: column.repeat_interleave(size) for name, column in columns.items()}

    def _take_fresh(self, groups: Any, wanted: int) -> Tensor:
        drawable = self.base_sampler.masses(groups).numpy().nonzero()[0]
        ages = (self._newest - drawable) % groups.max_size
        taken = drawable[np.lexsort((ages, self._turns[drawable]))[:wanted]]
        # Old groups are always ordered by their ages.
        self._turns[taken] += self._turns[taken] < _OLD
        return torch.from_numpy(taken)

    def _draw_distinct(self, groups: Any, fresh: Tensor, count: int) -> tuple[Tensor, dict[str, Any]]:
        mass = self.base_sampler.masses(groups)
        held = int((mass > 0).sum())
        if held < count:
            raise RuntimeError(
                f"a batch needs {count} different groups, and {held} of the {len(groups)} stored ones can be drawn. "
                "Store more groups before the first draw, or use a smaller batch_size or replace=True"
            )
        drawn = first_arrivals(mass.index_fill(0, fresh, 0.0), count - len(fresh), self._generator)
        totals = dataclasses.replace(GroupTotals.alike(held), smallest=mass[mass > 0].amin(0, keepdim=True).numpy())
        weights = self.base_sampler.weigh(None, ShardDraw(mass[drawn].numpy(), totals))
        return drawn, {name: torch.from_numpy(weight) for name, weight in weights.items()}

    def set_priorities(self, slots: Any, magnitudes: Any, storage: Storage | None) -> None:
        """Sets the priority of each group to the mean of the magnitudes of its rows. Slots of -1 are skipped.

        Slots and magnitudes are ``[n]``. A batch that has a group twice gives it the mean over both.
        """
        slots = flat_index(slots, storage)
        magnitudes = matching_priority(magnitudes, slots)
        limit = len(self._turns) * self.group_size if storage is None else len(storage)
        if not ((magnitudes >= 0) & (magnitudes < torch.inf) & (slots >= -1) & (slots < limit)).all():
            raise refusal(slots, magnitudes, limit, limit)
        groups, place = (slots[slots >= 0] // self.group_size).unique(return_inverse=True)
        total = magnitudes.new_zeros(len(groups)).index_add_(0, place, magnitudes[slots >= 0])
        stored = None if storage is None else self._groups(storage)
        self.base_sampler.set_priorities(groups, total / place.bincount(), stored)

    def priority_of(self, index: Tensor) -> Tensor | None:
        """Returns the priorities of the groups of rows ``[n]``, float32 ``[n]``, or ``None`` if there are none."""
        return self.base_sampler.priority_of(index // self.group_size)

    def stats(self) -> dict[str, float]:
        """Returns the statistics of ``base_sampler``, and ``groups_waiting``, the fresh groups without a turn."""
        waiting = {"groups_waiting": int((self._turns == 0).sum())} if self.fresh_share else {}
        return self.base_sampler.stats() | waiting

    @property
    def nbytes(self) -> int:
        """Size of ``base_sampler`` and of the turns in bytes."""
        return super().nbytes + self._turns.nbytes

    def _empty(self) -> None:
        super()._empty()
        self._turns[:] = _OLD
