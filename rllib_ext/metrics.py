# SPDX-License-Identifier: Apache-2.0
"""What went in and out of the buffer, counted in plain integers and logged once per draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils import metrics as keys
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

if TYPE_CHECKING:
    from rllib_ext.module_replay import ModuleReplay

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
AGENT_STEPS_ADDED = "agent_steps_added"  # by agent where the others are by module
_Counts = Counter[tuple[str, str]]  # (counter, module or agent) -> amount


class BufferMetrics:
    """Counters under RLlib's usual keys; logging each where it changes would cost more than a draw."""

    def __init__(self) -> None:
        self._counts: _Counts = Counter()
        self._env_steps = 0
        self._logged: _Counts = Counter()
        self._logger = MetricsLogger(root=False)

    def count(self, counter: str, amount: int, module_id: str = DEFAULT_MODULE_ID) -> None:
        """Adds to a counter of a module."""
        self._counts[counter, module_id] += amount

    def count_env_steps(self, amount: int) -> None:
        """Adds steps of an environment of several agents, each of which may be several rows or none."""
        self._env_steps += amount

    def total(self, counter: str, module_id: str | None = None) -> int:
        """The sum over the whole run, of a module or of all."""
        return sum(
            amount for (name, module), amount in self._counts.items() if name == counter and module_id in (None, module)
        )

    def reduce(self, modules: Mapping[str, ModuleReplay]) -> dict[str, Any]:
        """What RLlib's metrics logger takes, and the start of the next interval."""
        log = self._logger.log_value
        for counter, (key, lifetime_key) in _SUMS.items():
            now, before = self._sum(self._counts, counter), self._sum(self._logged, counter)
            log(key, now - before, reduce="sum")
            log(lifetime_key, now - before, reduce="lifetime_sum")
        for name, module in modules.items():
            for counter, key in _SUMS_BY_MODULE.items():
                amount = self._counts[counter, name] - self._logged[counter, name]
                log((key, name), amount, reduce="lifetime_sum")
            log((keys.NUM_MODULE_STEPS_STORED, name), len(module), reduce="item")
        for (counter, agent), amount in self._counts.items():
            if counter == AGENT_STEPS_ADDED:
                added = amount - self._logged[counter, agent]
                log((keys.NUM_AGENT_STEPS_ADDED_LIFETIME, agent), added, reduce="lifetime_sum")
        self._log_items(modules)
        self._logged = self._counts.copy()
        self._logged["env_steps", ""] = self._env_steps
        return self._logger.reduce()

    def state(self) -> dict[str, Any]:
        """Plain values from which :meth:`load` restores the counters."""
        counts = [[counter, module, amount] for (counter, module), amount in self._counts.items()]
        return {"counts": counts, "env_steps": self._env_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from saved counters; what was logged before the save is not logged again."""
        self._counts = Counter({(counter, module): amount for counter, module, amount in state["counts"]})
        self._env_steps = state["env_steps"]
        self._logged = self._counts.copy()
        self._logged["env_steps", ""] = self._env_steps

    def _sum(self, counts: _Counts, counter: str) -> int:
        if counter == "steps_added" and self._env_steps:
            return self._env_steps if counts is self._counts else counts["env_steps", ""]
        return sum(amount for (name, _), amount in counts.items() if name == counter)

    def _log_items(self, modules: Mapping[str, ModuleReplay]) -> None:
        """Numbers that hold now: fill, ages, and what was lost on the way."""
        log = self._logger.log_value
        every = list(modules.values())
        stats = [module.replay.stats() for module in every]
        ages = [(one["drawn_age_mean"], one["drawn_age_max"]) for one in stats if "drawn_age_mean" in one]
        log(keys.NUM_ENV_STEPS_STORED, sum(map(len, every)), reduce="item")
        log(keys.ACTUAL_N_STEP, sum(module.mean_n_step for module in every) / len(every), reduce="item")
        if ages:
            log("drawn_age_mean", sum(mean for mean, _ in ages) / len(ages), reduce="item")
            log("drawn_age_max", max(longest for _, longest in ages), reduce="item")
        late = sum(one["late_updates_dropped"] for one in stats)
        log("num_late_updates_dropped_lifetime", late, reduce="item")
        fragments = [module.converter.fragments for module in every]
        log("num_fragment_gaps_lifetime", sum(one.gaps for one in fragments), reduce="item")
        log("num_duplicate_env_steps_lifetime", sum(one.duplicates for one in fragments), reduce="item")
