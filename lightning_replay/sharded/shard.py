# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that holds a part of a :class:`~lightning_replay.sharded.replay.ShardedReplay`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from lightning_replay import recipes
from lightning_replay.checkpoint.replay import save_replay
from lightning_replay.draw_parts import DrawPart
from lightning_replay.episodes.running import stored_trajectories
from lightning_replay.replay import Replay
from lightning_replay.sharded.fetching import fetched
from lightning_replay.sharded.folders import Folder
from lightning_replay.sharded.recipe_options import options_of_shard, seed_of_shard
from lightning_replay.sharded.reports import Answer, RemotePart, ShardReport
from lightning_replay.sharded.resharding import ReshardedRows
from lightning_replay.sharded.row_routing import Columns, columns_of, is_of_writer, layout_of
from lightning_replay.storage.packed import PackedStorage

#: The name of the only replay of a shard, in reports and draws.
MODULE = "replay"


class ReplayShard:
    """A :class:`~lightning_replay.Replay` of whole episodes in a process of its own.

    Every method returns an :class:`~lightning_replay.sharded.reports.Answer`. A method that raises an error has changed
    nothing.

    Args:
        recipe, options: of the whole sharded replay.
        number: of this shard.
        num_shards: S.
        fetch_timeout_s: seconds to wait for rows from a process that may hang.
        folder: of a save to begin with; ``None`` begins empty.
    """

    def __init__(
        self,
        recipe: str,
        options: Mapping[str, Any],
        number: int,
        num_shards: int,
        fetch_timeout_s: float,
        folder: Folder | None,
    ) -> None:
        self._fetch_timeout_s = fetch_timeout_s
        self._recipe, self._options = recipe, options
        self._number, self._num_shards = number, num_shards
        self._replay = self._build(number, num_shards)
        self._staged: Replay | None = None
        self._counts: Counter[tuple[str, str]] = Counter()
        self._rows_not_fetched = 0
        if folder is not None:
            self._loaded(folder, self._replay)

    def report(self) -> Answer:
        """Returns what the shard holds."""
        return self._answer()

    def extend(self, reference: Sequence[ray.ObjectRef[Any]], largest: Mapping[str, float]) -> Answer:
        """Stores rows.

        Args:
            reference: the only one, of columns ``[N, ...]`` by key.
            largest: the largest priority that a row of any shard was given, if it is above that of this one.

        Returns:
            The slots, int64 ``[n]``; or the error, not raised, if they are refused: it belongs to the one who sent
            them, not to the next who waits for this shard.
        """
        columns: Columns | None = fetched(reference, self._fetch_timeout_s)[0]
        if columns is None:  # its sender was lost, or hangs, before it could be fetched
            self._rows_not_fetched += 1
            return self._answer(np.zeros(0, dtype=np.int64))
        for priority in largest.values():
            self._replay.raise_largest_priority(priority)
        try:
            slots = self._replay.extend_columns(columns).cpu().numpy()
        except (TypeError, ValueError, RuntimeError) as error:
            return self._answer(error)
        self._counts["rows_added", MODULE] += len(next(iter(columns.values())))
        return self._answer(slots)

    def draw(self, parts: Mapping[str, DrawPart], clocks: Mapping[str, int]) -> Answer:
        """Draws this shard's rows of a batch, and keeps them in the object store until they are fetched.

        Args:
            parts: of the only replay; left out if there is nothing to draw it from any more.
            clocks: ``env_steps`` and ``updates`` of all shards together.

        Returns:
            A :class:`~lightning_replay.sharded.reports.RemotePart` by module, whose reference is of columns.
        """
        part = parts[MODULE]
        if not (self._replay.group_totals().mass[part.groups] > 0).all():
            return self._answer({})  # all priorities have become 0 since the draw was divided
        self._replay.advance(**clocks)
        batch, reply = self._replay.sample_part(part)
        columns = columns_of(batch)
        slot, generation = columns.pop(("index",)), columns.pop(("generation",))
        return self._answer({MODULE: RemotePart(ray.put(columns), slot, generation, reply, 1.0, None)})

    def update(
        self,
        module_id: str,
        slot: np.ndarray,
        generation: np.ndarray,
        td_errors: np.ndarray,
        signals: Mapping[str, np.ndarray] | None = None,
    ) -> Answer:
        """Updates drawn rows with their TD errors; those that have left since are dropped and counted."""
        given = {name: torch.tensor(values) for name, values in (signals or {}).items()}
        index, td_error = torch.tensor(slot), torch.tensor(td_errors)
        self._replay.update_priority(index, td_error, generation=torch.tensor(generation), **given)
        return self._answer()

    def end_episodes(self, writer: int | None, trajectories: np.ndarray | None) -> Answer:
        """Ends running episodes: of a writer those given, or all of them; without a writer all."""
        storage = self._replay.storage
        if writer is None or not len(self._replay):
            self._replay.end_episodes()
            return self._answer()
        assert isinstance(storage, PackedStorage)
        stored = np.array([one for one in stored_trajectories(storage) if one is not None], dtype=np.int64)
        own = stored[is_of_writer(stored, writer)]
        self._replay.end_episodes((own if trajectories is None else np.intersect1d(own, trajectories)).tolist())
        return self._answer()

    def seed(self, seed: int) -> Answer:
        """Restarts the draws from a seed of all shards."""
        self._replay.seed(seed_of_shard(seed, self._number))
        return self._answer()

    def stats(self) -> Answer:
        """Returns the statistics of the replay, by module."""
        return self._answer({MODULE: self._replay.stats()})

    def sees(self, folder: str) -> Answer:
        """Returns whether this node has a folder at a path."""
        return self._answer(Path(folder).is_dir())

    def save(self, folder: Folder, previous: Folder | None) -> Answer:
        """Saves the replay into a folder, by a temporary one of this node where that is on another file system.

        Returns the bytes of all files, and of those written.
        """
        with folder.to_write() as local:
            size = save_replay(self._replay, local, previous=None if previous is None else previous.local)
        return self._answer(tuple(size))

    def stage(self, folder: Folder) -> Answer:
        """Reads a save of this shard without using it yet; returns its rows, and ``None``.

        Raises:
            DamagedFileError, ValueError: the save cannot be used here.
        """
        self._staged = None  # of a save that another shard could not read
        self._staged = self._loaded(folder, self._build(self._number, self._num_shards))
        return self._answer((len(self._staged), None))

    def stage_resharded(self, folders: Sequence[Folder]) -> Answer:
        """Reads this shard's part of a save of other shards, or of a replay without, and does not use it yet.

        Args:
            folders: of every shard saved, or of the replay.

        Returns:
            How many rows this shard holds of it, and the layout of all; ``None`` if there are none.

        Raises:
            DamagedFileError, ValueError: as :meth:`stage`, or rows that cannot be dealt out anew.
        """
        self._staged = None
        resharded = ReshardedRows(self._number, self._num_shards)
        for place, folder in enumerate(folders):
            resharded.add(self._loaded(folder, self._build(place, len(folders))))
        staged = self._build(self._number, self._num_shards)
        rows = resharded.store(staged)
        self._staged = staged
        return self._answer((len(staged), None if rows is None else layout_of(columns_of(rows))))

    def take_over(self) -> Answer:
        """Replaces what the shard holds by the save that was read."""
        assert self._staged is not None
        self._replay, self._staged = self._staged, None
        return self._answer()

    def _build(self, number: int, num_shards: int) -> Replay:
        """Returns an empty replay as that of a shard."""
        # Batches are as large as the part that each draw gives this shard.
        own = {**options_of_shard(self._options, num_shards, number), "batch_size": 1}
        return recipes.by_name(self._recipe)(**own)

    @staticmethod
    def _loaded(folder: Folder, replay: Replay) -> Replay:
        with folder.to_read() as local:
            replay.load(local)
        return replay

    def _answer(self, value: Any = None) -> Answer:
        report = ShardReport(
            totals={MODULE: self._replay.group_totals()},
            rows={MODULE: len(self._replay)},
            env_steps_stored=len(self._replay),
            counts=Counter(self._counts),
            fragments_lost=self._rows_not_fetched,
        )
        return Answer(value, report)
