# SPDX-License-Identifier: Apache-2.0
"""The callbacks of an algorithm; light, because the config that names them travels to every EnvRunner."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from rllib_ext.clocks import add_clocks, count_updates
from rllib_ext.levels.playing import follow

_LEARNER_LAG = 16  # updates by which one Learner may be behind another, with a margin
_LEAST_EPISODES = 1024  # of one environment that may wait for their scores


def install(
    algorithm: Any,
    *,
    packed: bytes | None,
    flush: bool,
    held_out: Sequence[int] | None,
    **ignored: Any,
) -> None:
    """Starts the level buffer, and has EnvRunners and Learners use it; the callback ``on_algorithm_init``.

    Args:
        algorithm: just built.
        packed: the level buffer, as cloudpickle has it; ``None`` where the config's setting ``levels`` has its
            arguments, which held search spaces of Tune.
        flush: whether unfinished episodes are scored after every update.
        held_out: ids that evaluation plays, in a trial of Tune; ``None`` where the values were checked before.
        ignored: what else RLlib passes.

    Raises:
        ValueError, TypeError: values of a trial that :func:`rllib_ext.configure_levels` would have refused.
    """
    from ray import cloudpickle

    from rllib_ext.episodes.task_assignment import num_actors
    from rllib_ext.levels import scoring
    from rllib_ext.levels.checkpoint import CheckpointedLevels
    from rllib_ext.levels.config import checked_levels
    from rllib_ext.levels.evaluation import GeneralizationGap
    from rllib_ext.levels.remote import RemoteLevels
    from rllib_ext.levels.scored_only import ScoredOnly

    config = algorithm.config
    source = config.levels if packed is None else cloudpickle.loads(packed)
    if held_out is not None:
        source = checked_levels(source, config, held_out, flush=flush, check_environments=False)
    built = cloudpickle.dumps(source)
    environments = num_actors(config)
    levels = RemoteLevels(
        built,
        GeneralizationGap(config.seed),
        environments=environments,
        patience=_LEARNER_LAG * max(config.num_learners, 1),
        most=max(_LEAST_EPISODES, 4 * config.total_train_batch_size // environments),  # each may have a single step
        flush=flush,
    )
    levels.check()  # an error of its start is raised here
    algorithm.levels = levels
    algorithm.env_runner_group.foreach_env_runner(functools.partial(follow, server=levels.actor))
    reports = functools.partial(scoring.follow, server=levels.actor)
    for result in algorithm.learner_group.foreach_learner(reports):
        if not result.ok:
            raise result.get()
    if source.plays_unlearned:
        ScoredOnly(algorithm.learner_group, levels.actor).install()
    count_updates(algorithm)
    CheckpointedLevels(algorithm, levels, built).install()
    stop = algorithm.cleanup

    def stop_all() -> None:
        stop()
        levels.stop()

    algorithm.cleanup = stop_all


def tell_recreated(*, algorithm: Any, env_runner_indices: Sequence[int], is_evaluation: bool, **ignored: Any) -> None:
    """Gives EnvRunners that came back the level buffer; the callback ``on_env_runners_recreated``."""
    if not is_evaluation:
        # Not waited for: calls of an actor keep their order, so that it has the buffer before it samples again.
        algorithm.env_runner_group.foreach_env_runner(
            functools.partial(follow, server=algorithm.levels.actor),
            remote_worker_ids=list(env_runner_indices),
            local_env_runner=False,
            timeout_seconds=0.0,
        )


def add_results(*, algorithm: Any, result: dict[str, Any], **ignored: Any) -> None:
    """Adds figures of the levels to a result, under ``levels``, and the clocks; the callback ``on_train_result``.

    Raises:
        RuntimeError: levels could not be chosen.
    """
    runners = set(range(1, algorithm.config.num_env_runners + 1))
    lost = runners - set(algorithm.env_runner_group.healthy_worker_ids())
    result["levels"] = algorithm.levels.report(sorted(lost))
    add_clocks(algorithm=algorithm, result=result)
