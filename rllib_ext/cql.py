# SPDX-License-Identifier: Apache-2.0
"""RLlib's conservative Q-learning from the rows of a replay buffer, in place of files of a data set."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.cql import CQL
from ray.rllib.utils.metrics import (
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    REPLAY_BUFFER_RESULTS,
    REPLAY_BUFFER_SAMPLE_TIMER,
    TIMERS,
)


class ReplayCQL(CQL):
    """RLlib's ``CQL`` whose batches are drawn from its replay buffer, which :func:`rllib_ext.fill` fills.

    :func:`rllib_ext.configure` sets it. No environment steps are taken but those of evaluation. A training step makes
    ``dataset_num_iters_per_learner`` updates of ``train_batch_size_per_learner`` rows for each Learner.
    """

    def training_step(self) -> None:
        config, buffer, metrics = self.config, self.local_replay_buffer, self.metrics
        if not len(buffer):
            raise RuntimeError("the replay buffer is empty; call rllib_ext.fill(algorithm, replay) before training")
        for _ in range(config.dataset_num_iters_per_learner):
            with metrics.log_time((TIMERS, REPLAY_BUFFER_SAMPLE_TIMER)):
                episodes = buffer.sample(config.total_train_batch_size, gamma=config.gamma)
                metrics.aggregate([buffer.get_metrics()], key=REPLAY_BUFFER_RESULTS)
            with metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
                results = self.learner_group.update(episodes=episodes)
                metrics.aggregate(results, key=LEARNER_RESULTS)


def use_replay(config: AlgorithmConfig) -> None:
    """Lets CQL draw from its replay buffer, and refuses options of others; other algorithms stay as they are."""
    kind: Any = config.algo_class
    if not issubclass(kind, CQL):
        return
    if config.is_offline:
        raise ValueError(
            f"input_ is {config.input_!r}, and the replay buffer is to be learned from: leave .offline_data(...) out "
            "and fill the buffer, rllib_ext.fill(algorithm, replay)"
        )
    if config.n_step != 1:
        raise ValueError(f"n_step is {config.n_step}, and RLlib's CQL learns from single steps alone; leave it out")
    if config.min_sample_timesteps_per_iteration:
        raise ValueError(
            f"min_sample_timesteps_per_iteration is {config.min_sample_timesteps_per_iteration}, and CQL takes no "
            "steps: an iteration would never end. Give min_train_timesteps_per_iteration"
        )
    if kind is not CQL and not issubclass(kind, ReplayCQL):
        raise ValueError(f"{kind.__name__} learns from files of a data set; derive it from rllib_ext.cql.ReplayCQL")
    config.dataset_num_iters_per_learner = config.dataset_num_iters_per_learner or 1
    config.algo_class = ReplayCQL if kind is CQL else kind


def check_draws(buffer: Any) -> None:
    """Refuses a buffer that needs TD errors or weights, which the Learner of CQL neither returns nor multiplies."""
    if any(one.replay.takes_feedback for one in buffer.modules.values()):
        raise ValueError(
            "RLlib's CQL returns no TD errors of single rows and its loss takes no weights, which this replay needs. "
            'Use replay_config("uniform", ...), or another recipe without priorities'
        )
