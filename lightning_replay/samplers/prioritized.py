# SPDX-License-Identifier: Apache-2.0
"""Draws rows in proportion to a power of their TD errors, weighted by importance."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers import Sampler, Storage

from lightning_replay.feedback import flat_index, matching_priority, refusal
from lightning_replay.options import checked_choice, checked_count, checked_flag, checked_number
from lightning_replay.parts import GroupTotals, ReplaySampler, ShardDraw, ShardRequest, enter_torchrls, refuse_batch
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.samplers.distinct import checked_replace, draw_rows, has_repeats
from lightning_replay.saving.spec import describe, rebuildable
from lightning_replay.schedules import Constant, Schedule, checked_schedule
from lightning_replay.storage.columns import as_tensor, checked_device
from lightning_replay.storage.packed import empty_storage, occupancy_of, stored_before

if TYPE_CHECKING:
    from lightning_replay.ages import Age

logger: logging.Logger = logging.getLogger(__name__)


class PrioritizedBase(ReplaySampler, TorchRLPrioritizedSampler):
    """Exponents, clocks and TorchRL's names, which all prioritized samplers share.

    TorchRL's class is a base only because its buffers check the type. Its constructor, tree, and compiled code are not
    used.
    """

    uses_priorities = True
    # TorchRL's buffers reduce several priorities of a row to one by this function.
    reduction = "max"

    priority_exponent: float
    _tree: PriorityTree
    # Largest priority so far, before any exponent, or negative before the first one. On a device, it is a tensor.
    _largest: Any

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
        # The constructor's options, because attributes may be set to other values later.
        self._built_with: dict[str, Any] = {
            "priority_exponent": self._priority_exponent,
            "importance_exponent": describe(self._importance_exponent),
            "priority_offset": self.priority_offset,
        }
        self._clocks = {"draws": 0, "updates": 0, "env_steps": 0}
        self._seed_generator(seed)

    @property
    def max_size(self) -> int:
        """Number of slots that may have a priority."""
        return self._tree.capacity

    @property
    def device(self) -> torch.device:
        """Device of the priorities, always the CPU."""
        return self._tree.device

    @property
    def importance_exponent(self) -> Schedule:
        """β as a schedule. :attr:`beta` is its present value."""
        return self._importance_exponent

    @importance_exponent.setter
    def importance_exponent(self, value: float | Schedule) -> None:
        self._importance_exponent = checked_schedule("importance_exponent", value, highest=1.0)

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clocks of environment steps and updates, which schedules read."""
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
        # TorchRL sets no bound, and its schedulers step to 1.0000000015.
        self._importance_exponent = checked_schedule("importance_exponent", value)

    # TorchRL calls both after mark_update, so they do nothing.
    add: Any = Sampler.add
    extend: Any = Sampler.extend

    @torch.no_grad()
    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Sets priorities, one for all, ``[n]`` or ``[n, 1]``. TorchRL's buffers call it.

        If a slot occurs twice, the last priority counts. Index -1 is skipped. Slots are an int or int64 ``[n]``. If the
        storage has d dimensions, they are ``[n, d]`` or a tuple. They lie below the length of the storage, or below the
        capacity if no storage is given.

        Raises:
            ValueError: A priority is negative, infinite, or NaN. Nothing is changed.
            IndexError: A slot holds no row. Nothing is changed.
        """
        refuse_batch(index)
        slots = flat_index(index, storage)
        self.set_priorities(slots, matching_priority(priority, slots), storage)
        self.pass_on(index, priority, storage)

    def check_priority(self, priority: Tensor) -> None:
        """Refuses priorities of new rows, float32 ``[n]``, that :meth:`update_priority` would refuse."""
        if not bool(self._exponentiated(priority).isfinite().all()):
            raise refusal(torch.zeros(len(priority), dtype=torch.int64, device="cpu"), priority, len(priority), None)

    def raise_max_priority(self, priority: float) -> None:
        """Raises the priority that new rows get, if ``priority`` is larger."""
        if priority > self._largest:
            self._largest = priority

    def _exponentiated(self, priority: Tensor) -> Tensor:
        return priority.add(self.priority_offset).pow_(self.priority_exponent)

    def _differs(self, option: str, state_dict: Mapping[str, Any]) -> bool:
        return state_dict["built_with"][option] != self._built_with[option]

    def _shared_state(self) -> dict[str, Any]:
        schedule = self._importance_exponent
        return {
            "max_priority": float(self._largest),
            "priority_exponent": self.priority_exponent,
            "importance_exponent": schedule.value if isinstance(schedule, Constant) else None,
            "priority_offset": self.priority_offset,
            "built_with": self._built_with,
            "clocks": dict(self._clocks),
            **self._generator_state(),
        }

    def _load_shared_state(self, state_dict: Mapping[str, Any]) -> None:
        # The constructor's options count if they differ from the saved ones. A schedule is never replaced.
        if state_dict["importance_exponent"] is not None and not self._differs("importance_exponent", state_dict):
            self.beta = state_dict["importance_exponent"]
        different = [name for name in self._built_with if self._differs(name, state_dict)]
        if different:
            built = self._built_with
            saved = state_dict["built_with"]
            values = ", ".join(f"{name} {_shown(built[name])} (saved: {_shown(saved[name])})" for name in different)
            logger.warning("the options with which the buffer is built count, not those of the save: %s", values)
        self._clocks = {clock: int(reading) for clock, reading in state_dict["clocks"].items()}
        self._restore_generator(state_dict)


def _shown(value: Any) -> Any:
    arguments = value["arguments"] if isinstance(value, dict) and "class" in value else {}
    return arguments["value"] if set(arguments) == {"value"} else arguments or value


def _checked_age(age: Age | Mapping[str, Any] | None) -> Age | None:
    # A replay without ages loads none of their modules.
    if age is None:
        return None
    from lightning_replay.ages import checked_age

    return checked_age(age)


def refuse_vanishing(age: Age, importance_exponent: Schedule) -> None:
    """Refuses an age without a floor for weights that are divided by the largest over the memory.

    Raises ``ValueError``.
    """
    has_weights = not isinstance(importance_exponent, Constant) or importance_exponent.value > 0
    if age.half_life is not None and age.floor == 0 and has_weights:
        raise ValueError(
            f"age is {age!r} and importance_exponent is {importance_exponent}; without a floor the weights of all rows "
            "but the oldest vanish. Give a floor above 0 or importance_exponent=0. A PrioritizedSampler also accepts "
            "normalize_over_batch=True"
        )


def written_slots(index: int | Tensor, storage: Storage | None, sampler: str) -> Tensor:
    """Returns the slots that ``mark_update`` of a sampler was given, int64 ``[n]`` in insertion order, each once."""
    if storage is None:
        raise ValueError(f"{sampler}.mark_update got no storage; pass the buffer's as storage=.")
    index = as_tensor(index)
    if index.ndim > 1:
        remedy = "build the storage with ndim=1, and flatten environments and time before extend"
        raise ValueError(f"{sampler} got an index of shape {list(index.shape)}, not of one dimension; {remedy}")
    # A batch longer than the ring names slots twice, and only its last rows are stored.
    return index.reshape(-1)[-storage.max_size :]


@rebuildable
class PrioritizedSampler(PrioritizedBase):
    """Draws item i with probability proportional to ``(priority[i] + priority_offset) ** priority_exponent``.

    New items get the largest priority so far, or 1 if there is none, so that each is drawn early. Call
    :meth:`update_priority` after every update with the magnitudes of the TD errors. TorchRL's ``isinstance`` checks
    accept it as their sampler of this name. Its compiled code is not needed. A draw waits for no device. Priorities
    and draws stay on the CPU wherever the rows are, unless ``device`` is given.
    Proportional variant of Schaul et al. 2016, https://arxiv.org/abs/1511.05952.

    Args:
        capacity: Number of slots in the storage.
        priority_exponent: Exponent α. 0 draws uniformly, 1 in proportion.
        importance_exponent: Exponent β of the correction ``priority_weight``. 1 removes all bias. A schedule follows
            its clock: the sampler counts its own draws, :meth:`advance` sets the other two.
        priority_offset: Offset ε that is added to every priority, so that an item of error 0 can still be drawn.
        min_priority: Least priority. Smaller ones are raised to it. With 1, ``priority_exponent=0.4``,
            ``importance_exponent=0`` and a Huber loss these are the loss-adjusted priorities (LAP) of Fujimoto et al.
            2020, https://arxiv.org/abs/2007.06049.
        normalize_over_batch: Whether weights are divided by the largest of the batch, not by the largest over the
            memory.
        backend: Back end of the :class:`~lightning_replay.priority_tree.PriorityTree`.
        seed: Seed for the sampler's own generator. ``None`` seeds it from torch's global generator.
        device: Device of the rows, on which priorities are kept and slots drawn. ``None`` does both on the CPU. On the
            device, a draw reads all priorities, and neither a draw nor an update waits. Probabilities are as in
            :class:`~lightning_replay.priority_tree.cumulative_sums.CumulativeSums`.
        age: :class:`~lightning_replay.Age`, or a mapping of its options, by which rows become less likely as they age.
            With ``None``, age has no effect. Importance weights also correct for the age. Draws are made on the CPU.
        replace: Whether a batch may contain a row several times. Otherwise rows are drawn one after the other, each in
            proportion to its priority among the rows that are left. Weights are as for draws with replacement.

    Sampled keys:
        index: int64 ``[B]``.
        priority_weight: float32 ``[B]``, at most 1.

    Raises:
        RuntimeError: at the draw, with ``replace=False``: fewer rows can be drawn than the batch needs.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = PrioritizedSampler(capacity=4, priority_exponent=1.0, priority_offset=0.0, seed=0)
        >>> replay = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=2)
        >>> slots = replay.extend(TensorDict({"observation": torch.arange(4)}, [4]))
        >>> replay.update_priority(slots, torch.tensor([0.0, 0.0, 3.0, 0.0]))
        >>> replay.sample()["index"]
        tensor([2, 2])
    """

    exact: bool = True

    def __init__(
        self,
        capacity: int,
        priority_exponent: float = 0.6,
        importance_exponent: float | Schedule = 0.4,
        priority_offset: float = 1e-6,
        normalize_over_batch: bool = False,
        backend: str = "auto",
        seed: int | None = None,
        min_priority: float = 0.0,
        device: str | torch.device | None = None,
        age: Age | Mapping[str, Any] | None = None,
        replace: bool = True,
    ) -> None:
        super().__init__(priority_exponent, importance_exponent, priority_offset, seed)
        self.replace: bool = checked_replace(replace, device)
        self.age: Age | None = _checked_age(age)
        if self.age is not None and (device is not None or backend == "torch"):
            raise ValueError(
                f"age is {self.age!r} with device={str(device)!r} and backend={backend!r}; draws by age are made on "
                "the CPU by compiled loops. Leave out device and backend"
            )
        self.normalize_over_batch: bool = checked_flag("normalize_over_batch", normalize_over_batch)
        if self.age is not None and self.uses_priorities and not self.normalize_over_batch:
            refuse_vanishing(self.age, self._importance_exponent)
        self.min_priority: float = checked_number("min_priority", min_priority, 0.0)
        self._built_with["min_priority"] = self.min_priority
        self.draw_device: torch.device | None = None if device is None else checked_device(device)
        if self.draw_device is None:
            self._build_tree(capacity, backend)
        else:
            backend = checked_choice("backend", backend, ("auto", "torch"))
            self._tree = PriorityTree(capacity, device=self.draw_device, backend="torch")
            self._seed_generator(seed, self.draw_device)
            self._largest = torch.zeros((), dtype=torch.float32, device=self.draw_device)
        self._set_largest(-1.0)
        self._has_rows = False

    def _build_tree(self, capacity: int, backend: str = "auto") -> None:
        if self.age is not None:
            from lightning_replay.ages import RowAges

            self._ages = RowAges(self.age, checked_count("capacity", capacity, of="slots"))
        self._tree = PriorityTree(capacity, backend=backend, ages=self._ages)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Gives new rows at ``index``, an int or int64 ``[n]``, the largest priority so far.

        Raises ``ValueError`` if they are of another buffer than the rows before, or of a larger one.
        """
        # A buffer of TorchRL with a writer of TorchRL shows its storage only here. Groups of rows are no storage.
        if (self._home is None or self._home() is not storage) and isinstance(storage, Storage):
            enter_torchrls(storage, self)
        if not self._has_rows:
            self._attach_storage(storage, index)
        if self.draw_device is not None:
            slots = torch.as_tensor(index, dtype=torch.int64, device=self.draw_device).reshape(-1)
            priority = torch.where(self._largest > 0, self._largest, max(1.0, self.min_priority))
            self._tree.set(slots, self._powered_there(priority))
            self._has_rows = True
            return
        if isinstance(index, Tensor) and index.dtype == torch.int64 and index.numel() == 1:
            # An int is written in a third of the time.
            index = int(index)
        if not isinstance(index, int):
            index = flat_index(index, storage)
            if not index.numel():
                return
        self._fill(index, storage)

    def _fill(self, index: int | Tensor, storage: Storage | None) -> None:
        if self._ages is not None:
            self._insert_ages(np.array([index]) if isinstance(index, int) else index.numpy(), storage)
        # New rows get the largest priority so far, so that each is drawn soon.
        value = (self.default_priority + self.priority_offset) ** self._priority_exponent
        if not self._tree.fill_checked(index, value, self._tree.capacity):
            raise refusal(as_tensor(index), None, self.max_size, None)
        self._has_rows = True

    def _insert_ages(self, slots: np.ndarray, storage: Storage | None) -> None:
        assert self._ages is not None
        if not 0 <= slots.min() <= slots.max() < self.max_size:
            raise refusal(torch.from_numpy(slots), None, self.max_size, None)
        self._ages.insert(slots, self._ages.register(slots, self._clocks, storage))

    def _follow_ages(self) -> None:
        if self._ages is not None:
            self._tree.replace_rows(self._ages.follow(self._clocks))

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        """Capacity of the priority tree, which must equal the storage's."""
        return self.max_size

    def on_evict(self, index: Tensor) -> None:
        """Sets the priorities of evicted rows to 0, so that they are never drawn."""
        self._tree.set(index, 0.0)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draws ``batch_size`` slots, int64 ``[B]``, or a tuple for several dimensions.

        Raises RuntimeError without any.
        """
        if not len(storage):
            raise empty_storage()
        self._attach_storage(storage)
        self._follow_ages()
        tree = self._tree
        # On a device, this check would wait. If all priorities are 0 there, the first row is drawn.
        if self.draw_device is None and not tree.has_mass():
            raise self._without_mass(len(storage))
        generator = self._generator
        uniform = torch.rand(batch_size, dtype=torch.float64, generator=generator, device=generator.device)
        # The tree also returns the importance weights (p / smallest p) ** -beta, so that the rarest row has weight 1.
        # One compiled loop draws and weighs 256 rows in 27 microseconds. Separate torch calls take 73.
        if self.draw_device is None:
            uniform = uniform.cpu()
        index, weight = tree.draw(uniform, over_batch=self.normalize_over_batch, exponent=-self.beta)
        if not self.replace and has_repeats(index.numpy()):
            index, weight = self._draw_different(storage, uniform.numpy())
        self._clocks["draws"] += 1
        if storage.ndim > 1:
            return torch.unravel_index(index, storage.shape), {"priority_weight": weight}
        return index, {"priority_weight": weight}

    def _draw_different(self, storage: Storage, points: np.ndarray) -> tuple[Tensor, Tensor]:
        # The first draw at these points is that of the tree's loop, which returns weights without probabilities.
        slots, probability = draw_rows(self, storage, np.zeros(len(points), dtype=np.int64), points)
        totals = self.group_totals(storage)
        weight = self._weights_of(probability * totals.mass, totals)
        return torch.from_numpy(slots), torch.from_numpy(weight)

    def _rows_at(self, storage: Any, groups: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        index, probability = self._tree.draw_at(points)
        return index.numpy(), probability

    def _draw_there(self, uniform: Tensor, count: Tensor, beta: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        index, weight = self._tree.draw(uniform, over_batch=self.normalize_over_batch, exponent=-beta)
        return index, {"priority_weight": weight}

    def count_draw(self) -> None:
        """Counts a draw, for schedules.

        :meta private:
        """
        self._clocks["draws"] += 1

    def _without_mass(self, stored: int) -> RuntimeError:
        if self.age is not None and self.age.max_age is not None:
            return RuntimeError(
                f"none of the {stored} stored rows can be drawn: all have priority 0, or are older than max_age "
                f"{self.age.max_age}. Store new rows first, or raise max_age"
            )
        return RuntimeError(
            f"every one of the {stored} stored rows has priority 0 and priority_offset is {self.priority_offset}, "
            "so none can be drawn; give at least one a positive priority or use a positive priority_offset"
        )

    def masses(self, storage: Any, group: int = 0) -> Tensor:
        """Returns the numbers in proportion to which rows are drawn, float64 ``[len(storage)]``, and reads all of them.

        :meta private:
        """
        self._attach_storage(storage)
        self._follow_ages()
        return self._tree.masses()[: len(storage)]

    def group_totals(self, storage: Storage) -> GroupTotals:
        """Returns the sum and the minimum of the priorities, after the exponent."""
        self._attach_storage(storage)
        self._follow_ages()
        total, least = self._tree.bounds()
        rows = np.array([occupancy_of(storage).count])
        return GroupTotals(["rows"], np.array([total]), rows, np.array([least]), float(self._largest))

    def sample_shard(self, storage: Storage, part: ShardRequest) -> tuple[Tensor, dict[str, Any], ShardDraw]:
        """Draws one row at each point of the request. Raises ``RuntimeError`` if all priorities are 0."""
        totals = self.group_totals(storage)
        if not len(storage):
            raise empty_storage()
        if not totals.mass[0] > 0:
            raise self._without_mass(len(storage))
        slots, probability = draw_rows(self, storage, part.groups, part.points)
        self._clocks["draws"] += 1
        return torch.from_numpy(slots), {}, ShardDraw(probability, totals)

    def weigh(self, part: ShardRequest, drawn: ShardDraw) -> dict[str, np.ndarray]:
        """Returns ``priority_weight``, float32 ``[B]``, from the totals of all replays."""
        weight = self._weights_of(drawn.probability, drawn.totals)
        self._clocks["draws"] += 1
        return {"priority_weight": weight}

    def _weights_of(self, mass: np.ndarray, totals: GroupTotals) -> np.ndarray:
        smallest = mass.min() if self.normalize_over_batch else totals.smallest[0]
        return ((mass / smallest) ** -self.beta).astype(np.float32)

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Storage | None) -> None:
        """Sets priorities. Of several for one slot the last counts, -1 is skipped, and refused ones change nothing."""
        # A buffer that was filled before it got this sampler.
        if not self._has_rows:
            self._attach_storage(storage)
        if not len(slots):
            return
        limit = self.max_size if storage is None else min(self.max_size, len(storage))
        if self.min_priority > 0:
            # Negative priorities and NaN stay, so that they are refused.
            magnitudes = magnitudes.clamp(min=self.min_priority).where(magnitudes >= 0, magnitudes)
        largest = self._tree.set_checked(
            slots, magnitudes, limit, offset=self.priority_offset, exponent=self._priority_exponent
        )
        if largest is None:
            raise refusal(slots, magnitudes, limit, None if storage is None else len(storage))
        self.raise_max_priority(float(largest))
        self._has_rows = True

    def set_priorities_there(self, slots: Tensor, td_error: Tensor, is_fresh: Tensor) -> Tensor:
        """Sets priorities by signed errors ``[n]``, on the device, and returns which are finite, bool ``[n]``."""
        magnitudes = td_error.abs().to(torch.float32)
        if self.min_priority > 0:
            magnitudes = magnitudes.clamp_min(self.min_priority)  # NaN stays.
        value = self._powered_there(magnitudes)
        is_sound = value < torch.inf  # NaN is not.
        is_kept = is_sound & is_fresh
        self._tree.set_kept(slots, value, is_kept)
        torch.maximum(self._largest, torch.where(is_kept, magnitudes, self._largest).amax(), out=self._largest)
        return is_sound

    def _powered_there(self, magnitudes: Tensor) -> Tensor:
        return magnitudes.add(self.priority_offset).pow_(self._priority_exponent)

    def _set_largest(self, priority: float) -> None:
        if self.draw_device is None:
            self._largest = priority
        else:
            self._largest.fill_(priority)  # It keeps its memory, which a CUDA graph may have captured.

    def raise_max_priority(self, priority: float) -> None:
        """Raises the priority that new rows get, if ``priority`` is larger."""
        if self.draw_device is None:
            super().raise_max_priority(priority)
        else:
            self._largest.clamp_min_(priority)

    def _update_matching(self, slots: Any, errors: Any, generation: Any, stored: Any, length: int) -> int | None:
        """Sets priorities by signed errors if generations are the stored ones, and returns how many are not."""
        # The torch back end has no pass that compares generations.
        if not self._has_rows or self._tree.backend != "numba":
            return None
        if self.min_priority > 0:
            errors = np.maximum(np.abs(errors), np.float32(self.min_priority))
        updated = self._tree.update(
            slots, errors, generation, stored, length, offset=self.priority_offset, exponent=self._priority_exponent
        )
        if updated is None:
            return None
        largest, stale = updated
        self.raise_max_priority(largest)
        return stale

    def priority_of(self, index: Tensor) -> Tensor | None:
        """Returns the priorities of rows before any exponent, float32 ``[n]``, or ``None`` if α is 0."""
        if self._priority_exponent == 0:
            return None
        return (self._tree.get(index) ** (1 / self._priority_exponent) - self.priority_offset).clamp(min=0)

    def stats(self) -> dict[str, float]:
        """Returns ``effective_sample_size``, ``1 / Σ P(i)²``: as many equally likely rows would repeat as often."""
        self._follow_ages()
        effective = self._tree.effective_slots()
        return {"effective_sample_size": effective} if effective else {}

    def _attach_storage(self, storage: Storage | None, new: int | Tensor | None = None) -> None:
        if storage is None or self._has_rows or not len(storage):
            return
        if self._ages is None:
            self.mark_update(occupancy_of(storage).slots())
            return
        # New rows are counted once, after the rows that were stored before this sampler came.
        self._has_rows = True
        earlier = stored_before(storage, flat_index([] if new is None else new, storage))
        if len(earlier):
            self._fill(earlier, storage)

    @property
    def default_priority(self) -> float:
        """Returns the priority of new rows, before any exponent, the largest so far, or 1 if none is positive.

        :meta private:
        """
        return float(self._largest) if self._largest > 0 else max(1.0, self.min_priority)

    @property
    def nbytes(self) -> int:
        """Size of the priority tree and the ages in bytes."""
        return self._tree.nbytes + (0 if self._ages is None else self._ages.nbytes)

    @property
    def priority_exponent(self) -> float:
        """α. Setting it re-exponentiates the stored priorities, which is impossible from 0."""
        return self._priority_exponent

    @priority_exponent.setter
    def priority_exponent(self, value: float) -> None:
        value = checked_number("priority_exponent", value, 0.0)
        if value == self._priority_exponent:
            return
        if self._priority_exponent == 0:
            if self._has_rows:
                warnings.warn(
                    "priority_exponent was 0, which keeps no priorities: stored rows stay equal until update_priority",
                    stacklevel=2,
                )
        else:
            # The tree keeps p ** α. Raised to α'/α, it becomes p ** α', the value at the new exponent.
            powered = self._tree.leaves().pow(value / self._priority_exponent)
            if not torch.isfinite(powered).all():
                raise ValueError(f"priority_exponent is {value}, at which a stored priority does not fit float32")
            self._replace_leaves(powered)
        self._priority_exponent = value

    def _empty(self) -> None:
        if self._ages is not None:
            self._ages.clear()
        self._tree.clear()
        self._set_largest(-1.0)
        self._has_rows = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the priorities, options, clocks, and the generator's state."""
        ages = {} if self._ages is None else {"ages": self._ages.state_dict()}
        return {"tree": self._tree.state_dict(), "has_rows": self._has_rows} | ages | self._shared_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        If this sampler was built with another exponent, offset or schedule than the saved one, its own counts, also for
        the stored priorities. The log names them. A schedule continues at the saved clocks.
        """
        # A negative number would make priorities complex.
        saved_exponent = checked_number("the saved priority_exponent", state_dict["priority_exponent"], 0.0)
        saved_offset = checked_number("the saved priority_offset", state_dict["priority_offset"], 0.0)
        if self._ages is not None:
            self._ages.load_state_dict(state_dict)
        self._tree.load_state_dict(state_dict["tree"])
        self._set_largest(float(state_dict["max_priority"]))
        self._has_rows = bool(state_dict["has_rows"])
        self._priority_exponent = saved_exponent
        self.priority_offset: float = saved_offset
        # The offset comes first, because it was added before the saved exponent was applied.
        if self._differs("priority_offset", state_dict):
            self._set_offset(self._built_with["priority_offset"])
        if self._differs("priority_exponent", state_dict):
            self.priority_exponent = self._built_with["priority_exponent"]
        if self._differs("min_priority", state_dict):
            least = (self.min_priority + self.priority_offset) ** self._priority_exponent
            self._replace_leaves(self._tree.leaves().clamp(min=least))
        self._load_shared_state(state_dict)

    def _set_offset(self, offset: float) -> None:
        if self._priority_exponent > 0:
            powered = self._tree.leaves().double()
            priority = (powered ** (1 / self._priority_exponent) - self.priority_offset).clamp(min=0.0)
            # Priorities go from p ** α back to p, and forward with the new offset.
            self._replace_leaves(((priority + offset) ** self._priority_exponent).float())
        self.priority_offset = offset

    def _replace_leaves(self, values: Tensor) -> None:
        # Rows of priority 0 keep it.
        leaves = self._tree.leaves()
        self._tree.load_state_dict({"leaves": torch.where(leaves > 0, values, leaves)})

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(capacity={self.max_size}, priority_exponent={self._priority_exponent}, "
            f"importance_exponent={self._importance_exponent}, priority_offset={self.priority_offset})"
        )
