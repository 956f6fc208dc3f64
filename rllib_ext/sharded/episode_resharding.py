# SPDX-License-Identifier: Apache-2.0
"""Saved episodes dealt out anew: a save of other shards, or of a buffer without shards, read into one shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_replay.sharded.resharding import ReshardedRows
from rllib_ext.buffer.files import SavedBuffer, read_buffer

if TYPE_CHECKING:
    from lightning_replay.sharded.folders import Folder
    from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer
    from rllib_ext.buffer.module_replay import ModuleReplay


def reshard_saved(
    buffer: RecipeEpisodeReplayBuffer,
    build: Callable[[int], RecipeEpisodeReplayBuffer],
    folders: Sequence[Folder],
    number: int,
    num_shards: int,
) -> SavedBuffer:
    """Reads the episodes of a save that one of ``num_shards`` new shards gets; the others get the others.

    :class:`~lightning_replay.sharded.resharding.ReshardedRows` decides which. One folder at a time is held in
    memory, beside the rows that stay here.

    Args:
        buffer: of the new shard, which is not changed.
        build: builds an empty buffer as the one that was saved in a folder, by its number.
        folders: of the save.
        number: of the new shard.
        num_shards: S.

    Raises:
        DamagedFileError, ValueError, MemoryError: as :func:`~rllib_ext.buffer.files.read_buffer`.
        ValueError: as :meth:`~lightning_replay.sharded.resharding.ReshardedRows.add`.
    """
    collected: dict[str, _Collected] = {}
    states = []
    for place, folder in enumerate(folders):
        with folder.to_read() as local:
            saved = read_buffer(build(place), local)
        states.append(saved.state)
        for name, module in saved.modules.items():
            if name not in collected:
                collected[name] = _Collected(ReshardedRows(number, num_shards))
            collected[name].add(module, saved.state["modules"][name])
    several_agents = any(state["several_agents"] for state in states)
    modules = {}
    for name, one in collected.items():
        modules[name] = buffer.options.build(name, several_agents)
        one.store(modules[name], number, num_shards)
    state = {**states[0], "several_agents": several_agents, "counters": _part_of(states, number, num_shards)}
    return SavedBuffer(modules, state, saved.warm_up, saved.algorithm)


@dataclass
class _Collected:
    """Rows and states of one module for one new shard."""

    rows: ReshardedRows
    states: list[dict[str, Any]] = field(default_factory=list)

    def add(self, module: ModuleReplay, state: dict[str, Any]) -> None:
        """Adds the rows of a saved module."""
        self.states.append(state)
        self.rows.add(module.replay)

    def store(self, module: ModuleReplay, number: int, num_shards: int) -> None:
        """Stores the rows in a new module, oldest first."""
        state = dict(self.states[0])
        fragments = [one["converter"]["fragments"]["counts"] for one in self.states]
        counts = [_share(sum(values), number, num_shards) for values in zip(*fragments, strict=True)]
        counts[-1] = self.rows.renumber()  # the number of the next trajectory
        state["converter"] = {**state["converter"], "fragments": {"counts": counts, "known": []}}
        state["draws"] = max(one["draws"] for one in self.states)
        module.load_state(state)
        self.rows.store(module.replay)


def _part_of(states: Sequence[dict[str, Any]], number: int, num_shards: int) -> dict[str, Any]:
    """Returns this shard's part of the saved counters, so that all shards together have their sum."""
    counters: dict[str, Any] = {}
    for name in ("counts", "logged"):
        total: Counter[tuple[str, str]] = Counter()
        for state in states:
            total.update({(counter, key): amount for counter, key, amount in state["counters"][name]})
        counters[name] = [[*key, _share(amount, number, num_shards)] for key, amount in total.items()]
    environments = [state["counters"]["environment"]["counts"] for state in states]
    counts = [_share(sum(values), number, num_shards) for values in zip(*environments, strict=True)]
    return {**counters, "environment": {"counts": counts, "known": []}}


def _share(amount: int, number: int, num_shards: int) -> int:
    return amount // num_shards + (number < amount % num_shards)
