# SPDX-License-Identifier: Apache-2.0
"""Saved episodes dealt out anew: a save of other shards, or of a buffer without shards, read into one shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_replay.sharded.resharding import ReshardedRows
from rllib_ext.buffer.files import SavedBuffer

if TYPE_CHECKING:
    from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer


def reshard_saved(
    buffer: RecipeEpisodeReplayBuffer, saved: Iterable[SavedBuffer], number: int, num_shards: int
) -> SavedBuffer:
    """Returns the part of saved buffers that one of ``num_shards`` new shards gets, by :class:`ReshardedRows`.

    Counters are divided, so that all shards together have the sums of the save.

    Args:
        buffer: of the new shard, which is not changed.
        saved: each was read into an empty buffer, and is discarded before the next is read.
        number: of the new shard.
        num_shards: S.

    Raises:
        ValueError: as :meth:`~lightning_replay.sharded.resharding.ReshardedRows.add`.
    """

    def shares(counts: Iterable[Sequence[int]]) -> list[int]:
        return [_share(sum(values), number, num_shards) for values in zip(*counts, strict=True)]

    rows: dict[str, ReshardedRows] = {}
    states: list[dict[str, Any]] = []
    for one in saved:
        states.append(one.state)
        for name, module in one.modules.items():
            rows.setdefault(name, ReshardedRows(number, num_shards)).add(module.replay)
    several_agents = any(state["several_agents"] for state in states)
    modules = {}
    for name, resharded in rows.items():
        of_module = [state["modules"][name] for state in states if name in state["modules"]]
        counts = shares(state["converter"]["fragments"]["counts"] for state in of_module)
        counts[-1] = resharded.next_trajectory
        converter = of_module[0]["converter"] | {"fragments": {"counts": counts, "known": []}}
        draws = max(state["draws"] for state in of_module)
        modules[name] = buffer.options.build(name, several_agents)
        modules[name].load_state(of_module[0] | {"converter": converter, "draws": draws})
        resharded.store(modules[name].replay)
    counters: dict[str, Any] = {}
    for counter in ("counts", "logged"):
        total: Counter[tuple[str, str]] = Counter()
        for state in states:
            total.update({(kind, key): amount for kind, key, amount in state["counters"][counter]})
        counters[counter] = [[*key, _share(amount, number, num_shards)] for key, amount in total.items()]
    environment = shares(state["counters"]["environment"]["counts"] for state in states)
    counters["environment"] = {"counts": environment, "known": []}
    state = states[0] | {"several_agents": several_agents, "counters": counters}
    return SavedBuffer(modules, state, one.warm_up, one.algorithm)


def _share(amount: int, number: int, num_shards: int) -> int:
    return amount // num_shards + (number < amount % num_shards)
