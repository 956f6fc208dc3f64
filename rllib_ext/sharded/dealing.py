# SPDX-License-Identifier: Apache-2.0
"""Saved episodes dealt out anew: a save of other shards, or of a buffer without shards, read into one shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_ext.buffer.files import SavedBuffer, read_buffer

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torch import Tensor

    from lightning_replay.replay import Replay
    from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer
    from rllib_ext.buffer.module_replay import ModuleReplay
    from rllib_ext.checkpoint.folders import Folder

_ROWS_AT_ONCE = 4096


def deal_saved(
    buffer: RecipeEpisodeReplayBuffer,
    build: Callable[[int], RecipeEpisodeReplayBuffer],
    folders: Sequence[Folder],
    number: int,
    num_shards: int,
) -> SavedBuffer:
    """Reads the episodes of a save that one of ``num_shards`` new shards gets; the others get the others.

    Each episode goes to the shard with the fewest rows so far, in the same way in every process. Rows keep their
    priorities. Of rows of different folders the age is compared by their place in the folder. One folder at a time is
    held in memory, beside the rows that stay here.

    Args:
        buffer: of the new shard, which is not changed.
        build: builds an empty buffer as the one that was saved in a folder, by its number.
        folders: of the save.
        number: of the new shard.
        num_shards: S.

    Raises:
        DamagedFileError, ValueError, MemoryError: as :func:`~rllib_ext.buffer.files.read_buffer`.
        ValueError: rows that are kept by importance.
    """
    collected: dict[str, _Collected] = {}
    states = []
    for place, folder in enumerate(folders):
        with folder.to_read() as local:
            saved = read_buffer(build(place), local)
        states.append(saved.state)
        for name, module in saved.modules.items():
            collected.setdefault(name, _Collected([0] * num_shards)).add(module, saved.state["modules"][name], number)
    several_agents = any(state["several_agents"] for state in states)
    modules = {}
    for name, one in collected.items():
        modules[name] = buffer.options.build(name, several_agents)
        one.store(modules[name], number, num_shards)
    state = {**states[0], "several_agents": several_agents, "counters": _part_of(states, number, num_shards)}
    return SavedBuffer(modules, state, saved.warm_up, saved.algorithm)


def assigned(trajectory: np.ndarray, loads: list[int]) -> np.ndarray:
    """Returns the shard of each row, int64 ``[N]``: whole trajectories, each to that with the fewest rows.

    Args:
        trajectory: int64 ``[N]``.
        loads: rows of each shard so far; increased here.

    Example:
        >>> loads = [0, 0]
        >>> assigned(np.array([7, 7, 7, 4, 5, 5]), loads).tolist(), loads
        ([0, 0, 0, 1, 1, 1], [3, 3])
    """
    _, first, inverse, lengths = np.unique(trajectory, return_index=True, return_inverse=True, return_counts=True)
    shards = np.empty(len(first), dtype=np.int64)
    for one in np.argsort(first).tolist():
        shards[one] = loads.index(min(loads))
        loads[shards[one]] += int(lengths[one])
    return shards[inverse]


@dataclass
class _Collected:
    """Rows of one module for one new shard."""

    loads: list[int]
    rows: list[TensorDictBase] = field(default_factory=list)
    priorities: list[Tensor | None] = field(default_factory=list)
    places: list[np.ndarray] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    num_trajectories: int = 0

    def add(self, module: ModuleReplay, state: dict[str, Any], number: int) -> None:
        """Adds the rows of a saved module."""
        import torch

        from lightning_replay.declared import declared_sampler

        replay = module.replay
        _check_dealable(replay)
        self.states.append(state)
        slots = replay.oldest_first()
        if not len(slots):
            return
        trajectory = replay.storage.get(slots)["trajectory"].reshape(-1).numpy()
        names, inverse = np.unique(trajectory, return_inverse=True)
        kept = torch.from_numpy(np.flatnonzero(assigned(trajectory, self.loads) == number))
        rows = replay.storage.get(slots[kept])
        rows = rows.exclude("index", "generation")
        renumbered = torch.from_numpy(inverse)[kept] + self.num_trajectories
        rows.set("trajectory", renumbered.reshape(rows["trajectory"].shape))
        self.num_trajectories += len(names)
        self.rows.append(rows)
        self.priorities.append(declared_sampler(replay.sampler).base_sampler.priority_of(slots[kept]))
        self.places.append(kept.numpy() / len(slots))

    def store(self, module: ModuleReplay, number: int, num_shards: int) -> None:
        """Stores the rows in a new module, oldest first."""
        import torch

        state = dict(self.states[0])
        fragments = [one["converter"]["fragments"]["counts"] for one in self.states]
        counts = [_share(sum(values), number, num_shards) for values in zip(*fragments, strict=True)]
        counts[-1] = self.num_trajectories  # the number of the next one
        state["converter"] = {**state["converter"], "fragments": {"counts": counts, "known": []}}
        state["draws"] = max(one["draws"] for one in self.states)
        module.load_state(state)
        if not self.rows:
            return
        order = torch.from_numpy(np.argsort(np.concatenate(self.places), kind="stable"))
        rows = torch.cat(self.rows)[order]
        given = [one for one in self.priorities if one is not None]
        priority = torch.cat(given)[order] if given else None
        replay, most = module.replay, min(_ROWS_AT_ONCE, module.intake.max_rows)
        for start in range(0, len(rows), most):
            replay.extend(rows[start : start + most])
            if priority is not None:
                slots, stored = replay.last_insertion
                replay.sampler.update_priority(slots, priority[start : start + most][stored], storage=replay.storage)


def _check_dealable(replay: Replay) -> None:
    from lightning_replay.parts import ReplayTransform

    own = [transform for transform in replay.transform if isinstance(transform, ReplayTransform)]
    delaying = [type(transform).__name__ for transform in own if transform.delays_rows]
    if delaying:
        raise ValueError(
            f"the save holds returns that {delaying[0]} formed before they were stored, and its rows can be restored "
            "into as many shards as were saved alone. Give replay_config(num_shards=...) the number of the save"
        )


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
