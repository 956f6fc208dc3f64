# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that holds a part of a sharded replay of RLlib's episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from lightning_replay.sharded.fetching import fetched
from lightning_replay.sharded.reports import Answer, RemotePart, ShardReport
from lightning_replay.sharded.shard import ReplayShard
from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.files import SavedBuffer, check_spaces, read_buffer, write_buffer
from rllib_ext.rllib_compat import DRAWS_PER_REPORT
from rllib_ext.sharded.episode_resharding import reshard_saved
from rllib_ext.sharded.options import options_of_shard

if TYPE_CHECKING:
    import numpy as np

    from lightning_replay.draw_parts import DrawPart
    from lightning_replay.replay import Replay
    from lightning_replay.sharded.folders import Folder
    from rllib_ext.buffer.building import Returns


class EpisodeShard(ReplayShard):
    """A shard that holds a :class:`~rllib_ext.buffer.episode_buffer.RecipeEpisodeReplayBuffer`.

    :meth:`add` of more steps than the shard holds has, after an error, stored those before the ones refused.

    Args:
        recipe, options, number, num_shards, fetch_timeout_s, folder: as of the base class.
        returns: length and discount, for rows whose returns are formed before they are stored.
    """

    def __init__(
        self,
        recipe: str | None,
        options: Mapping[str, Any],
        number: int,
        num_shards: int,
        returns: Returns,
        fetch_timeout_s: float,
        folder: Folder | None,
    ) -> None:
        self._returns = returns
        super().__init__(recipe, options, number, num_shards, fetch_timeout_s, folder)

    @property
    def replays(self) -> dict[str, Replay]:
        return {name: module.replay for name, module in self.held.modules.items()}

    def add(self, references: Sequence[ray.ObjectRef[Any]], largest: Mapping[str, float]) -> Answer:
        """Stores fragments of episodes.

        Args:
            references: each of a list of episodes.
            largest: the largest priority that a row of any shard was given, by module; new rows get it.
        """
        episodes: list[Any] = []
        for fragments in fetched(references, self._fetch_timeout_s):
            if fragments is None:  # its EnvRunner was lost, or hangs, before it could be fetched
                self._not_fetched += 1
            else:
                episodes += fragments
        self.held.options.largest_priorities |= largest
        for name, replay in self.replays.items():
            if name in largest:
                replay.raise_largest_priority(largest[name])
        most = min((module.max_rows for module in self.held.modules.values()), default=0)
        at_once = len(episodes) if sum(map(len, episodes)) <= most else 1  # what comes may be more than a shard holds
        for start in range(0, len(episodes), max(at_once, 1)):
            self.held.add(episodes[start : start + at_once])
        return self._answer()

    def draw(self, parts: Mapping[str, DrawPart], clocks: Mapping[str, int], *request: Any) -> Answer:
        """Draws as the base class does; the request is length and discount of returns. Some answers have statistics."""
        stats = self.held.counters.stats_due(self.held.modules, DRAWS_PER_REPORT)
        drawn, report = super().draw(parts, clocks, *request)
        return Answer({name: part._replace(stats=stats.get(name)) for name, part in drawn.items()}, report)

    def update(self, module_id: str, slot: np.ndarray, generation: np.ndarray, td_errors: np.ndarray) -> Answer:  # type: ignore[override]
        self.held.modules[module_id].update_part(slot, generation, td_errors)
        return self._answer()

    def stage(self, folders: Sequence[Folder], spaces: Mapping[str, Any]) -> Answer:  # type: ignore[override]
        """Reads a save without using it yet; returns the draws made before it.

        Args:
            folders: as of the base class.
            spaces: RLlib's, which the stored columns are compared with.

        Raises:
            DamagedFileError, ValueError, MemoryError: as :func:`~rllib_ext.buffer.files.read_buffer`.
        """
        self._staged = None  # of a save that another shard could not read
        if len(folders) == self._num_shards:
            staged = self._read(folders[self._number], self.held)
        else:
            # One at a time is held in memory.
            saved = (self._read(folder, self._build(place, len(folders))) for place, folder in enumerate(folders))
            staged = reshard_saved(self.held, saved, self._number, self._num_shards)
        check_spaces(staged.modules, spaces)
        self._staged = staged
        return self._answer(max((one["draws"] for one in staged.state["modules"].values()), default=0))

    def get_state(self) -> Answer:
        return self._answer(self.held.get_state())

    def set_state(self, state: dict[str, Any]) -> Answer:
        self.held.set_state(state)
        return self._answer()

    def _build(self, number: int, num_shards: int) -> RecipeEpisodeReplayBuffer:
        options = options_of_shard(self._options, num_shards, number)
        buffer = RecipeEpisodeReplayBuffer(self._recipe, layout="flagged", **options)
        buffer.is_in_checkpoints = True
        buffer.form_returns(*self._returns)
        return buffer

    def _draw_part(self, name: str, part: DrawPart, clocks: Mapping[str, int], *request: Any) -> RemotePart:
        rows = self.held.modules[name].draw_part(part, *request, **clocks)
        module_id = rows.block.module_id
        return RemotePart(ray.put(rows.block), rows.slot, rows.generation, rows.reply, rows.mean_n_step, module_id)

    def _write(self, local: Path, previous: Path | None, *fields: Any) -> Sequence[int]:
        (warm_up,) = fields
        return write_buffer(self.held, local, warm_up, previous)

    def _read(self, folder: Folder, into: RecipeEpisodeReplayBuffer) -> SavedBuffer:
        with folder.to_read() as local:
            return read_buffer(into, local)

    def _use(self, saved: SavedBuffer) -> None:
        self.held.take_over(saved.modules, saved.state)

    def _report(self) -> ShardReport:
        progress = {name: module.task_progress for name, module in self.held.modules.items()}
        return ShardReport(
            env_steps_stored=self.held.num_env_steps_stored,
            counts=self.held.counts(),
            signals={name: one.new_signals() for name, one in progress.items() if one is not None},
        )
