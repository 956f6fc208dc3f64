# SPDX-License-Identifier: Apache-2.0
"""Samplers of pairs of rows: partners by a rule, random ones, and the next row of the episode."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers import Sampler, Storage, TensorStorage

from lightning_replay.episodes.running import FollowedEpisodes
from lightning_replay.options import check_kind, checked_flag
from lightning_replay.parts import (
    ReplaySampler,
    ShardDraw,
    ShardRequest,
    as_replay_sampler,
    refuse_batch,
    without_columns,
)
from lightning_replay.samplers.prioritized import written_slots
from lightning_replay.samplers.uniform import UniformSampler
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.columns import as_tensor
from lightning_replay.storage.packed import occupancy_of, stored_before


class Delegated:
    """An attribute or method that a sampler takes from its ``base_sampler``, under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, sampler: SamplerWrapper | None, owner: type) -> Any:
        return self if sampler is None else getattr(as_replay_sampler(sampler.base_sampler), self._name)

    def __set__(self, sampler: SamplerWrapper, value: Any) -> None:
        raise AttributeError(f"{self._name} belongs to base_sampler; set it there")


class SamplerWrapper(ReplaySampler, TorchRLPrioritizedSampler):
    """Draws by another sampler, ``base_sampler``, which keeps the priorities, and adds to its draws.

    A subclass defines ``sample``, and :meth:`on_insert` if it keeps something of new rows. TorchRL's buffers pass TD
    errors only to subclasses of TorchRL's ``PrioritizedSampler``, hence the base class. Its constructor is not called,
    because it builds priority trees, which ``base_sampler`` has.
    """

    base_sampler: Sampler
    _shown: tuple[str, ...] = ()  # Attributes that repr shows beside base_sampler.

    # The base_sampler answers everything that depends only on its priorities and rows.
    num_slots: Any = Delegated()
    uses_priorities: Any = Delegated()
    check_storage: Any = Delegated()
    check_rows: Any = Delegated()
    check_priority: Any = Delegated()
    end_episodes: Any = Delegated()
    on_evict: Any = Delegated()
    on_append: Any = Delegated()
    on_leave: Any = Delegated()
    priority_of: Any = Delegated()
    raise_max_priority: Any = Delegated()
    group_totals: Any = Delegated()
    rows_of_groups: Any = Delegated()
    weigh: Any = Delegated()
    advance: Any = Delegated()
    stats: Any = Delegated()
    _draws_from_tables: Any = Delegated()
    # Most on_insert methods read columns of the new rows.
    _reads_columns: Any = True

    def __init__(self, base_sampler: Sampler | None, default: Callable[[int], Sampler], seed: int | None) -> None:
        if base_sampler is not None:
            check_kind(
                "base_sampler", base_sampler, Sampler, "a sampler, such as PrioritizedSampler(capacity=...), or None"
            )
        self._seed_generator(seed)
        self.base_sampler = default(self._derived_seed()) if base_sampler is None else base_sampler
        self.reduction = "max"
        self._is_attached = False

    def on_insert(self, index: Tensor, storage: Storage) -> None:
        """Reads new rows in the slots ``index``, int64 ``[n]`` in insertion order. Does nothing by default."""

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Calls :meth:`on_insert` for rows just written at ``index``, an int or int64 ``[n]`` in insertion order."""
        slots = written_slots(index, storage, type(self).__name__)
        if self.draw_device is None:
            slots = slots.cpu()
        assert storage is not None
        self.base_sampler.mark_update(index, storage=storage)
        self._attach_storage(storage, slots)
        self.on_insert(slots, storage)

    def _attach_storage(self, storage: Storage, new: Tensor) -> None:
        # A sampler that is added to a filled buffer reads the stored rows in slot order.
        if self._is_attached:
            return
        if self._reads_columns and not isinstance(storage, TensorStorage):
            raise without_columns(type(self).__name__, storage)
        self._is_attached = True
        earlier = stored_before(storage, new.cpu())
        if len(earlier):
            self.on_insert(earlier, storage)

    def extend(self, index: Any) -> None:
        """Passes new slots to ``base_sampler``, by TorchRL's name."""
        self.base_sampler.extend(index)

    def add(self, index: Any) -> None:
        """Passes one new slot to ``base_sampler``. TorchRL calls this method ``add``."""
        self.base_sampler.add(index)

    @property
    def default_priority(self) -> float:
        """Priority of new rows before any exponent, from ``base_sampler``."""
        return self.base_sampler.default_priority

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Storage | None) -> None:
        """Passes priorities ``[B]`` of rows ``[B]`` on to ``base_sampler``."""
        self.base_sampler.update_priority(slots, magnitudes, storage=storage)

    def reseed(self, seed: int) -> None:
        """Seeds this sampler and, unless both share one generator, ``base_sampler`` with a derived seed."""
        super().reseed(seed)
        if self.base_sampler._rng is not self._rng:
            as_replay_sampler(self.base_sampler).reseed(self._derived_seed())

    @property
    def nbytes(self) -> int:
        """Size of ``base_sampler`` in bytes."""
        return as_replay_sampler(self.base_sampler).nbytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of both samplers, and whether they share one generator."""
        return {
            **self._read_attributes(),
            "shares_generator": self.base_sampler._rng is self._rng,
            "base_sampler": self.base_sampler.state_dict(),
            "met_storage": self._is_attached,
            # State that a subclass keeps of rows is restored last.
            "learned": {},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of both samplers. A shared generator stays shared."""
        self._restore_attributes(state_dict)
        self.base_sampler.load_state_dict(state_dict["base_sampler"])
        self._is_attached = state_dict["met_storage"]
        if state_dict["shares_generator"]:
            # TorchRL's set_rng gave both one generator. Two copies of its state would repeat each other's numbers.
            self.base_sampler._rng = self._rng

    @property
    def _rng(self) -> torch.Generator:
        return self._generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        if generator is not None:
            self._generator = generator
            self.base_sampler._rng = generator

    def _derived_seed(self) -> int:
        return int(torch.randint(2**62, (), generator=self._generator, device=self._generator.device))

    def _empty(self) -> None:
        self.base_sampler._empty()
        self._is_attached = False

    def __repr__(self) -> str:
        shown = "".join(f", {name}={getattr(self, name)}" for name in self._shown)
        return f"{type(self).__name__}(base_sampler={self.base_sampler!r}{shown})"


class PairSampler(SamplerWrapper):
    """Draws pairs of rows, an index ``[B, 2]``: ``base_sampler`` draws the first of each, :meth:`partners` the second.

    Put :class:`~lightning_replay.transforms.MixPairs` behind it. A subclass defines :meth:`partners`, and
    :meth:`on_insert` if it keeps something of new rows. If ``base_sampler`` is prioritized, TD errors go to it.
    Otherwise they are ignored. TorchRL's ``update_tensordict_priority`` passes only the first of each pair, which is an
    error with ``update_partners``. Call ``buffer.update_priority(batch["index"], td_error.abs())``.

    Over tables ``base_sampler`` is a sampler of tables. A partner that no table holds any more leaves its pair unmixed.

    Args:
        base_sampler: Sampler that draws the first row of each pair, with its weights. The default is uniform.
        update_partners: Whether both rows of a pair get its TD error, not only the first.
        seed: Seed for the sampler's generator, and for the default ``base_sampler``.

    Sampled keys:
        index: int64 ``[B, 2]``.
        priority_weight: float32 ``[B]``, of the first of each pair, if ``base_sampler`` is prioritized.
    """

    _shown = ("update_partners",)

    def __init__(
        self, base_sampler: Sampler | None = None, update_partners: bool = False, seed: int | None = None
    ) -> None:
        super().__init__(base_sampler, UniformSampler, seed)
        self.update_partners: bool = checked_flag("update_partners", update_partners)

    @abstractmethod
    def partners(self, index: Tensor, storage: Storage) -> Tensor:
        """Returns the partner of each row, int64 ``[B]``.

        If there is none, it is the row itself, which stays unmixed.
        """

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` pairs, int64 ``[B, 2]``, with the columns that ``base_sampler`` returns."""
        first, info = self.base_sampler.sample(storage, batch_size)
        return self._paired(first, storage), info

    def sample_shard(self, storage: Storage, part: ShardRequest) -> tuple[Tensor, dict[str, Any], ShardDraw]:
        """Draws the first of each pair at the points by ``base_sampler``, and its partner in this replay."""
        first, info, reply = as_replay_sampler(self.base_sampler).sample_shard(storage, part)
        return self._paired(first, storage), info, reply

    def _paired(self, first: Tensor, storage: Storage) -> Tensor:
        if not self._is_attached:
            self._attach_storage(storage, first.new_empty(0))
        partners = self.partners(first, storage)
        is_held = occupancy_of(storage).held(partners)
        if is_held is not None:
            # A partner may have left without being overwritten. Its pair then stays unmixed.
            partners = torch.where(is_held, partners, first)
        return torch.stack((first, partners), dim=1)

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Sets priorities, by TorchRL's name.

        Raises ``ValueError`` if partners get them and ``index`` lacks partners.
        """
        refuse_batch(index)
        if self.uses_priorities and self.update_partners and as_tensor(index).ndim < 2:
            raise ValueError(
                "update_partners=True gives a TD error to both rows of a pair, and index is of single rows, as "
                "update_tensordict_priority of TorchRL's buffers passes it; call update_priority(batch['index'], "
                "td_error.abs()), or use lightning_replay.Replay. No priority was changed"
            )
        super().update_priority(index, priority, storage=storage)

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Storage | None) -> None:
        """Passes priorities ``[B]`` of pairs ``[B, 2]`` or rows ``[B]`` on. Only the first of a pair gets one."""
        slots = as_tensor(slots)
        magnitudes = as_tensor(magnitudes)
        if slots.ndim == 2 and self.update_partners:
            # The last of duplicates counts, so partners come before first rows.
            slots = slots.t().flip(0).reshape(-1)
            magnitudes = magnitudes.reshape(-1).repeat(2)
        elif slots.ndim == 2:
            slots = slots[:, 0].contiguous()
        super().set_priorities(slots, magnitudes, storage)


@rebuildable
class RandomPairSampler(PairSampler):
    """Pairs each drawn row with any stored row, itself included, all equally likely.

    Naive mixup, the baseline of the NMER paper. Zhang et al. 2018, https://arxiv.org/abs/1710.09412.

    Args:
        base_sampler, update_partners, seed: as in :class:`PairSampler`, and so are the sampled keys.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=RandomPairSampler(seed=0), batch_size=4)
        >>> _ = buffer.extend(TensorDict({"observation": torch.arange(8)}, [8]))
        >>> buffer.sample().batch_size
        torch.Size([4, 2])
    """

    def partners(self, index: Tensor, storage: Storage) -> Tensor:
        """Returns any stored row for each row, int64 ``[B]``."""
        return occupancy_of(storage).sample(len(index), self._generator)


def check_capacities(*slots: int) -> None:
    """Refuses a saved state whose parts differ in their number of slots. Raises ``ValueError``."""
    # Compiled loops index all parts without checks.
    if len(set(slots)) > 1:
        raise ValueError(f"the parts of the state have {sorted(set(slots))} slots, not all the same; load another save")


class FollowsEpisodes(ReplaySampler):
    """A sampler that keeps the links between stored rows.

    It stands before the class that draws in the list of bases.
    """

    followed: FollowedEpisodes
    _purpose: str  # The feature that needs episode ends, named in the error about missing ones.
    _reads_columns = True
    stored_options: tuple[str, ...] = ("done_key", "check_continuity")
    done_key: Any = property(attrgetter("followed.done_key"))
    check_continuity: Any = property(attrgetter("followed.check_continuity"))

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses rows ``[N]`` without the column ``done_key``."""
        super().check_rows(rows)
        self.followed.check_ends(rows, type(self).__name__, self._purpose)

    def on_evict(self, index: Tensor) -> None:
        """Removes evicted rows from the sampler and from the links of their episodes."""
        super().on_evict(index)
        self.followed.on_evict(index)

    def end_episodes(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        """Ends the episodes of the rows in ``slots``, and the running ``trajectories``."""
        super().end_episodes(slots, trajectories)
        self.followed.end_episodes(slots, trajectories)

    @property
    def nbytes(self) -> int:
        """Size of the sampler and of the episode links in bytes."""
        return super().nbytes + self.followed.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the sampler's state and the episode links."""
        state = super().state_dict()
        state.get("learned", state).update(self.followed.state_dict())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the sampler's state and the episode links."""
        super().load_state_dict(dict(state_dict))
        self.followed.load_state_dict(state_dict.get("learned", state_dict))

    def _empty(self) -> None:
        super()._empty()
        self.followed.clear()
        self._forget()

    def _forget(self) -> None:
        """Discards what a subclass keeps of stored rows, by default nothing."""


@rebuildable
class ContinuousTransitionSampler(FollowsEpisodes, PairSampler):
    """Pairs each drawn row with the next step of its episode, or with itself if there is none.

    The last row of an episode and the newest row of a running one have no next step and stay unmixed. Rows of several
    environments need ``trajectory`` (or ``("collector", "traj_ids")``). Without it all rows are one environment in
    order. A row that starts with another observation than the row before ended with is not its next step. Continuous
    Transition, Lin et al. 2021, https://arxiv.org/abs/2011.14487, without its tuning of the mixing
    temperature, as in the NMER paper.

    Args:
        done_key: Flag of rows that ended their episode, terminated or truncated.
        check_continuity: Whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.
        base_sampler, update_partners, seed: as in :class:`PairSampler`, and so are the sampled keys.

    Raises:
        ValueError: rows without ``done_key``, before ``Replay`` stores anything.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = ContinuousTransitionSampler(seed=0)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler, batch_size=4)
        >>> _ = buffer.extend(TensorDict({"next": {"done": torch.tensor([[False], [True], [False]])}}, [3]))
        >>> sampler.partners(torch.tensor([0, 1, 2]), buffer.storage)
        tensor([1, 1, 2])
    """

    _purpose = "pairs of consecutive steps"

    def __init__(
        self,
        base_sampler: Sampler | None = None,
        update_partners: bool = False,
        done_key: NestedKey = ("next", "done"),
        check_continuity: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(base_sampler=base_sampler, update_partners=update_partners, seed=seed)
        self.followed: FollowedEpisodes = FollowedEpisodes(done_key, check_continuity)

    def partners(self, index: Tensor, storage: Storage) -> Tensor:
        """Returns the next step of each row, int64 ``[B]``, or the row itself if there is none."""
        following = self.followed.links.successor[index]
        return torch.where(following < 0, index, following)

    def on_insert(self, index: Tensor, storage: Storage) -> None:
        """Links new rows to the previous rows of their episodes, and warns if most rows continue none.

        :meta private:
        """
        self.followed.mark_update(index, storage)
        self.followed.warn()
