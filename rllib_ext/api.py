# SPDX-License-Identifier: Apache-2.0
"""The replay methods as an RLlib ``replay_buffer_config``, and ``configure``, which prepares the algorithm for it."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from lightning_replay.validation import checked_flag
from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.frame_stacks import choose_module
from rllib_ext.checks import (
    check_algorithm,
    check_buffer,
    check_capacity,
    check_cpus,
    check_curriculum,
    check_returns,
    check_room_for_episodes,
    with_room_for_episodes,
)
from rllib_ext.clocks import add_clocks
from rllib_ext.environments import check_environment
from rllib_ext.episodes.task_assignment import assigned, begin_episode, num_actors, tell_recreated
from rllib_ext.hooks import install
from rllib_ext.learner.done_flags_connector import flags_connector
from rllib_ext.search_spaces import accepted, sampled_configs, samples_of

C = TypeVar("C", bound=AlgorithmConfig)


def replay_config(recipe: str | None = None, **options: Any) -> dict[str, Any]:
    """Settings for ``AlgorithmConfig.training(replay_buffer_config=...)`` of DQN, SAC and TQC, new API stack.

    Nothing else of the algorithm's configuration changes: ``n_step``, ``gamma``, the batch size and ``seed`` are
    RLlib's and are followed. Annealing (``importance_exponent=Linear(...)``) happens inside the buffer. Checkpoints,
    several Learners and the fastest path need :func:`rllib_ext.configure` as well.

    Args:
        recipe: a function of :mod:`lightning_replay.recipes` by name, or the import path of an own one,
            ``"my_module.my_recipe"``, that takes ``capacity`` and ``batch_size`` and returns a
            :class:`~lightning_replay.Replay`; left out where ``sampler``, ``writer`` or ``transform`` name by class
            path what the buffer is put together from.
        options: the recipe's arguments (``capacity``, ``num_neighbors``, ...), or ``capacity``, ``device``,
            ``memmap``, ``seed`` and the parts; and ``layout``, ``num_learners``, ``modules``, ``info_keys`` and
            ``progress`` of :class:`~rllib_ext.buffer.episode_buffer.RecipeEpisodeReplayBuffer`. A value may be a class
            path with arguments, ``{"class_path": "lightning_replay.schedules.Linear", "init_args": {...}}``; a table of
            ``"event_tables"`` a dict of :class:`~lightning_replay.events.EventTable`'s arguments, its condition the
            import path of a function or a class path. With ``"event_tables"``, ``max_trajectories`` is 128 and
            ``forget_stale`` is on if not given, because a lost EnvRunner leaves episodes that never end. ``recipe`` and
            every value may be a search space of Ray Tune, ``priority_exponent=tune.uniform(0.3, 0.9)``.

    Raises:
        ValueError: an unknown recipe, class or option, a condition that cannot be imported or called, or values that
            are refused.
        TypeError: a class that is not what its place takes.

    Example:
        >>> config = replay_config("prioritized", capacity=50_000, priority_exponent=0.6)
        >>> config["recipe"], config["capacity"]
        ('prioritized', 50000)
        >>> config = replay_config(capacity=50_000, sampler="lightning_replay.samplers.RandomPairSampler",
        ...                        transform="lightning_replay.transforms.MixPairs")
    """
    given = {"recipe": recipe, **options}
    try:
        samples = samples_of(given)
    except ValueError:
        samples = []  # a function of tune.sample_from reads other settings of the algorithm: configure() has them
    if samples:
        accepted(samples, _check_options)
    return {"type": RecipeEpisodeReplayBuffer, **given}


def _check_options(given: dict[str, Any]) -> None:
    """Builds the replay of every module once."""
    buffer = _trial(**given)
    for name in given.get("modules") or {}:
        if buffer.options.stores(name):
            buffer.options.build(name)


def configure(
    config: C,
    *,
    restore: bool = True,
    incremental: bool = True,
    require_cpus: bool = True,
    assign_tasks: bool = True,
    check_environments: bool = True,
) -> C:
    """Prepares an algorithm for the buffer of its ``replay_buffer_config``; call it last, before ``build_algo()``.

    * A batch travels to the Learners as one block, with one connector piece that reads it. Where the config has a
      ``learner_connector`` of its own, or leaves RLlib's connectors out, each row travels as an episode instead, which
      is slower; a warning is logged.
    * TD errors reach their rows with any number of Learners.
    * ``save_to_path``, ``restore_from_path``, ``from_checkpoint`` and Tune save and restore the buffer, see
      :class:`~rllib_ext.checkpoint.CheckpointedReplay`.
    * Where rows are kept by importance (``surprise_retention``), returns are formed over ``n_step`` steps before they
      are stored, DQN's Learners report surprise and action values of each row, and new rows get the surprise that the
      present networks compute for them.
    * Where frames are stored once and the observation is the stack, DQN gets a module that takes bytes,
      :class:`~rllib_ext.buffer.image_module.ImageDQNModule`, unless the config names one.
    * With a curriculum of one agent, each environment plays the task its scheduler gives it, also on EnvRunners that
      were lost and came back, and environments that evaluate play the first: their attribute ``task`` is set.

    Results get ``num_updates_lifetime``, gradient steps, and ``timesteps_total``, environment steps, see
    :func:`~rllib_ext.clocks.add_clocks`.

    The config may hold search spaces of Ray Tune, among its settings and among the options of the buffer. They are
    checked by samples: if none is accepted the config is refused, if some are a warning has the reason, and each trial
    checks its own values when it is built.

    The user's callbacks stay as they are.

    Args:
        config: of DQN, SAC or TQC on the new API stack; changed in place.
        restore: whether restoring a checkpoint restores the buffer. If not, the algorithm goes on with the rows it has
            and collects ``num_steps_sampled_before_learning_starts`` of them before it learns.
        incremental: link what has not changed since the last save instead of writing it again; every checkpoint is
            complete all the same.
        require_cpus: refuse configs whose EnvRunners and Learners take more CPUs than Ray has; pass ``False`` for a
            cluster that grows.
        assign_tasks: set the tasks of a curriculum in the environments; if not, their infos must have what they play.
        check_environments: make the environment once, here, and play a step, so that errors are reported; pass
            ``False`` where only the machines of EnvRunners can make it.

    Returns:
        The config.

    Raises:
        ModuleNotFoundError: a package that the environment needs is not installed.
        ValueError: an environment that cannot be made, an algorithm without a replay buffer, the old API stack, another
            ``replay_buffer_config``, a capacity below what one round brings or a batch takes, histories for fewer
            episodes than environments run, ``n_step`` an interval where rows are kept by importance, or too few CPUs
            (Ray would wait for ever).
    """
    checked_flag("restore", restore)
    checked_flag("incremental", incremental)
    checked_flag("require_cpus", require_cpus)
    checked_flag("assign_tasks", assign_tasks)
    checked_flag("check_environments", check_environments)
    check_algorithm(config)
    samples = sampled_configs(config)
    in_tune = samples[0] is not config
    played: list[tuple[Any, Any]] = []  # most searches have one environment, which may be slow to make

    def check(sample: AlgorithmConfig) -> None:
        _check(sample, require_cpus=require_cpus, in_tune=in_tune)
        if check_environments and (sample.env, sample.env_config) not in played:
            check_environment(sample)
            played.append((sample.env, sample.env_config))

    samples = accepted(samples, check)
    environments = max(map(num_actors, samples))
    config.replay_buffer_config = with_room_for_episodes(config.replay_buffer_config, environments)
    if config._learner_connector is None:
        config.learners(learner_connector=flags_connector)
    choose_module(config, samples)
    tasks = _tasks(samples)
    assigns = assign_tasks and bool(tasks) and not config.is_multi_agent
    ours: dict[str, Any] = {name: None for name in ("on_episode_created", "on_env_runners_recreated")}
    ours["on_algorithm_init"] = functools.partial(
        install, restore=restore, incremental=incremental, assign_tasks=assigns
    )
    ours["on_train_result"] = functools.partial(add_clocks)
    if assigns:
        replay = _trial(**_given(samples[0])).replay
        first = assigned(replay, samples[0])
        check_curriculum(samples[0], replay, first)
        ours["on_episode_created"] = functools.partial(begin_episode, target=tasks[0], first=first)
        ours["on_env_runners_recreated"] = functools.partial(tell_recreated)
    for event, hook in ours.items():
        present = _as_list(getattr(config, f"callbacks_{event}"))
        others = [one for one in present if not _is_ours(one)]
        if hook is not None or others != present:
            config.callbacks(**{event: [*others, *_as_list(hook)]})
    return config


def _check(config: AlgorithmConfig, *, require_cpus: bool, in_tune: bool) -> None:
    """Refuses values that cannot work together; the config has no search spaces."""
    check_buffer(config)
    check_room_for_episodes(config)
    check_capacity(config)
    if require_cpus:
        check_cpus(config, in_tune=in_tune)
    check_returns(config, functools.partial(_trial, **_given(config)))


def _given(config: AlgorithmConfig) -> dict[str, Any]:
    """The arguments of :func:`replay_config` in a config without search spaces."""
    return {name: value for name, value in config.replay_buffer_config.items() if name != "type"}


def _tasks(samples: list[AlgorithmConfig]) -> list[str]:
    """Tasks of the curriculum, empty where there is none.

    Raises:
        ValueError: trials would have different tasks.
    """
    found = [list(sample.replay_buffer_config.get("tasks") or ()) for sample in samples]
    if any(tasks != found[0] for tasks in found):
        raise ValueError(
            f"the search space has buffers of different tasks, such as {found[0]} and "
            f"{next(tasks for tasks in found if tasks != found[0])}; the environments are prepared for one list. "
            "Search over each in a Tuner of its own"
        )
    return found[0]


def _trial(recipe: str | None = None, **options: Any) -> RecipeEpisodeReplayBuffer:
    """Builds a buffer that is thrown away, so that wrong values raise an error here and not inside a Ray actor."""
    # With a seed, because without one it would draw its own from torch's global generator.
    trial = {**options, "seed": 0 if options.get("seed") is None else options["seed"]}
    if "memmap" in options:
        trial["memmap"] = None
    return RecipeEpisodeReplayBuffer(recipe, **trial)


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and hook.func in (install, add_clocks, begin_episode, tell_recreated)


def _as_list(hooks: Any) -> list[Any]:
    if hooks is None:
        return []
    return list(hooks) if isinstance(hooks, list | tuple) else [hooks]
