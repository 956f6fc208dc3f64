# SPDX-License-Identifier: Apache-2.0
"""Routes rows to shards, numbers rows so that any process finds them, and fetches them from Ray's object store."""

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
from lightning_replay.storage.rows import shown

#: A batch carries the number of starts of a shard modulo this.
NUM_EPOCHS = 1 << 11
SLOT_BITS = 40
#: The three numbers in a generation have 63 bits together.
_GENERATION_BITS = 32
_EPOCH_BITS = NUM_EPOCHS.bit_length() - 1
_KEY_BITS = 20
#: Keys of replays are below it.
NUM_KEYS = 1 << _KEY_BITS
#: Seconds for each object if not all could be fetched in time.
_LEAST_S = 0.1
Columns = dict[tuple[str, ...], np.ndarray]
#: Names, dtypes, and shapes of columns, sorted, as a save holds them.
Layout = list[list[Any]]
#: Bits of the number that a trajectory has in one process.
_BITS = 40
_KEYS = tuple((key,) if isinstance(key, str) else key for key in TRAJECTORY_KEYS)
_DONE = ("next", "done")


class Router:
    """Chooses the shard that has got the fewest steps from here, for each new episode.

    All fragments of an episode go to the same shard, so that links, histories, and returns stay inside it. If several
    shards have got equally many steps, the first shard from ``first`` on is chosen. Routers that start together
    therefore begin with different shards.

    The router remembers at most ``remembered`` running episodes. It forgets the episode that was continued longest ago.

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
            # The episode moves behind the others, so that the one that was continued longest ago is first.
            self._running[episode_id] = shard
            if len(self._running) > self._remembered:
                del self._running[next(iter(self._running))]
        self.num_steps[shard] += num_steps
        return shard


class RowRouter(Router):
    """Deals rows out to shards, whole trajectories to one shard, and adds the number of the process to trajectories."""

    def __init__(self, num_shards: int, writer: int) -> None:
        super().__init__(num_shards, first=writer)
        self.writer = writer
        self._next_trajectory = 0

    def route(self, columns: Mapping[tuple[str, ...], np.ndarray]) -> tuple[dict[int, Columns], RowRouter]:
        """Returns the rows by shard, and the router for further rows once these rows are stored."""
        # This router stays as it is, because the rows may be refused.
        after = copy.deepcopy(self)
        columns = dict(columns)
        count = len(next(iter(columns.values())))
        done = columns.get(_DONE, np.zeros(count, dtype=bool))
        ended: np.ndarray = np.any(done.reshape(count, -1), axis=1)
        key = next((key for key in _KEYS if key in columns), None)
        if key is None:
            # The rows come from one environment in order, and each end begins the next trajectory.
            key = _KEYS[0]
            given = self._next_trajectory + np.cumsum(ended) - ended
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
        # One shard gets all rows without a copy.
        if len(numbers) == 1:
            return {numbers[0]: columns}, after
        return {number: {key: column[shard == number] for key, column in columns.items()} for number in numbers}, after

    def ended(self, trajectories: np.ndarray | None) -> np.ndarray | None:
        """Returns the stored numbers of trajectories that end. Rows without numbers begin another trajectory."""
        self._next_trajectory += 1
        if trajectories is None:
            return None
        return of_writer(trajectories, self.writer)


def is_of_writer(trajectories: np.ndarray, writer: int) -> np.ndarray:
    """Returns whether the writer gave each of these stored trajectories."""
    return trajectories >> _BITS == writer


def of_writer(trajectories: np.ndarray, writer: int) -> np.ndarray:
    """Returns the numbers under which trajectories of a writer are stored. The numbers of writer 0 do not change."""
    if writer and len(trajectories) and (trajectories.min() < 0 or trajectories.max() >> _BITS):
        raise ValueError(
            f"trajectories have the numbers {trajectories.min()} to {trajectories.max()}; if several processes fill "
            f"a sharded replay, they must be from 0 to 2**{_BITS} - 1. Number the episodes of each process from 0. "
            "Nothing was stored"
        )
    return trajectories.astype(np.int64) + (writer << _BITS)


def columns_of(rows: TensorDictBase) -> Columns:
    """Returns the columns of rows ``[N]`` as arrays by key, on the CPU."""
    return {
        (key,) if isinstance(key, str) else key: value.detach().cpu().numpy()
        for key, value in rows.items(include_nested=True, leaves_only=True)
    }


def layout_of(columns: Columns) -> Layout:
    """Returns names, dtypes, and shapes of columns."""
    return sorted([[*key], str(column.dtype), [*column.shape[1:]]] for key, column in columns.items())


def check_layout(layout: Layout, stored: Layout | None) -> Layout:
    """Returns the layout of rows. Raises ``ValueError`` with the differing columns if the stored layout differs."""
    if stored is not None and layout != stored:
        ours, given = ({shown(tuple(key)): [kind, *shape] for key, kind, shape in one} for one in (stored, layout))
        pairs = ((name, ours.get(name), given.get(name)) for name in sorted({*ours, *given}))
        found = "; ".join(f"{name}: stored {here}, given {there}" for name, here, there in pairs if here != there)
        raise ValueError(
            f"rows have other columns than those stored, by dtype and shape: {found}. Give all rows the same columns. "
            "Nothing was stored"
        )
    return layout


class RowIds(NamedTuple):
    """The numbers in ``index`` and ``generation`` of n drawn rows. See :func:`numbers_of`."""

    shard: np.ndarray  #: int64 ``[n]``.
    epoch: np.ndarray  #: int64 ``[n]``; a shard that is started again gets another epoch.
    key: np.ndarray  #: int64 ``[n]``, key of the replay.
    slot: np.ndarray  #: int64 ``[n]``, or ``[n, 2]`` for pairs.
    generation: np.ndarray  #: int64 like ``slot``, or ``[n]`` if feedback belongs to the first row of each pair.


def numbers_of(
    shard: int, epoch: int, slot: np.ndarray, generation: np.ndarray, key: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``index`` and ``generation`` of a shard's rows, int64, by which any process finds the rows.

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
    """Returns the inverse of :func:`numbers_of`."""
    shard, head = (
        numbers.reshape(len(numbers), -1)[:, 0] >> bits
        for numbers, bits in ((index, SLOT_BITS), (generation, _GENERATION_BITS))
    )
    slot = index & ((1 << SLOT_BITS) - 1)
    written = generation & ((1 << _GENERATION_BITS) - 1)
    return RowIds(shard, head % NUM_EPOCHS, head >> _EPOCH_BITS, slot, written)


class Block(NamedTuple):
    """Rows ``start`` to ``stop`` of an object in the object store."""

    reference: ray.ObjectRef[Any]
    start: int
    stop: int


def cut_blocks(blocks: Sequence[Block], start: int, stop: int) -> list[Block]:
    """Returns rows ``start`` to below ``stop`` of the rows of all blocks in order."""
    cut = []
    position = 0
    for reference, first, last in blocks:
        low = max(start, position)
        high = min(stop, position + last - first)
        if low < high:
            cut.append(Block(reference, first + low - position, first + high - position))
        position += last - first
    return cut


def fetched(references: Sequence[ray.ObjectRef[Any]], timeout_s: float) -> list[Any]:
    """Returns objects in order, with ``None`` for an object that was lost with its process or node.

    After ``timeout_s`` an object counts as lost, because its process may hang.
    """
    deadline = time.monotonic() + timeout_s
    with suppress(RayError):
        # One call fetches all objects, because each call takes a round trip.
        return list(ray.get(references, timeout=timeout_s))
    found: list[Any] = [None] * len(references)
    for place, reference in enumerate(references):
        with suppress(RayError):
            found[place] = ray.get(reference, timeout=max(deadline - time.monotonic(), _LEAST_S))
    return found
