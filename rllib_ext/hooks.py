# SPDX-License-Identifier: Apache-2.0
"""The callbacks that :func:`rllib_ext.configure` adds, and the sharded replay that they connect."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import ALL_MODULES
from ray.rllib.utils.metrics import LEARNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune.result import TIMESTEPS_TOTAL

from rllib_ext.rllib_compat import (
    Hook,
    callbacks_on,
    complete_results,
    is_first_learner,
    learner_connector_of,
    local_replay_buffer,
    num_actors,
    values,
)
from rllib_ext.sharded.routing import check_trial

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm import Algorithm
    from ray.rllib.core.learner.learner import Learner

logger: logging.Logger = logging.getLogger(__name__)

EVENTS = (
    *("on_algorithm_init", "on_environment_created", "on_episode_created", "on_episode_end", "on_train_result"),
    *("on_env_runners_recreated", "on_evaluate_start", "on_evaluate_end", "on_sample_end"),
)
NUM_UPDATES_LIFETIME = "num_updates_lifetime"
_LEARNER_LAG = 16  # updates by which one Learner may be behind another, with a margin
# Episodes of one environment that may wait for their scores.
_LEAST_EPISODES = 1024


def set_hooks(config: AlgorithmConfig, hooks: Mapping[str, Hook]) -> None:
    """Replaces the callbacks of an earlier call. The user's callbacks stay, and run first."""
    for event in EVENTS:
        present = callbacks_on(config, event)
        kept = [one for one in present if not isinstance(one, Hook)]
        if event in hooks or kept != present:
            config.callbacks(**{event: [*kept, *([hooks[event]] if event in hooks else [])]})


def install_replay(
    algorithm: Algorithm, *, restore: bool, incremental: bool, assign_tasks: bool = False, **ignored: Any
) -> None:
    """Connects the replay buffer to the algorithm. The callback ``on_algorithm_init``."""
    from rllib_ext.checkpoints import CheckpointedAlgorithm, ReplayPart
    from rllib_ext.checks import check_buffer, check_recurrent
    from rllib_ext.learner.remote_blocks import flags_connector
    from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
    from rllib_ext.sharded.checkpoint import ShardedReplayPart

    config = algorithm.config
    buffer = algorithm.local_replay_buffer
    values(algorithm.learner_group.foreach_learner(_log_gradient_steps))
    check_buffer(config)  # again: values may have been search spaces when configure() checked them
    if any(values(algorithm.learner_group.foreach_learner(_stacks_frames))):
        raise ValueError(
            "the config has the connector FrameStackingLearner, which stacks consecutive steps of an episode, and the "
            "rows of a batch are single steps. Leave it and FrameStackingEnvToModule out, give the algorithm stacked "
            "observations, as gymnasium.wrappers.FrameStackObservation(env, 4) makes them of uint8 images, and "
            "replay_config(frame_stack=4) stores each frame once"
        )
    with_state, *_ = values(algorithm.learner_group.foreach_learner(_modules_with_state))
    if with_state:
        check_recurrent(config, with_state)
    buffer.num_learners = config.num_learners
    reads_flags = learner_connector_of(config) is flags_connector and config.add_default_connectors_to_learner_pipeline
    is_sharded = isinstance(buffer, ShardedEpisodeReplayBuffer)
    buffer.form_returns(config.n_step, config.gamma)
    if is_sharded:
        start_shards(algorithm, reads_flags)
    elif not buffer.layout_was_given:
        buffer.options.layout = "flagged" if reads_flags else "rows"
        if not reads_flags:
            logger.warning(
                "the config has Learner connectors of its own, which may need real episodes: each row of a batch "
                "travels as an episode, which is about ten times slower. If they only read columns, "
                'replay_config(layout="blocks") keeps blocks.'
            )
    elif buffer.options.layout == "flagged" and not reads_flags:
        raise ValueError(
            'layout is "flagged", and the config has Learner connectors of its own, which do not read such batches. '
            'Leave the layout out, or give layout="blocks" or "rows"'
        )
    if buffer.options.modules_with_retention():
        from rllib_ext.learner.signals import report_signals, surprise_of_candidates

        if all(values(algorithm.learner_group.foreach_learner(report_signals))) and not is_sharded:
            buffer.set_initial_surprise(functools.partial(surprise_of_candidates, algorithm.learner_group))
    if assign_tasks:
        from rllib_ext.tasks import TaskAssignment

        buffer.assignment = TaskAssignment(algorithm)
    complete_results(algorithm.metrics, buffer)
    part = ShardedReplayPart if is_sharded else ReplayPart
    CheckpointedAlgorithm(algorithm, part(algorithm, restore=restore, incremental=incremental))


def _stacks_frames(learner: Learner) -> bool:
    from ray.rllib.connectors.common.frame_stacking import FrameStacking

    return any(isinstance(piece, FrameStacking) for piece in learner_connector_of(learner).connectors)


def _modules_with_state(learner: Learner) -> list[str]:
    from ray.rllib.algorithms.sac.default_sac_rl_module import DefaultSACRLModule
    from ray.rllib.algorithms.tqc.default_tqc_rl_module import DefaultTQCRLModule

    def has_state(module: Any) -> bool:
        """Returns whether a module is recurrent, also if it reports no state."""
        # These report no state, even with an LSTM in their networks.
        is_other = isinstance(module, DefaultSACRLModule | DefaultTQCRLModule)
        return bool(module.is_stateful() or (is_other and module.model_config.get("use_lstm")))

    return [name for name, module in learner.module.items() if has_state(module.unwrapped())]


def install_levels(
    algorithm: Algorithm, *, packed: bytes | None, flush: bool, held_out: Sequence[int] | None, **ignored: Any
) -> None:
    """Connects the level buffer, of the config or ``packed``, to the algorithm. The callback ``on_algorithm_init``."""
    from ray import cloudpickle

    from rllib_ext.checkpoints import CheckpointedAlgorithm
    from rllib_ext.levels.checks import checked_levels
    from rllib_ext.levels.level_assignment import attach_player
    from rllib_ext.levels.scoring import add_scoring, train_without_scored
    from rllib_ext.levels.server import LEVELS, RemoteLevels

    config = algorithm.config
    values(algorithm.learner_group.foreach_learner(_log_gradient_steps))
    source = config.levels if packed is None else cloudpickle.loads(packed)
    if held_out is not None:
        source = checked_levels(source, config, held_out, flush=flush, check_environments=False)
    packed = cloudpickle.dumps(source) if packed is None else packed
    environments = num_actors(config)
    levels = RemoteLevels(
        packed,
        config.seed,
        environments=environments,
        max_lag=_LEARNER_LAG * max(config.num_learners, 1),
        # The fragments of an EnvRunner may have episodes of a single step.
        max_pending=max(_LEAST_EPISODES * environments, 4 * config.total_train_batch_size)
        // max(config.num_env_runners, 1),
        flush=flush,
    )
    levels.ask("check")  # waits for the start, and raises its error
    LEVELS.set(algorithm, levels)
    algorithm.env_runner_group.foreach_env_runner(functools.partial(attach_player, server=levels.actor))
    values(algorithm.learner_group.foreach_learner(functools.partial(add_scoring, server=levels.actor)))
    if source.plays_unlearned:
        train_without_scored(algorithm.learner_group, levels.actor)
    CheckpointedAlgorithm(algorithm, levels)
    _at_end(algorithm, levels.stop)


def _at_end(algorithm: Algorithm, stop: Callable[[], None]) -> None:
    cleanup = algorithm.cleanup  # RLlib has no callback for the end of an algorithm

    def cleanup_all() -> None:
        """Ends the algorithm's own processes, and then the added ones."""
        cleanup()
        stop()

    algorithm.cleanup = cleanup_all


def sync_recreated(
    *, algorithm: Algorithm, env_runner_indices: Sequence[int], is_evaluation: bool, **ignored: Any
) -> None:
    """Sends tasks or the level buffer to restarted EnvRunners. The callback ``on_env_runners_recreated``."""
    if is_evaluation:
        return
    buffer = local_replay_buffer(algorithm)
    if buffer is not None and buffer.assignment is not None:
        buffer.assignment.send()
        return
    from rllib_ext.levels.level_assignment import attach_player
    from rllib_ext.levels.server import LEVELS

    levels = LEVELS.of(algorithm)
    if levels is not None:
        # Without waiting: an actor runs its calls in order, so it has the buffer before it samples again.
        algorithm.env_runner_group.foreach_env_runner(
            functools.partial(attach_player, server=levels.actor),
            remote_worker_ids=list(env_runner_indices),
            local_env_runner=False,
            timeout_seconds=0.0,
        )


def add_results(*, algorithm: Algorithm, result: dict[str, Any], **ignored: Any) -> None:
    """Adds the clocks to a result, and figures of levels under ``levels``. The callback ``on_train_result``.

    ``num_updates_lifetime`` counts gradient steps over the whole run, including steps before a restore.
    ``timesteps_total`` are environment steps, under the name that Tune's loggers take for their horizontal axis.
    """
    from rllib_ext.levels.server import LEVELS

    levels = LEVELS.of(algorithm)
    if levels is not None:
        runners = set(range(1, algorithm.config.num_env_runners + 1))
        lost = runners - set(algorithm.env_runner_group.healthy_worker_ids())
        result["levels"] = levels.ask("report", sorted(lost))
    key = (LEARNER_RESULTS, ALL_MODULES, NUM_UPDATES_LIFETIME)
    result |= {
        NUM_UPDATES_LIFETIME: int(algorithm.metrics.peek(key, default=0)),
        TIMESTEPS_TOTAL: int(result[NUM_ENV_STEPS_SAMPLED_LIFETIME]),
    }


def _log_gradient_steps(learner: Learner) -> None:
    # Learners step together, and RLlib adds up their counts.
    if not is_first_learner(learner):
        return
    apply_gradients = learner.apply_gradients

    def counted(gradients_dict: Any) -> None:
        """Applies the gradients, and counts one update."""
        apply_gradients(gradients_dict)
        learner.metrics.log_value((ALL_MODULES, NUM_UPDATES_LIFETIME), 1, reduce="lifetime_sum")

    learner.apply_gradients = counted


def start_shards(algorithm: Algorithm, reads_flags: bool) -> None:
    """Starts the shards of an algorithm that was just built, and ends them with it."""
    config = algorithm.config
    replay = algorithm.local_replay_buffer
    if not reads_flags:
        raise ValueError(
            "num_shards is given, and the config has Learner connectors of its own, which do not fetch rows from "
            "shards. Leave the connectors out, or num_shards"
        )
    check_trial(config)
    nodes: list[str] = []
    if replay.shards.options.shard_placement == "pack":
        found = algorithm.learner_group.foreach_learner(lambda _: str(ray.get_runtime_context().get_node_id()))
        nodes = list(dict.fromkeys(values(found)))
    replay.start(algorithm, nodes)
    _at_end(algorithm, replay.stop)
