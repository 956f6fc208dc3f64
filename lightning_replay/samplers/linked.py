# SPDX-License-Identifier: Apache-2.0
"""Links between consecutive stored steps, kept by samplers that follow episodes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.links import Continuity, EpisodeLinks
from lightning_replay.episodes.tracker import read_trajectory, require_one_each
from lightning_replay.parts import ReplaySampler
from lightning_replay.storage.access import read_columns
from lightning_replay.validation import checked_flag, checked_key


class LinkedSampler(ReplaySampler):
    """Base class of samplers with links; see :class:`~lightning_replay.episodes.links.EpisodeLinks`."""

    reads_columns = True
    _links: EpisodeLinks | None = None  # until rows are stored

    def _set_up_links(self, done_key: NestedKey, check_continuity: bool) -> None:
        checked_key("done_key", done_key)
        self._done_key = tuple(done_key) if isinstance(done_key, list) else done_key
        self._check_continuity = checked_flag("check_continuity", check_continuity)

    def _check_done(self, rows: TensorDictBase, purpose: str) -> None:
        """Refuses the first rows ``[N]`` where they have no flags of episode ends; later ones have their columns."""
        if self._links is not None:
            return
        if rows.get(self._done_key, None) is None:
            raise ValueError(
                f"the transitions have no {self._done_key!r}, which marks where episodes end; nothing was stored. "
                f"Store it with every transition, or name your key with done_key= of {type(self).__name__}"
            )
        require_one_each(rows, self._done_key, purpose, is_flag=True)

    def _allocate(self, capacity: int, device: torch.device) -> EpisodeLinks:
        self._links = EpisodeLinks(capacity, device=device)
        return self._links

    def _write_links(self, index: Tensor, storage: Storage) -> None:
        """Links the rows just written into the slots ``index``, int64 ``[n]`` in insertion order."""
        assert self._links is not None
        if self._check_continuity and self._links.continuity is None:
            self._links.continuity = Continuity(storage)
        (done,) = read_columns(storage, index, [self._done_key])
        self._links.write(index, read_trajectory(storage, index), done)

    def _warn(self) -> None:
        """Warns once where most rows do not continue the row before them, once this sampler has the new rows."""
        if self._links is not None and self._links.continuity is not None:
            self._links.continuity.warn()

    def cut(self, index: Tensor) -> None:
        super().cut(index)
        if self._links is not None:
            self._links.cut(index)

    def break_episodes(self, trajectories: Iterable[int | None]) -> None:
        super().break_episodes(trajectories)
        if self._links is not None:
            self._links.break_episodes(trajectories)
