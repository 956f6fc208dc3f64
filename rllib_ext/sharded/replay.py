# SPDX-License-Identifier: Apache-2.0
"""The driver's part of a sharded replay: it stands where the replay buffer of an algorithm stands."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer

from lightning_replay.validation import checked_choice, checked_count, checked_seed
from rllib_ext.buffer.module_options import ModuleOptions
from rllib_ext.learner.batch_layouts import Piece
from rllib_ext.learner.references import RemoteBlock, Span
from rllib_ext.learner.sharding import deal
from rllib_ext.rllib_compat import BufferType
from rllib_ext.sharded.actors import ShardActors
from rllib_ext.sharded.draws import DividedDraws, RemoteBatch
from rllib_ext.sharded.metrics import ShardMetrics
from rllib_ext.sharded.options import check_room, options_of_shard, split_options
from rllib_ext.sharded.routing import EpisodeReference, Router
from rllib_ext.sharded.shard import EpisodeShard

if TYPE_CHECKING:
    from lightning_replay.divided_draws import Divider
    from lightning_replay.replay import Replay
    from rllib_ext.buffer.building import Returns
    from rllib_ext.buffer.module_replay import ModuleReplay
    from rllib_ext.episodes.task_assignment import TaskAssignment
    from rllib_ext.sharded.reports import ShardReport
    from rllib_ext.sharded.row_ids import RowIds

logger = logging.getLogger(__name__)


class ShardedReplay(PrioritizedEpisodeReplayBuffer, metaclass=BufferType):
    """A replay of whole episodes divided over Ray actors, as the replay buffer of DQN, SAC or TQC.

    Each shard is a :class:`~rllib_ext.buffer.episode_buffer.RecipeEpisodeReplayBuffer` of its part of the capacity.
    EnvRunners put their episodes into Ray's object store, shards fetch them from there, and Learners fetch the rows of
    a batch from shards: the driver moves identities of rows, masses and TD errors. Draws are those of one buffer, see
    :class:`~lightning_replay.divided_draws.Divider`; local to a shard are which rows leave, partners of pairs, and
    sequences. Build it with ``rllib_ext.replay_config(..., num_shards=...)`` and prepare the algorithm with
    :func:`rllib_ext.configure`.

    Nothing waits for a shard but :meth:`sample`, which first waits until every shard has stored and updated what it was
    sent; an error that one raises meanwhile is raised there.

    Args:
        recipe: as of :class:`~rllib_ext.buffer.episode_buffer.RecipeEpisodeReplayBuffer`.
        layout: ``flagged``, or ``None`` for the same: rows travel in one block for each module.
        num_learners: Learners the batch is dealt out to.
        metrics_num_episodes_for_smoothing: given by RLlib and ignored.
        options: those of :class:`~rllib_ext.sharded.options.ShardOptions`, and of the buffer. Every capacity is that of
            all shards together.

    Attributes:
        shards: the actors.
        draws: divides the draws.

    Raises:
        ValueError: an unknown recipe or option, more shards than rows, or shards that no node has room for.
    """

    def __init__(
        self,
        recipe: str | None = None,
        *,
        layout: str | None = None,
        num_learners: int = 0,
        metrics_num_episodes_for_smoothing: int = 100,
        **options: Any,
    ) -> None:
        del metrics_num_episodes_for_smoothing
        checked_choice("layout", layout, (None, "flagged"))
        self.recipe, self.num_learners = recipe, checked_count("num_learners", num_learners, 0, of="Learners")
        shard_options, self._options = split_options(options)
        template = options_of_shard(self._options, shard_options.num_shards)
        modules = template.pop("modules", None) or {}
        self.options = ModuleOptions(recipe, "flagged", template, modules)
        # Built now: bad options are refused here and not in an actor.
        self._templates = {DEFAULT_MODULE_ID: self.options.build(DEFAULT_MODULE_ID)}
        options_of_shard(self._options, shard_options.num_shards, 0)  # more shards than rows, of a capacity or a table
        self.shards = ShardActors(EpisodeShard, self._arguments_of, shard_options, self._on_report)
        self.draws = DividedDraws(self.shards, self._build_divider)
        self.returns: Returns = (1, 0.99)
        self.last_save: Sequence[str] | None = None
        self.is_in_checkpoints, self.draws_per_report = False, 1
        self.assignment: TaskAssignment | None = None
        seed = checked_seed(self._options.get("seed"))
        self._seed = int(np.random.randint(2**31)) if seed is None else seed  # which RLlib seeds with config.seed
        self._router = Router(shard_options.num_shards)
        self._metrics = ShardMetrics()
        self._num_draws = 0
        self._expected: dict[str, RowIds] = {}
        self._owner: Any = None

    def __reduce__(self) -> Any:
        raise TypeError(
            "a sharded replay belongs to the driver that built it and cannot be sent to another process. Its actors "
            "are buffer.shards.handles"
        )

    def start(self, owner: Any = None, nodes: Sequence[str] = ()) -> None:
        """Starts the shards; nothing happens if they have started.

        Args:
            owner: the algorithm that draws from them, the only one.
            nodes: ids of those to place shards on, as far as there is room.

        Raises:
            ValueError: no room for the shards, or another algorithm has this buffer.
            RuntimeError: shards have not started in time.
        """
        if owner is not None and self._owner is not None and owner is not self._owner:
            raise ValueError(
                "this sharded replay belongs to another algorithm: TD errors of one would reach rows that the other "
                "drew. Give each algorithm a replay_config(...) of its own; its shards are its own then, too"
            )
        self._owner = owner if owner is not None else self._owner
        if not self.shards.handles:
            check_room(self.shards.options)
            self.shards.start(nodes)

    @property
    def replay(self) -> Replay:
        """A replay as those of the shards, but without rows; of a curriculum, with the scheduler of all shards."""
        return self._templates[DEFAULT_MODULE_ID].replay

    def stop(self) -> None:
        """Ends the processes of the shards, and what they hold."""
        self.shards.stop()

    def __len__(self) -> int:
        self._settle()
        return sum(self.shards.rows.values())

    @property
    def num_env_steps_stored(self) -> int:
        """Steps of the environment, as of one buffer."""
        self._settle()
        return sum(report.env_steps_stored for report in self.shards.reports)

    def form_returns(self, n_step: int | tuple[int, int], gamma: float) -> None:
        """Sets length and discount of returns that are formed before rows are stored; called before :meth:`start`."""
        self.returns = (n_step, gamma)
        self._templates |= self.options.form_returns(self.returns, self._templates)

    def add(self, episodes: Any, weight: float | None = None) -> None:
        """Sends episodes, or references to them, to their shards, without waiting until they are stored.

        Args:
            episodes: references from EnvRunners that :func:`rllib_ext.configure` prepared; or episodes or their
                fragments, which are put into the object store here.
            weight: ignored; new rows get the largest priority of all shards.
        """
        self.start()
        episodes = episodes if isinstance(episodes, list) else [episodes]
        given = [one for one in episodes if isinstance(one, EpisodeReference)]
        others = [one for one in episodes if not isinstance(one, EpisodeReference)]
        self.options.group(others)  # refuses other objects
        by_shard: dict[int, list[EpisodeReference]] = {}
        for one in [*given, *self._router.put(others)]:
            by_shard.setdefault(one.shard, []).append(one)
        for shard, parts in by_shard.items():
            references, steps = [one.reference for one in parts], sum(one.num_steps for one in parts)
            self.shards.send(shard, "add", references, self.draws.largest(shard), steps=steps)

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
            beta: ignored; the recipe's ``importance_exponent`` is the correction's exponent.
            batch_length_T: 0 or ``None``: sequences for recurrent modules are not drawn from shards.
            ignored: RLlib's further arguments.

        Returns:
            A block for each module, cut where several Learners learn from several modules.

        Raises:
            RuntimeError: no shard holds rows.
            ValueError: sequences, or returns other than those stored.
        """
        if batch_length_T:
            raise ValueError(
                f"batch_length_T is {batch_length_T}: a recurrent module learns from sequences, which are not drawn "
                "from shards. Leave num_shards out, or use a module without state"
            )
        num_items = checked_count("num_items", num_items, of="rows")
        self.start()
        self._num_draws += 1
        counts = self.shards.counts
        clocks = counts["steps_added", ""], self._num_draws
        if self.assignment is not None:
            self.assignment.update()
        batches = self.draws.draw(num_items, self._prepare, n_step or 1, gamma, *clocks)
        pieces = {name: [_piece(batch)] for name, batch in batches.items()}
        dealt, places = deal(pieces, self.num_learners)
        self._expected = {name: batch.ids.take(places[name]) for name, batch in batches.items()}
        self._metrics.count_draw(batches)
        return [piece.episode for _, piece in dealt]

    def update_priorities(self, priorities: Any, module_id: str | None = None) -> None:
        """Sends the TD errors of the last draw to the shards of their rows, without waiting.

        Args:
            priorities: one TD error per row, in the order of the Learners; with surprise and action values
                ``[B, 2 + A]``.
            module_id: the module that learned; may be left out where there is one.

        Raises:
            ValueError: another number of TD errors than of rows, NaN or infinite values, no draw to update, or a module
                that has no replay.
        """
        if module_id is None and len(self._expected) == 1:
            module_id = next(iter(self._expected))
        if module_id is not None and not self._template(module_id).replay.takes_feedback:
            return
        if module_id not in self._expected:
            raise ValueError(
                f"update_priorities got TD errors of module {module_id!r}, and rows were drawn for "
                f"{sorted(self._expected)} since the last update; sample first"
            )
        td_errors = np.asarray(priorities)
        ids = self._expected[module_id]
        if len(td_errors) != len(ids.shard) or not np.isfinite(td_errors).all():
            raise ValueError(
                f"td_error must hold one finite value for each of the {len(ids.shard)} rows of the batch; got shape "
                f"{list(td_errors.shape)}, {np.count_nonzero(~np.isfinite(td_errors))} of them NaN or infinite. No "
                "priority was changed"
            )
        del self._expected[module_id]
        self.draws.update(module_id, ids, td_errors)

    def get_metrics(self) -> dict[str, Any]:
        """Returns counters under RLlib's keys, in the form of its metrics logger; call it once per draw."""
        return self._metrics.report(self, self.draws_per_report)

    def remaining_metrics(self) -> dict[str, Any]:
        """Returns the counters if something was drawn since they were last returned."""
        return self._metrics.remaining(self)

    def stats(self) -> dict[str, Any]:
        """Returns what the shards hold.

        ``num_shards``, ``num_rows``, ``rows``, ``mass`` (of what rows are drawn in proportion to), ``alive`` and
        ``epochs``, the last four of each shard; ``rows_lost`` with shards, ``td_errors_dropped`` because their shard
        was lost, ``late_updates_dropped`` because their row had left, ``fragments_lost`` with EnvRunners before a shard
        fetched them; ``bytes`` stored.
        """
        values = self._settled_stats()
        replays = [stats for by_module in values for stats in by_module.values()]
        reports = self.shards.reports
        rows = [sum(report.rows.values()) for report in reports]
        return {
            "num_shards": len(self.shards),
            "num_rows": sum(rows),
            "rows": rows,
            "mass": [float(sum(total.mass.sum() for total in report.totals.values())) for report in reports],
            "alive": self.shards.alive,
            "epochs": self.shards.epochs.tolist(),
            "rows_lost": self.shards.rows_lost,
            "td_errors_dropped": self.draws.td_errors_dropped,
            "late_updates_dropped": sum(one["late_updates_dropped"] for one in replays),
            "fragments_lost": sum(report.fragments_lost for report in reports),
            "bytes": sum(one["nbytes"] for one in replays),
        }

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Returns the steps stored."""
        return len(self) if module_id is None else self.shards.rows[module_id]

    def get_num_episodes(self, module_id: str | None = None) -> int:
        """Returns the episodes added."""
        return self.shards.counts["episodes_added", module_id or ""]

    def get_added_timesteps(self, module_id: str | None = None) -> int:
        """Returns the steps added since the start."""
        return self.shards.counts["steps_added", module_id or ""]

    def get_sampled_timesteps(self, module_id: str | None = None) -> int:
        """Returns the steps drawn since the start."""
        return self._metrics.sampled["steps_sampled", module_id or ""]

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the driver and of every shard, which all pass through the driver."""
        return {**self.driver_state(), "shards": self.shards.call("get_state")}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`get_state` of as many shards of the same recipe and options."""
        states = state["shards"]
        if len(states) != len(self.shards):
            raise ValueError(
                f"the state is of {len(states)} shards and there are {len(self.shards)}; save_to_path writes a "
                "checkpoint that any number of shards can be restored from"
            )
        self.start()
        self.shards.call("set_state", lambda shard: (states[shard],))
        self.load_driver_state(state)

    def driver_state(self) -> dict[str, Any]:
        """Returns the state of the driver: tensors and plain values."""
        return {"dividers": self.draws.state_dict(), "num_draws": self._num_draws, "metrics": self._metrics.state()}

    def load_driver_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`driver_state`; rows drawn before get no TD errors."""
        self.draws.load_state_dict(state["dividers"])
        self._num_draws = state["num_draws"]
        self._metrics.load(state["metrics"])
        self._expected = {}

    def resume_at(self, num_draws: int) -> None:
        """Sets the draws made so far, by which schedules go."""
        self._num_draws, self._expected = num_draws, {}

    def _settle(self) -> None:
        if self.shards.handles:
            self.shards.settle()

    def _settled_stats(self) -> list[dict[str, Any]]:
        if not self.shards.handles:
            return []
        asked = [self.shards.send(shard, "stats") for shard in range(len(self.shards))]
        values = self.shards.settle()
        return [values[reference] for reference in asked if reference in values]

    def _arguments_of(self, shard: int) -> tuple[Any, ...]:
        """Returns the arguments of a shard's actor."""
        options = {**self._options, "seed": self._seed}
        folder = None
        if self.shards.epochs[shard] > 1 and self.shards.options.restart_shards == "last_save" and self.last_save:
            folder = self.last_save[shard]
        return self.recipe, options, shard, len(self.shards), self.returns, folder

    def _on_report(self, report: ShardReport) -> None:
        for name, signals in report.signals.items():
            for task, signal in signals:
                self._template(name).replay.progress(task, signal)

    def _build_divider(self, module_id: str) -> Divider:
        from lightning_replay.divided_draws import Divider

        return Divider(self._template(module_id).replay.sampler, seed=self._seed)

    def _template(self, module_id: str) -> ModuleReplay:
        if module_id not in self._templates:
            self._templates[module_id] = self.options.build(module_id)
        return self._templates[module_id]

    def _prepare(self, module_id: str, batch_size: int) -> None:
        held = [total for total in self.shards.totals(module_id) if total is not None]
        self._template(module_id).set_min_sizes(batch_size, np.sum([total.rows for total in held], axis=0))
        self.draws.divider(module_id).advance(env_steps=self.shards.counts["steps_added", ""], updates=self._num_draws)


def _piece(batch: RemoteBatch) -> Piece:
    spans = [Span(part.reference, 0, len(part.slot)) for part in batch.parts]
    weights = batch.columns.get("priority_weight")
    if weights is None:
        weights = np.ones(len(batch), dtype=np.float32)
    module_id = batch.parts[0].module_id
    return Piece(RemoteBlock(f"rows_of_{module_id or 'batch'}", spans, weights, module_id), np.arange(len(batch)))
