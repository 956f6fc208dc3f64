# SPDX-License-Identifier: Apache-2.0
"""The callback after an algorithm is built; light, because the config that names it travels to every EnvRunner."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def install(algorithm: Any, *, restore: bool, incremental: bool, assign_tasks: bool = False, **ignored: Any) -> None:
    """Fits the buffer to the algorithm's Learners and returns, and makes it a part of the algorithm's checkpoints.

    Where rows are kept by importance, DQN's Learners report surprise and action values, and the surprise of new
    rows.

    Args:
        algorithm: just built.
        restore: whether a restore of the algorithm restores the buffer.
        incremental: whether saves link what has not changed.
        assign_tasks: whether the environments get the tasks of the buffer's curriculum.
        ignored: what else RLlib passes to ``on_algorithm_init`` (a metrics logger).

    Raises:
        ValueError: a layout was given that the Learners' connectors do not read, environments without tasks,
            ``n_step`` an interval where rows are kept by importance, or values of a trial of Tune that
            :func:`rllib_ext.configure` would have refused.
    """
    from rllib_ext.checkpoint import CheckpointedReplay
    from rllib_ext.checks import check_buffer, check_capacity, check_room_for_episodes
    from rllib_ext.clocks import count_updates

    # Values that were search spaces when configure() checked the config.
    for check in (check_buffer, check_room_for_episodes, check_capacity):
        check(algorithm.config)
    buffer = algorithm.local_replay_buffer
    buffer.num_learners = algorithm.config.num_learners
    if not buffer.layout_was_given:
        buffer.use_layout("flagged" if _reads_flags(algorithm.config) else _layout_of_own_connectors())
    elif buffer.options.layout == "flagged" and not _reads_flags(algorithm.config):
        raise ValueError(
            'layout is "flagged", and the config has Learner connectors of its own, which do not read such batches. '
            'Leave the layout out, or give layout="blocks" or "rows"'
        )
    buffer.form_returns(algorithm.config.n_step, algorithm.config.gamma)
    if buffer.keeps_by_importance:
        from rllib_ext.learner.signals import NewcomersSurprise, report_from_all

        if report_from_all(algorithm.learner_group):
            buffer.measure_newcomers(NewcomersSurprise(algorithm.learner_group))
    count_updates(algorithm)
    if assign_tasks:
        from rllib_ext.episodes.task_assignment import TaskAssignment

        buffer.assignment = TaskAssignment(algorithm)
    CheckpointedReplay(algorithm, restore=restore, incremental=incremental).install()


def _reads_flags(config: Any) -> bool:
    """Returns whether the Learners have the connector piece that reads a batch in one block."""
    from rllib_ext.learner.done_flags_connector import flags_connector

    return config._learner_connector is flags_connector and config.add_default_connectors_to_learner_pipeline


def _layout_of_own_connectors() -> str:
    logger.warning(
        "the config has Learner connectors of its own, which may need real episodes: each row of a batch travels as an "
        'episode, which is about ten times slower. If they only read columns, replay_config(layout="blocks") keeps '
        "blocks."
    )
    return "rows"
