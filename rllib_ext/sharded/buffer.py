# SPDX-License-Identifier: Apache-2.0
"""The driver's part of a sharded replay, in place of the replay buffer of an algorithm."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from lightning_replay.divided_draws import Divider, check_divisible
from lightning_replay.options import checked_count, checked_seed
from lightning_replay.parts import unwrap
from lightning_replay.sharded.actors import Counts, ShardActors, counts_of, listed
from lightning_replay.sharded.coordinator import stats_of
from lightning_replay.sharded.draws import DividedDraws, DrawnRows
from lightning_replay.sharded.options import check_room, split_options
from lightning_replay.sharded.rows import Router
from rllib_ext.buffer.buffer import ModuleOptions
from rllib_ext.buffer.metrics import CounterLog
from rllib_ext.learner.blocks import Piece, deal
from rllib_ext.learner.remote_blocks import RemoteBlock
from rllib_ext.rllib_compat import RowBuffer, prepare_algorithm
from rllib_ext.sharded.routing import EpisodeReference, put_episodes
from rllib_ext.sharded.shard import EpisodeShard, check_shard_layout, options_of_shard

if TYPE_CHECKING:
    from lightning_replay.replay import Replay
    from lightning_replay.sharded.actors import ShardReport
    from rllib_ext.buffer.buffer import ModuleReplay
    from rllib_ext.tasks import TaskAssignment

Stats = Mapping[str, Any]
_LARGEST = {"age_max", "drawn_age_max"}
_SUMS = {
    *("admitted", "refused", "evicted", "size", "capacity", "rows", "rows_drawn", "num_episodes_lifetime", "episodes"),
    *("nbytes", "stale_updates_dropped", "frames_held", "frame_capacity"),
    # This is an upper bound, which is exact if the priorities of all shards are alike.
    "effective_sample_size",
}
_BY_NAME = ("tables", "tasks")
# The statistic by which each shard's value is weighted. Without an entry, rows are the weight.
_WEIGHTS = {"fill": "capacity", "share_drawn": "rows_drawn", "age_mean": "size"}


class ShardedEpisodeReplayBuffer(RowBuffer):
    """A replay of whole episodes divided over Ray actors, as the replay buffer of DQN, SAC, or TQC.

    Each shard is a :class:`~rllib_ext.buffer.buffer.RecipeEpisodeReplayBuffer` of its part of the capacity.
    EnvRunners put their episodes into Ray's object store, and shards fetch them from there. Learners fetch the rows of
    a batch from shards. The driver moves only identities of rows, masses, and TD errors. Draws are the same as in one
    buffer, see :class:`~lightning_replay.divided_draws.Divider`. Local to a shard are the choice of rows that leave,
    partners of pairs, and sequences. Build it with ``rllib_ext.replay_config(..., num_shards=...)`` and prepare the
    algorithm with :func:`rllib_ext.configure`.

    Only :meth:`sample` waits for shards. It first waits until every shard has stored and updated everything that it was
    sent. If a shard raises an error meanwhile, :meth:`sample` raises it. With ``num_prefetch`` it waits for no more
    than the draw that it returns, which was sent in an earlier call. A restore, or a call with another batch size,
    ``n_step``, or ``gamma``, discards draws in flight. Rows that a Learner cannot fetch have weight 0 in its batch.

    Args:
        recipe: as of :class:`~rllib_ext.buffer.buffer.RecipeEpisodeReplayBuffer`.
        layout: ``flagged``, or ``None`` for the same: rows travel in one block for each module.
        num_learners: Learners the batch is dealt out to.
        metrics_num_episodes_for_smoothing: given by an algorithm that is being built, which
            :func:`rllib_ext.configure` must have prepared.
        options: options of :class:`~lightning_replay.sharded.options.ShardOptions`, and of the buffer. Every capacity
            is for all shards together.

    Raises:
        ValueError: an unknown recipe or option, more shards than rows, or shards that no node has room for.
    """

    def __init__(
        self,
        recipe: str | None = None,
        *,
        layout: str | None = None,
        num_learners: int = 0,
        metrics_num_episodes_for_smoothing: int | None = None,
        **options: Any,
    ) -> None:
        if metrics_num_episodes_for_smoothing is not None:
            prepare_algorithm(type(self))
        check_shard_layout(layout)
        self.recipe: str | None = recipe
        self.num_learners: int = checked_count("num_learners", num_learners, 0, of="Learners")
        shard_options, self._given = split_options(options)
        template = options_of_shard(self._given, shard_options.num_shards)
        modules = template.pop("modules", None) or {}
        self.options: ModuleOptions = ModuleOptions(recipe, "flagged", template, modules)
        # Replays without rows, by whose samplers draws are divided. Bad options are refused here and not in an actor.
        self._templates = {DEFAULT_MODULE_ID: self.options.build(DEFAULT_MODULE_ID)}
        check_divisible(self._templates[DEFAULT_MODULE_ID].replay.sampler)
        # This also checks the capacities of tables.
        options_of_shard(self._given, shard_options.num_shards, 0)
        seed = checked_seed(self._given.get("seed"))
        if "capacity" in self._given:
            self.capacity: int = self._given["capacity"]
        # RLlib seeds NumPy's generator with config.seed.
        self._seed: int = int(np.random.randint(2**31)) if seed is None else seed
        self._given |= {"seed": self._seed, "returns": self.options.returns}
        self.shards: ShardActors = ShardActors(
            EpisodeShard,
            lambda shard: (recipe, self._given, shard, shard_options.num_shards),
            shard_options,
            self._pass_signals,
        )
        self.draws: DividedDraws = DividedDraws(self.shards, self._divider, self._clocks, self._set_min_sizes)
        self.draws_per_report: int = 1
        self.assignment: TaskAssignment | None = None
        self._router = Router(shard_options.num_shards)
        self._metrics = ShardMetrics(self.shards, self.template)
        self._num_draws = 0
        #: By module, index and generation of the rows of the last draw, in the order in which their TD errors come.
        self.expected: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._owner: Any = None
        self._has_stopped = False

    def __reduce__(self) -> Any:
        raise TypeError("a sharded buffer belongs to the driver that built it; send its actors, buffer.shards.handles")

    def start(self, owner: Any = None, nodes: Sequence[str] = ()) -> None:
        """Starts the shards of an algorithm, if they have not started, on nodes of these ids as far as there is room.

        Raises:
            ValueError: no room for the shards, or another algorithm has this buffer.
            RuntimeError: shards have not started in time, or have ended with their algorithm.
        """
        if self._has_stopped:
            raise RuntimeError(
                "this sharded replay has ended with its algorithm, algo.stop(). Build another algorithm, and restore a "
                "checkpoint into it"
            )
        if owner is not None and self._owner is not None and owner is not self._owner:
            raise ValueError(
                "this sharded replay belongs to another algorithm: TD errors of one would reach rows that the other "
                "drew. Give each algorithm a replay_config(...) of its own; its shards are its own then, too"
            )
        self._owner = self._owner if owner is None else owner
        if not self.shards.handles:
            check_room(self.shards.options)
            self.shards.start(nodes)

    @property
    def replay(self) -> Replay:
        """A replay like the replays of the shards, but without rows. A curriculum has the scheduler of all shards."""
        return self.template(DEFAULT_MODULE_ID).replay

    def stop(self) -> None:
        """Ends the processes of the shards, and what they hold."""
        self._has_stopped = True
        self.shards.stop()

    def __len__(self) -> int:
        return sum(self._settled().rows.values())

    @property
    def num_env_steps_stored(self) -> int:
        """Environment steps stored in all shards."""
        return sum(report.env_steps_stored for report in self._settled().reports)

    def form_returns(self, n_step: int | tuple[int, int], gamma: float) -> None:
        """Sets length and discount of returns that are formed before rows are stored. Called before :meth:`start`.

        :meta private:
        """
        self._given["returns"] = n_step, gamma
        self._templates |= self.options.form_returns((n_step, gamma), self._templates)

    def template(self, module_id: str) -> ModuleReplay:
        """Returns a replay of a module without rows, whose sampler divides draws.

        :meta private:
        """
        if module_id not in self._templates:
            self._templates[module_id] = self.options.build(module_id)
        return self._templates[module_id]

    def add(self, episodes: Any, weight: float | None = None) -> None:
        """Sends episodes, or references to them, to their shards, without waiting until they are stored.

        Args:
            episodes: references from EnvRunners that :func:`rllib_ext.configure` prepared. Or episodes or their
                fragments, which are put into the object store here.
            weight: ignored. New rows get the largest priority of all shards.
        """
        self.start()
        episodes = episodes if isinstance(episodes, list) else [episodes]
        others = [one for one in episodes if not isinstance(one, EpisodeReference)]
        self.options.group(others)  # refuses other objects
        by_shard: dict[int, list[EpisodeReference]] = {}
        for one in [*episodes, *put_episodes(self._router, others)]:
            if isinstance(one, EpisodeReference):
                by_shard.setdefault(one.shard, []).append(one)
        # The ages of new rows count from the clocks of all shards.
        added = self.shards.counts["steps_added", ""] + self.shards.steps_sent
        clocks = {"env_steps": added, "updates": self._num_draws}
        # The driver sends only references. The shard fetches the steps, and new rows get the group's largest priority.
        for shard, parts in by_shard.items():
            references = [one.reference for one in parts]
            steps = sum(one.num_steps for one in parts)
            self.shards.send(shard, "add", references, self.draws.largest(shard), clocks, steps=steps)

    def sample(
        self,
        num_items: int | None = None,
        *,
        n_step: int | tuple[int, int] | None = None,
        gamma: float = 0.99,
        beta: float | None = None,
        batch_length_T: int | None = None,
        **ignored: Any,
    ) -> list[RemoteBlock]:
        """Draws a train batch, whose rows stay in the object store.

        Args:
            num_items: rows, of each module.
            n_step, gamma: rewards summed into one return, and its discount.
            beta: ignored. The recipe's ``importance_exponent`` is the correction's exponent.
            ignored: RLlib's further arguments.

        Returns:
            A block for each module, cut if several Learners learn from several modules.

        Raises:
            RuntimeError: no shard holds rows, or the algorithm has stopped.
            ValueError: returns other than the stored returns.
        """
        num_items = checked_count("num_items", num_items, of="rows")
        self.start()
        if self.assignment is not None:
            self.assignment.update()
        batches = self.draws.draw(num_items, n_step or 1, gamma)
        self._num_draws += 1
        timeout_s = self.shards.options.shard_timeout_s
        pieces = {name: [_piece(batch, timeout_s)] for name, batch in batches.items()}
        dealt, places = deal(pieces, self.num_learners)
        self.expected = {}
        for name, batch in batches.items():
            index, generation = (batch.columns[column][places[name]] for column in ("index", "generation"))
            self.expected[name] = index, generation
        self._metrics.count_draw(batches)
        return [piece.episode for _, piece in dealt]

    def update_priorities(self, priorities: np.ndarray, module_id: str | None = None) -> None:
        """Sends the TD errors of the last draw to the shards of their rows, without waiting.

        Args:
            priorities: one TD error per row, in the order of the Learners. With surprise and action values
                ``[B, 2 + A]``.
            module_id: the module that learned. May be left out if there is only one.

        Raises:
            ValueError: another number of TD errors than of rows, NaN or infinite values, no draw to update, or a module
                that has no replay.
            RuntimeError: the algorithm has stopped.
        """
        if module_id is None and len(self.expected) == 1:
            module_id = next(iter(self.expected))
        if module_id not in self.expected:
            raise ValueError(
                f"update_priorities got TD errors of module {module_id!r}, and rows were drawn for "
                f"{sorted(self.expected)} since the last update; sample first"
            )
        if self.template(module_id).replay.takes_feedback:
            self.start()
            self.draws.update(module_id, *self.expected[module_id], np.asarray(priorities))
            del self.expected[module_id]

    def get_metrics(self) -> dict[str, Any]:
        """Returns counters under RLlib's keys, in the form of its metrics logger. Call it once per draw.

        :meta private:
        """
        return self._metrics.report(self.draws_per_report)

    def remaining_metrics(self) -> dict[str, Any]:
        """Returns the metrics that have been kept back.

        :meta private:
        """
        return self._metrics.remaining()

    def stats(self) -> dict[str, Any]:
        """Returns what the shards hold, see :func:`~lightning_replay.sharded.coordinator.stats_of`."""
        return stats_of(self.shards, self.draws)

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Returns the stored rows of a module, or of all."""
        return len(self) if module_id is None else self._settled().rows[module_id]

    def get_num_episodes(self, module_id: str | None = None) -> int:
        """Returns the episodes of which rows are stored, as counted at one of the last draws."""
        return self._settled().counts["episodes_added", module_id or ""] - self.get_num_episodes_evicted(module_id)

    def get_num_episodes_evicted(self, module_id: str | None = None) -> int:
        """Returns the evicted episodes of a module, or of all."""
        return self._settled().counts["episodes_evicted", module_id or ""]

    def get_added_timesteps(self, module_id: str | None = None) -> int:
        """Returns the added steps of a module, or of all.

        :meta private:
        """
        return self._settled().counts["steps_added", module_id or ""]

    def get_sampled_timesteps(self, module_id: str | None = None) -> int:
        """Returns the drawn steps of a module, or of all.

        :meta private:
        """
        return self._metrics.sampled["steps_sampled", module_id or ""]

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the driver and of every shard, which all pass through the driver.

        Raises:
            RuntimeError: the algorithm has stopped.
        """
        self.start()
        return {**self.driver_state(), "shards": self._call_of_all("get_state")}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`get_state` of as many shards of the same recipe and options."""
        states = state["shards"]
        if len(states) != len(self.shards):
            raise ValueError(
                f"the state is of {len(states)} shards and there are {len(self.shards)}; save_to_path writes a "
                "checkpoint that any number of shards can be restored from"
            )
        self.start()
        self._call_of_all("set_state", lambda shard: (states[shard],))
        self.load_driver_state(state)

    def driver_state(self) -> dict[str, Any]:
        """Returns the state of the draws and the counters in the driver.

        :meta private:
        """
        counts = {"num_draws": self._num_draws, "metrics": self._metrics.state(), "losses": self.shards.lost.state()}
        return {"dividers": self.draws.state_dict(), **counts}

    def load_driver_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`driver_state`. Rows drawn before get no TD errors, and draws in flight are discarded.

        :meta private:
        """
        self.resume_at(state["num_draws"])
        self.draws.load_state_dict(state["dividers"])
        self._metrics.load(state["metrics"])
        self.shards.lost.load(state["losses"])

    def resume_at(self, num_draws: int) -> None:
        """Sets the number of draws made, which schedules follow, if a save has no state of the driver.

        :meta private:
        """
        self.draws.in_flight.clear()
        self._num_draws = num_draws
        self.expected = {}

    def _call_of_all(self, method: str, arguments: Callable[[int], tuple[Any, ...]] = lambda shard: ()) -> list[Any]:
        self.shards.start_lost()
        limit_s = self.shards.options.save_timeout_s
        return self.shards.values_of(self.shards.send_all(method, arguments, limit_s=limit_s))

    def _settled(self) -> ShardActors:
        # While draws are in flight nothing is waited for.
        return self.shards.settle({} if self.draws.in_flight else None)

    def _divider(self, module_id: str) -> Divider:
        # Modules draw independently of each other, as in one buffer.
        own = 0 if module_id == DEFAULT_MODULE_ID else zlib.crc32(module_id.encode())
        return Divider(self.template(module_id).replay.sampler, seed=self._seed + own)

    def _set_min_sizes(self, module_id: str, batch_size: int) -> None:
        rows = [total.rows for total in self.shards.totals(module_id) if total is not None]
        self.template(module_id).set_min_sizes(batch_size, np.sum(rows, axis=0))

    def _pass_signals(self, report: ShardReport) -> None:
        for name, signals in report.signals.items():
            for task, signal in signals:
                self.template(name).replay.progress(task, signal)

    def _clocks(self, draws_before: int) -> dict[str, int]:
        return {"env_steps": self.shards.counts["steps_added", ""], "updates": self._num_draws + 1 + draws_before}


def _piece(batch: DrawnRows, timeout_s: float) -> Piece:
    module_id = next(iter(batch.parts.values())).module_id
    weights = batch.columns.get("priority_weight", np.ones(len(batch), dtype=np.float32))
    block = RemoteBlock(f"rows_of_{module_id or 'batch'}", batch.blocks, weights, module_id, timeout_s)
    return Piece(block, np.arange(len(batch)))


class ShardMetrics:
    """Counters of all shards under the keys of one buffer, and under ``shards`` the state of the shards.

    Current values are joined by :func:`joined_stats`. ``template`` returns a module's replay without rows.
    """

    def __init__(self, shards: ShardActors, template: Callable[[str], ModuleReplay]) -> None:
        self._shards = shards
        self._template = template
        # Statistics by module and shard.
        self._parts: dict[str, dict[int, Stats]] = {}
        self.sampled: Counts = Counter()  # rows, by module, and of all under the module ""
        self._log = CounterLog()

    def count_draw(self, batches: Mapping[str, DrawnRows]) -> None:
        """Counts the rows of a draw, and keeps the statistics that shards sent with it."""
        for name, batch in batches.items():
            for owner in (name, ""):  # the sum of all modules is counted here, those of shards by them
                self.sampled["steps_sampled", owner] += len(batch)
            of_shards = {shard: part.stats for shard, part in batch.parts.items() if part.stats is not None}
            self._parts.setdefault(name, {}).update(of_shards)

    def state(self) -> dict[str, Any]:
        """Returns the counters as a save holds them."""
        return {"sampled": listed(self.sampled), "logged": listed(self._log.logged)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.sampled, self._log.logged = counts_of(state["sampled"]), counts_of(state["logged"])

    def report(self, draws_per_report: int) -> dict[str, Any]:
        """Counts a call of a draw, and returns the metrics that are due."""
        # If they are due, and nothing otherwise. Called once per draw.
        self._log.calls += 1
        return self.remaining(draws_per_report)

    def remaining(self, draws: int = 1) -> dict[str, Any]:
        """Returns the metrics that are due after ``draws`` further calls, or an empty dictionary."""
        if not self._log.is_due(draws):
            return {}
        shards = self._shards
        rows = [report.num_rows for report in shards.reports]
        stored = sum(report.env_steps_stored for report in shards.reports)
        self._log.totals(Counter({**shards.counts, **self.sampled}), stored, shards.rows)
        self._log.items({name: self._joined(name, parts) for name, parts in self._parts.items() if parts})
        of_shards = {
            "num_alive": sum(shards.alive),
            "rows_lost": shards.lost.rows,
            "rows_smallest": min(rows),
            "rows_largest": max(rows),
            "td_errors_dropped": shards.lost.td_errors,
        }
        for name, value in of_shards.items():
            self._log.logger.log_value(("shards", name), value, reduce="item")
        return self._log.logger.reduce()

    def _joined(self, name: str, parts: Mapping[int, Stats]) -> dict[str, Any]:
        joined = joined_stats(list(parts.values()))
        replay = self._template(name).replay
        if replay.is_prioritized:
            joined["importance_exponent"] = unwrap(replay.sampler).beta
        if "tasks" in joined:
            for task, probability in replay.probabilities().items():
                joined["tasks"][task]["probability"] = probability
        return joined


def joined_stats(parts: Sequence[Stats], shards: Sequence[Stats] | None = None) -> dict[str, Any]:
    """Returns the statistics of one replay that holds the rows of all shards, under the same names.

    Counts and sizes are added up, and the largest is taken of largest ages. Other numbers are means, weighted by the
    rows of each shard. For tables, the weight is the number that each figure is a share of. Ages count the rows of a
    shard. ``shards`` are the statistics of the shards if ``parts`` are entries in them, as of a table.

    Example:
        >>> parts = [{"rows": 30, "evicted": 3, "age_mean": 4.0}, {"rows": 10, "evicted": 5, "age_mean": 8.0}]
        >>> joined_stats(parts)
        {'rows': 40, 'evicted': 8, 'age_mean': 5.0}
    """
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        held = [(part[name], part, shard) for part, shard in zip(parts, shards or parts, strict=True) if name in part]
        values = [value for value, _, _ in held]
        if name in _BY_NAME:
            joined[name] = {}
            for entry in dict.fromkeys(entry for value in values for entry in value):
                of_entry = [(value[entry], shard) for value, _, shard in held if entry in value]
                joined[name][entry] = joined_stats(*zip(*of_entry, strict=True))
        elif name in _SUMS:
            joined[name] = sum(values)
        elif name in _LARGEST:
            joined[name] = max(values)
        elif all(isinstance(value, int | float) for value in values):
            weight = _WEIGHTS.get(name, "rows")
            weights = [part.get(weight, shard.get(weight, shard["rows"])) for _, part, shard in held]
            weighted = sum(value * weight for value, weight in zip(values, weights, strict=True))
            joined[name] = weighted / sum(weights) if sum(weights) else sum(values) / len(values)
    return joined
