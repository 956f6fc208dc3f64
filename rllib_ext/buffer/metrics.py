# SPDX-License-Identifier: Apache-2.0
"""Counters of the buffer in plain integers, logged once per draw or at every tenth."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from ray.rllib.core import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils import metrics as keys
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from lightning_replay.sharded.actors import Counts, counts_of, listed
from rllib_ext.episodes import FragmentTracker

# RLlib's names of counters, behind num_, num_module_, and num_agent_. "per_sample" counts each once in a draw.
_COUNTERS = (
    *("steps_added", "steps_evicted", "steps_sampled", "steps_per_sample"),
    *("episodes_added", "episodes_evicted", "episodes_per_sample"),
)
# group of keys -> its statistics of a replay, which has the first of them if it has any
STATS: dict[str, tuple[str, ...]] = {
    "retention": (
        *("admitted", "refused", "evicted", "age_mean", "age_max"),
        *("age_over_capacity", "terminal_share", "terminal_over_newest", "td_error_over_newest"),
    ),
    "priorities": ("effective_sample_size",),
    "frames": ("frames_held", "frame_capacity", "frames_per_transition"),
}
TABLE_STATS: tuple[str, ...] = ("share_drawn", "fill", "size", "evicted", "age_mean", "age_max", "event_share")
# Entries whose ages a call reads on average.
_ENTRIES_PER_CALL = 10_000
# Priorities that a call adds up on average.
_PRIORITIES_PER_CALL = 100_000
_EPISODES_PER_CALL = 1_000  # rows whose episodes are counted, on average
FRAGMENT_GAPS = "fragment_gaps"
DUPLICATE_STEPS = "duplicate_steps"
# This counter is kept by agent, the others by module.
AGENT_STEPS_ADDED = "agent_steps_added"
# The ModuleReplay of each module, by name.
Modules = Mapping[str, Any]


class Drawn(NamedTuple):
    """Steps of a draw, and how many of them and of their episodes are distinct."""

    steps_sampled: int
    steps_per_sample: int
    episodes_per_sample: int


class BufferMetrics:
    """Counters under RLlib's usual keys, which ``docs/rllib-metrics.md`` describes.

    Logging each counter at every change would cost more than a draw. With several agents, episodes, gaps, and
    duplicates are counted for the environment.
    """

    def __init__(self) -> None:
        # Counts by counter, and by module or agent. The module "" has the sums of all modules.
        self.counts: Counts = Counter()
        self._environment = FragmentTracker()  # stays empty where there is one agent
        self._log = CounterLog()
        self._read: dict[tuple[str, str], tuple[int, Any]] = {}  # figures, and the call in which they were computed

    def count_fragment(self, episode: MultiAgentEpisode, stored: Container[str]) -> None:
        """Adds steps of an environment of several agents, and steps of each agent whose module is ``stored``."""
        steps = episode.env_steps()
        _, first_new = self._environment.place(episode.id_, episode.env_t_started, steps)
        if first_new < steps:  # otherwise it was sent twice
            for part in episode.agent_episodes.values():
                if part.module_id in stored:
                    self.counts[AGENT_STEPS_ADDED, str(part.agent_id)] += len(part)

    def count_draw(self, name: str, drawn: Drawn) -> None:
        """Counts a draw of a module."""
        for counter, amount in drawn._asdict().items():
            self.counts[counter, name] += amount

    def total(self, counter: str, module_id: str | None = None) -> int:
        """Returns a counter of one module, or of all modules."""
        return sum(
            amount for (name, module), amount in self.counts.items() if name == counter and module_id in (None, module)
        )

    def report(self, modules: Modules, draws_per_report: int) -> dict[str, Any]:
        """Returns the metrics if they are due, and nothing otherwise. Call it once per draw."""
        self._log.calls += 1
        return self.remaining(modules, draws_per_report)

    def remaining(self, modules: Modules, draws: int = 1) -> dict[str, Any]:
        """Returns the metrics that are due after ``draws`` further calls, or an empty dictionary."""
        if not self._log.is_due(draws):
            return {}
        rows = {name: len(module) for name, module in modules.items()}
        self._log.items({name: self.stats(name, module) for name, module in modules.items()})
        self._log.totals(self.totals(modules), self.env_steps_stored(modules), rows)
        return self._log.logger.reduce()

    def totals(self, modules: Modules) -> Counts:
        """Returns the sums over the whole run by module and agent. Sums of environments are under the module ``""``."""
        stored = self.env_steps_stored(modules)
        environment = [self._environment] if self._environment.episodes else None
        fragments = environment or [module.converter.fragments for module in modules.values()]
        found = {
            (FRAGMENT_GAPS, ""): sum(one.gaps for one in fragments),
            (DUPLICATE_STEPS, ""): sum(one.duplicates for one in fragments),
        }
        return Counter({**self.counts, **{(counter, ""): self._sum(counter, stored) for counter in _COUNTERS}, **found})

    def state(self) -> dict[str, Any]:
        """Returns the counters as a save holds them."""
        return {
            "counts": listed(self.counts),
            "logged": listed(self._log.logged),
            "environment": self._environment.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores the counters. Increases that were logged before the save are not logged again."""
        # Increases logged before the save are not logged again.
        self.counts, self._log.logged = counts_of(state["counts"]), counts_of(state["logged"])
        self._environment.load_state(state["environment"])
        self._read.clear()

    def env_steps_stored(self, modules: Modules) -> int:
        """Returns the stored environment steps. With several agents it is an estimate by the module that kept most."""
        # Of several agents the steps added, times the largest share of its rows that a module has kept.
        if not self._environment.episodes:
            return sum(map(len, modules.values()))
        kept = (len(module) / max(self.total("steps_added", name), 1) for name, module in modules.items())
        return round(self._environment.steps * max(kept, default=0.0))

    def _sum(self, counter: str, env_steps_stored: int) -> int:
        environment = self._environment
        # With several agents, these are the episodes of one module.
        if counter == "episodes_evicted":
            return max((amount for (name, _), amount in self.counts.items() if name == counter), default=0)
        if environment.episodes and counter == "episodes_added":
            return environment.episodes
        if environment.episodes and counter in ("steps_added", "steps_evicted"):
            return environment.steps - (env_steps_stored if counter == "steps_evicted" else 0)
        return self.total(counter)

    def stats_due(self, modules: Modules, draws_per_report: int) -> dict[str, dict[str, Any]]:
        """Returns :meth:`stats` of each module when they are due, first at once. Call it once per draw."""
        self._log.calls += 1
        is_due = self._log.is_due(draws_per_report if self._log.reported else 1)
        return {name: self.stats(name, module) for name, module in modules.items()} if is_due else {}

    def stats(self, name: str, module: Any) -> dict[str, Any]:
        """Returns the statistics of one module."""
        from lightning_replay.parts import unwrap

        sampler = unwrap(module.replay.sampler)
        stored, evicted = self._figures((name, "episodes"), len(module) // _EPISODES_PER_CALL, module.num_episodes)
        self.counts["episodes_evicted", name] = evicted
        stats = {
            **self._stats_of(name, module),
            "rows": len(module),
            keys.ACTUAL_N_STEP: module.mean_n_step,
            "step_utilization": module.drawn.steps_per_sample / max(module.drawn.steps_sampled, 1),
            "episodes": stored,
        }
        if module.replay.is_prioritized:
            stats["importance_exponent"] = sampler.beta
        if module.replay.tables is not None:
            stats["rows_drawn"] = int(sum(sampler.rows_drawn))
        progress = module.task_progress
        if progress is not None:
            stats["tasks"] = {
                task: {"probability": probability, "num_episodes_lifetime": progress.episodes[task]}
                | ({"progress": progress.signals[task]} if task in progress.signals else {})
                for task, probability in progress.replay.probabilities().items()
            }
        return stats

    def _stats_of(self, name: str, module: Any) -> Any:
        # At intervals if reading many rows takes longer than a draw.
        from lightning_replay.writers import RetentionWriter

        tables = module.replay.tables
        entries = 0 if tables is None else int(tables.length.sum())
        if isinstance(module.replay.writer, RetentionWriter):
            entries = max(entries, len(module))
        calls_between = entries // _ENTRIES_PER_CALL
        if module.replay.is_prioritized:
            calls_between = max(calls_between, len(module) // _PRIORITIES_PER_CALL)
        return self._figures((name, "stats"), calls_between, module.replay.stats)

    def _figures(self, key: tuple[str, str], calls_between: int, compute: Callable[[], Any]) -> Any:
        if key not in self._read or self._log.calls - self._read[key][0] > calls_between:
            self._read[key] = self._log.calls, compute()
        return self._read[key][1]


class CounterLog:
    """Logs how far counters have increased since they were ``logged``, under RLlib's keys."""

    def __init__(self) -> None:
        self.logger: MetricsLogger = MetricsLogger(root=False)
        self.logged: Counts = Counter()
        self.calls: int = 0
        self.reported: int = 0

    def is_due(self, draws: int) -> bool:
        """Returns whether there were so many calls since it was due."""
        if self.calls - self.reported < draws:
            return False
        self.reported = self.calls
        return True

    def totals(self, counts: Counts, env_steps_stored: int, rows: Mapping[str, int]) -> None:
        """Logs sums over the whole run, and what is stored: steps of the environment, and rows by module."""
        log = self.logger.log_value
        for counter in (*_COUNTERS, "resamples"):  # none is drawn again, as returns at an end are shorter
            whole = f"num_env_{counter}" if counter.startswith("steps") else f"num_{counter}"
            self._log_sum(whole, counter, "", counts[counter, ""])
            for name in rows:
                self._log_sum(f"num_module_{counter}", counter, name, counts[counter, name])
            if list(rows) == [DEFAULT_MODULE_ID]:  # There is one agent, or the rows do not name their agent.
                amount = counts[counter, DEFAULT_MODULE_ID]
                self._log_sum(f"num_agent_{counter}", f"agent_{counter}", DEFAULT_AGENT_ID, amount)
        for (counter, agent), amount in counts.items():
            if counter == AGENT_STEPS_ADDED and agent != DEFAULT_AGENT_ID:
                self._log_sum(f"num_{counter}", counter, agent, amount)
        for name, count in rows.items():
            log((keys.NUM_MODULE_STEPS_STORED, name), count, reduce="item")
        log(keys.NUM_ENV_STEPS_STORED, env_steps_stored, reduce="item")
        log("num_fragment_gaps_lifetime", counts[FRAGMENT_GAPS, ""], reduce="item")
        log("num_duplicate_env_steps_lifetime", counts[DUPLICATE_STEPS, ""], reduce="item")

    def items(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Logs the statistics of each module, and of all modules together."""
        log = functools.partial(self.logger.log_value, reduce="item")
        every = list(stats.values())
        several = len(stats) > 1 or DEFAULT_MODULE_ID not in stats
        for key, whole in ((keys.ACTUAL_N_STEP, keys.ACTUAL_N_STEP), ("step_utilization", keys.ENV_STEP_UTILIZATION)):
            log(whole, sum(one[key] for one in every) / max(len(every), 1))
            owners = {f"module_{key}": stats} | ({} if several else {f"agent_{key}": {DEFAULT_AGENT_ID: every[0]}})
            for path, by_owner in owners.items():
                for owner, one in by_owner.items():
                    log((path, owner), one[key])
        log(keys.NUM_EPISODES_STORED, max((one["episodes"] for one in every), default=0))
        ages = [(one["drawn_age_mean"], one["drawn_age_max"]) for one in every if "drawn_age_mean" in one]
        if ages:
            log("drawn_age_mean", sum(mean for mean, _ in ages) / len(ages))
            log("drawn_age_max", max(longest for _, longest in ages))
        exponents = [one["importance_exponent"] for one in every if "importance_exponent" in one]
        if exponents:
            log("importance_exponent", sum(exponents) / len(exponents))
        log("num_stale_updates_dropped_lifetime", sum(one["stale_updates_dropped"] for one in every))
        log("bytes_stored", sum(one["nbytes"] for one in every))
        for name, of_module in stats.items():
            prefix = (name,) if several else ()
            tables, tasks = (of_module.get(group, {}).items() for group in ("tables", "tasks"))
            found = [
                *((("tables", *prefix, table), TABLE_STATS, given) for table, given in tables),
                *(((group, *prefix), names, of_module) for group, names in STATS.items() if names[0] in of_module),
                *((("tasks", *prefix, task), tuple(given), given) for task, given in tasks),
            ]
            for group, names, given in found:
                for key in names:
                    if key in given:
                        log((*group, key), given[key])

    def _log_sum(self, key: str, counter: str, owner: str, amount: int) -> None:
        increase = self._increase(counter, owner, amount)
        path = (owner,) if key.startswith(("num_module_", "num_agent_")) else ()
        self.logger.log_value((key, *path), increase, reduce="sum")
        self.logger.log_value((f"{key}_lifetime", *path), increase, reduce="lifetime_sum")

    def _increase(self, counter: str, module_id: str, amount: int) -> int:
        increase = max(amount - self.logged[counter, module_id], 0)
        self.logged[counter, module_id] += increase  # nothing for an estimate that went down
        return increase
