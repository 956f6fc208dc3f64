# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that holds a part of a sharded replay."""

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
    """Replays of whole episodes in a process of their own, by module: one, or in RLlib one of each module.

    Every method that the driver calls returns an :class:`~lightning_replay.sharded.actors.Answer`; one that raises an
    error has changed nothing. Recipe and options are of the whole sharded replay; ``folder`` is a save to begin with.
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
        self._recipe, self._options = recipe, options
        self._number, self._num_shards = number, num_shards
        self._fetch_timeout_s = fetch_timeout_s
        self._not_fetched = 0
        self._staged: Any = None
        self.held: Any = self._build(number, num_shards)  # a Replay; in RLlib a buffer of episodes
        if folder is not None:
            self._use(self._read(folder, self.held))

    @property
    def replays(self) -> dict[str, Replay]:
        return {MODULE: self.held}

    def report(self) -> Answer:
        return self._answer()

    def extend(self, reference: Sequence[ray.ObjectRef[Any]], largest: Mapping[str, float]) -> Answer:
        """Stores the rows of a reference to columns ``[N, ...]``, which get the ``largest`` priority of any shard.

        Returns the slots, int64 ``[n]``; or the error, not raised, if they are refused: it belongs to the process that
        sent them, not to the next that waits for this shard.
        """
        columns: Columns | None = fetched(reference, self._fetch_timeout_s)[0]
        if columns is None:  # its sender was lost, or hangs, before it could be fetched
            self._not_fetched += 1
            return self._answer(np.zeros(0, dtype=np.int64))
        # A new row gets the largest priority of all shards, as in one replay.
        for priority in largest.values():
            self.held.raise_max_priority(priority)
        try:
            slots = self.held.extend_columns(columns).cpu().numpy()
        except (TypeError, ValueError, RuntimeError) as error:
            return self._answer(error)
        return self._answer(slots)

    def draw(self, parts: Mapping[str, ShardRequest], clocks: Mapping[str, int], *request: Any) -> Answer:
        """Draws this shard's rows of a batch, which wait in the object store; returns one draw by module."""
        replays, drawn = self.replays, {}
        for name, part in parts.items():
            # A part is left out where all priorities have become 0 since the draw was divided.
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
        # Rows that have left since, by their generation, are dropped and counted.
        given = {name: torch.tensor(values) for name, values in (signals or {}).items()}
        index, td_error = torch.tensor(slot), torch.tensor(td_errors)
        self.held.update_priority(index, td_error, generation=torch.tensor(generation), **given)
        return self._answer()

    def end_episodes(self, writer: int, trajectories: np.ndarray | None) -> Answer:
        if not len(self.held):
            self.held.end_episodes()
            return self._answer()
        assert isinstance(self.held.storage, PackedStorage)
        running = [one for one in stored_trajectories(self.held.storage) if one is not None]
        own = np.array(running, dtype=np.int64)
        own = own[is_of_writer(own, writer)]  # other processes' episodes go on
        self.held.end_episodes((own if trajectories is None else np.intersect1d(own, trajectories)).tolist())
        return self._answer()

    def seed(self, seed: int) -> Answer:
        self.held.seed(seed_of_shard(seed, self._number))
        return self._answer()

    def stats(self) -> Answer:
        return self._answer({name: replay.stats() for name, replay in self.replays.items()})

    def sees(self, folder: str) -> Answer:
        return self._answer(Path(folder).is_dir())

    def save(self, folder: Folder, previous: Folder | None, *fields: Any) -> Answer:
        """Saves into a folder; returns the bytes of all files, and of those written."""
        with folder.to_write() as local:
            size = self._write(local, None if previous is None else previous.local, *fields)
        return self._answer(tuple(size))

    def stage(self, folders: Sequence[Folder], is_of_shards: bool) -> Answer:
        """Reads a save, of shards in their ``folders`` or of a replay without, and does not use it yet.

        Of another number than there are shards, episodes are dealt out anew. Returns how many rows this shard holds of
        it, and the layout of all where they were dealt out.
        """
        self._staged = None  # of a save that another shard could not read
        staged, layout = self._build(self._number, self._num_shards), None
        if is_of_shards and len(folders) == self._num_shards:
            self._read(folders[self._number], staged)
        else:
            # Of another number of shards: every shard reads all rows, one saved shard after the other.
            resharded = ReshardedRows(self._number, self._num_shards)
            for place, folder in enumerate(folders):
                resharded.add(self._read(folder, self._build(place, len(folders))))
            rows = resharded.store(staged)
            layout = None if rows is None else layout_of(columns_of(rows))
        self._staged = staged
        return self._answer((len(staged), layout))

    def take_over(self) -> Answer:
        assert self._staged is not None
        self._use(self._staged)
        self._staged = None
        return self._answer()

    def _build(self, number: int, num_shards: int) -> Any:
        assert self._recipe is not None
        # A batch size of 1, as the part that each draw gives this shard is of any size.
        return recipes.by_name(self._recipe)(**options_of_shard(self._options, num_shards, number) | {"batch_size": 1})

    def _draw_part(self, name: str, part: ShardRequest, clocks: Mapping[str, int], *request: Any) -> RemoteShardDraw:
        self.held.advance(**clocks)  # schedules follow the draws and rows of all shards
        batch, reply = self.held.sample_shard(part)
        columns = columns_of(batch)
        slot, generation = columns.pop(("index",)), columns.pop(("generation",))
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
