# SPDX-License-Identifier: Apache-2.0
"""The names under which TorchRL's buffers, writers and schedulers know a prioritized sampler."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler as TorchRLPrioritizedSampler

from lightning_replay.parts import ReplaySampler
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.schedules import Schedule, checked_schedule


class TorchRLNames(ReplaySampler, TorchRLPrioritizedSampler):
    """TorchRL's sampler without its constructor, its trees and its compiled code."""

    uses_priorities = True
    checks_priorities = True
    reduction = "max"  # how TorchRL's buffers make one priority of several per row

    priority_exponent: float
    _importance_exponent: Schedule
    _tree: PriorityTree
    _largest: float | Tensor
    _clocks: dict[str, int]

    @property
    def max_size(self) -> int:
        """Slots."""
        return self._tree.capacity

    @property
    def device(self) -> torch.device:
        """Returns where the priorities are."""
        return self._tree.device

    @property
    def importance_exponent(self) -> Schedule:
        """β as a schedule; :attr:`beta` is its present value."""
        return self._importance_exponent

    @importance_exponent.setter
    def importance_exponent(self, value: float | Schedule) -> None:
        self._importance_exponent = checked_schedule("importance_exponent", value, highest=1.0)

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks that the schedule of ``importance_exponent`` may follow; absolute readings."""
        if env_steps is not None:
            self._clocks["env_steps"] = env_steps
        if updates is not None:
            self._clocks["updates"] = updates

    @property
    def alpha(self) -> float:
        """TorchRL's name of :attr:`priority_exponent`."""
        return self.priority_exponent

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.priority_exponent = value

    @property
    def beta(self) -> float:
        """TorchRL's name of the present value of :attr:`importance_exponent`."""
        schedule = self._importance_exponent
        return schedule(self._clocks[schedule.clock])

    @beta.setter
    def beta(self, value: float) -> None:
        self.importance_exponent = value

    @property
    def _max_priority(self) -> tuple[float | Tensor | None, None]:
        """As TorchRL keeps it: ``None`` before any was given; the slot is not kept."""
        if isinstance(self._largest, Tensor):
            return self.default_priority, None
        return (self._largest if self._largest >= 0 else None), None

    def add(self, index: int | Tensor) -> None:
        """Nothing to do: :meth:`mark_update` came first."""

    def extend(self, index: Tensor | tuple[Tensor, ...]) -> None:
        """Nothing to do: :meth:`mark_update` came first."""
