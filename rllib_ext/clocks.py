# SPDX-License-Identifier: Apache-2.0
"""The two clocks of every result: environment steps, over which everything is reported, and updates."""

from __future__ import annotations

from typing import Any

from ray.rllib.core import ALL_MODULES
from ray.rllib.utils.metrics import LEARNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune.result import TIMESTEPS_TOTAL

NUM_UPDATES_LIFETIME = "num_updates_lifetime"


def count_updates(algorithm: Any) -> None:
    """Has the Learners of an algorithm log their gradient steps, of which RLlib keeps no count.

    Raises:
        RuntimeError: a Learner is lost.
    """
    for result in algorithm.learner_group.foreach_learner(_log_gradient_steps):
        if not result.ok:
            raise RuntimeError("a Learner was lost before training began") from result.get()


def add_clocks(*, algorithm: Any, result: dict[str, Any], **ignored: Any) -> None:
    """Adds ``num_updates_lifetime`` and ``timesteps_total`` to a result; the callback ``on_train_result``.

    ``num_updates_lifetime`` counts gradient steps over the whole run, those before a restore included.
    ``timesteps_total`` are the environment steps of ``num_env_steps_sampled_lifetime``, under the name that Tune's
    loggers take for their horizontal axis; without it they count calls of ``train()``.
    """
    key = (LEARNER_RESULTS, ALL_MODULES, NUM_UPDATES_LIFETIME)
    result[NUM_UPDATES_LIFETIME] = int(algorithm.metrics.peek(key, default=0))
    result[TIMESTEPS_TOTAL] = int(result[NUM_ENV_STEPS_SAMPLED_LIFETIME])


def _log_gradient_steps(learner: Any) -> None:
    if learner._learner_index:
        return  # Learners step together, and RLlib adds up what they log
    apply_gradients = learner.apply_gradients

    def counted(gradients_dict: Any) -> None:
        apply_gradients(gradients_dict)
        learner.metrics.log_value((ALL_MODULES, NUM_UPDATES_LIFETIME), 1, reduce="lifetime_sum")

    learner.apply_gradients = counted
