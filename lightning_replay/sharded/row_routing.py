# SPDX-License-Identifier: Apache-2.0
"""Rows as columns on their way to the shards: checked, with trajectory numbers that no other process gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from lightning_replay.episodes.links import TRAJECTORY_KEYS
from lightning_replay.sharded.routing import Router

Columns = dict[tuple[str, ...], np.ndarray]
#: Names, dtypes and shapes of columns, in one order, as they are saved.
Layout = list[list[Any]]

_BITS = 40  # of a number that a trajectory has in one process
_KEYS = tuple((key,) if isinstance(key, str) else key for key in TRAJECTORY_KEYS)
_DONE = ("next", "done")


def columns_of(rows: TensorDictBase) -> Columns:
    """Returns the leaves of rows ``[N]`` as arrays ``[N, ...]`` on the CPU."""
    return {
        (key,) if isinstance(key, str) else key: value.detach().cpu().numpy()
        for key, value in rows.items(include_nested=True, leaves_only=True)
    }


def layout_of(columns: Columns) -> Layout:
    return sorted([[*key], str(column.dtype), [*column.shape[1:]]] for key, column in columns.items())


def check_layout(layout: Layout, stored: Layout | None) -> Layout:
    """Returns the layout of rows; refuses another than that of the stored ones, and names the columns that differ."""
    if stored is not None and layout != stored:
        ours, given = ({".".join(key): [kind, *shape] for key, kind, shape in one} for one in (stored, layout))
        other = sorted(name for name in {*ours, *given} if ours.get(name) != given.get(name))
        found = "; ".join(f"{name}: stored {ours.get(name)}, given {given.get(name)}" for name in other)
        raise ValueError(
            f"rows have other columns than those stored, by dtype and shape: {found}. Give all rows the same columns. "
            "Nothing was stored"
        )
    return layout


def is_of_writer(trajectories: np.ndarray, writer: int) -> np.ndarray:
    return trajectories >> _BITS == writer


def of_writer(trajectories: np.ndarray, writer: int) -> np.ndarray:
    """Returns the stored numbers of the trajectories of a writer: the first one's are their own."""
    if writer and len(trajectories) and (trajectories.min() < 0 or trajectories.max() >> _BITS):
        raise ValueError(
            f"trajectories have the numbers {trajectories.min()} to {trajectories.max()}; where several processes fill "
            f"a sharded replay they must be from 0 to 2**{_BITS} - 1. Number the episodes of each process from 0. "
            "Nothing was stored"
        )
    return trajectories.astype(np.int64) + (writer << _BITS)


class RowRouter(Router):
    """Deals rows out to shards, whole trajectories to one, and numbers their trajectories.

    Trajectories are those of the column ``trajectory``, or of ``("collector", "traj_ids")`` of TorchRL's collectors.
    Several processes may give the same numbers, so that each adds its own to them. Rows without such a column are one
    environment in order: they get ``trajectory``, a number for each of its episodes. ``writer`` is the number of this
    process.
    """

    def __init__(self, num_shards: int, writer: int) -> None:
        super().__init__(num_shards, first=writer)
        self.writer = writer
        self._next_trajectory = 0

    def route(self, columns: Mapping[tuple[str, ...], np.ndarray]) -> tuple[dict[int, Columns], RowRouter]:
        """Returns the rows of each shard that gets some, and the router for further rows once these are stored."""
        after, columns = self.copied(), dict(columns)
        count = len(next(iter(columns.values())))
        done = columns.get(_DONE)
        ended: np.ndarray = np.zeros(count, dtype=bool)
        if done is not None:
            ended = np.any(done.reshape(count, -1), axis=1)
        key = next((key for key in _KEYS if key in columns), None)
        if key is None:
            key, given = _KEYS[0], self._next_trajectory + np.cumsum(ended) - ended
            columns[key] = of_writer(given, self.writer)
            after._next_trajectory = int(given[-1]) + int(ended[-1])
        else:
            given = columns[key]
            columns[key] = of_writer(given, self.writer)
            given = given.reshape(count)
        shard = np.empty(count, dtype=np.int64)
        for trajectory in dict.fromkeys(given.tolist()):
            own = np.flatnonzero(given == trajectory)
            shard[own] = after.shard_of(trajectory, len(own), ended=bool(ended[own[-1]]))
        numbers = np.unique(shard).tolist()
        if len(numbers) == 1:
            return {numbers[0]: columns}, after
        return {number: {key: column[shard == number] for key, column in columns.items()} for number in numbers}, after

    def ended(self, trajectories: np.ndarray | None) -> np.ndarray | None:
        """Returns the stored numbers of trajectories that break off; ``None`` for all of this process."""
        self._next_trajectory += 1
        return None if trajectories is None else of_writer(trajectories, self.writer)
