# SPDX-License-Identifier: Apache-2.0
"""The replay buffer class of RLlib configs, and the replay of each module: episodes in, pieces of a batch out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray
import torch
from ray.rllib.core import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from torch import Tensor

from lightning_replay.options import check_kind, checked_choice, checked_count, checked_seed
from lightning_replay.sharded.actors import RemoteShardDraw
from rllib_ext.buffer.building import MinSizes, Returns, build_progress, build_replay, uses_retention
from rllib_ext.buffer.images import check_stacks
from rllib_ext.buffer.metrics import AGENT_STEPS_ADDED, BufferMetrics, Counts, Drawn
from rllib_ext.episodes import TASK, EpisodeConverter, FlatEpisode, Information, TaskProgress
from rllib_ext.learner.blocks import LAYOUTS, BatchCutter, Piece, deal
from rllib_ext.rllib_compat import RowBuffer, prepare_algorithm

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from lightning_replay.parts import ShardRequest
    from lightning_replay.replay import Replay
    from rllib_ext.buffer.sequences import SequencePriorities
    from rllib_ext.tasks import TaskAssignment

ROWS_PER_PASS = 512  # new rows whose surprise is computed at once: 0.1 GB of Atari's stacks as floats
# Several Learners would get both parts of a sequence that RLlib divides under one name.
SEVERAL_LEARNERS = (
    "modules with memory of several agents need a single Learner; set .learners(num_learners=0) or 1, or use modules "
    "without state"
)
# Returns the surprise of a module's rows, given as pieces of a batch in order.
MeasureSurprise = Callable[[str, Sequence[Any]], np.ndarray]


class RecipeEpisodeReplayBuffer(RowBuffer):
    """A replay of :mod:`lightning_replay` as the replay buffer of DQN, SAC, or TQC.

    RLlib calls :meth:`add`, :meth:`sample`, :meth:`get_metrics`, and :meth:`update_priorities` in every training step.
    A TD error finds its row in the order of the batch. :meth:`sample` deals the rows out to the Learners. Each
    :class:`ModuleReplay` expects the TD errors of its rows in the order in which RLlib will return them.
    :meth:`update_priorities` passes TD errors with slot and generation to :meth:`Replay.update_priority
    <lightning_replay.replay.Replay.update_priority>`.

    Build it with :func:`rllib_ext.replay_config`. RLlib's type checks need the base class
    (:mod:`rllib_ext.rllib_compat`). Torch and TorchRL are imported when a buffer is built: EnvRunners get only the
    class.

    With several agents each module has its own replay of ``capacity`` rows, built when its first step arrives.

    Args:
        recipe: name of the recipe, or ``None`` if ``options`` name a sampler, writer, or transform.
        layout: form in which drawn rows travel. ``blocks`` are blocks of columns. ``flagged`` is one block, only with
            :func:`rllib_ext.configure`. ``rows`` is an episode for each row (ten times slower), for learner connectors
            that do more with an episode than read its columns. By default ``blocks``, and with ``configure`` the form
            that the algorithm's connectors allow.
        num_learners: Learners the batch is dealt out to. With 2 or more, the TD errors come back in another order.
        modules: options of single modules by name that differ: ``{"pursuer": {"capacity": 10_000}}``. ``None`` as a
            value leaves an option out. ``None`` in place of the options stores nothing of a module (one that does not
            learn).
        metrics_num_episodes_for_smoothing: given by an algorithm that is being built, which is then prepared for this
            buffer as :func:`rllib_ext.configure` does.
        options: the recipe's own, or the parts'. ``seed=None`` follows ``config.seed``. ``info_keys``: numbers and
            flags of the steps' infos by name, stored as columns ``("next", key)`` for conditions of events, float32
            ``[n, 1]``, 0 if an info lacks the key. ``progress``: of :mod:`lightning_replay.schedulers`, makes a
            curriculum's signals from episode returns. ``image_key``: with ``frame_stack``, the entry of Dict
            observations that holds the stacks of frames, if any. A list names several.

    Raises:
        ValueError: an unknown recipe, layout or option, or values that are refused.
    """

    def __init__(
        self,
        recipe: str | None = None,
        *,
        layout: str | None = None,
        num_learners: int = 0,
        modules: dict[str, dict[str, Any] | None] | None = None,
        metrics_num_episodes_for_smoothing: int | None = None,
        **options: Any,
    ) -> None:
        if metrics_num_episodes_for_smoothing is not None:
            options |= prepare_algorithm(type(self))
        check_kind("modules", modules, Mapping | None, "options by the name of the module, or None")
        self.recipe = recipe
        self.num_learners: int = checked_count("num_learners", num_learners, 0, of="Learners")
        self.layout_was_given: bool = layout is not None
        self.options: ModuleOptions = ModuleOptions(
            recipe, "blocks" if layout is None else layout, options, modules or {}
        )
        self.draws_per_report = 1
        self.assignment: TaskAssignment | None = None
        self.counters: BufferMetrics = BufferMetrics()
        self._several_agents = False
        # Built now, whatever the number of agents will be: bad options are refused here and not at the first step.
        self.modules: dict[str, ModuleReplay] = {DEFAULT_MODULE_ID: self.options.build(DEFAULT_MODULE_ID)}
        self.capacity: int = self.replay.capacity

    def form_returns(self, n_step: int | tuple[int, int], gamma: float) -> None:
        """Sets length and discount of returns that are formed before rows are stored.

        :meta private:
        """
        self.modules |= self.options.form_returns((n_step, gamma), self.modules)

    def set_initial_surprise(self, measure: MeasureSurprise) -> None:
        """Gives replays that keep rows by surprise a measure of it for new rows, unless they have one.

        :meta private:
        """
        self.options.measure = measure
        for module in self.modules.values():
            module.set_initial_surprise(measure)

    @property
    def replay(self) -> Replay:
        """The replay of the only module. ``modules`` has several."""
        if len(self.modules) != 1:
            raise ValueError(f"there is a replay for each of {sorted(self.modules)}; take .modules[name].replay")
        return next(iter(self.modules.values())).replay

    @property
    def num_env_steps_stored(self) -> int:
        """Steps of the environment, counted as in :class:`~rllib_ext.buffer.metrics.BufferMetrics`."""
        return self.counters.env_steps_stored(self.modules)

    def counts(self) -> Counts:
        """Returns sums since the start, see :meth:`~rllib_ext.buffer.metrics.BufferMetrics.totals`."""
        return self.counters.totals(self.modules)

    def __len__(self) -> int:
        return sum(map(len, self.modules.values()))

    def add(
        self,
        episodes: list[SingleAgentEpisode | MultiAgentEpisode] | SingleAgentEpisode | MultiAgentEpisode,
        weight: float | None = None,
    ) -> None:
        """Stores the new steps of episodes or of their fragments, with one ``extend`` for each module.

        Args:
            episodes: from EnvRunners. Fragments continue by ``id_`` and ``t_started``.
            weight: ignored. New rows get the largest priority seen.

        Raises:
            TypeError: something else than an episode.
            ValueError: rows that do not fit the first ones, or more than the capacity. Nothing of this call is stored.
        """
        episodes = episodes if isinstance(episodes, list) else [episodes]
        grouped = self.options.group(episodes)
        several_agents = self._several_agents
        # Everything is checked before anything is stored.
        modules = dict(self.modules)
        if not several_agents and any(isinstance(one, MultiAgentEpisode) for one in episodes) and not len(self):
            # the module built in advance was for one agent
            several_agents = True
            modules = {}
        modules |= {name: self.options.build(name, several_agents) for name in grouped if name not in modules}
        flat = {name: modules[name].flatten(parts) for name, parts in grouped.items()}
        self.modules = modules
        self._several_agents = several_agents
        counts = self.counters.counts
        for name, parts in flat.items():
            added = modules[name].add(parts)
            for counter, amount in zip(("steps_added", "steps_evicted", "episodes_added"), added, strict=True):
                counts[counter, name] += amount
            if not several_agents:
                counts[AGENT_STEPS_ADDED, DEFAULT_AGENT_ID] += added.steps
        for episode in episodes if several_agents else ():
            if isinstance(episode, MultiAgentEpisode):
                self.counters.count_fragment(episode, stored=grouped)
        if self.assignment is not None:
            self.assignment.update()  # the new returns may have changed the scheduler's choice

    def sample(
        self,
        num_items: int | None = None,
        *,
        n_step: int | tuple[int, int] | None = None,
        gamma: float = 0.99,
        beta: float | None = None,
        batch_length_T: int | None = None,
        min_batch_length_T: int = 0,
        **ignored: Any,
    ) -> list[SingleAgentEpisode]:
        """Draws a train batch.

        Args:
            num_items: rows, of each module. For sequences, their steps together.
            n_step: rewards summed into one return: a number, or a closed interval one is drawn from for each row.
            gamma: discount of that return.
            beta: ignored. The recipe's ``importance_exponent`` is the correction's exponent.
            batch_length_T: steps of a sequence at most, for a recurrent module. 0 or ``None`` draws single rows.
            min_batch_length_T: the burn-in of sequences. Each sequence is longer.
            ignored: RLlib's further arguments (lookback, sample_episodes, ...).

        Returns:
            Blocks, or sequences as episodes. Extra model outputs are ``weights``, ``n_step``, and, for sequences,
            ``state_out``.

        Raises:
            RuntimeError: the buffer is empty.
            ValueError: sequences of several agents with several Learners, of n-step returns, of pairs, or of rows
                without state. Sequences with a burn-in longer than the episodes. Other returns than the returns formed
                before rows were stored.
        """
        num_items = checked_count("num_items", num_items, of="rows")
        drawable = self.modules
        if len(drawable) > 1:
            # A module whose agents have not acted yet has nothing to draw from.
            drawable = {name: module for name, module in drawable.items() if len(module)} or drawable
        if not drawable:
            raise RuntimeError("cannot sample from an empty replay buffer: no module that stores steps has any yet")
        if batch_length_T:
            return self._sequences(drawable, num_items, n_step or 1, gamma, batch_length_T, min_batch_length_T)
        pieces = {name: module.draw(num_items, n_step or 1, gamma) for name, module in drawable.items()}
        # TD errors come back in the order of the Learners, which is not that of the draw.
        dealt, places = deal(pieces, self.num_learners)
        for name, module in drawable.items():
            module.expect(places[name])
            self.counters.count_draw(name, module.drawn)
        return [piece.episode for _, piece in dealt]

    def _sequences(
        self,
        modules: dict[str, ModuleReplay],
        num_steps: int,
        n_step: int | tuple[int, int],
        gamma: float,
        longest: int,
        burn_in: int,
    ) -> list[SingleAgentEpisode]:
        if self._several_agents and self.num_learners > 1:
            raise ValueError(SEVERAL_LEARNERS)
        drawn: list[SingleAgentEpisode] = []
        for name, module in modules.items():
            # Another module is recurrent.
            if self._several_agents and not module.is_recurrent:
                dealt, places = deal({name: module.draw(num_steps, 1, gamma, "blocks")}, 0)
                module.expect(places[name])
                episodes = [piece.episode for _, piece in dealt]
            else:
                episodes = module.draw_sequences(num_steps, n_step, longest, burn_in, self.num_learners)
            self.counters.count_draw(name, module.drawn)
            drawn += episodes
        return drawn

    def update_priorities(self, priorities: np.ndarray, module_id: str | None = None) -> None:
        """Updates the rows of the last draw with their TD errors. Replays without feedback ignore them.

        Args:
            priorities: one TD error per row, in the order of the Learners. For sequences ``[chunks, batch_length_T]``,
                see :class:`~rllib_ext.buffer.sequences.SequencePriorities`. With surprise and action values
                ``[B, 2 + A]``, see :func:`~rllib_ext.learner.signals.report_signals`.
            module_id: the module that learned. May be left out if there is only one.

        Raises:
            ValueError: as :meth:`~rllib_ext.buffer.buffer.ModuleReplay.update`, or a module that has no replay.
        """
        if module_id is None and len(self.modules) == 1:
            module_id = next(iter(self.modules))
        if module_id not in self.modules:
            raise ValueError(f"module_id is {module_id!r}; there is a replay for each of {sorted(self.modules)}")
        self.modules[module_id].update(priorities)

    def get_metrics(self) -> dict[str, Any]:
        """Returns counters under RLlib's keys, in the form of its metrics logger. Call it once per draw.

        Computing them takes longer than a draw. With ``draws_per_report`` above 1 other calls return an empty dict.

        :meta private:
        """
        return self.counters.report(self.modules, self.draws_per_report)

    def remaining_metrics(self) -> dict[str, Any]:
        """Returns the counters if something was drawn since they were last returned.

        :meta private:
        """
        return self.counters.remaining(self.modules)

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Returns the steps stored."""
        return len(self) if module_id is None else len(self.modules[module_id])

    def get_num_episodes(self, module_id: str | None = None) -> int:
        """Returns the episodes of which rows are stored. With several agents it is the largest number of a module."""
        return max(module.num_episodes()[0] for module in self._modules_of(module_id))

    def get_num_episodes_evicted(self, module_id: str | None = None) -> int:
        """Returns the episodes of which no row is stored any more. With several agents it is the largest number."""
        return max(module.num_episodes()[1] for module in self._modules_of(module_id))

    def _modules_of(self, module_id: str | None) -> list[ModuleReplay]:
        return list(self.modules.values()) if module_id is None else [self.modules[module_id]]

    def get_sampled_timesteps(self, module_id: str | None = None) -> int:
        """Returns the steps drawn since the start.

        :meta private:
        """
        return self.counters.total("steps_sampled", module_id)

    def get_added_timesteps(self, module_id: str | None = None) -> int:
        """Returns the steps added since the start.

        :meta private:
        """
        return self.counters.total("steps_added", module_id)

    def get_state(self) -> dict[str, Any]:
        """Returns the state on which further draws depend: tensors and plain values."""
        replays = {name: module.replay.state_dict() for name, module in self.modules.items()}
        return {**self.plain_state(), "replays": replays}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`get_state` of a buffer of the same recipe and options.

        Raises:
            ValueError: the state of another recipe. Nothing is changed.
        """
        modules = self.options.restored(state)
        for name, module in modules.items():
            module.replay.load_state_dict(state["replays"][name])
        self.take_over(modules, state)

    def plain_state(self) -> dict[str, Any]:
        """Returns the state without the replays', of values that JSON takes.

        :meta private:
        """
        return {
            "recipe": self.recipe,
            "several_agents": self._several_agents,
            "modules": {name: module.state() for name, module in self.modules.items()},
            "counters": self.counters.state(),
        }

    def take_over(self, modules: dict[str, ModuleReplay], state: dict[str, Any]) -> None:
        """Replaces the modules by restored ones, and the counters by the counters of :meth:`plain_state`.

        :meta private:
        """
        self.modules = modules
        self._several_agents = state["several_agents"]
        self.counters.load(state["counters"])
        if self.assignment is not None:
            self.assignment.send()


class ModuleOptions:
    """The options of a buffer, for all modules and, ``special``, for single ones."""

    def __init__(
        self,
        recipe: str | None,
        layout: str,
        options: Mapping[str, Any],
        special: Mapping[str, Mapping[str, Any] | None],
    ) -> None:
        for name, options_of_module in special.items():
            accepted = "options by name, or None to store nothing of the module"
            check_kind(f"modules[{name!r}]", options_of_module, Mapping | None, accepted)
        self.recipe: str | None = recipe
        self.layout: Any = checked_choice("layout", layout, tuple(LAYOUTS))
        self.returns: Returns = (1, 0.99)  # formed before rows are stored
        self.measure: MeasureSurprise | None = None
        # By module, of rows elsewhere: the first rows of a module that is built later get it.
        self.largest_priorities: dict[str, float] = {}
        #: In a shard, the readings of the clocks of all shards before the rows that are added next.
        self.clocks: dict[str, int] = {}
        self._options = options
        self._special = special

    def stores(self, module_id: str) -> bool:
        """Returns whether rows of a module are stored. Options of ``None`` leave it out."""
        return self._special.get(module_id, {}) is not None

    def of(self, module_id: str) -> tuple[str | None, dict[str, Any]]:
        """Returns the recipe of a module (``None`` for a custom one), and its options."""
        special = self._special.get(module_id) or {}
        options = {**self._options, **special}
        # None removes an option of all modules, as another recipe may not have it.
        options = {key: value for key, value in options.items() if value is not None or key not in special}
        return options.pop("recipe", self.recipe), options

    def modules_with_retention(self) -> list[str]:
        """Returns the known modules whose rows are kept by importance."""
        names = dict.fromkeys([DEFAULT_MODULE_ID, *self._special])
        return [name for name in names if self.stores(name) and uses_retention(*self.of(name))]

    def build(self, module_id: str, several_agents: bool = False) -> ModuleReplay:
        """Builds the replay of a module. Errors are as of :func:`~rllib_ext.buffer.building.build_replay`."""
        return ModuleReplay(self, module_id, several_agents)

    def form_returns(self, returns: Returns, present: Container[str]) -> dict[str, ModuleReplay]:
        """Returns new replays of the present modules whose returns are formed before rows are stored."""
        # Rebuilds the replays whose returns are formed before rows are stored.
        self.returns = returns
        built = {name: self.build(name) for name in self.modules_with_retention()}
        return {name: module for name, module in built.items() if name in present}

    def restored(self, state: dict[str, Any]) -> dict[str, ModuleReplay]:
        """Returns the replays that a state names, without rows. Raises ``ValueError`` if the recipe differs."""
        if state["recipe"] != self.recipe:
            raise ValueError(
                f"the state is of recipe {state['recipe']!r}; this buffer is {self.recipe!r}. "
                "Build it with the recipe and options it was saved with."
            )
        modules = {name: self.build(name, state["several_agents"]) for name in state["modules"]}
        for name, module in modules.items():
            module.load_state(state["modules"][name])
        return modules

    def group(self, episodes: Iterable[Any]) -> dict[str, list[SingleAgentEpisode]]:
        """Returns single-agent episodes by the module that acted, except for modules that store nothing."""
        grouped: dict[str, list[SingleAgentEpisode]] = {}
        for episode in episodes:
            if isinstance(episode, SingleAgentEpisode):
                grouped.setdefault(DEFAULT_MODULE_ID, []).append(episode)
            elif isinstance(episode, MultiAgentEpisode):
                for part in episode.agent_episodes.values():
                    if self.stores(part.module_id):
                        grouped.setdefault(part.module_id, []).append(part)
            else:
                raise TypeError(
                    f"got a {type(episode).__name__}; episodes are accepted (SingleAgentEpisode, MultiAgentEpisode)"
                )
        return grouped


class ModuleReplay:
    """A :class:`~lightning_replay.replay.Replay` of a module, for RLlib's episodes, TD errors and Learners.

    Call :meth:`flatten` and :meth:`add` with the episodes of EnvRunners, :meth:`draw` for a batch, :meth:`expect` with
    the order in which its TD errors will come back, and :meth:`update` with them.
    """

    def __init__(self, options: ModuleOptions, name: str, several_agents: bool) -> None:
        from lightning_replay.table_replay import CurriculumReplay
        from rllib_ext.buffer.n_step import SampledReturns, StoredReturns

        recipe, given = options.of(name)
        seed = checked_seed(given.get("seed"))
        if seed is not None and name != DEFAULT_MODULE_ID:
            given["seed"] = seed = seed + zlib.crc32(name.encode())  # modules draw independently of each other
        info_keys = given.pop("info_keys", None)
        progress = given.pop("progress", None)
        self.replay: Replay = build_replay(recipe, given, options.returns)
        if name in options.largest_priorities:
            self.replay.raise_max_priority(options.largest_priorities[name])
        self._options = options
        self._module_id = name if several_agents else None
        self.converter: EpisodeConverter = EpisodeConverter(Information(info_keys or (), self.replay.tasks or None))
        signals = build_progress(progress, self.replay)
        is_curriculum = isinstance(self.replay, CurriculumReplay)
        self.task_progress: TaskProgress | None = TaskProgress(self.replay, signals) if is_curriculum else None
        self._returns, self._stored_returns = SampledReturns(seed), StoredReturns.of(self.replay)
        self._min_sizes = None if self.replay.tables is None else MinSizes(self.replay, given)
        self._interrupted = False
        self._num_draws = 0
        self.mean_n_step: float = 1.0  #: Mean of n over the rows of the last draw.
        self.drawn: Drawn = Drawn(0, 0, 0)
        self._batch: TensorDictBase | None = None
        self._expected: Expected | None = None
        if options.measure is not None:
            self.set_initial_surprise(options.measure)

    def __len__(self) -> int:
        return len(self.replay)

    @property
    def is_recurrent(self) -> bool:
        """Whether the stored steps have the state of the module."""
        return "state_out" in self.converter.columns

    @property
    def max_rows(self) -> int:
        """Rows that a table or the replay can hold."""
        # A curriculum has one table for each task.
        tables = self.replay.tables
        return self.replay.capacity if tables is None else int(tables.capacity[0])

    def flatten(self, episodes: Sequence[SingleAgentEpisode]) -> list[FlatEpisode]:
        """Returns the new steps of episodes as columns, before anything is stored."""
        flat = self.converter.flatten(episodes)
        if not flat:
            return flat
        columns = flat[0].columns
        if not self.converter.columns:  # the first rows decide what fits
            check_stacks(self.replay.storage, columns["observation"])
            # A recurrent module has states.
            if "state_out" in columns:
                from rllib_ext.buffer.sequences import check_sequences

                check_sequences(self.replay)
        steps = sum(len(one.episode) for one in flat)
        max_rows = self.max_rows
        if (TASK,) in flat[0].arrays and len(self.replay.tables or ()) > 1:  # a table for each task
            steps = int(np.bincount(np.concatenate([one.arrays[(TASK,)] for one in flat])).max())
        if steps > max_rows:
            raise ValueError(
                f"capacity is {max_rows}, and {steps} steps came with one add(). Raise the capacity to that of "
                "several rounds of all EnvRunners, or shorten rollout_fragment_length"
            )
        return flat

    def add(self, flat: Sequence[FlatEpisode]) -> Added:
        """Stores flattened episodes, and returns the counts of what entered and left."""
        fragments = self.converter.fragments
        stored = 0
        rows_before = len(self.replay)
        episodes_before = fragments.episodes
        if flat and self._interrupted:  # the episodes that ran before a load
            stored = len(self.replay.end_episodes())
            self._interrupted = False
            fragments.end_all_episodes()
            if self._stored_returns is not None:
                self._stored_returns.clear()
            if self.task_progress is not None:
                self.task_progress.end_all_episodes()
        rows = self.converter.transitions(flat)
        if rows is None:  # each fragment was sent before
            return Added(0, rows_before + stored - len(self.replay), 0)
        if self.is_recurrent:
            # Sequences are drawn along the links, so the links begin with the first row.
            self._returns.attach(self.replay)
        clocks = self._options.clocks
        if clocks:
            self._num_draws = max(self._num_draws, clocks["updates"])
            self.replay.advance(env_steps=clocks["env_steps"], updates=self._num_draws)
        try:
            stored += len(self.replay.extend_columns(rows))
        except Exception:  # the Learner that measures new rows was lost, or a function of the user's raised
            fragments.end_all_episodes()  # the next fragments follow rows that are missing
            raise
        trajectory = rows[("trajectory",)]
        if self._stored_returns is not None:
            stored += self._stored_returns.on_extend(trajectory, rows["next", "done"])
        if self.task_progress is not None:
            self.task_progress.update(self.converter.slices)
        # Schedules by environment steps go on after the rows are in: a refused add changes none.
        self.replay.advance(env_steps=max(fragments.steps, clocks.get("env_steps", 0)))
        return Added(len(trajectory), rows_before + stored - len(self.replay), fragments.episodes - episodes_before)

    def draw(
        self, num_items: int, n_step: int | tuple[int, int], gamma: float, layout: str | None = None
    ) -> list[Piece]:
        """Draws rows, and returns them as pieces of a batch in the given layout."""
        self._set_returns(n_step, gamma)
        self._advance()
        if self._min_sizes is not None:
            self._min_sizes.update(num_items)
        self._batch = self.replay.sample(num_items)
        self._count_draw(num_items, self._batch["index"], self._batch["trajectory"])
        rows = self._drawn_rows(self._batch)
        self.mean_n_step = rows.mean_n_step
        return LAYOUTS[layout or self._options.layout](rows)

    def draw_part(
        self, part: ShardRequest, n_step: int | tuple[int, int], gamma: float, *, env_steps: int, updates: int
    ) -> RemoteShardDraw:
        """Draws this shard's rows of a batch, with the clocks of all replays that the batch is divided over."""
        # By the clocks of all replays that the batch is divided over.
        self._set_returns(n_step, gamma)
        self._num_draws = updates
        self.replay.advance(env_steps=env_steps, updates=updates)
        batch, reply = self.replay.sample_shard(part)
        self._count_draw(len(batch), batch["index"], batch["trajectory"])
        rows = self._drawn_rows(batch)
        self.mean_n_step = rows.mean_n_step
        (piece,) = rows.flagged()
        slot, generation = (batch[name].cpu().numpy() for name in ("index", "generation"))
        return RemoteShardDraw(ray.put(piece.episode), slot, generation, reply, self._module_id)

    def set_min_sizes(self, batch_size: int, held: np.ndarray) -> None:
        """Sets the rows that each table needs, given the rows ``held`` by all shards."""
        if self._min_sizes is not None:
            self._min_sizes.update(batch_size, held)

    def expect(self, places: np.ndarray) -> None:
        """Notes the order ``places`` in which RLlib's Learners return the TD errors of the last draw."""
        # The TD errors of the rows drawn last come back in the order of ``places``, as RLlib joins its Learners'.
        batch = self._batch
        self._batch = None
        assert batch is not None
        if self.replay.takes_feedback:
            key = self.converter.columns["action"].leaves[0].key
            actions = batch.get(key)[places] if self._reads_actions else None
            self._expected = Expected(batch["index"][places], batch["generation"][places], actions)

    def draw_sequences(
        self, num_steps: int, n_step: int | tuple[int, int], longest: int, burn_in: int, num_learners: int
    ) -> list[SingleAgentEpisode]:
        """Draws sequences of ``num_steps`` steps together. From the first ``burn_in`` of each nothing is learned."""
        from lightning_replay.storage.packed import read_columns
        from rllib_ext.buffer.sequences import SequencePriorities, check_sequences, draw_sequences, read_episodes

        check_sequences(self.replay, n_step)
        if longest <= burn_in:
            raise ValueError(
                f"burn_in_len is {burn_in} and max_seq_len is {longest}: nothing is left to learn from. "
                "Give sequences longer than the burn-in"
            )
        if not len(self.replay):
            raise RuntimeError("cannot sample from an empty replay buffer; call add first")
        if not self.is_recurrent:
            raise ValueError(
                f"batch_length_T is {longest}: a recurrent module learns from sequences with its state, and the stored "
                "episodes carry no state_out among their extra model outputs. Fill the buffer with episodes that the "
                "module itself has played, from a new buffer on"
            )
        self._advance()
        assert self._returns.links is not None
        drawn = draw_sequences(self.replay, self._returns.links, num_steps, longest, shortest=burn_in + 1)
        self.mean_n_step = 1.0
        trajectories = read_columns(self.replay.storage, drawn.slots.flatten(), ["trajectory"])
        self._count_draw(int(drawn.lengths.sum()), drawn.slots, *trajectories)
        episodes = read_episodes(drawn, self.replay.storage, self.converter.columns, self._module_id)
        priorities = SequencePriorities(drawn.lengths.tolist(), num_learners, longest, burn_in)
        if self.replay.is_prioritized:
            self._expected = Expected(drawn.drawn, drawn.generation, sequences=priorities)
        return episodes

    def update(self, td_errors: np.ndarray) -> None:
        """Updates the rows drawn last, as :meth:`RecipeEpisodeReplayBuffer.update_priorities`."""
        if not self.replay.takes_feedback:
            return
        if self._expected is None:
            raise ValueError(
                "update_priorities got TD errors, but nothing was drawn since the last update; sample first"
            )
        # The generations come from the draw, so rows that were written since then get no TD error.
        index, generation, action, sequences = self._expected
        given: Any = np.asarray(td_errors)
        if sequences is not None:
            learned, given = sequences.of(given)
            index = index[learned]
            generation = generation[learned]
        self._update_rows(index, generation, given, action)
        # The draw stays expected until the update succeeds, so that corrected TD errors can follow refused ones.
        self._expected = None

    def update_part(self, slot: np.ndarray, generation: np.ndarray, td_errors: np.ndarray) -> None:
        """Updates rows that :meth:`draw_part` drew, in any order. Arguments are as there and as for :meth:`update`."""
        if not self.replay.takes_feedback:
            return
        from lightning_replay.storage.packed import read_columns

        # Copies, because arrays from Ray's object store cannot be written to, of which torch warns.
        index = torch.tensor(slot, device="cpu")
        action = None
        if self._reads_actions and td_errors.ndim == 2:
            (action,) = read_columns(self.replay.storage, index, [self.converter.columns["action"].leaves[0].key])
        self._update_rows(index, torch.tensor(generation, device="cpu"), td_errors.copy(), action)

    @property
    def _reads_actions(self) -> bool:
        return self._stored_returns is not None and len(self.converter.columns["action"].leaves) == 1

    def _update_rows(self, index: Tensor, generation: Tensor, given: np.ndarray, action: Tensor | None) -> None:
        signals: dict[str, Tensor] = {}
        if given.ndim == 2 and given.shape[1] > 2:  # TD error, surprise and action values, see learner.signals
            columns = torch.as_tensor(given, dtype=torch.float32, device="cpu")
            if action is not None:
                signals = {"surprise": columns[:, 1], "action_values": columns[:, 2:], "action": action}
            given = given[:, 0]  # the TD errors alone are priorities
        td_error = torch.as_tensor(given, device="cpu").reshape(-1)
        self.replay.update_priority(index, td_error, generation=generation, **signals)

    def set_initial_surprise(self, measure: MeasureSurprise) -> None:
        """Gives a replay that keeps rows by surprise a measure of it for new rows, unless it has one."""

        def surprise_of(rows: TensorDictBase) -> Tensor:
            surprise = np.empty(len(rows), dtype=np.float32)
            for start in range(0, len(rows), ROWS_PER_PASS):
                # In the form of drawn rows, and copied: connectors may write into them.
                pieces = LAYOUTS[self._options.layout](self._drawn_rows(rows[start : start + ROWS_PER_PASS].clone()))
                places = np.concatenate([piece.places for piece in pieces])
                module_id = self._module_id or DEFAULT_MODULE_ID
                surprise[start + places] = measure(module_id, [piece.episode for piece in pieces])
            return torch.from_numpy(surprise)

        if self.replay.needs_initial_surprise:
            self.replay.set_initial_surprise(surprise_of)

    def state(self) -> dict[str, Any]:
        """Returns the state of the fragments, the draws, and the returns. Rows are saved apart."""
        return {
            "converter": self.converter.state(),
            "draws": self._num_draws,
            "follows_episodes": self._returns.is_attached,
            "task_progress": None if self.task_progress is None else self.task_progress.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.converter.load_state(state["converter"])
        self._num_draws = state["draws"]
        # Episodes that ran are truncated once new steps arrive. Until then, contents and draws match the save.
        self._interrupted = True
        if self._stored_returns is not None:
            self._stored_returns.clear()
        if self.task_progress is not None:
            self.task_progress.load_state(state["task_progress"])
        if state["follows_episodes"]:
            self._returns.attach(self.replay)
        self._batch = self._expected = None

    def _count_draw(self, steps: int, slots: Tensor, trajectories: Tensor) -> None:
        rows, episodes = (len(set(values.flatten().tolist())) for values in (slots, trajectories))
        self.drawn = Drawn(steps, rows, episodes)

    def num_episodes(self) -> tuple[int, int]:
        """Returns the episodes with a row that is stored, and the episodes whose rows have left.

        Parts after a gap count.
        """
        from lightning_replay.episodes.running import stored_trajectories

        stored = len(stored_trajectories(self.replay.storage)) if len(self) else 0
        return stored, self.converter.fragments.trajectories - stored

    def _set_returns(self, n_step: int | tuple[int, int], gamma: float) -> None:
        if self._stored_returns is not None:
            self._stored_returns.check(n_step, gamma)
        elif n_step != 1 or self._returns.is_attached:
            self._returns.set_length(n_step, gamma)
            self._returns.attach(self.replay)

    def _advance(self) -> None:
        self._num_draws += 1
        self.replay.advance(updates=self._num_draws)

    def _drawn_rows(self, rows: TensorDictBase) -> BatchCutter:
        columns = self.converter.columns
        return BatchCutter(rows, columns["observation"], columns["action"], self._module_id)


class Added(NamedTuple):
    """The changes of one call of :meth:`ModuleReplay.add`. ``rows_evicted`` also counts rows that a writer refused."""

    steps: int
    rows_evicted: int
    episodes: int


class Expected(NamedTuple):
    """Rows in the order in which their TD errors will come back."""

    slots: Tensor
    generation: Tensor
    action: Tensor | None = None
    sequences: SequencePriorities | None = None
