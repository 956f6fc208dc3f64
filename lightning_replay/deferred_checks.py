# SPDX-License-Identifier: Apache-2.0
"""Refusals that are collected on a device and raised by a later call, so that no call waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_replay.options import checked_count

_NEVER = torch.iinfo(torch.int64).max


class DeferredChecks:
    """Collects on a device what a buffer would refuse, and raises it in a later call.

    A check that the CPU reads waits for the device. Here, the device keeps the number of the first call that brought
    something wrong. All numbers are read together, in one transfer, once in ``check_every`` calls.

    Args:
        check_every: Number of calls between two reads.
        device: Device of the checked values.

    Example:
        >>> checks = DeferredChecks(2, "cpu")
        >>> for reward in (1.0, float("nan"), 1.0):
        ...     try:
        ...         call = checks.begin("extend")
        ...         checks.note("extend", ["call {} of extend brought NaN"], torch.tensor([reward == reward]))
        ...     except ValueError as error:
        ...         print(error)
        call 2 of extend brought NaN
    """

    def __init__(self, check_every: int, device: torch.device | str) -> None:
        self.check_every: int = checked_count("check_every", check_every, of="calls")
        self.device: torch.device = torch.device(device)
        self._calls: dict[str, int] = {}
        self._unread = 0  # Calls since the last read.
        self._first: dict[tuple[str, ...], Tensor] = {}  # The first wrong calls by problems, int64 [n].
        self._reads: list[tuple[Callable[[], Tensor], Callable[[list[int]], None]]] = []

    def begin(self, method: str) -> int:
        """Counts a call of ``method``, such as ``extend``, and returns its number. Call it before anything is changed.

        Raises:
            ValueError: An earlier call brought something wrong. The present call is not counted.
        """
        if self._unread >= self.check_every:
            self.read()
        self._unread += 1
        self._calls[method] = self._calls.get(method, 0) + 1
        return self._calls[method]

    def note(self, method: str, problems: Sequence[str], are_fine: Tensor) -> None:
        """Keeps the number of the present call for each problem that it has. Waits for nothing.

        Args:
            method: Method that was given to :meth:`begin`.
            problems: Sentences in which ``{}`` stands for the number of the call.
            are_fine: bool ``[n]`` on the device, false for each of the n problems that the call has.
        """
        keep_first(self.first_of(problems), self._calls[method], are_fine)

    def first_of(self, problems: Sequence[str]) -> Tensor:
        """Returns the numbers of the first calls with these problems, int64 ``[n]``, for :func:`keep_first`."""
        key = tuple(problems)
        if key not in self._first:
            self._first[key] = torch.full((len(key),), _NEVER, dtype=torch.int64, device=self.device)
        return self._first[key]

    def register(self, numbers: Callable[[], Tensor], receive: Callable[[list[int]], None]) -> None:
        """Has whole numbers on the device read in the same transfer as the refusals.

        Args:
            numbers: Function that returns the numbers, int64 ``[n]`` on the device.
            receive: Function that gets the numbers at each read.
        """
        self._reads.append((numbers, receive))

    def read(self) -> None:
        """Waits for the device, passes the registered numbers on, and raises what was found.

        Raises:
            ValueError: An earlier call brought something wrong. It is reported once.
        """
        self._unread = 0
        values = [*self._first.values(), *(numbers() for numbers, _ in self._reads)]
        if not values:
            return
        found = torch.cat(values).cpu().split([len(value) for value in values])
        for (_, receive), numbers in zip(self._reads, found[len(self._first) :], strict=True):
            receive(numbers.tolist())
        wrong = []
        for problems, calls in zip(self._first, found, strict=False):
            named = zip(problems, calls.tolist(), strict=True)
            wrong += [problem.format(call) for problem, call in named if call < _NEVER]
        if wrong:
            for first in self._first.values():
                first.fill_(_NEVER)
            raise ValueError(". ".join(wrong))


def keep_first(first: Tensor, call: int | Tensor, are_fine: Tensor) -> None:
    """Keeps in ``first``, int64 ``[n]``, the number of a call for the problems that it is the first to have."""
    torch.where(are_fine.reshape(-1), first, first.clamp(max=call), out=first)
