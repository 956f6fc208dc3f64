# SPDX-License-Identifier: Apache-2.0
"""Counters of the buffer in plain integers, logged once per draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils import metrics as keys
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_ext.episodes.fragments import FragmentTracker

if TYPE_CHECKING:
    from rllib_ext.buffer.module_replay import ModuleReplay

# counter -> (key of the sum since the last call, key of the sum over the whole run)
_SUMS: dict[str, tuple[str, str]] = {
    "steps_added": (keys.NUM_ENV_STEPS_ADDED, keys.NUM_ENV_STEPS_ADDED_LIFETIME),
    "steps_evicted": (keys.NUM_ENV_STEPS_EVICTED, keys.NUM_ENV_STEPS_EVICTED_LIFETIME),
    "steps_sampled": (keys.NUM_ENV_STEPS_SAMPLED, keys.NUM_ENV_STEPS_SAMPLED_LIFETIME),
    "episodes_added": (keys.NUM_EPISODES_ADDED, keys.NUM_EPISODES_ADDED_LIFETIME),
}
# further sums over the whole run, by module
_SUMS_BY_MODULE = {
    "steps_added": keys.NUM_MODULE_STEPS_ADDED_LIFETIME,
    "steps_evicted": keys.NUM_MODULE_STEPS_EVICTED_LIFETIME,
    "steps_sampled": keys.NUM_MODULE_STEPS_SAMPLED_LIFETIME,
}
# group of keys -> statistics of a replay in it; those of the first name are there where all are
STATS = {
    "retention": ("admitted", "refused", "evicted", "age_mean", "age_max"),
    "frames": ("frames_held", "frame_capacity", "frames_per_transition"),
}
TABLE_STATS = ("share_drawn", "fill", "size", "evicted", "age_mean", "age_max", "event_share")
_ENTRIES_PER_CALL = 10_000  # whose ages are looked at, on average
AGENT_STEPS_ADDED = "agent_steps_added"  # by agent where the others are by module
_Counts = Counter[tuple[str, str]]  # (counter, module or agent) -> amount


class BufferMetrics:
    """Counters under RLlib's usual keys; logging each where it changes would cost more than a draw.

    With one agent a row is a step of the environment. With several, a step of the environment is a row of each agent
    that acted in it: ``num_module_steps_*`` and ``num_agent_steps_*`` count rows, and of ``num_env_steps_*``

    * ``added`` are steps of the environment, however many agents acted in each;
    * ``stored`` are those back to which the rows of one module reach, of the module that reaches furthest: all steps
      added while there is a module that has lost no row, then its share of rows kept, times the steps added;
    * ``evicted`` are the others;
    * ``sampled`` are rows drawn, of all modules together, as RLlib's own buffer for several agents counts them.

    Episodes, gaps and duplicates are then those of the environment, not of each agent.

    Of tables, ``tables/NAME`` has ``share_drawn`` (of all rows drawn so far), ``fill``, ``size``, ``evicted``,
    ``age_mean``, ``age_max`` and ``event_share``; of the tasks of a curriculum, ``tasks/NAME`` has ``probability``,
    ``progress`` (the newest signal, once there is one) and ``num_episodes_lifetime``. With several agents the module's
    name stands before the table's or task's.

    Of replays that keep rows by importance, ``retention`` has ``admitted``, ``refused`` and ``evicted`` since the
    start, and ``age_mean`` and ``age_max`` of the rows stored; where frames are stored once, ``frames`` has
    ``frames_held``, ``frame_capacity`` and ``frames_per_transition``. ``bytes_stored`` are those of all that is kept.
    """

    def __init__(self) -> None:
        self._counts: _Counts = Counter()
        self._environment = FragmentTracker()  # stays empty where there is one agent
        self._logged: _Counts = Counter()  # sums of all modules under the module ""
        self._logger = MetricsLogger(root=False)
        self._calls = 0
        self._stats: dict[str, dict[str, Any]] = {}

    def count(self, counter: str, amount: int, module_id: str = DEFAULT_MODULE_ID) -> None:
        """Adds to a counter of a module."""
        self._counts[counter, module_id] += amount

    def count_fragments(self, episodes: Sequence[Any], stored: Container[str]) -> None:
        """Adds steps of environments of several agents, and those of each agent whose module is ``stored``."""
        for episode in episodes:
            if not isinstance(episode, MultiAgentEpisode):
                continue
            steps = episode.env_steps()
            _, first_new = self._environment.place(episode.id_, episode.env_t_started, steps)
            if first_new == steps:
                continue  # sent twice
            for part in episode.agent_episodes.values():
                if part.module_id in stored:
                    self.count(AGENT_STEPS_ADDED, len(part), str(part.agent_id))

    def total(self, counter: str, module_id: str | None = None) -> int:
        """Returns the sum over the whole run, of a module or of all."""
        return sum(
            amount for (name, module), amount in self._counts.items() if name == counter and module_id in (None, module)
        )

    def reduce(self, modules: Mapping[str, ModuleReplay]) -> dict[str, Any]:
        """Returns the metrics in the form of RLlib's logger, and starts the next interval."""
        log = self._logger.log_value
        stored = self.env_steps_stored(modules)
        for counter, (key, lifetime_key) in _SUMS.items():
            increase = self._increase(counter, "", self._sum(counter, stored))
            log(key, increase, reduce="sum")
            log(lifetime_key, increase, reduce="lifetime_sum")
        for name, module in modules.items():
            for counter, key in _SUMS_BY_MODULE.items():
                log((key, name), self._increase(counter, name, self._counts[counter, name]), reduce="lifetime_sum")
            log((keys.NUM_MODULE_STEPS_STORED, name), len(module), reduce="item")
        for (counter, agent), amount in self._counts.items():
            if counter == AGENT_STEPS_ADDED:
                added = self._increase(counter, agent, amount)
                log((keys.NUM_AGENT_STEPS_ADDED_LIFETIME, agent), added, reduce="lifetime_sum")
        log(keys.NUM_ENV_STEPS_STORED, stored, reduce="item")
        self._log_items(modules)
        return self._logger.reduce()

    def state(self) -> dict[str, Any]:
        """Returns plain values for :meth:`load`."""
        counters = {"counts": self._counts, "logged": self._logged}
        plain = {name: [[*key, amount] for key, amount in counts.items()] for name, counts in counters.items()}
        return {**plain, "environment": self._environment.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state`; values logged before the save are not logged again."""
        self._counts, self._logged = (
            Counter({(counter, module): amount for counter, module, amount in state[name]})
            for name in ("counts", "logged")
        )
        self._environment.load_state(state["environment"])
        self._stats.clear()

    def env_steps_stored(self, modules: Mapping[str, ModuleReplay]) -> int:
        """Returns steps of the environment in the buffer, see the class."""
        if not self._environment.episodes:
            return sum(map(len, modules.values()))
        kept = (len(module) / max(self.total("steps_added", name), 1) for name, module in modules.items())
        return round(self._environment.steps * max(kept, default=0.0))

    def _sum(self, counter: str, env_steps_stored: int) -> int:
        """Returns the sum over the whole run, in steps and episodes of the environment."""
        if self._environment.episodes and counter != "steps_sampled":
            steps = self._environment.steps
            of_environment = {
                "steps_added": steps,
                "steps_evicted": steps - env_steps_stored,
                "episodes_added": self._environment.episodes,
            }
            return of_environment[counter]
        return self.total(counter)

    def _increase(self, counter: str, module_id: str, amount: int) -> int:
        """Returns the increase since the last call with these names; 0 for an estimate that went down."""
        increase = max(amount - self._logged[counter, module_id], 0)
        self._logged[counter, module_id] += increase
        return increase

    def _log_items(self, modules: Mapping[str, ModuleReplay]) -> None:
        """Logs present values: fill, ages and losses."""
        from lightning_replay.parts import declared_sampler

        log = self._logger.log_value
        every = list(modules.values())
        stats = [self._stats_of(name, module) for name, module in modules.items()]
        self._calls += 1
        ages = [(one["drawn_age_mean"], one["drawn_age_max"]) for one in stats if "drawn_age_mean" in one]
        log(keys.ACTUAL_N_STEP, sum(module.draws.mean_n_step for module in every) / max(len(every), 1), reduce="item")
        if ages:
            log("drawn_age_mean", sum(mean for mean, _ in ages) / len(ages), reduce="item")
            log("drawn_age_max", max(longest for _, longest in ages), reduce="item")
        samplers = [module.replay.sampler for module in every if module.replay.is_prioritized]
        exponents = [declared_sampler(sampler).base_sampler.beta for sampler in samplers]
        if exponents:
            log("importance_exponent", sum(exponents) / len(exponents), reduce="item")
        late = sum(one["late_updates_dropped"] for one in stats)
        log("num_late_updates_dropped_lifetime", late, reduce="item")
        fragments = [module.converter.fragments for module in every]
        if self._environment.episodes:
            fragments = [self._environment]
        log("num_fragment_gaps_lifetime", sum(one.gaps for one in fragments), reduce="item")
        log("num_duplicate_env_steps_lifetime", sum(one.duplicates for one in fragments), reduce="item")
        log("bytes_stored", sum(one["nbytes"] for one in stats), reduce="item")
        several = len(modules) > 1 or DEFAULT_MODULE_ID not in modules
        for (name, module), of_module in zip(modules.items(), stats, strict=True):
            prefix = (name,) if several else ()
            self._log_tables(prefix, module, of_module.get("tables", {}))
            for group, names in STATS.items():
                for key in names:
                    if names[0] in of_module:
                        log((group, *prefix, key), of_module[key], reduce="item")

    def _log_tables(self, prefix: tuple[str, ...], module: ModuleReplay, tables: Mapping[str, Any]) -> None:
        log = self._logger.log_value
        for name, stats in tables.items():
            for key in TABLE_STATS:
                if key in stats:
                    log(("tables", *prefix, name, key), stats[key], reduce="item")
        followed = module.intake.task_progress
        if followed is not None:
            for name, probability in followed.replay.probabilities().items():
                log(("tasks", *prefix, name, "probability"), probability, reduce="item")
                log(("tasks", *prefix, name, "num_episodes_lifetime"), followed.episodes[name], reduce="item")
                if name in followed.signals:
                    log(("tasks", *prefix, name, "progress"), followed.signals[name], reduce="item")

    def _stats_of(self, name: str, module: ModuleReplay) -> dict[str, Any]:
        """Returns statistics of a replay; computed at intervals where ages of many entries take longer than a draw."""
        from lightning_replay.writers import RetentionWriter

        tables = module.replay.tables
        entries = 0 if tables is None else int(tables.length.sum())
        if isinstance(module.replay.writer, RetentionWriter):
            entries = max(entries, len(module))
        interval = 1 + entries // _ENTRIES_PER_CALL
        if name not in self._stats or self._calls % interval == 0:
            self._stats[name] = module.replay.stats()
        return self._stats[name]
