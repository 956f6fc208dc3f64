# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that holds one shard of a sharded replay, and the saved episodes that it gets at a load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from lightning_replay.parts import ShardRequest
from lightning_replay.replay import Replay
from lightning_replay.saving.folders import Folder
from lightning_replay.sharded import options as of_recipe
from lightning_replay.sharded.actors import Answer, RemoteShardDraw, ShardReport, counts_of
from lightning_replay.sharded.options import SHARD_OPTIONS
from lightning_replay.sharded.resharding import ReshardedRows
from lightning_replay.sharded.rows import fetched
from lightning_replay.sharded.shard import ReplayShard
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.building import built
from rllib_ext.checkpoints import SavedBuffer, check_spaces, read_buffer, write_buffer
from rllib_ext.rllib_compat import DRAWS_PER_REPORT


class EpisodeShard(ReplayShard):
    """A shard that holds a :class:`~rllib_ext.buffer.buffer.RecipeEpisodeReplayBuffer`. An option is ``returns``."""

    @property
    def replays(self) -> dict[str, Replay]:
        """The replay of each module."""
        return {name: module.replay for name, module in self.held.modules.items()}

    def add(
        self, references: Sequence[ray.ObjectRef[Any]], largest: Mapping[str, float], clocks: Mapping[str, int]
    ) -> Answer:
        """Stores fragments of episodes, of which each reference has a list. New rows get the largest priority.

        ``clocks`` are the readings of all shards before these rows.
        """
        episodes: list[Any] = []
        for fragments in fetched(references, self._fetch_timeout_s):
            if fragments is None:  # its EnvRunner was lost, or hangs, before it could be fetched
                self._not_fetched += 1
            else:
                episodes += fragments
        self.held.options.largest_priorities |= largest
        self.held.options.clocks = dict(clocks)
        for name, replay in self.replays.items():
            if name in largest:
                replay.raise_max_priority(largest[name])
        most = min((module.max_rows for module in self.held.modules.values()), default=0)
        # What comes may be more than a shard holds: after an error, those before the one refused are stored.
        at_once = len(episodes) if sum(map(len, episodes)) <= most else 1
        for start in range(0, len(episodes), max(at_once, 1)):
            self.held.add(episodes[start : start + at_once])
        return self._answer()

    def draw(self, parts: Mapping[str, ShardRequest], clocks: Mapping[str, int], *request: Any) -> Answer:
        """Draws as the base class does. The request is length and discount of returns. Some answers have statistics."""
        drawn, report = super().draw(parts, clocks, *request)
        stats = self.held.counters.stats_due(self.held.modules, DRAWS_PER_REPORT)
        return Answer({name: part._replace(stats=stats.get(name)) for name, part in drawn.items()}, report)

    def update(self, module_id: str, slot: np.ndarray, generation: np.ndarray, td_errors: np.ndarray) -> Answer:  # type: ignore[override]
        """Sets priorities. Stale TD errors are dropped and counted."""
        self.held.modules[module_id].update_part(slot, generation, td_errors)
        return self._answer()

    def stage(self, folders: Sequence[Folder], spaces: Mapping[str, Any]) -> Answer:  # type: ignore[override]
        """Reads a save without using it yet. Returns the draws made before it."""
        # Another shard may have failed to read an earlier save.
        self._staged = None
        if len(folders) == self._num_shards:
            staged = self._read(folders[self._number], self.held)
        else:
            # One at a time is held in memory.
            saved = (self._read(folder, self._build(place, len(folders))) for place, folder in enumerate(folders))
            staged = reshard_saved(self.held, saved, self._number, self._num_shards)
        check_spaces(staged.modules, spaces)
        self._staged = staged
        return self._answer(max((one["draws"] for one in staged.state["modules"].values()), default=0))

    def get_state(self) -> Answer:
        """Returns the state of the buffer."""
        return self._answer(self.held.get_state())

    def set_state(self, state: dict[str, Any]) -> Answer:
        """Restores the state of the buffer."""
        self.held.set_state(state)
        return self._answer()

    def _build(self, number: int, num_shards: int) -> RecipeEpisodeReplayBuffer:
        options = options_of_shard(self._options, num_shards, number)
        returns = options.pop("returns")
        buffer = RecipeEpisodeReplayBuffer(self._recipe, layout="flagged", **options)
        buffer.form_returns(*returns)
        return buffer

    def _draw_part(self, name: str, part: ShardRequest, clocks: Mapping[str, int], *request: Any) -> RemoteShardDraw:
        module = self.held.modules[name]
        drawn = module.draw_part(part, *request, **clocks)
        self.held.counters.count_draw(name, module.drawn)
        return drawn

    def _write(self, local: Path, previous: Path | None, *fields: Any) -> Sequence[int]:
        (warm_up,) = fields
        return write_buffer(self.held, local, warm_up, previous)

    def _read(self, folder: Folder, into: RecipeEpisodeReplayBuffer) -> SavedBuffer:
        with folder.to_read() as local:
            return read_buffer(into, local)

    def _use(self, saved: SavedBuffer) -> None:
        self.held.take_over(saved.modules, saved.state)

    def _report(self) -> ShardReport:
        progress = {name: module.task_progress for name, module in self.held.modules.items()}
        return ShardReport(
            env_steps_stored=self.held.num_env_steps_stored,
            counts=self.held.counts(),
            signals={name: one.new_signals() for name, one in progress.items() if one is not None},
        )


def reshard_saved(
    buffer: RecipeEpisodeReplayBuffer, saved: Iterable[SavedBuffer], number: int, num_shards: int
) -> SavedBuffer:
    """Returns the part of saved buffers and of their counters for one of ``num_shards`` new shards."""

    def share(amount: int) -> int:
        """Returns this shard's part of a count."""
        return amount // num_shards + (number < amount % num_shards)

    def shares(counts: Iterable[Sequence[int]]) -> list[int]:
        """Returns this shard's part of each summed count."""
        return [share(sum(values)) for values in zip(*counts, strict=True)]

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
        total = sum((counts_of(state["counters"][counter]) for state in states), Counter())
        counters[counter] = [[*key, share(amount)] for key, amount in total.items()]
    environment = shares(state["counters"]["environment"]["counts"] for state in states)
    counters["environment"] = {"counts": environment, "known": []}
    state = states[0] | {"several_agents": several_agents, "counters": counters}
    return SavedBuffer(modules, state, one.warm_up, one.algorithm)


def options_of_shard(options: Mapping[str, Any], num_shards: int, number: int | None = None) -> dict[str, Any]:
    """Returns the options of the buffer in one shard, or without rows, also of single modules."""
    own = {name: value for name, value in options.items() if name != "modules"}
    if own.get("tables") is not None and number is not None:
        own["tables"] = built(own["tables"], "tables")
    divided = of_recipe.options_of_shard(own, num_shards, number)
    if options.get("modules"):
        divided["modules"] = {
            name: None if special is None else options_of_shard(special, num_shards, number)
            for name, special in options["modules"].items()
        }
    return divided


def without_shard_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options without options of shards. Raises ``ValueError`` if an option of shards is given."""
    given = [name for name in SHARD_OPTIONS if options.get(name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} is for a replay of several shards. Add num_shards=4, or leave it out")
    return {name: value for name, value in options.items() if name not in SHARD_OPTIONS}


def check_shard_layout(layout: str | None) -> None:
    """Raises ``ValueError`` for a layout that shards do not offer."""
    if layout not in (None, "flagged"):
        raise ValueError(
            f"layout is {layout!r}, and Learners fetch the rows of shards in blocks, layout='flagged'. Leave layout "
            "out, or num_shards"
        )
