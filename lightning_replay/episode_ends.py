# SPDX-License-Identifier: Apache-2.0
"""The running episodes of a replay buffer: where they are, and that nothing follows them any more."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_replay.assembled import AssembledReplay
from lightning_replay.episodes.running import newest_running
from lightning_replay.episodes.tracker import EpisodeTracker, read_trajectory
from lightning_replay.storage.access import device_of, occupancy_of


class EpisodicReplay(AssembledReplay):
    """A replay buffer whose running episodes can be ended."""

    def flush(self, trajectories: Iterable[int] | None = None) -> Tensor:
        """Stores the steps that transforms keep back; see :class:`~lightning_replay.replay.Replay`."""
        raise NotImplementedError

    def follow_episodes(self, episodes: EpisodeTracker) -> None:
        """Forms n-step rows along ``episodes`` from the next draw on, after linking the stored rows, oldest first.

        For a caller that learns the length of its returns only when it draws; otherwise give ``n_steps`` when building.

        Raises:
            ValueError: rows are stored, and the writer keeps no order of them.
        """
        with self._replay_lock, self._write_lock:
            if len(self._storage):
                episodes.mark_update(self.oldest_first(), self._storage)
            self._episodes = episodes

    def oldest_first(self) -> Tensor:
        """Returns the slots of the stored rows, int64 ``[N]``, in the order in which they were given.

        Raises:
            ValueError: the writer keeps no order of rows.
        """
        in_order = self._slots_by_age()
        if in_order is None:
            raise ValueError(
                f"{type(self._writer).__name__} keeps no order of its rows; define age_of as "
                "lightning_replay.parts.ReplayWriter has it, or use a writer of lightning_replay.writers"
            )
        return in_order

    def _stored_slots(self) -> Tensor:
        return occupancy_of(self._storage).slots().to(device_of(self._storage) or "cpu")

    def _slots_by_age(self) -> Tensor | None:
        """Returns the slots of the stored rows, oldest first; ``None`` where the writer keeps no order."""
        slots = self._stored_slots()
        age = self._writer_hooks.age_of(slots)
        return None if age is None else slots[age.to(slots.device).argsort(descending=True)]

    def _trajectories(self) -> list[int | None]:
        """Returns the ids of all stored trajectories; ``[None]`` where rows have none."""
        slots = self._stored_slots()
        ids = read_trajectory(self._storage, slots) if len(slots) else None
        return [None] if ids is None else ids.unique().tolist()

    def end_episodes(self, trajectories: Iterable[int] | None = None) -> Tensor:
        """Ends running episodes: their environments were closed, reset or lost, and nothing follows what is stored.

        Steps that a transform keeps back are stored first, as returns over the steps there are. Then the newest row of
        each episode is marked truncated and done, so that returns, pairs and histories end there. Where that may not be
        the last step of its episode (a writer that refuses rows or keeps no order, returns formed before they are
        stored) it stays as it is, and only what comes next is kept apart from it. Looks at all rows once, O(N).

        Args:
            trajectories: ids of the episodes, where rows have them; ``None`` for all that run.

        Returns:
            int64, slots of the rows that were stored by this call.

        Raises:
            TypeError: the storage is not a :class:`~lightning_replay.storage.PackedStorage`.
        """
        if self._packed is None:  # before anything is stored
            raise TypeError(
                f"end_episodes marks rows in a PackedStorage; the storage is a {type(self._storage).__name__}. "
                "Build the buffer with storage=PackedStorage(capacity)"
            )
        named = None if trajectories is None else list(trajectories)
        stored = self.flush(named)
        with self._changing():
            in_order = None if self._writer_hooks.may_refuse else self._slots_by_age()
            if in_order is None:
                self.break_episodes(self._trajectories() if named is None else named)
                return stored
            index, running = newest_running(self._packed, in_order, named)
            if any(one.delays_rows for one in self._own_transforms()):
                self.break_episodes(running)
            elif len(index):
                self._mark_truncated(index)
            self._writer_hooks.cut(index)
        return stored

    def _mark_truncated(self, index: Tensor) -> None:
        assert self._packed is not None
        self._packed.set_flags([("next", "truncated"), ("next", "done")], index)
        self.cut(index)

    def truncate(self, index: Tensor, generation: Tensor) -> None:
        """Closes interrupted episodes: marks stored rows truncated and done, where the slots still hold them.

        Args:
            index: int64 ``[N]``, the newest row of each interrupted episode.
            generation: int64 ``[N]``, of these rows.
        """
        assert self._packed is not None, "truncate needs a PackedStorage"
        with self._changing():
            index = index[self._storage.generation_of(index) == generation]
            if len(index):
                self._mark_truncated(index)
                self._writer_hooks.cut(index)
