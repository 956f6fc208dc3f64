# SPDX-License-Identifier: Apache-2.0
"""Draws by another sampler, with the newest row in every batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from lightning_replay.options import check_kind
from lightning_replay.samplers.pairs import Delegated, SamplerWrapper
from lightning_replay.samplers.prioritized import PrioritizedSampler
from lightning_replay.samplers.uniform import UniformSampler
from lightning_replay.saving.spec import rebuildable


@rebuildable
class CombinedSampler(SamplerWrapper):
    """Draws all rows of a batch but the last by ``base_sampler``; the last is the newest row.

    Combined experience replay, Zhang and Sutton 2017, https://arxiv.org/abs/1712.01275, which learns from new steps
    at once however large the replay is. Of rows stored together, as of several environments, the last one counts.
    If the newest row has left, or no row is stored yet, ``base_sampler`` draws the whole batch.

    Args:
        base_sampler: Sampler of rows, a :class:`UniformSampler` or :class:`PrioritizedSampler`, or a subclass; uniform
            by default.
        seed: Seed for the default ``base_sampler``.

    Sampled keys:
        index: int64 ``[B]``, last the newest row.
        priority_weight: float32 ``[B]`` if ``base_sampler`` is prioritized; the newest row too.

    Raises:
        TypeError: ``base_sampler`` draws pairs, or from tables, whose shares the newest row would change.

    Example:
        >>> from lightning_replay import PackedStorage, Replay
        >>> from tensordict import TensorDict
        >>> replay = Replay(storage=PackedStorage(100), sampler=CombinedSampler(seed=0), batch_size=4)
        >>> _ = replay.extend(TensorDict({"observation": torch.arange(50.0)}, [50]))
        >>> int(replay.sample()["observation"][-1])
        49
    """

    saved_attributes: tuple[str, ...] = ("_newest",)
    _reads_columns: Any = Delegated()

    def __init__(self, base_sampler: Sampler | None = None, seed: int | None = None) -> None:
        super().__init__(base_sampler, UniformSampler, seed)
        accepted = "a UniformSampler or PrioritizedSampler of rows; one of pairs or of tables has other batches"
        check_kind("base_sampler", self.base_sampler, UniformSampler | PrioritizedSampler, accepted)
        if self._draws_from_tables:
            raise TypeError(f"base_sampler is {self.base_sampler!r}; it must be {accepted}")
        # The slot of the newest row, or -1.
        self._newest = -1

    def on_insert(self, index: Tensor, storage: Storage) -> None:
        """Notes the slot of the newest row.

        :meta private:
        """
        if len(index):
            self._newest = int(index[-1])

    def on_evict(self, index: Tensor) -> None:
        """Forgets the newest row if it is evicted."""
        super().on_evict(index)
        if bool((index == self._newest).any()):
            self._newest = -1

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` slots, int64 ``[B]``, and their weights."""
        if self._newest >= len(storage):
            raise ValueError(f"the newest row of the state is in slot {self._newest}, which there is not; load another")
        if self._newest < 0:
            return self.base_sampler.sample(storage, batch_size)
        # A priority tree cannot draw an empty batch.
        index, info = self.base_sampler.sample(storage, max(batch_size - 1, 1))
        index = torch.cat((index[: batch_size - 1], index.new_full((1,), self._newest)))
        if isinstance(self.base_sampler, PrioritizedSampler):
            info["priority_weight"] = self.base_sampler.weights_of(index)
        return index, info

    def _empty(self) -> None:
        super()._empty()
        self._newest = -1
