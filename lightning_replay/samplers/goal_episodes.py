# SPDX-License-Identifier: Apache-2.0
"""Episodes that reached a goal, drawn by their place and forgotten by slot."""

from __future__ import annotations

import torch
from torch import Tensor


class GoalEpisodes:
    """Episodes that reached a goal, and the slots of their last goals, from :meth:`state`, int64 ``[G, 2]``."""

    def __init__(self, pairs: Tensor) -> None:
        self._pairs: list[tuple[int, int]] = [(episode, slot) for episode, slot in pairs.tolist()]
        self._place_of_episode = {episode: place for place, (episode, _) in enumerate(self._pairs)}
        self._episode_at = {slot: episode for episode, slot in self._pairs}

    def __len__(self) -> int:
        return len(self._pairs)

    def slot(self, place: int) -> int:
        """Returns the slot of the goal of one episode."""
        return self._pairs[place][1]

    def put(self, episodes: Tensor, slots: Tensor) -> None:
        """Adds goals, earlier ones first; a later goal of an episode replaces the earlier one."""
        for episode, slot in zip(episodes.tolist(), slots.tolist(), strict=True):
            place = self._place_of_episode.setdefault(episode, len(self._pairs))
            if place == len(self._pairs):
                self._pairs.append((episode, slot))
            else:
                del self._episode_at[self._pairs[place][1]]
                self._pairs[place] = (episode, slot)
            self._episode_at[slot] = episode

    def drop(self, slots: Tensor) -> None:
        """Discards the episodes whose goal was in one of these slots."""
        if not self._episode_at:
            return
        for slot in sorted(self._episode_at.keys() & set(slots.tolist())):
            place = self._place_of_episode.pop(self._episode_at.pop(slot))
            last = self._pairs.pop()
            if place < len(self._pairs):
                self._pairs[place] = last
                self._place_of_episode[last[0]] = place

    def state(self) -> Tensor:
        """Returns episodes and slots, int64 ``[G, 2]``."""
        return torch.tensor(self._pairs, dtype=torch.int64, device="cpu").reshape(-1, 2)
