# SPDX-License-Identifier: Apache-2.0
"""The replay methods as a ``replay_buffer_config``, and ``configure``, which prepares an algorithm for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from lightning_replay.levels import LevelSelector
from lightning_replay.levels.level_ids import checked_held_out
from lightning_replay.options import check_kind, checked_flag
from lightning_replay.replay import Replay
from rllib_ext import checks, environments
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.images import choose_module
from rllib_ext.cql import CQL, ReplayCQL, check_cql
from rllib_ext.hooks import add_results, install_levels, install_replay, set_hooks, sync_recreated
from rllib_ext.learner.remote_blocks import flags_connector
from rllib_ext.levels import evaluation, level_assignment
from rllib_ext.levels.checks import check_discount, check_evaluated, checked_levels
from rllib_ext.rllib_compat import Hook, learner_connector_of, num_actors
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from rllib_ext.sharded.routing import counting_shards, num_shards_in, push_episodes
from rllib_ext.sharded.shard import without_shard_options
from rllib_ext.tasks import assigned, begin_episode

C = TypeVar("C", bound=AlgorithmConfig)
_HELD_OUT = 100
REPLAY_OPTIONS = ("restore", "incremental", "assign_tasks")
LEVEL_OPTIONS = ("held_out_levels", "generalization_gap", "flush")


def replay_config(recipe: str | None = None, **options: Any) -> dict[str, Any]:
    """Returns settings for ``AlgorithmConfig.training(replay_buffer_config=...)`` of DQN, SAC, TQC, and CQL.

    ``n_step``, ``gamma``, the batch size and ``seed`` are RLlib's. An algorithm of such a config is prepared as by
    :func:`rllib_ext.configure` when it is built. If its class has to change, for CQL and ``num_shards``, building it
    raises ``ValueError``, which says to call ``configure``.

    Args:
        recipe: a function of :mod:`lightning_replay.recipes` by name, or the import path of another function,
            ``"my_module.my_recipe"``, that takes ``capacity`` and ``batch_size`` and returns a
            :class:`~lightning_replay.Replay`. Leave it out if ``sampler``, ``writer``, or ``transform`` name the
            buffer's parts by class path.
        options: the recipe's arguments (``capacity``, ``num_neighbors``, ...), or ``capacity``, ``device``, ``memmap``,
            ``seed``, and the parts. Further options are ``layout``, ``num_learners``, ``modules``, ``info_keys``, and
            ``progress`` of :class:`~rllib_ext.buffer.buffer.RecipeEpisodeReplayBuffer`. A value may be a class path
            with arguments, ``{"class_path": "lightning_replay.schedules.Linear", "init_args": {...}}``. A table of
            ``"event_tables"`` is a dict of :class:`~lightning_replay.events.EventTable`'s arguments, and its condition
            is the import path of a function or a class path. With ``"event_tables"``, ``max_trajectories`` is 128 (with
            :func:`rllib_ext.configure` at least twice the environments) and ``forget_stale`` is on by default, because
            a lost EnvRunner leaves episodes that never end. ``recipe`` and every value may be a search space of Ray
            Tune, ``priority_exponent=tune.uniform(0.3, 0.9)``. With ``num_shards`` the rows are divided over Ray
            actors, see :class:`~rllib_ext.sharded.buffer.ShardedEpisodeReplayBuffer`. Further options are then the
            options of :class:`~lightning_replay.sharded.options.ShardOptions`.

    Raises:
        ValueError: an unknown recipe, class or option, a condition that cannot be imported or called, or values that
            are refused.
        TypeError: a class of another kind than its option takes, or arguments that the class does not have.

    Example:
        >>> config = replay_config("prioritized", capacity=50_000, priority_exponent=0.6)
        >>> config["recipe"], config["capacity"]
        ('prioritized', 50000)
        >>> config = replay_config(capacity=50_000, sampler="lightning_replay.samplers.RandomPairSampler",
        ...                        transform="lightning_replay.transforms.MixPairs")
    """
    given = {"recipe": recipe, **options}
    if given.get("num_shards") is None:
        given = without_shard_options(given)
    try:
        samples = environments.samples_of(given)
    except ValueError:
        samples = []  # a function of tune.sample_from reads other settings of the algorithm: configure() has them
    if samples:
        environments.accepted(samples, _replays_of)
    kind = RecipeEpisodeReplayBuffer if given.get("num_shards") is None else ShardedEpisodeReplayBuffer
    return {"type": kind, **given}


def _replays_of(given: dict[str, Any]) -> list[Replay]:
    buffer = checks.trial_buffer(**given)
    names = filter(buffer.options.stores, given.get("modules") or {})
    return [buffer.replay, *(buffer.options.build(name).replay for name in names)]


def configure(
    config: C,
    *,
    levels: LevelSelector | Mapping[str, Any] | None = None,
    restore: bool = True,
    incremental: bool = True,
    assign_tasks: bool = True,
    held_out_levels: int | Iterable[int] | None = None,
    generalization_gap: bool = True,
    flush: bool = False,
    require_cpus: bool = True,
    check_environments: bool = True,
) -> C:
    """Prepares an algorithm for replay of transitions or of levels. Call it last, before ``build_algo()``.

    Transitions, for DQN, SAC, TQC, and CQL with a ``replay_buffer_config`` of :func:`replay_config`:

    * A batch travels to the Learners as one block, with one connector piece that reads it. If the config sets a
      ``learner_connector``, or leaves out RLlib's connectors, each row travels as an episode instead. That is slower,
      and a warning is logged.
    * TD errors reach their rows with any number of Learners.
    * With ``num_shards``, ``EnvRunner.sample()`` returns references, also to other callers. The config's Learner
      connectors must be RLlib's own. The shards end with ``algorithm.stop()``. ``config.algo_class`` becomes a class
      that requests CPUs for them in trials of Tune: give it to the ``Tuner``.
    * If rows are kept by importance (``surprise_retention``), returns are formed before they are stored, DQN's Learners
      report surprise and action values, and new rows get the surprise of the present networks.
    * If frames are stored once and the observation is the stack, DQN gets a module that takes bytes,
      :class:`~rllib_ext.buffer.images.ImageDQNModule`, unless the config names one.
    * With a curriculum and one agent, the attribute ``task`` of each environment is set to the task that the scheduler
      assigns. Actor k of the scheduler is environment ``(worker_index - 1) * num_envs_per_env_runner + env_index``.
      Environments that evaluate play the first task.

    Levels, for PPO, APPO, and IMPALA:

    * Each episode's level is set before its environment is reset, by ``reset(seed=level_id)`` or by the environment's
      method ``set_level(level_id)``. Infos and the episode's ``custom_data`` have it as ``level_id``.
    * :func:`rllib_ext.level_buffer` returns the buffer, see :class:`~rllib_ext.levels.server.RemoteLevels`. Results
      have figures under ``levels``.
    * Evaluation plays held-out levels only, and adds the gap to the returns on training levels, see
      :func:`~rllib_ext.levels.evaluation.measure_gap`.

    Both: ``save_to_path``, ``restore_from_path``, ``from_checkpoint``, and Tune save and restore the buffer, see
    :class:`~rllib_ext.checkpoints.CheckpointedAlgorithm`. Results get the clocks of
    :func:`~rllib_ext.hooks.add_results`. The user's callbacks stay.

    The config may hold search spaces of Ray Tune: among its settings, among the options of the replay buffer, and in
    levels given by arguments, ``{"levels": 200, "staleness_weight": tune.uniform(0.1, 0.5)}``. Such levels become the
    config's setting ``levels``. Search spaces are checked by samples, and each trial checks its own values when it is
    built.

    Args:
        config: on the new API stack. It is changed in place.
        levels: of :mod:`lightning_replay.levels`. The algorithm works on a copy. Or the arguments of
            :class:`~lightning_replay.levels.LevelBuffer`, or a class path with arguments,
            ``{"class_path": "lightning_replay.levels.UniformLevels", "init_args": {"levels": 200}}``. Values may also
            be class paths. Then ``seed`` is the config's by default. ``score`` is the L1 value loss with the config's
            ``gamma``, and ``lambda_`` of PPO.
        restore: whether restoring a checkpoint restores the replay buffer. If not, the algorithm keeps the rows it has
            and collects ``num_steps_sampled_before_learning_starts`` of them before it learns.
        incremental: link unchanged files of the last save of the replay buffer instead of writing them again. Every
            checkpoint is complete all the same.
        assign_tasks: set the tasks of a curriculum in the environments. If not, infos must have the task played.
        held_out_levels: ids that evaluation plays, or how many of the largest, below 2^31. By default 100. They need
            ``.evaluation(evaluation_interval=...)``. A warning is logged without it.
        generalization_gap: whether evaluations also play levels that were trained on.
        flush: makes scores of unfinished episodes after every update, as the paper's released code does. Only for PPO
            with at most one Learner.
        require_cpus: refuse configs whose EnvRunners and Learners take more CPUs than Ray has. Pass ``False`` for a
            cluster that grows.
        check_environments: make the environment once, here, and play a step, or the beginnings of a few levels, to
            report errors early. Pass ``False`` if only the machines of EnvRunners can make it.

    Returns:
        The config.

    Raises:
        ModuleNotFoundError: a package that the environment needs is not installed.
        ValueError: an algorithm without this kind of replay, options of the other kind, or the old API stack. Too few
            CPUs, because Ray would wait forever. An environment that cannot be made or ignores its level. Another
            ``replay_buffer_config``, or a capacity below the steps of one round or of a batch. Several agents, or
            held-out levels that are trained on.
        TypeError: an object that is no config, or no level buffer.

    Example:
        >>> from ray.rllib.algorithms.ppo import PPOConfig
        >>> config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=2)
        >>> config = configure(config, levels={"levels": 200, "staleness_weight": 0.3}, held_out_levels=50)
        >>> config.callbacks_on_algorithm_init[0].func.__name__
        'install_levels'
    """
    given = {**locals()}
    of_levels = "PPOConfig(), APPOConfig() or IMPALAConfig(), and after it the levels: configure(config, levels=...)"
    check_kind("config", config, AlgorithmConfig, f"one with a replay buffer, DQNConfig() or another, or {of_levels}")
    for name, value in given.items():
        if name not in ("config", "levels", "held_out_levels"):
            checked_flag(name, value)
    held_out = checked_held_out(_HELD_OUT if held_out_levels is None else held_out_levels)
    options = {"require_cpus": require_cpus, "check_environments": check_environments}
    # No algorithm of RLlib has both a replay buffer and values of whole episodes.
    if levels is None:
        checks.check_algorithm(config)
        _refuse_given(given, LEVEL_OPTIONS, "levels, and none are given: configure(config, levels=...)")
        hooks = prepare_replay(config, restore=restore, incremental=incremental, assign_tasks=assign_tasks, **options)
    else:
        _refuse_given(given, REPLAY_OPTIONS, "the replay buffers of DQN, SAC, TQC and CQL, and levels are given")
        hooks = prepare_levels(config, levels, held_out, flush=flush, generalization_gap=generalization_gap, **options)
        if held_out_levels is not None:
            check_evaluated(config)
    set_hooks(config, hooks | {"on_train_result": Hook(add_results)})
    return config


def _refuse_given(given: Mapping[str, Any], names: Iterable[str], purpose: str) -> None:
    defaults = inspect.signature(configure).parameters
    wrong = [name for name in names if given[name] is not defaults[name].default]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} is for {purpose}. Leave it out")


def prepare_replay(
    config: AlgorithmConfig,
    *,
    restore: bool,
    incremental: bool,
    assign_tasks: bool,
    require_cpus: bool,
    check_environments: bool,
) -> dict[str, Hook]:
    """Checks and prepares a config for its replay buffer, and returns the callbacks by event."""
    is_cql = issubclass(config.algo_class, CQL)
    if is_cql:
        config.dataset_num_iters_per_learner = config.dataset_num_iters_per_learner or 1  # RLlib demands a number
    samples = environments.sampled_configs(config)
    in_tune = samples[0] is not config
    played: list[tuple[Any, Any]] = []  # most searches have one environment, which may be slow to make

    def check(sample: AlgorithmConfig) -> None:
        """Checks one sample of a search space."""
        checks.check_buffer(sample)
        if is_cql:
            check_cql(sample, config.algo_class, _replays_of(checks.replay_options(sample)))
        if sample.replay_buffer_config.get("transform") is not None:
            checks.check_discounts(sample, _replays_of(checks.replay_options(sample)))
        if require_cpus:
            checks.check_cpus(sample, in_tune=in_tune)
        if check_environments and (sample.env, sample.env_config) not in played:
            environments.check_environment(sample, next(iter(sample.replay_buffer_config.get("tasks") or ()), None))
            played.append((sample.env, sample.env_config))

    # The algorithm's class and connectors must serve all trials, so what one accepted sample needs is prepared.
    samples = environments.accepted(samples, check)
    if config.algo_class is CQL:
        config.algo_class = ReplayCQL
    given = config.replay_buffer_config
    config.replay_buffer_config = checks.with_max_trajectories(given, max(map(num_actors, samples)))
    if learner_connector_of(config) is None:  # the user's own stay, and rows travel as episodes
        config.learners(learner_connector=flags_connector)
    choose_module(config, samples)
    tasks = _tasks(samples)
    assigns = assign_tasks and bool(tasks) and not config.is_multi_agent
    hooks: dict[str, Hook] = {
        "on_algorithm_init": Hook(install_replay, restore=restore, incremental=incremental, assign_tasks=assigns),
        "on_environment_created": Hook(environments.copy_results),
    }
    if any(num_shards_in(sample.replay_buffer_config) for sample in samples):
        hooks["on_sample_end"] = Hook(push_episodes)
        config.algo_class = counting_shards(config.algo_class)
    if assigns:
        replay = checks.trial_buffer(**checks.replay_options(samples[0])).replay
        first = assigned(replay, samples[0])
        checks.check_curriculum(samples[0], replay, first)
        hooks |= {
            "on_episode_created": Hook(begin_episode, target=tasks[0], first=first),
            "on_env_runners_recreated": Hook(sync_recreated),
        }
    return hooks


def _tasks(samples: list[AlgorithmConfig]) -> list[str]:
    found = [list(sample.replay_buffer_config.get("tasks") or ()) for sample in samples]
    other = next((tasks for tasks in found if tasks != found[0]), None)
    if other is not None:
        raise ValueError(
            f"the search space has buffers of different tasks, such as {found[0]} and {other}; the environments are "
            "prepared for one list. Search over each in a Tuner of its own"
        )
    return found[0]


def prepare_levels(
    config: AlgorithmConfig,
    levels: LevelSelector | Mapping[str, Any],
    held_out: Sequence[int],
    *,
    flush: bool,
    generalization_gap: bool,
    require_cpus: bool,
    check_environments: bool,
) -> dict[str, Hook]:
    """Checks and prepares a config for levels, and returns the callbacks by event."""
    # An earlier call may have set it.
    vars(config).pop("levels", None)
    built_by_trials = isinstance(levels, Mapping) and environments.has_search_space({**vars(config), "levels": levels})
    if built_by_trials:
        config.levels = levels
    samples = environments.sampled_configs(config)
    in_tune = samples[0] is not config
    sources: list[tuple[AlgorithmConfig, LevelSelector]] = []

    def check(sample: AlgorithmConfig) -> None:
        given = sample.levels if built_by_trials else levels
        source = checked_levels(given, sample, held_out, flush=flush, check_environments=check_environments)
        if require_cpus:
            checks.check_cpus(sample, in_tune=in_tune)
        sources.append((sample, source))

    environments.accepted(samples, check)
    check_discount(*sources[0])
    hooks: dict[str, Hook] = {
        "on_algorithm_init": Hook(
            install_levels,
            packed=None if built_by_trials else cloudpickle.dumps(sources[0][1]),
            flush=flush,
            held_out=held_out if in_tune else None,
        ),
        "on_environment_created": Hook(level_assignment.wrap_environments),
        "on_episode_created": Hook(level_assignment.begin_episode, held_out=held_out),
        "on_sample_end": Hook(level_assignment.end_round),
        "on_env_runners_recreated": Hook(sync_recreated),
        "on_evaluate_start": Hook(evaluation.check_evaluation, held_out=held_out),
    }
    if generalization_gap:
        hooks |= {
            "on_episode_end": Hook(evaluation.note_return),
            "on_evaluate_end": Hook(evaluation.measure_gap),
        }
    return hooks
