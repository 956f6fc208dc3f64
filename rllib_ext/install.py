# SPDX-License-Identifier: Apache-2.0
"""What runs once an algorithm is built; light, because the config that names it travels to every EnvRunner."""

from __future__ import annotations

from typing import Any


def install(algorithm: Any, *, restore: bool, incremental: bool, **ignored: Any) -> None:
    """Tells the buffer how many Learners there are, and makes it a part of the algorithm's checkpoints.

    Args:
        algorithm: just built.
        restore: whether a restore of the algorithm restores the buffer.
        incremental: whether saves link what has not changed.
        ignored: what else RLlib passes to ``on_algorithm_init`` (a metrics logger).
    """
    from rllib_ext.checkpoint import CheckpointedReplay

    algorithm.local_replay_buffer.num_learners = algorithm.config.num_learners
    CheckpointedReplay(algorithm, restore=restore, incremental=incremental).install()
