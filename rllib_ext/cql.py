# SPDX-License-Identifier: Apache-2.0
"""RLlib's conservative Q-learning from the rows of a replay buffer, in place of files of a data set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.cql import CQL
from ray.rllib.core import ALL_MODULES
from ray.rllib.utils.metrics import (
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_TRAINED_LIFETIME,
    REPLAY_BUFFER_RESULTS,
    REPLAY_BUFFER_SAMPLE_TIMER,
    TIMERS,
)

from rllib_ext.sharded.routing import num_shards_in

if TYPE_CHECKING:
    from lightning_replay.replay import Replay


class ReplayCQL(CQL):
    """RLlib's ``CQL`` as :func:`rllib_ext.configure` sets it, on the rows that :func:`rllib_ext.fill` stores.

    A training step makes ``dataset_num_iters_per_learner`` updates of ``train_batch_size_per_learner`` rows for each
    Learner, and takes no steps of the environment.
    """

    def training_step(self) -> None:
        """Draws a batch from the replay and updates on it. Raises ``RuntimeError`` for an empty replay."""
        config = self.config
        buffer = self.local_replay_buffer
        metrics = self.metrics
        if not len(buffer):
            raise RuntimeError("the replay buffer is empty; call rllib_ext.fill(algorithm, replay) before training")
        for _ in range(config.dataset_num_iters_per_learner):
            with metrics.log_time((TIMERS, REPLAY_BUFFER_SAMPLE_TIMER)):
                episodes = buffer.sample(config.total_train_batch_size, gamma=config.gamma)
                metrics.aggregate([buffer.get_metrics()], key=REPLAY_BUFFER_RESULTS)
            with metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
                # Schedules, and the target network's updates, go by steps sampled: here by rows learned from.
                learned = metrics.peek((LEARNER_RESULTS, ALL_MODULES, NUM_ENV_STEPS_TRAINED_LIFETIME), default=0)
                timesteps = {NUM_ENV_STEPS_SAMPLED_LIFETIME: learned}
                results = self.learner_group.update(episodes=episodes, timesteps=timesteps)
                metrics.aggregate(results, key=LEARNER_RESULTS)


def check_cql(config: AlgorithmConfig, kind: type, replays: Iterable[Replay]) -> None:
    """Refuses options and replays, one of each module, from which CQL of the class ``kind`` cannot learn."""
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
    if num_shards_in(config.replay_buffer_config):
        raise ValueError("CQL learns from the rows of rllib_ext.fill, which fills no shards. Leave num_shards out")
    if any(replay.takes_feedback for replay in replays):
        raise ValueError(
            "RLlib's CQL returns no TD errors of single rows and its loss takes no weights, which this replay needs. "
            'Use replay_config("uniform", ...), or another recipe without priorities'
        )
