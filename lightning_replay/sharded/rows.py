# SPDX-License-Identifier: Apache-2.0
"""Rows on their way to the shards and back: which shard, which identity, in which objects of Ray's store."""

from __future__ import annotations

import copy
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError
from tensordict import TensorDictBase

from lightning_replay.episodes.links import TRAJECTORY_KEYS

#: A batch carries the number of starts of a shard modulo this.
NUM_EPOCHS = 1 << 11
SLOT_BITS = 40
_GENERATION_BITS, _EPOCH_BITS, _KEY_BITS = 32, NUM_EPOCHS.bit_length() - 1, 20  # 63 together
#: Keys of replays are below it.
NUM_KEYS = 1 << _KEY_BITS
_LEAST_S = 0.1  # for each of several objects, where some of them could not be fetched in time
Columns = dict[tuple[str, ...], np.ndarray]
#: Names, dtypes and shapes of columns, in one order, as they are saved.
Layout = list[list[Any]]
_BITS = 40  # of a number that a trajectory has in one process
_KEYS = tuple((key,) if isinstance(key, str) else key for key in TRAJECTORY_KEYS)
_DONE = ("next", "done")


class Router:
    """Chooses a shard for each new episode: that which has got the fewest steps from here.

    All fragments of an episode go to the same shard, so that links, histories and returns stay inside it. Where several
    have got as many steps, the first one from ``first`` on is taken: those that start together begin with different
    shards.

    At most ``remembered`` running episodes are; the one continued longest ago, whose end never came, is removed first.

    Example:
        >>> router = Router(num_shards=2)
        >>> fragments = [("a", 5, False), ("b", 3, True), ("a", 1, True), ("c", 1, True)]
        >>> [router.shard_of(name, steps, ended=ended) for name, steps, ended in fragments]
        [0, 1, 0, 1]
    """

    def __init__(self, num_shards: int, first: int = 0, remembered: int = 4096) -> None:
        self._remembered = remembered
        self.num_steps: list[int] = [0] * num_shards
        self._order = [(first + number) % num_shards for number in range(num_shards)]
        self._running: dict[Hashable, int] = {}

    def shard_of(self, episode_id: Hashable, num_steps: int, *, ended: bool) -> int:
        """Returns the shard of a fragment of so many steps, which may be the last one of its episode."""
        shard = self._running.pop(episode_id, None)
        if shard is None:
            shard = min(self._order, key=self.num_steps.__getitem__)
        if not ended:
            self._running[episode_id] = shard  # behind the others: the one continued longest ago is first
            if len(self._running) > self._remembered:
                del self._running[next(iter(self._running))]
        self.num_steps[shard] += num_steps
        return shard


class RowRouter(Router):
    """Deals rows out to shards, whole trajectories to one; each process adds a number of its own to theirs."""

    def __init__(self, num_shards: int, writer: int) -> None:
        super().__init__(num_shards, first=writer)
        self.writer = writer
        self._next_trajectory = 0

    def route(self, columns: Mapping[tuple[str, ...], np.ndarray]) -> tuple[dict[int, Columns], RowRouter]:
        """Returns the rows of each shard that gets some, and the router for further rows once these are stored."""
        after, columns = copy.deepcopy(self), dict(columns)  # this router stays, in case the rows are refused
        count = len(next(iter(columns.values())))
        done = columns.get(_DONE, np.zeros(count, dtype=bool))
        ended: np.ndarray = np.any(done.reshape(count, -1), axis=1)
        key = next((key for key in _KEYS if key in columns), None)
        if key is None:  # one environment in order: each end begins the next trajectory
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
        if len(numbers) == 1:  # without copying the columns
            return {numbers[0]: columns}, after
        return {number: {key: column[shard == number] for key, column in columns.items()} for number in numbers}, after

    def ended(self, trajectories: np.ndarray | None) -> np.ndarray | None:
        self._next_trajectory += 1  # rows without a trajectory go on in another one
        return None if trajectories is None else of_writer(trajectories, self.writer)


def is_of_writer(trajectories: np.ndarray, writer: int) -> np.ndarray:
    return trajectories >> _BITS == writer


def of_writer(trajectories: np.ndarray, writer: int) -> np.ndarray:
    # The first writer's numbers stay as they are: a replay that one process fills equals one without shards.
    if writer and len(trajectories) and (trajectories.min() < 0 or trajectories.max() >> _BITS):
        raise ValueError(
            f"trajectories have the numbers {trajectories.min()} to {trajectories.max()}; where several processes fill "
            f"a sharded replay they must be from 0 to 2**{_BITS} - 1. Number the episodes of each process from 0. "
            "Nothing was stored"
        )
    return trajectories.astype(np.int64) + (writer << _BITS)


def columns_of(rows: TensorDictBase) -> Columns:
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
        pairs = ((name, ours.get(name), given.get(name)) for name in sorted({*ours, *given}))
        found = "; ".join(f"{name}: stored {one}, given {other}" for name, one, other in pairs if one != other)
        raise ValueError(
            f"rows have other columns than those stored, by dtype and shape: {found}. Give all rows the same columns. "
            "Nothing was stored"
        )
    return layout


class RowIds(NamedTuple):
    """What ``index`` and ``generation`` of n drawn rows say; see :func:`numbers_of`."""

    shard: np.ndarray  # int64 [n]
    epoch: np.ndarray  # int64 [n]; a shard that was started again has another one
    key: np.ndarray  # int64 [n], of the replay
    slot: np.ndarray  # int64 [n], or [n, 2] of pairs
    #: int64, as ``slot``, or ``[n]`` where feedback belongs to the first of a pair; another once the slot was written.
    generation: np.ndarray


def numbers_of(
    shard: int, epoch: int, slot: np.ndarray, generation: np.ndarray, key: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``index`` and ``generation`` of a shard's rows, int64, by which they are found from any process.

    The index is ``shard * 2**40 + slot``. The generation has, from its highest bits on, the key of the replay, how
    often the shard was started modulo :data:`~lightning_replay.sharded.rows.NUM_EPOCHS`, and how often the slot was
    written.

    Example:
        >>> index, generation = numbers_of(1, 2, np.array([5]), np.array([3]), key=9)
        >>> index.tolist() == [2**40 + 5], row_ids_of(index, generation)
        (True, RowIds(shard=array([1]), epoch=array([2]), key=array([9]), slot=array([5]), generation=array([3])))
    """
    head = (key << _EPOCH_BITS) + int(epoch) % NUM_EPOCHS
    return (shard << SLOT_BITS) + slot, (head << _GENERATION_BITS) + generation


def row_ids_of(index: np.ndarray, generation: np.ndarray) -> RowIds:
    """Returns what is in the numbers of rows, the inverse of :func:`numbers_of`."""
    shard, head = (
        numbers.reshape(len(numbers), -1)[:, 0] >> bits
        for numbers, bits in ((index, SLOT_BITS), (generation, _GENERATION_BITS))
    )
    slot, written = index & ((1 << SLOT_BITS) - 1), generation & ((1 << _GENERATION_BITS) - 1)
    return RowIds(shard, head % NUM_EPOCHS, head >> _EPOCH_BITS, slot, written)


class Block(NamedTuple):
    """Rows ``start`` to ``stop`` of an object in the object store."""

    reference: ray.ObjectRef[Any]
    start: int
    stop: int


def cut_blocks(blocks: Sequence[Block], start: int, stop: int) -> list[Block]:
    """Returns rows ``start`` to ``stop`` of those in the blocks, one after the other."""
    cut, position = [], 0
    for reference, first, last in blocks:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            cut.append(Block(reference, first + low - position, first + high - position))
        position += last - first
    return cut


def fetched(references: Sequence[ray.ObjectRef[Any]], timeout_s: float) -> list[Any]:
    """Returns objects that were put, in order; ``None`` for one that was lost with the process or node that had it.

    After ``timeout_s`` it counts as lost, as its process may hang.
    """
    deadline = time.monotonic() + timeout_s
    with suppress(RayError):
        return list(ray.get(references, timeout=timeout_s))  # one call, because each has a round trip
    found: list[Any] = [None] * len(references)
    for place, reference in enumerate(references):
        with suppress(RayError):
            found[place] = ray.get(reference, timeout=max(deadline - time.monotonic(), _LEAST_S))
    return found
