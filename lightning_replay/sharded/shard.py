# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that holds one shard of a sharded replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from lightning_replay import recipes
from lightning_replay.episodes.running import stored_trajectories
from lightning_replay.parts import ShardRequest
from lightning_replay.replay import Replay
from lightning_replay.saves import save_replay
from lightning_replay.saving.folders import Folder
from lightning_replay.sharded.actors import Answer, RemoteShardDraw, ShardReport
from lightning_replay.sharded.options import options_of_shard, seed_of_shard
from lightning_replay.sharded.resharding import ReshardedRows
from lightning_replay.sharded.rows import Columns, columns_of, fetched, is_of_writer, layout_of
from lightning_replay.storage.packed import PackedStorage

#: The name of the only replay of a shard, in reports and draws.
MODULE = "replay"


class ReplayShard:
    """A process with the rows of whole episodes: one replay, or in RLlib one replay for each module.

    Every method that the driver calls returns an :class:`~lightning_replay.sharded.actors.Answer`. A method that raises
    an error has changed nothing. Recipe and options describe the whole sharded replay.

    Args:
        recipe: Name of the recipe, or ``None`` in RLlib.
        options: Options of the whole sharded replay.
        number: Number of this shard.
        num_shards: Number of shards.
        fetch_timeout_s: Seconds after which rows that cannot be fetched count as lost.
        folder: Folder of a save to begin with.
    """

    def __init__(
        self,
        recipe: str | None,
        options: Mapping[str, Any],
        number: int,
        num_shards: int,
        fetch_timeout_s: float,
        folder: Folder | None,
    ) -> None:
        self._recipe = recipe
        self._options = options
        self._number = number
        self._num_shards = num_shards
        self._fetch_timeout_s = fetch_timeout_s
        self._not_fetched = 0
        self._staged: Any = None
        #: A :class:`~lightning_replay.Replay`, or in RLlib a buffer of episodes.
        self.held: Any = self._build(number, num_shards)
        if folder is not None:
            self._use(self._read(folder, self.held))

    @property
    def replays(self) -> dict[str, Replay]:
        """The replay of each module."""
        return {MODULE: self.held}

    def report(self) -> Answer:
        """Returns an empty answer with the report of this shard."""
        return self._answer()

    def extend(
        self, reference: Sequence[ray.ObjectRef[Any]], largest: Mapping[str, float], clocks: Mapping[str, int]
    ) -> Answer:
        """Stores the rows of a reference to columns ``[N, ...]`` with the ``largest`` priority of any shard.

        ``clocks`` are the readings of all shards before these rows. Returns the slots, int64 ``[n]``. If the rows are
        refused, it returns the error and does not raise it. The error belongs to the process that sent the rows, and
        not to the next process that waits for this shard.
        """
        columns: Columns | None = fetched(reference, self._fetch_timeout_s)[0]
        if columns is None:
            # The sender was lost, or hangs.
            self._not_fetched += 1
            return self._answer(np.zeros(0, dtype=np.int64))
        # A new row gets the largest priority of all shards, as in one replay.
        for priority in largest.values():
            self.held.raise_max_priority(priority)
        self.held.advance(**clocks)
        try:
            slots = self.held.extend_columns(columns).cpu().numpy()
        except (TypeError, ValueError, RuntimeError) as error:
            return self._answer(error)
        return self._answer(slots)

    def draw(self, parts: Mapping[str, ShardRequest], clocks: Mapping[str, int], *request: Any) -> Answer:
        """Draws this shard's rows of a batch into the object store, and returns one draw for each module."""
        replays = self.replays
        drawn = {}
        for name, part in parts.items():
            # All priorities may have become 0 since the draw was divided.
            if (replays[name].group_totals().mass[part.groups] > 0).all():
                drawn[name] = self._draw_part(name, part, clocks, *request)
        return self._answer(drawn)

    def update(
        self,
        module_id: str,
        slot: np.ndarray,
        generation: np.ndarray,
        td_errors: np.ndarray,
        signals: Mapping[str, np.ndarray] | None = None,
    ) -> Answer:
        """Sets priorities. Drops and counts TD errors whose generation shows that their row has left."""
        given = {name: torch.tensor(values) for name, values in (signals or {}).items()}
        index = torch.tensor(slot)
        td_error = torch.tensor(td_errors)
        self.held.update_priority(index, td_error, generation=torch.tensor(generation), **given)
        return self._answer()

    def end_episodes(self, writer: int, trajectories: np.ndarray | None) -> Answer:
        """Ends running episodes of a writer. ``None`` ends all of its episodes."""
        if not len(self.held):
            self.held.end_episodes()
            return self._answer()
        assert isinstance(self.held.storage, PackedStorage)
        stored = [trajectory for trajectory in stored_trajectories(self.held.storage) if trajectory is not None]
        running = np.array(stored, dtype=np.int64)
        # Episodes of other processes go on.
        running = running[is_of_writer(running, writer)]
        if trajectories is not None:
            running = np.intersect1d(running, trajectories)
        self.held.end_episodes(running.tolist())
        return self._answer()

    def seed(self, seed: int) -> Answer:
        """Seeds the draws of this shard."""
        self.held.seed(seed_of_shard(seed, self._number))
        return self._answer()

    def stats(self) -> Answer:
        """Returns the statistics of each module's replay."""
        return self._answer({name: replay.stats() for name, replay in self.replays.items()})

    def sees(self, folder: str) -> Answer:
        """Returns whether this node has the folder."""
        return self._answer(Path(folder).is_dir())

    def save(self, folder: Folder, previous: Folder | None, *fields: Any) -> Answer:
        """Saves into a folder. Returns the bytes of all files, and the bytes of written files."""
        earlier = None
        if previous is not None:
            earlier = previous.local
        with folder.to_write() as local:
            size = self._write(local, earlier, *fields)
        return self._answer(tuple(size))

    def stage(self, folders: Sequence[Folder], is_of_shards: bool) -> Answer:
        """Reads a save, with or without shards, and does not use it yet.

        If the number of shards differs, whole episodes are dealt out again. Returns the number of rows of this shard,
        and the layout of rows that were dealt out.
        """
        # Another shard may have failed to read an earlier save.
        self._staged = None
        staged = self._build(self._number, self._num_shards)
        layout = None
        if is_of_shards and len(folders) == self._num_shards:
            self._read(folders[self._number], staged)
        else:
            # Every shard reads all rows, one saved shard after the other.
            resharded = ReshardedRows(self._number, self._num_shards)
            for place, folder in enumerate(folders):
                resharded.add(self._read(folder, self._build(place, len(folders))))
            rows = resharded.store(staged)
            if rows is not None:
                layout = layout_of(columns_of(rows))
        self._staged = staged
        return self._answer((len(staged), layout))

    def take_over(self) -> Answer:
        """Uses the save that :meth:`stage` has read."""
        assert self._staged is not None
        self._use(self._staged)
        self._staged = None
        return self._answer()

    def _build(self, number: int, num_shards: int) -> Any:
        assert self._recipe is not None
        # Each draw says how many rows this shard draws, so the batch size does not matter.
        return recipes.by_name(self._recipe)(**options_of_shard(self._options, num_shards, number) | {"batch_size": 1})

    def _draw_part(self, name: str, part: ShardRequest, clocks: Mapping[str, int], *request: Any) -> RemoteShardDraw:
        # Schedules follow the draws and rows of all shards.
        self.held.advance(**clocks)
        batch, reply = self.held.sample_shard(part)
        columns = columns_of(batch)
        slot = columns.pop(("index",))
        generation = columns.pop(("generation",))
        return RemoteShardDraw(ray.put(columns), slot, generation, reply)

    def _write(self, local: Path, previous: Path | None, *fields: Any) -> Sequence[int]:
        return save_replay(self.held, local, previous=previous)

    def _read(self, folder: Folder, into: Any) -> Any:
        with folder.to_read() as local:
            into.load(local)
        return into

    def _use(self, saved: Any) -> None:
        self.held = saved

    def _report(self) -> ShardReport:
        return ShardReport()

    def _answer(self, value: Any = None) -> Answer:
        report, replays = self._report(), self.replays
        report.totals = {name: replay.group_totals() for name, replay in replays.items()}
        report.rows = {name: len(replay) for name, replay in replays.items()}
        report.fragments_lost = self._not_fetched
        return Answer(value, report)
