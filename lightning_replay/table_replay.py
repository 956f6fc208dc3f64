# SPDX-License-Identifier: Apache-2.0
"""Replay buffers whose rows lie in named tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from lightning_replay.parts import as_replay_sampler, unwrap
from lightning_replay.replay import Replay
from lightning_replay.samplers.tables import ScheduledSampler, tables_of
from lightning_replay.saving.spec import rebuildable
from lightning_replay.schedulers import checked_probabilities
from lightning_replay.tables.tables import Tables


@rebuildable
class TableReplay(Replay):
    """A :class:`~lightning_replay.replay.Replay` whose writer keeps tables. It accepts the same arguments.

    ``len(replay)`` counts the transitions that a table or a running episode refers to, each once.
    """

    exact: bool = True

    @property
    def tables(self) -> Tables:
        """The tables over the storage."""
        return tables_of(self._storage, self)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, links, tables and of what the sampler keeps."""
        return super().nbytes + self.tables.nbytes

    def table(self, name: str) -> TensorDictBase:
        """Returns the rows of a table, TensorDict ``[n]``, the oldest entry first, copied.

        Raises:
            KeyError: no such table.
            RuntimeError: nothing was stored yet.
        """
        number = self.tables.number(name)
        with self._replay_lock:  # the table may change between its slots and their rows
            slots = self.tables.slots_of(number)
            return self._storage.get(torch.from_numpy(slots).to(self._storage.device))

    def stats(self) -> dict[str, Any]:
        """Returns the statistics of :class:`~lightning_replay.replay.Replay`, and for each table under ``tables``:

        * ``size``, ``capacity``, ``fill`` (their ratio), ``evicted`` (entries that left),
        * ``share_drawn`` (of all rows drawn so far), ``age_mean`` and ``age_max`` (in transitions written since),
        * ``event_share`` (of all steps, of event tables), and of event tables ``histories_forgotten``, running episodes
          whose history was dropped for others.
        """
        stats = super().stats()
        tables = self.tables
        drawn: Any = as_replay_sampler(unwrap(self._sampler)).rows_drawn
        if len(drawn) != len(tables):  # before the first draw
            drawn = np.zeros(len(tables))
        events = stats.pop("event_shares", {})  # which the writer counts over all steps
        stats["tables"] = {}
        for number, name in enumerate(tables.names):
            size, capacity = int(tables.length[number]), int(tables.capacity[number])
            ages = tables.age_of(tables.slots_of(number))
            stats["tables"][name] = {
                "size": size,
                "capacity": capacity,
                "fill": size / capacity,
                "evicted": int(tables.appended[number]) - size,
                "share_drawn": float(drawn[number]) / max(float(drawn.sum()), 1.0),
                "age_mean": float(ages.mean()) if size else 0.0,
                "age_max": int(ages.max()) if size else 0,
            } | ({"event_share": events[name]} if name in events else {})
        return stats


@rebuildable
class CurriculumReplay(TableReplay):
    """A buffer with a table for each task and a scheduler that chooses the task of each batch.

    Takes the arguments of :class:`~lightning_replay.replay.Replay`. Its sampler is a
    :class:`~lightning_replay.samplers.tables.ScheduledSampler`, alone or as ``base_sampler`` of a sampler of pairs.
    """

    exact: bool = True

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in the order of the column ``task``."""
        return self._curriculum.tasks

    def progress(self, task: str, value: float) -> None:
        """Passes the progress of a task to the scheduler.

        Args:
            task: its name.
            value: progress signal in [0, 1], usually the mean normalized return.

        Raises:
            ValueError: an unknown task, or a signal outside [0, 1] or NaN. Nothing is changed.
        """
        scheduler = self._curriculum.scheduler
        with self._replay_lock:
            scheduler.progress(scheduler.index_of(task), value)

    def probabilities(self) -> dict[str, float]:
        """Returns the probability that the next batch comes from each task, by name.

        Tasks with too few rows are left out once another has enough. Until then, the probabilities come from the
        scheduler.
        """
        sampler = self._curriculum
        probability = checked_probabilities(sampler.scheduler, sampler.ready(self.tables))
        if not probability.any():
            probability = checked_probabilities(sampler.scheduler, np.ones(len(self.tasks), dtype=np.bool_))
        return dict(zip(self.tasks, probability.tolist(), strict=True))

    def actor_tasks(self, num_actors: int) -> list[int]:
        """Returns the next task of each of ``num_actors`` actors, as indices into :attr:`tasks`."""
        return self._curriculum.scheduler.actor_tasks(num_actors)

    @property
    def _curriculum(self) -> ScheduledSampler:
        sampler = unwrap(self._sampler)
        if not isinstance(sampler, ScheduledSampler):
            raise TypeError(f"the sampler is a {type(sampler).__name__}; a curriculum needs a ScheduledSampler")
        return sampler
