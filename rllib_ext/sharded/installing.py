# SPDX-License-Identifier: Apache-2.0
"""A sharded replay connected to the algorithm that draws from it."""

from __future__ import annotations

from typing import Any

import ray

from rllib_ext.episodes.task_assignment import TaskAssignment
from rllib_ext.rllib_compat import complete_results, values
from rllib_ext.sharded.resources import check_trial


def install_shards(algorithm: Any, *, reads_flags: bool, restore: bool, incremental: bool, assign_tasks: bool) -> None:
    """Starts the shards of an algorithm that was just built, and ends them with it.

    ``reads_flags`` is whether its Learners have the connector that fetches rows; other options are those of
    :func:`rllib_ext.configure`.
    """
    from rllib_ext.checkpoint.algorithm import CheckpointedAlgorithm
    from rllib_ext.sharded.checkpoint import ShardedReplayPart

    config, replay = algorithm.config, algorithm.local_replay_buffer
    if not reads_flags:
        raise ValueError(
            "num_shards is given, and the config has Learner connectors of its own, which do not fetch rows from "
            "shards. Leave the connectors out, or num_shards"
        )
    check_trial(config)
    replay.form_returns(config.n_step, config.gamma)
    nodes: list[str] = []
    if replay.shards.options.shard_placement == "pack":
        nodes = list(dict.fromkeys(values(algorithm.learner_group.foreach_learner(_node))))
    replay.start(algorithm, nodes)
    if replay.options.modules_with_retention():
        from rllib_ext.learner.signals import report_signals

        values(algorithm.learner_group.foreach_learner(report_signals))
    if assign_tasks:
        replay.assignment = TaskAssignment(algorithm)
    complete_results(algorithm.metrics, replay)
    CheckpointedAlgorithm(algorithm, ShardedReplayPart(algorithm, restore=restore, incremental=incremental))
    cleanup = algorithm.cleanup

    def cleanup_all() -> None:
        cleanup()
        replay.stop()

    algorithm.cleanup = cleanup_all


def _node(_: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())
