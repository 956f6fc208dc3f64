# SPDX-License-Identifier: Apache-2.0
"""Links between consecutive stored steps, kept by samplers that follow episodes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.episodes.links import EpisodeLinks
from lightning_replay.episodes.tracker import require_one_each
from lightning_replay.parts import ReplaySampler
from lightning_replay.validation import checked_key


class LinkedSampler(ReplaySampler):
    """Base class of samplers with links; see :class:`~lightning_replay.episodes.links.EpisodeLinks`."""

    reads_columns = True
    _links: EpisodeLinks | None = None  # until rows are stored

    def _set_done_key(self, key: NestedKey) -> None:
        checked_key("done_key", key)
        self._done_key = tuple(key) if isinstance(key, list) else key

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

    def cut(self, index: Tensor) -> None:
        """Ends the episodes at these slots: nothing follows them, now or later."""
        super().cut(index)
        if self._links is not None:
            self._links.cut(index)

    def break_episodes(self, trajectories: Iterable[int | None]) -> None:
        """Ends the running episodes of these trajectories: their next rows follow no stored row."""
        super().break_episodes(trajectories)
        if self._links is not None:
            self._links.break_episodes(trajectories)
