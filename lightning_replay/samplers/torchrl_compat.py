# SPDX-License-Identifier: Apache-2.0
"""Base class of prioritized samplers, under the names that TorchRL's buffers, writers and schedulers use."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers import Storage

from lightning_replay.parts import ReplaySampler
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.priority_updates import flat_index, matching_priority, refusal
from lightning_replay.saving.spec import describe
from lightning_replay.schedules import Constant, Schedule, checked_schedule
from lightning_replay.seeded import Seeded
from lightning_replay.storage.devices import as_tensor
from lightning_replay.validation import checked_number

logger: logging.Logger = logging.getLogger(__name__)


class TorchRLNames(Seeded, ReplaySampler, TorchRLPrioritizedSampler):
    """TorchRL's sampler without its constructor, its trees and its compiled code."""

    uses_priorities = True
    reduction = "max"  # how TorchRL's buffers make one priority of several per row

    priority_exponent: float
    _tree: PriorityTree
    _largest: float | Tensor

    def __init__(
        self,
        priority_exponent: float,
        importance_exponent: float | Schedule,
        priority_offset: float,
        seed: int | None,
    ) -> None:
        self._priority_exponent = checked_number("priority_exponent", priority_exponent, 0.0)
        self.priority_offset: float = checked_number("priority_offset", priority_offset, 0.0)
        self.importance_exponent = importance_exponent
        # With what this sampler was built, which may be set to other values later.
        self._built_with: dict[str, Any] = {
            "priority_exponent": self._priority_exponent,
            "importance_exponent": describe(self._importance_exponent),
            "priority_offset": self.priority_offset,
        }
        self._clocks = {"draws": 0, "updates": 0, "env_steps": 0}
        self._seed_generator(seed)

    @property
    def max_size(self) -> int:
        return self._tree.capacity

    @property
    def device(self) -> torch.device:
        return self._tree.device

    @property
    def importance_exponent(self) -> Schedule:
        """β as a schedule; :attr:`beta` is its present value."""
        return self._importance_exponent

    @importance_exponent.setter
    def importance_exponent(self, value: float | Schedule) -> None:
        self._importance_exponent = checked_schedule("importance_exponent", value, highest=1.0)

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        if env_steps is not None:
            self._clocks["env_steps"] = env_steps
        if updates is not None:
            self._clocks["updates"] = updates

    @property
    def alpha(self) -> float:
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
        # Without a bound, as in TorchRL: its schedulers step to 1.0000000015.
        self._importance_exponent = checked_schedule("importance_exponent", value)

    @property
    def _max_priority(self) -> tuple[float | Tensor | None, None]:
        """Largest priority in TorchRL's form: ``None`` before any was given; the slot is not kept."""
        if isinstance(self._largest, Tensor):
            return self.default_priority, None
        return (self._largest if self._largest >= 0 else None), None

    def add(self, index: int | Tensor) -> None:
        """Does nothing: :meth:`mark_update` was called before."""

    def extend(self, index: Tensor | tuple[Tensor, ...]) -> None:
        """Does nothing: :meth:`mark_update` was called before."""

    @torch.no_grad()
    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Sets priorities; TorchRL's buffers call it. Of several for one slot the last counts, index -1 is skipped.

        Args:
            index: slots, int or int64 ``[n]``; ``[n, d]`` or a tuple where the storage has d dimensions.
            priority: a number for all, ``[n]`` or ``[n, 1]``; finite and not negative.
            storage: whose length bounds the slots; without it the capacity does.

        Raises:
            ValueError: a priority is negative, infinite or NaN, or the lengths differ.
            IndexError: a slot does not exist. In every case nothing has changed.
        """
        slots = flat_index(index, self.device, storage)
        self.set_priorities(slots, matching_priority(priority, slots), storage)

    @abstractmethod
    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Storage | None) -> None:
        """Sets priorities ``[n]``; see :class:`~lightning_replay.parts.SamplerHooks`."""

    def check_priority(self, priority: Tensor) -> None:
        """Refuses priorities of new rows, float32 ``[n]``, that :meth:`update_priority` would refuse.

        Raises:
            ValueError: one is negative or not finite, or does not fit float32 once it is raised to the exponent.
        """
        if not bool(self._exponentiated(priority.to(self.device)).isfinite().all()):
            raise refusal(torch.zeros(len(priority), dtype=torch.int64, device="cpu"), priority, len(priority), None)

    def raise_largest_priority(self, priority: float) -> None:
        if isinstance(self._largest, Tensor):
            self._largest.clamp_(min=priority)
        else:
            self._largest = max(self._largest, priority)

    def _exponentiated(self, priority: Tensor) -> Tensor:
        return priority.add(self.priority_offset).pow_(self.priority_exponent)

    def _differs(self, option: str, state_dict: Mapping[str, Any]) -> bool:
        """Returns whether the saved sampler was built with another value; format 3 began without these."""
        return state_dict.get("built_with", self._built_with)[option] != self._built_with[option]

    def _shared_state(self) -> dict[str, Any]:
        schedule = self._importance_exponent
        return {
            "largest_priority": float(self._largest),
            "priority_exponent": self.priority_exponent,
            "importance_exponent": schedule.value if isinstance(schedule, Constant) else None,
            "priority_offset": self.priority_offset,
            "built_with": self._built_with,
            "clocks": dict(self._clocks),
            "generator": self.generator_state(),
        }

    def _load_shared_state(self, state_dict: Mapping[str, Any]) -> None:
        """Restores all of :meth:`_shared_state` but the priorities, their exponent and their offset.

        Of options that differ from those of the saved sampler, the constructor's count; a schedule always is its own.
        """
        if state_dict["importance_exponent"] is not None and not self._differs("importance_exponent", state_dict):
            self.beta = state_dict["importance_exponent"]
        different = [name for name in self._built_with if self._differs(name, state_dict)]
        if different:
            built, saved = self._built_with, state_dict["built_with"]
            values = ", ".join(f"{name} {_shown(built[name])} (saved: {_shown(saved[name])})" for name in different)
            logger.warning("the options with which the buffer is built count, not those of the save: %s", values)
        self._clocks = {clock: int(reading) for clock, reading in state_dict["clocks"].items()}
        self.set_generator_state(state_dict["generator"])


def _shown(value: Any) -> Any:
    """Returns a described option for a message: a number, or a schedule with its arguments."""
    arguments = value["arguments"] if isinstance(value, dict) and "class" in value else {}
    return arguments["value"] if set(arguments) == {"value"} else arguments or value


def written_slots(index: int | Tensor, storage: Storage | None, sampler: str) -> Tensor:
    """Returns the slots that ``mark_update`` of a sampler was given, int64 ``[n]`` in insertion order, each once."""
    if storage is None:
        raise ValueError(f"{sampler}.mark_update got no storage; pass the buffer's as storage=.")
    index = as_tensor(index)
    if index.ndim > 1:
        raise ValueError(
            f"{sampler} got an index of shape {list(index.shape)}; it works with storages of one dimension. Build the "
            "storage with ndim=1 and flatten environments and time before extend."
        )
    # A batch longer than the ring names slots twice; the rows that came last are there.
    return index.reshape(-1)[-storage.max_size :]
