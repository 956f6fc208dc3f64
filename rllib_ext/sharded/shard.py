# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that holds a part of a sharded replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from lightning_replay.sharded.fetching import fetched
from lightning_replay.sharded.reports import Answer, RemotePart, ShardReport
from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.files import SavedBuffer, WarmUp, check_spaces, read_buffer, write_buffer
from rllib_ext.rllib_compat import DRAWS_PER_REPORT
from rllib_ext.sharded.episode_resharding import reshard_saved
from rllib_ext.sharded.options import options_of_shard

if TYPE_CHECKING:
    import numpy as np

    from lightning_replay.draw_parts import DrawPart
    from lightning_replay.sharded.folders import Folder
    from rllib_ext.buffer.building import Returns


class EpisodeShard:
    """A :class:`~rllib_ext.buffer.episode_buffer.RecipeEpisodeReplayBuffer` of whole episodes in a process of its own.

    Every method returns an :class:`~lightning_replay.sharded.reports.Answer`. A method that raises an error has changed
    nothing, except that :meth:`add` of more steps than the shard holds has stored those before the ones refused.

    Args:
        recipe, options: of the whole sharded replay.
        number: of this shard.
        num_shards: S.
        returns: length and discount, for rows whose returns are formed before they are stored.
        fetch_timeout_s: seconds to wait for steps from an EnvRunner that may hang.
        folder: of a save to begin with; ``None`` begins empty.
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
        self._fetch_timeout_s = fetch_timeout_s
        self._recipe, self._options, self._returns = recipe, options, returns
        self._number, self._num_shards = number, num_shards
        self._buffer = self._built(number, num_shards)
        self._fragments_lost = 0
        self._staged: SavedBuffer | None = None
        if folder is not None:
            with folder.to_read() as local:
                saved = read_buffer(self._buffer, local)
            self._buffer.take_over(saved.modules, saved.state)

    def report(self) -> Answer:
        """Returns what the shard holds."""
        return self._answer()

    def node(self) -> Answer:
        """Returns the id of the node that the shard is on."""
        return self._answer(ray.get_runtime_context().get_node_id())

    def add(self, references: Sequence[ray.ObjectRef[Any]], largest: Mapping[str, float]) -> Answer:
        """Stores fragments of episodes.

        Args:
            references: each of a list of episodes.
            largest: the largest priority that a row of any shard was given, by module; new rows get it.
        """
        episodes: list[Any] = []
        for fragments in fetched(references, self._fetch_timeout_s):
            if fragments is None:  # its EnvRunner was lost, or hangs, before it could be fetched
                self._fragments_lost += 1
            else:
                episodes += fragments
        self._buffer.options.largest_priorities |= largest
        for name, priority in largest.items():
            if name in self._buffer.modules:
                self._buffer.modules[name].replay.raise_largest_priority(priority)
        most = min((module.max_rows for module in self._buffer.modules.values()), default=0)
        at_once = len(episodes) if sum(map(len, episodes)) <= most else 1  # what comes may be more than a shard holds
        for start in range(0, len(episodes), max(at_once, 1)):
            self._buffer.add(episodes[start : start + at_once])
        return self._answer()

    def draw(
        self, parts: Mapping[str, DrawPart], clocks: Mapping[str, int], n_step: int | tuple[int, int], gamma: float
    ) -> Answer:
        """Draws this shard's rows of a batch, and keeps them in the object store until the Learners have fetched them.

        A part is left out if there is nothing to draw it from any more.

        Args:
            parts: by module, none without rows.
            clocks: ``env_steps`` and ``updates`` of all shards together.
            n_step, gamma: of returns.

        Returns:
            A :class:`~lightning_replay.sharded.reports.RemotePart` by module.
        """
        stats, drawn = self._buffer.counters.stats_due(self._buffer.modules, DRAWS_PER_REPORT), {}
        for name, part in parts.items():
            module = self._buffer.modules[name]
            if not (module.replay.group_totals().mass[part.groups] > 0).all():
                continue  # all priorities have become 0 since the draw was divided
            rows = module.draw_part(part, n_step, gamma, **clocks)
            drawn[name] = RemotePart(ray.put(rows.block), *rows[1:], rows.block.module_id, stats.get(name))
        return self._answer(drawn)

    def update(self, module_id: str, slot: np.ndarray, generation: np.ndarray, td_errors: np.ndarray) -> Answer:
        """Updates drawn rows of a module with their TD errors; those that have left since are dropped and counted."""
        self._buffer.modules[module_id].update_part(slot, generation, td_errors)
        return self._answer()

    def stats(self) -> Answer:
        """Returns the statistics of each module's replay."""
        return self._answer(
            {
                name: module.replay.stats()
                | {
                    "fragment_gaps": module.converter.fragments.gaps,
                    "duplicate_steps": module.converter.fragments.duplicates,
                }
                for name, module in self._buffer.modules.items()
            }
        )

    def sees(self, folder: str) -> Answer:
        """Returns whether this node has a folder at a path."""
        return self._answer(Path(folder).is_dir())

    def save(self, folder: Folder, warm_up: WarmUp, previous: Folder | None) -> Answer:
        """Saves the buffer into a folder, by a temporary one of this node where that is on another file system.

        Returns the bytes of all files, and of those written.
        """
        before = None if previous is None else previous.local
        with folder.to_write() as local:
            size = write_buffer(self._buffer, local, warm_up, before)
        return self._answer(tuple(size))

    def stage(self, folders: Sequence[Folder], spaces: Mapping[str, Any]) -> Answer:
        """Reads a save without using it yet; returns the draws made before it.

        Args:
            folders: of every shard saved; of other shards than there are now, episodes are dealt out anew.
            spaces: RLlib's, which the stored columns are compared with.

        Raises:
            DamagedFileError, ValueError, MemoryError: as :func:`~rllib_ext.buffer.files.read_buffer`.
        """
        self._staged = None  # of a save that another shard could not read
        if len(folders) == self._num_shards:
            with folders[self._number].to_read() as local:
                saved = read_buffer(self._buffer, local)
        else:

            def build(place: int) -> RecipeEpisodeReplayBuffer:
                return self._built(place, len(folders))

            saved = reshard_saved(self._buffer, build, folders, self._number, self._num_shards)
        check_spaces(saved.modules, spaces)
        self._staged = saved
        return self._answer(max((one["draws"] for one in saved.state["modules"].values()), default=0))

    def take_over(self) -> Answer:
        """Replaces what the shard holds by the save that was read."""
        assert self._staged is not None
        self._buffer.take_over(self._staged.modules, self._staged.state)
        self._staged = None
        return self._answer()

    def get_state(self) -> Answer:
        """Returns the state of the buffer."""
        return self._answer(self._buffer.get_state())

    def set_state(self, state: dict[str, Any]) -> Answer:
        """Restores :meth:`get_state`."""
        self._buffer.set_state(state)
        return self._answer()

    def _built(self, number: int, num_shards: int) -> RecipeEpisodeReplayBuffer:
        options = options_of_shard(self._options, num_shards, number)
        buffer = RecipeEpisodeReplayBuffer(self._recipe, layout="flagged", **options)
        buffer.is_in_checkpoints = True
        buffer.form_returns(*self._returns)
        return buffer

    def _answer(self, value: Any = None) -> Answer:
        modules = self._buffer.modules
        progress = {name: module.task_progress for name, module in modules.items()}
        report = ShardReport(
            totals={name: module.replay.group_totals() for name, module in modules.items()},
            rows={name: len(module) for name, module in modules.items()},
            env_steps_stored=self._buffer.num_env_steps_stored,
            counts=self._buffer.counts(),
            fragments_lost=self._fragments_lost,
            signals={name: one.new_signals() for name, one in progress.items() if one is not None},
        )
        return Answer(value, report)
