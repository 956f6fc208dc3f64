# SPDX-License-Identifier: Apache-2.0
"""Links from stored rows to the next rows of their episodes, kept on a device that nothing waits for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.episodes.links import Continuity, EpisodeLinks, equal_rows
from lightning_replay.options import checked_count

_UNNAMED = torch.iinfo(torch.int64).min  # The trajectory of rows without trajectories.


class DeviceContinuity(Continuity):
    """Whether rows continue others, as :class:`Continuity`, for slots and rows on a device."""

    def of_slots(self, before: Tensor, after: Tensor) -> Tensor:  # type: ignore[override]
        """Returns whether the rows ``after`` continue those in ``before``, int64 ``[n]`` each (-1: no row), as bool."""
        self._read()
        equal = torch.ones_like(before, dtype=torch.bool)
        for pair in self._pairs:
            own, following = (torch.from_numpy(one) if type(one) is np.ndarray else one for one in pair)
            equal &= equal_rows(own[after], following[before])
        return equal


class DeviceLinks:
    """:class:`~lightning_replay.episodes.links.EpisodeLinks` on a device.

    Links are the same for any rows, and a saved state of either class loads into the other. Each method is a number of
    calls of torch with shapes that the host knows, so that none waits for the device. The exceptions are
    :meth:`state_dict` and :meth:`load_state_dict`.

    Running episodes are a table whose length the host knows. Each :meth:`write` makes it longer by the number of its
    rows, up to ``capacity``. :meth:`receive` cuts it to the running episodes, which takes a read of the device.

    Args:
        capacity: Number of slots in the storage.
        device: Device of the rows and the links.
        continuity: Comparison of the observations of two rows. ``None`` links rows by their trajectory alone.
        counts_steps: Whether :attr:`position` is kept.
    """

    compares: type[DeviceContinuity] = DeviceContinuity  #: Comparison of observations that these links take.

    @torch.inference_mode(False)
    def __init__(
        self,
        capacity: int,
        device: str | torch.device,
        continuity: DeviceContinuity | None = None,
        counts_steps: bool = False,
    ) -> None:
        self.continuity: DeviceContinuity | None = continuity
        self.capacity: int = checked_count("capacity", capacity, of="slots")
        self.device: torch.device = torch.device(device)
        # The last entry belongs to no slot. It stays -1, or false, since rows without a previous or next step write so.
        self._after = torch.full((capacity + 1,), -1, dtype=torch.int64, device=device)
        self._before = self._after.clone()
        self._is_newest = torch.zeros(capacity + 1, dtype=torch.bool, device=device)
        #: Number of steps before each row in its episode, int64 ``[capacity]``, -1 for no row.
        self.position: Tensor | None = self._after[:-1].clone() if counts_steps else None
        # Newest slots of running episodes. Entries of no episode have the slot -1 and come first.
        self._names = self._slots = self._after[:0].clone()
        # Numbers of rows that were compared since the last read, and of rows among them that do not continue the other.
        self._compared = self._after.new_zeros(2)
        # By direction, the slots 1, 2, 4, ... steps away, [levels, capacity + 1].
        self._jumps: dict[bool, Tensor] = {}

    @property
    def successor(self) -> Tensor:
        """Slot of the next step of every slot, int64 ``[capacity]``, -1 for none."""
        return self._after[:-1]

    @property
    def predecessor(self) -> Tensor:
        """Slot of the previous step of every slot, int64 ``[capacity]``, -1 for none."""
        return self._before[:-1]

    @property
    def is_newest(self) -> Tensor:
        """Whether each slot holds the newest row of a running episode, bool ``[capacity]``."""
        return self._is_newest[:-1]

    @property
    def counts(self) -> Tensor:
        """Number of running episodes, and numbers of compared and of broken rows since the last read, int64 ``[3]``."""
        return torch.cat(((self._slots >= 0).sum().view(1), self._compared))

    def receive(self, counts: list[int]) -> None:
        """Receives :attr:`counts` as they are now."""
        num_running, compared, broken = counts
        self._shrink(num_running)
        self._compared.zero_()
        if self.continuity is not None:
            self.continuity.count(compared, broken)

    def _shrink(self, num_running: int) -> None:
        first = len(self._slots) - num_running
        self._names, self._slots = self._names[first:].clone(), self._slots[first:].clone()

    def write(self, index: Tensor, trajectory: Tensor | None, done: Tensor) -> None:
        """Links rows that were just written, as :meth:`EpisodeLinks.write`."""
        slots = index.reshape(-1).to(self.device, non_blocking=True)
        done = done.reshape(-1).to(self.device, non_blocking=True)
        if trajectory is None:
            names = torch.full_like(slots, _UNNAMED)
        else:
            names = trajectory.reshape(-1).to(self.device, torch.int64, non_blocking=True)
        for start in range(0, len(slots), self.capacity):
            # A batch longer than the ring names slots twice: the later rows must overwrite the earlier ones.
            rows = slice(start, start + self.capacity)
            self._write(slots[rows], names[rows], done[rows])
        self._update_jumps()

    def _write(self, new: Tensor, names: Tensor, done: Tensor) -> None:
        # The rows that were in these slots have left. No episode may go through them.
        self._after[self._before[new]] = -1
        self._before[self._after[new]] = -1
        self._after[new] = -1
        self._is_newest[new] = False
        # The newest rows of running episodes come first. A stable sort keeps the rows of each episode in order of time.
        num_old = len(self._slots)
        names = torch.cat((self._names, names))
        slots = torch.cat((self._slots, new))
        goes_on = torch.cat((self._is_newest[self._slots], ~done))
        order = names.argsort(stable=True)
        names, slots, goes_on = names[order], slots[order], goes_on[order]
        is_same = names[1:] == names[:-1]
        previous = torch.full_like(order, -1)
        previous[order[1:]] = torch.where(is_same & goes_on[:-1], slots[:-1], -1)
        before = previous[num_old:]
        if self.continuity is not None:
            continues = self.continuity.of_slots(before, new)
            self._compared += torch.stack(((before >= 0).sum(), ((before >= 0) & ~continues).sum()))
            before.copy_(torch.where(continues, before, -1))
        self._before[new] = before
        self._after[before] = torch.where(before < 0, -1, new)
        if self.position is not None:
            self.position[new] = self._steps_before(previous, order, slots, num_old)[num_old:]
        # The last row of each episode is its newest, unless the episode ended.
        runs = torch.cat((~is_same, is_same.new_ones(1))) & goes_on
        kept = runs.to(torch.uint8).argsort(stable=True)[-self.capacity :]
        self._is_newest[self._slots] = False
        self._names, self._slots = names[kept], torch.where(runs, slots, -1)[kept]
        self._is_newest[self._slots] = True
        self._is_newest[-1] = False

    def _steps_before(self, previous: Tensor, order: Tensor, slots: Tensor, num_old: int) -> Tensor:
        # Each row counts on from the last row before it that follows none. That row may be of a running episode.
        assert self.position is not None
        place = torch.arange(len(order), device=self.device)
        first = torch.where(previous[order] < 0, place, 0).cummax(0).values
        steps = place - first + torch.where(order[first] < num_old, self.position[slots[first]], 0)
        return torch.empty_like(steps).index_copy_(0, order, steps)

    def chain(self, index: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
        """Returns the slots of up to ``n_steps`` rows from each on, ``[B, n_steps]``, and how many differ, ``[B]``."""
        slots = [index.reshape(-1).to(self.device, non_blocking=True)]
        used = torch.ones_like(slots[0])
        for _ in range(1, n_steps):
            following = self._after[slots[-1]]
            used = used + (following >= 0)
            slots.append(torch.where(following < 0, slots[-1], following))
        return torch.stack(slots, 1), used

    def walk(
        self, index: Tensor, steps: Tensor, *, back: bool = False, most: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Follows the episode of each slot, as :meth:`EpisodeLinks.walk`.

        The first call takes memory for the slots 1, 2, 4, ... steps away from each slot, which :meth:`write` updates
        from then on: 8 bytes for each slot and power of two.

        Args:
            index: Slots, int64 ``[B]`` on the device.
            steps: Number of steps for each slot, int64 ``[B]`` on the device.
            back: Whether the previous steps are followed.
            most: Upper bound of ``steps``, which saves memory. The default is ``capacity``.
        """
        levels = max(min(self.capacity if most is None else most, self.capacity).bit_length(), 1)
        if back not in self._jumps or len(self._jumps[back]) < levels:
            self._jumps[back] = self._after.new_empty(levels, self.capacity + 1)
            self._update_jumps()
        slots, left = index, steps
        for power in reversed(range(levels)):
            further = self._jumps[back][power][slots]
            goes = (further >= 0) & (left >= 2**power)
            slots = torch.where(goes, further, slots)
            left = torch.add(left, goes, alpha=-(2**power))
        return slots, steps - left

    def _update_jumps(self) -> None:
        # In place, so that a captured graph that walks reads the present links.
        for back, jumps in self._jumps.items():
            jumps[0].copy_(self._before if back else self._after)
            for power in range(1, len(jumps)):
                jumps[power].copy_(jumps[power - 1][jumps[power - 1]])

    def before(self, index: Tensor) -> Tensor:
        """Returns the previous step of each slot, int64 ``[n]``, -1 for none."""
        return self._before[index]

    def end_episodes(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        """Ends episodes at these slots, and the running episodes of these trajectories. No row follows their rows."""
        slots = slots.reshape(-1).to(self.device, non_blocking=True)
        self._before[self._after[slots]] = -1
        self._after[slots] = -1
        self._is_newest[slots] = False
        named = [_UNNAMED if name is None else name for name in trajectories]
        if named:
            ends = torch.isin(self._names, torch.tensor(named, dtype=torch.int64, device=self.device))
            self._is_newest[torch.where(ends, self._slots, -1)] = False
        self._update_jumps()

    def release(self, index: Tensor) -> None:
        """Cuts the links to and from slots whose rows left without being overwritten."""
        index = index.reshape(-1).to(self.device, non_blocking=True)
        self.end_episodes(torch.cat((self._before[index], index)))
        if self.position is not None:
            self.position[index] = -1

    def clear(self) -> None:
        """Removes all links and running episodes."""
        if self.position is not None:
            self.position.fill_(-1)
        self._after.fill_(-1)
        self._before.fill_(-1)
        self._is_newest.fill_(False)
        self._shrink(0)
        self._update_jumps()

    @property
    def nbytes(self) -> int:
        """Bytes of links, steps, and running episodes."""
        kept = [self._after, self._before, self._is_newest, self._names, self._slots, *self._jumps.values()]
        return sum(one.nbytes for one in kept) + (0 if self.position is None else self.position.nbytes)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that :class:`~lightning_replay.episodes.links.EpisodeLinks` has with the same rows."""
        runs = self._is_newest[self._slots]
        names = self._names[runs].cpu()
        slots = self._slots[runs].cpu()
        is_named = names != _UNNAMED
        unnamed = slots[~is_named].tolist()
        return {
            "successor": self.successor.cpu().clone(),
            "running_trajectory": names[is_named],
            "running_slot": slots[is_named],
            "newest_slot": unnamed[0] if unnamed else -1,
        }

    def restore_position(self, position: Tensor, are_known: Tensor) -> None:
        """Sets :attr:`position` of the slots that links, or ``are_known``, bool ``[capacity]``, show to hold a row."""
        assert self.position is not None
        is_held = (self.successor >= 0) | (self.predecessor >= 0) | self.is_newest | are_known.to(self.device)
        self.position.copy_(torch.where(is_held, position.to(self.device, torch.int64), -1))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, and raises ``ValueError`` as :class:`EpisodeLinks` does."""
        links = EpisodeLinks(self.capacity)
        links.load_state_dict(state)
        self.clear()
        self.successor.copy_(links.successor)
        self.predecessor.copy_(links.predecessor)
        unnamed = [state["newest_slot"]] if state["newest_slot"] >= 0 else []
        names = [*state["running_trajectory"].tolist(), *[_UNNAMED] * len(unnamed)]
        slots = [*state["running_slot"].tolist(), *unnamed]
        self._names, self._slots = (torch.tensor(one, dtype=torch.int64, device=self.device) for one in (names, slots))
        self._is_newest[self._slots] = True
        self._update_jumps()
