# SPDX-License-Identifier: Apache-2.0
"""Places of next observations for rows on a device, found in calls of torch that nothing waits for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LEAST_CANDIDATES = 1_024


class DeviceNextObservations:
    """:class:`~lightning_replay.storage.next_observations.NextObservations` for rows on a device.

    A saved state of either class loads into the other. The number of last observations is known on the device only, so
    that their memory has room for the most that there can be. :meth:`receive` lowers this bound after a read.

    New rows are compared with the rows that came last, at least with the rows of the last two calls. A next observation
    that is not found there is kept beside the rows.

    Args:
        rows: Packed rows, int64 ``[capacity, words]``.
        start: Word of a row at which its observation begins.
        width: Number of words of an observation.
        is_read_later: Function that returns whether :meth:`receive` is called now and then. Otherwise, the number is
            read when memory runs out.
    """

    @torch.inference_mode(False)
    def __init__(self, rows: Tensor, start: int, width: int, is_read_later: Callable[[], bool]) -> None:
        self._rows = rows
        self._start = start
        self._width = width
        self._is_read_later = is_read_later
        # See observation_kernels for both, int32 [capacity + 1]. Entry -1 is of no slot and stays 0.
        self.places: Tensor = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
        self._before = self.places.clone()
        generator = torch.Generator().manual_seed(0)
        factors = torch.randint(-(2**63), 2**63 - 1, (width,), generator=generator, device="cpu")
        self._factors = factors.to(rows.device)
        self._most_candidates = _LEAST_CANDIDATES
        self.clear()

    _last: Tensor  # int64 [L, width], row 0 of zeros
    _used: Tensor  # bool [L], true for row 0
    _bound: int  # The most last observations that can be in use.
    _slots: Tensor  # int64 [C], the slots that were written last, oldest first
    _hashes: Tensor  # int64 [C], of their next observations
    _in_order: bool  # Whether each call began at the end of the call before.
    _stop: int | None  # The slot at which the last call ended.

    @property
    def number(self) -> Tensor:
        """Last observations that are kept, a tensor of one entry on the device."""
        return self._used.sum() - 1

    @property
    def count(self) -> int:
        """Last observations that are kept. Waits for the device."""
        return int(self.number)

    def receive(self, number: int) -> None:
        """Receives :attr:`number` as it is now."""
        self._bound = number

    @property
    def nbytes(self) -> int:
        """Bytes of places, of the memory for last observations, and of the rows that new ones are compared with."""
        kept = (self.places, self._before, self._last, self._used, self._slots, self._hashes)
        return sum(one.nbytes for one in kept)

    def link(self, slots: slice | Tensor, first: Tensor, second: Tensor) -> None:
        """Takes new rows in ``slots`` before they are written: both observations, words ``[N, W]`` on the device."""
        if isinstance(slots, slice):
            new = torch.arange(slots.start, slots.stop, device=self._rows.device)
            self._in_order &= self._stop in (None, slots.start)
            self._stop = slots.stop % len(self._rows)
        else:
            new = slots.to(self._rows.device, non_blocking=True)
            self._in_order = False
        # The rows that were in these slots leave. A row that is followed by one of them may stay.
        self._reserve(len(new) if self._in_order else 2 * len(new))
        self._used[_number(self.places[new])] = False
        self.places[new] = 0
        users = self._before[new].long() - 1
        stays = (users >= 0) & (self.places[users] == new + 1)
        found, hashes = self._matches(new, first, second)
        num_candidates = len(self._slots)
        is_found = found >= 0
        givers = torch.where(is_found, torch.cat((self._slots, new))[found], -1)
        self._used[_number(self.places[givers])] = False
        self._used[0] = True
        self.places[givers] = torch.where(is_found, new + 1, 0).int()
        self._before[new] = (givers + 1).int()
        lacks = torch.ones(len(new) + 1, dtype=torch.bool, device=new.device)
        lacks[torch.where(found >= num_candidates, found - num_candidates, -1)] = False
        if self._in_order:  # Then no row stays. Room for rows that stay would double the memory.
            self._keep(new, second, lacks[:-1])
        else:
            own = self._rows.narrow(1, self._start, self._width).index_select(0, new)
            self._keep(torch.cat((users, new)), torch.cat((own, second)), torch.cat((stays, lacks[:-1])))
        self._most_candidates = max(self._most_candidates, 2 * len(new))
        self._slots = torch.cat((self._slots, new))[-self._most_candidates :]
        self._hashes = torch.cat((self._hashes, hashes))[-self._most_candidates :]

    def _matches(self, new: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a row that ends with each observation of ``first``, ``[N]``, and the hashes of ``second``.

        Rows are counted among the candidates and then the new rows. -1 is none.
        """
        # Sorted by hash, a row lies behind the latest one that ends with its observation:
        #
        #     order of time   ends of candidates: x y z   start and end of each new row: y a, q b, a c
        #     sorted          a a b c q x y y z            found: y of a candidate, none, a of the first new row
        count = len(self._slots)
        hashes = self._hash(second)
        keys = torch.cat((self._hashes, torch.stack((self._hash(first), hashes), 1).flatten()))
        keys, order = keys.sort(stable=True)
        is_start = (order >= count) & ((order - count) % 2 == 0)
        is_match = (keys[1:] == keys[:-1]) & is_start[1:] & ~is_start[:-1]
        ends = torch.where(order < count, order, count + (order - count) // 2)
        found = torch.full((len(new) + 1,), -1, dtype=torch.int64, device=new.device)
        found[torch.where(is_match, (order[1:] - count) // 2, -1)] = torch.where(is_match, ends[:-1], -1)
        found = found[:-1]
        # Equal hashes prove nothing, and a candidate may have left or be continued by now.
        places = self.places[torch.cat((self._slots, new))[found]]
        is_candidate = found < count
        kept = self._last.index_select(0, _number(places))
        given = second.index_select(0, (found - count).clamp(min=0))
        is_same = (torch.where(is_candidate.unsqueeze(1), kept, given) == first).all(1)
        return torch.where(is_same & (~is_candidate | (places < 0)), found, -1), hashes

    def _hash(self, words: Tensor) -> Tensor:
        return ((words ^ (words >> 29)) * self._factors).sum(1)

    def _keep(self, owners: Tensor, words: Tensor, are_kept: Tensor) -> None:
        """Keeps next observations ``[n, W]`` of rows in the slots ``owners`` beside the rows, if ``are_kept``."""
        is_free = ~self._used
        rank = is_free.cumsum(0) - 1
        free = torch.zeros(len(owners) + 1, dtype=torch.int64, device=owners.device)
        numbers = torch.arange(len(is_free), device=owners.device)
        free[torch.where(is_free & (rank < len(owners)), rank, -1)] = numbers
        number = torch.where(are_kept, free[are_kept.cumsum(0) - 1], 0)
        self._last[number] = words
        self._last[0] = 0
        self._used[number] = True
        self.places[torch.where(are_kept, owners, -1)] = -number.int()

    @torch.inference_mode(False)
    def _reserve(self, count: int) -> None:
        """Takes memory for ``count`` more last observations, if there is too little."""
        size, capacity = len(self._last), len(self._rows)
        if self._bound + count >= size and not self._is_read_later():
            self._bound = self.count
        self._bound = min(self._bound + count, capacity)
        if self._bound >= size:
            more = min(self._bound + self._bound // 4, capacity) + 1 - size
            self._last = torch.cat((self._last, self._last.new_zeros(more, self._width)))
            self._used = torch.cat((self._used, self._used.new_zeros(more)))

    def gather(self, slots: Tensor, before: int = 0) -> Tensor:
        """Returns the next observations of slots, int64 ``[N]``, behind the first words ``before`` of their rows."""
        slots = slots.to(self._rows.device, non_blocking=True)
        places = self.places[slots]
        observations = self._rows.narrow(1, self._start, self._width)
        own = observations.index_select(0, (places - 1).clamp(min=0))
        last = self._last.index_select(0, _number(places))
        found = own.new_empty(len(slots), before + self._width)
        torch.where(places.unsqueeze(1) > 0, own, last, out=found[:, before:])
        if before:
            torch.index_select(self._rows.narrow(1, 0, before), 0, slots, out=found[:, :before])
        return found

    def saved(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns the same as ``NextObservations.saved``, on the CPU, and waits for the device."""
        places = self.places[:length].cpu().clone()
        kept = ((places < 0) | (places > length)).nonzero().squeeze(1)
        places[kept] = -1 - torch.arange(len(kept), dtype=torch.int32, device="cpu")
        return places, self.gather(kept).cpu()

    @torch.inference_mode(False)
    def load(self, places: Tensor, last: Tensor) -> None:
        """Restores what :meth:`saved` returned, once the rows are restored."""
        device = self._rows.device
        followed, kept = (one.nonzero().squeeze(1) for one in (places > 0, places < 0))
        self.places.zero_()
        self.places[: len(places)] = places.to(device)
        self._before.zero_()
        self._before[places[followed].long().to(device) - 1] = (followed + 1).int().to(device)
        self._last = torch.cat((last.new_zeros(1, self._width), last)).to(device)
        self._used = torch.ones(len(self._last), dtype=torch.bool, device=device)
        self._bound = len(last)
        self._slots = kept.to(device)
        self._hashes = self._hash(self._last[1:])
        self._in_order = False  # The rows may have come in any order.
        self._stop = None

    def clear(self) -> None:
        """Removes all places and last observations."""
        empty = torch.zeros(0, self._width, dtype=torch.int64, device="cpu")
        self.load(torch.zeros(0, dtype=torch.int32, device="cpu"), empty)
        self._in_order = True


def _number(places: Tensor) -> Tensor:
    """Returns the numbers of last observations of places, int64 ``[N]``, or 0 for other places."""
    return places.clamp(max=0).neg().long()
