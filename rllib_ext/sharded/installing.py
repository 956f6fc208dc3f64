# SPDX-License-Identifier: Apache-2.0
"""A sharded replay connected to the algorithm that draws from it."""

from __future__ import annotations

from typing import Any

import ray

from rllib_ext.rllib_compat import values
from rllib_ext.sharded.resources import check_trial


def start_shards(algorithm: Any, reads_flags: bool) -> None:
    """Starts the shards of an algorithm that was just built, and ends them with it.

    ``reads_flags`` is whether its Learners have the connector that fetches rows.
    """
    config, replay = algorithm.config, algorithm.local_replay_buffer
    if not reads_flags:
        raise ValueError(
            "num_shards is given, and the config has Learner connectors of its own, which do not fetch rows from "
            "shards. Leave the connectors out, or num_shards"
        )
    check_trial(config)
    nodes: list[str] = []
    if replay.shards.options.shard_placement == "pack":
        nodes = list(dict.fromkeys(values(algorithm.learner_group.foreach_learner(_node))))
    replay.start(algorithm, nodes)
    cleanup = algorithm.cleanup

    def cleanup_all() -> None:
        cleanup()
        replay.stop()

    algorithm.cleanup = cleanup_all


def _node(_: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())
