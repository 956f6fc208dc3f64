# SPDX-License-Identifier: Apache-2.0
"""What went in and out of the buffer, counted in plain integers and logged once per training step."""

from __future__ import annotations

from typing import Any

from ray.rllib.core import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.utils import metrics as keys
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

# counter -> (key of the sum since the last call, key of the sum over the whole run)
_SUMS: dict[str, tuple[str, str]] = {
    "steps_added": (keys.NUM_ENV_STEPS_ADDED, keys.NUM_ENV_STEPS_ADDED_LIFETIME),
    "steps_evicted": (keys.NUM_ENV_STEPS_EVICTED, keys.NUM_ENV_STEPS_EVICTED_LIFETIME),
    "steps_sampled": (keys.NUM_ENV_STEPS_SAMPLED, keys.NUM_ENV_STEPS_SAMPLED_LIFETIME),
    "episodes_added": (keys.NUM_EPISODES_ADDED, keys.NUM_EPISODES_ADDED_LIFETIME),
}
# further sums over the whole run, by agent and by module
_SUMS_BY_NAME: dict[str, tuple[tuple[str, str], ...]] = {
    "steps_added": (
        (keys.NUM_AGENT_STEPS_ADDED_LIFETIME, DEFAULT_AGENT_ID),
        (keys.NUM_MODULE_STEPS_ADDED_LIFETIME, DEFAULT_MODULE_ID),
    ),
    "steps_sampled": (
        (keys.NUM_AGENT_STEPS_SAMPLED_LIFETIME, DEFAULT_AGENT_ID),
        (keys.NUM_MODULE_STEPS_SAMPLED_LIFETIME, DEFAULT_MODULE_ID),
    ),
}


class BufferMetrics:
    """Counters under RLlib's usual keys; logging each where it changes would cost more than a draw."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(_SUMS, 0)
        self._logged = dict(self.totals)
        self._logger = MetricsLogger(root=False)

    def count(self, counter: str, amount: int) -> None:
        """Adds to a counter."""
        self.totals[counter] += amount

    def reduce(self, *, stored: int, n_step: float, gaps: int, duplicates: int) -> dict[str, Any]:
        """What RLlib's metrics logger takes, and the start of the next interval."""
        log = self._logger.log_value
        log(keys.NUM_ENV_STEPS_STORED, stored, reduce="item")
        log(keys.ACTUAL_N_STEP, n_step, reduce="item")
        log("num_fragment_gaps_lifetime", gaps, reduce="item")
        log("num_duplicate_env_steps_lifetime", duplicates, reduce="item")
        for counter, (key, lifetime_key) in _SUMS.items():
            amount = self.totals[counter] - self._logged[counter]
            log(key, amount, reduce="sum")
            log(lifetime_key, amount, reduce="lifetime_sum")
            for named_key in _SUMS_BY_NAME.get(counter, ()):
                log(named_key, amount, reduce="lifetime_sum")
        self._logged = dict(self.totals)
        return self._logger.reduce()

    def load(self, totals: dict[str, int]) -> None:
        """Goes on from saved totals; what was logged before the save is not logged again."""
        self.totals, self._logged = dict(totals), dict(totals)
