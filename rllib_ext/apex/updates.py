# SPDX-License-Identifier: Apache-2.0
"""One update of an algorithm's Learners from its replay buffer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from ray.rllib.core import ALL_MODULES
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    REPLAY_BUFFER_RESULTS,
    REPLAY_BUFFER_SAMPLE_TIMER,
    REPLAY_BUFFER_UPDATE_PRIOS_TIMER,
    TD_ERROR_KEY,
    TIMERS,
)
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.replay_buffers.utils import update_priorities_in_episode_replay_buffer


def update_learners(algorithm: Any, *, is_stateful: bool) -> set[str]:
    """Draws a batch, updates the Learners and the priorities, as the synchronous step of RLlib's DQN does.

    Args:
        algorithm: a DQN; its results get the metrics.
        is_stateful: whether the module is recurrent and learns from sequences.

    Returns:
        The modules that have learned.
    """
    config, metrics, buffer = algorithm.config, algorithm.metrics, algorithm.local_replay_buffer
    with metrics.log_time((TIMERS, REPLAY_BUFFER_SAMPLE_TIMER)):
        episodes = buffer.sample(
            num_items=config.total_train_batch_size,
            n_step=config.n_step,
            batch_length_T=is_stateful * config.model_config.get("max_seq_len", 0),
            lookback=int(is_stateful),
            min_batch_length_T=config.burn_in_len,
            gamma=config.gamma,
            beta=config.replay_buffer_config.get("beta"),
            sample_episodes=True,
        )
        metrics.aggregate([buffer.get_metrics()], key=REPLAY_BUFFER_RESULTS)
    with metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
        clocks = (NUM_ENV_STEPS_SAMPLED_LIFETIME, NUM_AGENT_STEPS_SAMPLED_LIFETIME)
        timesteps = {one: metrics.peek((ENV_RUNNER_RESULTS, one), default=0) for one in clocks}
        results = algorithm.learner_group.update(episodes=episodes, timesteps=timesteps)
        learned = {name for result in results for name in result} - {ALL_MODULES}
        td_errors = _pop_td_errors(results)
        metrics.aggregate(results, key=LEARNER_RESULTS)
    with metrics.log_time((TIMERS, REPLAY_BUFFER_UPDATE_PRIOS_TIMER)):
        update_priorities_in_episode_replay_buffer(replay_buffer=buffer, td_errors=td_errors)
    return learned


def _pop_td_errors(results: list[Any]) -> dict[str, Any]:
    """Takes the TD errors, by module and in the order of the Learners, out of results, which are logged."""
    found: dict[str, list[Any]] = defaultdict(list)
    for result in results:
        for name, one in result.items():
            if TD_ERROR_KEY in one:
                found[name].extend(convert_to_numpy(one.pop(TD_ERROR_KEY).peek()))
    return {name: {TD_ERROR_KEY: np.concatenate(parts, axis=0)} for name, parts in found.items()}
