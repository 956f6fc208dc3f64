# SPDX-License-Identifier: Apache-2.0
"""One task of a curriculum for each environment, sent to the EnvRunners by the replay in the driver.

Actor k of the curriculum is an environment: ``(worker_index - 1) * num_envs_per_env_runner + env_index``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rllib_ext.episodes import TASK
from rllib_ext.rllib_compat import Attached, num_actors

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    from lightning_replay.table_replay import CurriculumReplay

# The tasks of each EnvRunner's environments.
_TASKS = Attached[list[str]]("tasks_of_environments")


def assigned(replay: CurriculumReplay, config: AlgorithmConfig) -> list[str]:
    """Returns the task of each environment."""
    return [replay.tasks[task] for task in replay.actor_tasks(num_actors(config))]


def begin_episode(
    *, episode: Any, env_runner: Any, env: Any, env_index: int, target: str, first: Sequence[str], **ignored: Any
) -> None:
    """Sets the attribute ``task`` of an environment before its reset, in evaluation ``target``, also in custom data."""
    if env_runner.config.in_evaluation:
        names = [target] * env.num_envs
    else:
        start = (max(env_runner.worker_index or 0, 1) - 1) * env.num_envs
        names = list(_TASKS.of(env_runner) or first)[start : start + env.num_envs]
    env.set_attr(TASK, names)
    episode.custom_data[TASK] = names[env_index]


class TaskAssignment:
    """Sends the tasks of a curriculum to the EnvRunners, which play them from the next episodes on."""

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm
        self._sent: list[str] = []
        tasks = algorithm.local_replay_buffer.replay.tasks
        for group in (algorithm.env_runner_group, algorithm.eval_env_runner_group):
            found = [] if group is None else group.foreach_env_runner(functools.partial(find_problem, tasks=tasks))
            problems = [problem for problem in found if problem]
            if problems:
                raise ValueError(problems[0])
        self.send()

    def update(self) -> None:
        """Sends the tasks to the EnvRunners if they have changed."""
        if assigned(self._algorithm.local_replay_buffer.replay, self._algorithm.config) != self._sent:
            self.send()

    def send(self) -> None:
        """Sends the tasks without waiting. An actor runs its calls in order, so it has them before it samples again."""
        self._sent = assigned(self._algorithm.local_replay_buffer.replay, self._algorithm.config)
        # Without waiting: an actor runs its calls in order, so it has the tasks before it samples again.
        assign = functools.partial(set_tasks, names=self._sent)
        self._algorithm.env_runner_group.foreach_env_runner(assign, timeout_seconds=0.0)


def find_problem(env_runner: Any, tasks: Sequence[str]) -> str | None:
    """Returns why the environments of an EnvRunner cannot play these tasks, or ``None`` if they can."""
    # No exception, which would make RLlib restart the EnvRunner without end.
    if env_runner.env is None:
        return None
    env = env_runner.env.unwrapped
    try:
        env.get_attr(TASK)
    except (AttributeError, NotImplementedError):
        return (
            f"the replay has the tasks {list(tasks)}, and the environments have no attribute 'task'. Give them one "
            "that their reset follows, and a tuple TASKS (lightning_replay.envs.building.TaskChoice); or put the task "
            "into the infos, configure(config, assign_tasks=False)"
        )
    environments = list(getattr(env, "envs", ()))
    if environments and environments[0].has_wrapper_attr("TASKS"):
        known = list(environments[0].get_wrapper_attr("TASKS"))
        unknown = [task for task in tasks if task not in known]
        if unknown:
            return f"the replay has the tasks {unknown}, which the environments do not have; they have {known}"
    return None


def set_tasks(env_runner: Any, names: Sequence[str]) -> None:
    """Sets the tasks of an EnvRunner's environments."""
    _TASKS.set(env_runner, list(names))
