# SPDX-License-Identifier: Apache-2.0
"""Ends of the episodes in a replay that no stored flag marks: ends by lost environments, and by slices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_replay.episodes.beginnings import Beginnings
from lightning_replay.episodes.returns import EpisodeTracker
from lightning_replay.episodes.running import newest_running, slots_by_age, stored_trajectories
from lightning_replay.replay_parts import ReplayParts
from lightning_replay.samplers.slice_check import SliceCheck
from lightning_replay.storage.packed import readable_rows

_FLAGS = (("next", "truncated"), ("next", "done"))
_NO_SLOTS = torch.zeros(0, dtype=torch.int64, device="cpu")


class EpisodeEnds:
    """Ends episodes for the sampler, the writer, and the links of a replay.

    Args:
        checks_continuity: Whether observations are compared.
    """

    _parts: ReplayParts
    _episodes: EpisodeTracker | None

    def __init__(self, checks_continuity: bool) -> None:
        self._checks_continuity = checks_continuity
        self.beginnings: Beginnings = Beginnings(compares=False, is_silent=not checks_continuity)

    def attach(self, parts: ReplayParts, episodes: EpisodeTracker | None) -> None:
        """Sets the parts of the replay, and the links between its rows, or ``None`` if it follows no episodes."""
        self._parts = parts
        #: Whether the sampler cuts slices at rows that do not continue the row before.
        self.cuts_slices: bool = parts.cuts_slices and self._checks_continuity
        self.check_slices: SliceCheck = SliceCheck()
        self._episodes = episodes

    def follow(self, episodes: EpisodeTracker) -> None:
        """Sets the links between the rows."""
        self._episodes = episodes
        self.begin()

    def restart(self) -> None:
        """Prepares for the rows of a replay that was emptied or loaded."""
        self.check_slices = SliceCheck()
        self.begin()

    def begin(self) -> None:
        """Prepares for rows of other environments than those before."""
        parts: list[Any] = [self._parts.sampler, *self._parts.delaying]
        follows = self.cuts_slices or (self._checks_continuity and self._episodes is not None)
        compares = (follows, self._parts.writer.compares_rows, *(part.check_continuity for part in parts))
        packed = self._parts.packed
        if packed is not None and packed.deferred is not None:  # A comparison would wait for the device.
            self.beginnings = Beginnings(compares=False, is_silent=True)
        else:
            self.beginnings = Beginnings(any(compares), self.beginnings.is_silent)

    def keep(self, beginnings: Beginnings) -> None:
        """Keeps the beginnings of rows that are stored now, and reports ends that look wrong."""
        self.beginnings = beginnings
        beginnings.warn()

    def announce(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        """Tells links and sampler that nothing follows the rows in ``slots``, nor the running ``trajectories``."""
        named = [*trajectories]
        if self._episodes is not None:
            self._episodes.end_episodes(slots, named)
        self._parts.sampler.end_episodes(slots, named)

    def mark(self, slots: Tensor) -> None:
        """Sets the flags of ends in the rows in ``slots``, int64 ``[n]``: nothing follows them."""
        if not len(slots):
            return
        rows = readable_rows(self._parts.storage)
        flags = [key for key in _FLAGS if rows.get(key, None) is not None]
        if self._parts.packed is not None:
            self._parts.packed.set_flags(flags, slots)
        else:
            for key in flags:
                rows.get(key)[slots] = True
        self.announce(slots)

    def mark_broken(self, slots: Tensor) -> None:
        """Marks the rows before those in ``slots`` that do not continue them, for a sampler that cuts slices."""
        if self.cuts_slices:
            self.mark(self.check_slices.broken(slots, self._parts.storage))

    def end_slots(self, slots: Tensor, generation: Tensor) -> None:
        """Marks the newest rows of episodes, slots ``[n]``, if their slots still have this ``generation``."""
        assert self._parts.packed is not None, "slots= needs a PackedStorage"
        stored = self._parts.packed.generation_of(slots).cpu()
        slots = slots.cpu()[stored == generation.cpu()]
        if len(slots):
            self.mark(slots)
            self._parts.writer.end_episodes(slots)

    def end_running(self, trajectories: list[int] | None) -> None:
        """Ends the running episodes of these trajectories, or all. See ``Replay.end_episodes``."""
        packed, writer = self._parts.packed, self._parts.writer
        if trajectories is None:
            self.begin()
        in_order = None if writer.may_refuse or packed is None else slots_by_age(packed, writer)
        if in_order is None or packed is None:
            named = stored_trajectories(self._parts.storage) if trajectories is None else trajectories
            self.announce(_NO_SLOTS, named)
            return
        slots, running = newest_running(packed, in_order, trajectories)
        if self._parts.delaying:
            self.announce(_NO_SLOTS, running)
        else:
            self.mark(slots)
        writer.end_episodes(slots)
