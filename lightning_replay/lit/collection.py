# SPDX-License-Identifier: Apache-2.0
"""Collects transitions between the updates of a Trainer: environments, their episodes, infos, tasks and clocks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from lightning_replay.agents.interfaces import watching_agent
from lightning_replay.collecting import Columns, VectorSteps
from lightning_replay.envs.building import checked_info_keys
from lightning_replay.episodes.running import stored_trajectories
from lightning_replay.lit.rollouts import ActionReader, States, act_on, acting, as_input, random_actions, states_of
from lightning_replay.options import checked_count, checked_number
from lightning_replay.schedulers import ReturnProgress
from lightning_replay.state import Stateful
from lightning_replay.training_replay import TrainingReplay


@dataclass(frozen=True)
class Episode:
    """A finished training episode: the step it ended at, its return of unchanged rewards, length, and level if any."""

    env_steps: int
    episode_return: float
    length: int
    level_id: int | None = None


class Collector(Stateful):
    """Clock, generator and newest finished episodes of environments that are built when they are needed."""

    saved_attributes: tuple[str, ...] = ("env_steps",)
    recent_episodes: ClassVar[int] = 10  #: Number of episodes of :attr:`recent_return`.

    def __init__(self, seed: int | None, kept_episodes: int) -> None:
        # NumPy and Gymnasium take no negative seeds.
        self._generator = np.random.default_rng(None if seed is None else checked_count("seed", seed, 0))
        self.env_steps: int = 0
        self.episodes: deque[Any] = deque(maxlen=kept_episodes)
        self._vector: Any = None  # the environments in progress

    @property
    def recent_return(self) -> float:
        """Mean return of the last :attr:`recent_episodes`, NaN before the first."""
        recent = [episode.episode_return for episode in list(self.episodes)[-self.recent_episodes :]]
        return float(np.mean(recent)) if recent else math.nan

    def _run(self, vector: VectorEnv[Any, Any, Any], seed: int | None = None) -> None:
        self._read_actions: Any = ActionReader(vector.single_action_space)
        try:
            self._observation, _ = vector.reset(seed=seed)
        except Exception:
            vector.close()
            raise
        self._vector = vector
        self._num_envs = vector.num_envs
        self._return: Any = np.zeros(self._num_envs)
        self._steps = 0
        self._began = np.zeros(self._num_envs, np.int64)  # the step before the first of each episode

    def _count_step(self, reward: np.ndarray, done: np.ndarray) -> list[tuple[int, float, int]]:
        """Returns environment, return and length of the episodes that ended."""
        self._return += reward
        self._steps += 1
        if not np.count_nonzero(done):
            return []
        lengths = self._steps - self._began
        ended = [(i, float(self._return[i]), int(lengths[i])) for i in np.flatnonzero(done).tolist()]
        self._return[done], self._began[done] = 0.0, self._steps
        return ended

    def close(self) -> None:
        """Closes the environments, whose episodes are interrupted. New ones are built at the next step."""
        if self._vector is not None:
            self._vector.close()
            self._vector = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the clock and the generator."""
        return super().state_dict() | {"generator": self._generator.bit_generator.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, and closes the environments."""
        super().load_state_dict(state_dict)
        self.close()
        self._generator.bit_generator.state = state_dict["generator"]
        self.episodes.clear()


class Collection(Collector):
    """Fills a replay from environments that reset in the same step, by the rows of their steps.

    Rows come from :class:`~lightning_replay.collecting.VectorSteps`, with ``task``, the columns that are read from
    infos, and ``recurrent_state`` if there are such columns. Episodes that a close or a load interrupted are marked
    truncated in the replay, and n-step transitions flushed, only just before the next step: until then it is unchanged.
    """

    _vector: VectorSteps | None
    rows_per_write: ClassVar[int] = 1_024

    def __init__(
        self,
        replay: TrainingReplay,
        environments: Callable[[], VectorEnv[Any, Any, Any]],
        warmup_steps: int,
        env_steps: int,
        seed: int | None,
        assignment: TaskAssignment | None = None,
        info_keys: Sequence[str] = (),
    ) -> None:
        super().__init__(seed, kept_episodes=1_000)
        self._replay = replay
        self._environments: Callable[[], Any] = environments
        self._steps_of_all = self._warmup_steps, self._last_step = warmup_steps, env_steps
        self._assignment = assignment
        self._information = InformationColumns(info_keys)
        self._pending: list[Columns] = []  # rows of steps that are not stored yet
        self._states: States | None = None  # states of a recurrent agent
        self._next_trajectory = 0
        self._is_interrupted = self._has_single_stream = False
        self._stored_steps = 0
        self._rank, self._world_size = 0, 1

    def collect_share(self, replay: TrainingReplay, rank: int, world_size: int) -> None:
        """Collects the share of one of several processes."""
        self._replay = replay
        if self._assignment is not None:
            self._assignment.replay = replay
        self._rank, self._world_size = rank, world_size
        self._warmup_steps, self._last_step = (-(-steps // world_size) for steps in self._steps_of_all)
        self._begin_rank()

    def _begin_rank(self) -> None:
        if self._rank:  # Each process explores on its own. The first one goes on like a run in one process.
            self._generator = np.random.default_rng([self._rank, *self._generator.integers(2**63, size=2).tolist()])

    def collect_until(self, env_steps: int, agent: Any, pause_hooks: Iterable[Callable[[bool], None]] = ()) -> None:
        """Steps until ``env_steps`` are stored, at random at first. Hooks are called with ``False`` in between."""
        if self.env_steps >= env_steps:
            return
        watching = watching_agent(agent)
        with acting(agent):  # once for all steps that are due, not for each
            try:
                while self.env_steps < env_steps:
                    vector = self._start(agent) if self._vector is None else self._vector
                    states = self._states
                    is_random = self.env_steps < self._warmup_steps
                    if not is_random or states is not None:  # random steps advance a state too
                        action = act_on(agent, self._observation, not is_random, self._read_actions, states)
                    if is_random:
                        action = self._random_actions()
                        if watching is not None:
                            watching.observe(as_input(self._observation).to(agent.device))
                    self.env_steps += self._num_envs
                    self._step(vector, action)
                    if watching is not None:
                        watching.end_episodes(self._done)
                    # One write for many steps of the warm-up. The last steps are written before the next draw.
                    if self.env_steps < env_steps and len(self._pending) * self._num_envs < self.rows_per_write:
                        continue
                    # Before the first draw nothing else moves the clock, from which the ages of rows count.
                    if self._stored_steps < self._warmup_steps:
                        self._replay.advance(env_steps=self._stored_steps * self._world_size)
                    self._store()
                    if self._information.missing and self.env_steps >= self._warmup_steps and self.episodes:
                        self._information.check()
                    if self.env_steps < env_steps:
                        for hook in pause_hooks:
                            hook(False)
            except BaseException:  # an environment, the agent or a signal: finished steps are kept
                self._store_finished()
                raise

    def _start(self, agent: Any) -> VectorSteps:
        seed = int(self._generator.integers(2**31))
        environments = self._environments()
        try:
            self._states = states_of(agent, environments.num_envs)
        except Exception:
            environments.close()
            raise
        self._begin_episodes(environments.num_envs)
        if self._assignment is not None:
            self._assignment.begin(environments)
        vector = VectorSteps(environments, first_trajectory=self._next_trajectory)
        self._run(vector, seed)
        # Random actions have a copy, because environments may share a space.
        self._action_space = deepcopy(vector.single_action_space)
        self._action_space.seed(seed)
        return vector

    def _begin_episodes(self, num_envs: int) -> None:
        if self._is_interrupted:
            self._replay.end_episodes(range(self._next_trajectory))  # those that had ended stay as they are
            self._is_interrupted = False
        elif len(self._replay):  # rows of another run, or demonstrations, which these environments do not continue
            self._replay.end_episodes()
        if (entered := self._replay.entered) is not None:  # numbers of their own
            stored = stored_trajectories(entered.storage)
            self._next_trajectory = max([self._next_trajectory, *(name + 1 for name in stored if name is not None)])
            # Rows that were stored before without a number of their episode, such as demonstrations, go on without.
            self._has_single_stream = num_envs == 1 and len(entered) > 0 and stored == [None]

    def _random_actions(self) -> Any:
        return random_actions(self._action_space, self._num_envs)

    def _step(self, vector: VectorSteps, action: Any) -> None:
        actions = self._read_actions.actions
        taken = action if actions is None else actions.for_environments(*action)
        following, reward, _, _, infos = vector.step(taken)
        row = vector.columns
        self._done: Any = row["next", "done"][:, 0]
        done = self._done
        if isinstance(action, tuple):  # stored as the agent gives it, with the parameters of all actions
            row = {
                **{key: column for key, column in row.items() if key[0] != "action"},
                ("action", "discrete"): action[0].copy(),
                ("action", "parameters"): action[1].astype(np.float32),
            }
        if self._assignment is not None:
            row["task"] = self._assignment.running.copy()
        if self._information.keys:
            for key, column in self._information.read(infos, done).items():
                row["next", key] = column[:, None]
        if self._states is not None:
            row["recurrent_state"] = self._states.current.cpu().numpy()
            self._states.advance(done)
        self._pending.append(row)  # joined to columns only when they are stored
        self._observation = following
        ended = self._count_step(reward, done)
        if ended and self._assignment is not None:
            self._assignment.finish(vector.env, np.flatnonzero(done), [returned for _, returned, _ in ended])
        for _, returned, length in ended:
            self.episodes.append(Episode(self.env_steps, returned, length))

    def _store(self) -> None:
        excess = max(0, self.env_steps - self._last_step)  # rows of the last step beyond the end of the run
        steps = self._pending
        self._pending = []
        columns = steps[0]
        if len(steps) > 1 or excess:
            rows = len(steps) * self._num_envs - excess
            columns = {key: np.concatenate([step[key] for step in steps])[:rows] for key in steps[0]}
        if self._has_single_stream:
            del columns["trajectory"]
        self._replay.extend_columns(columns)
        if excess:  # these episodes cannot be continued
            self.env_steps: int = self._last_step
            self.close()
        self._stored_steps = self.env_steps

    def _store_finished(self) -> None:
        self.env_steps = self._stored_steps  # not the step that raised
        if self._pending:
            self.env_steps += len(self._pending) * self._num_envs
            try:
                self._store()
            except (TypeError, ValueError):  # rows that the replay refuses are collected again
                self.env_steps = self._stored_steps

    def close(self) -> None:
        """Closes the environments. The replay marks their episodes only before the next step."""
        if self._vector is not None:
            self._interrupt(self._vector)
        super().close()

    def _interrupt(self, vector: VectorSteps) -> None:
        self._is_interrupted = True  # marked in the replay only before the next step
        self._next_trajectory = vector.next_trajectory
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns clocks, generator, tasks, and the number of the next episode."""
        vector = self._vector
        return super().state_dict() | {
            "processes": self._world_size,
            "next_trajectory": self._next_trajectory if vector is None else vector.next_trajectory,
            "tasks": self._assignment and self._assignment.state_dict(),
            "missing_information": sorted(self._information.missing),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, also in another number of processes."""
        steps_of_all = state["env_steps"] * state["processes"]
        super().load_state_dict(state | {"env_steps": -(-steps_of_all // self._world_size)})
        self._stored_steps = self.env_steps
        # The state comes from the first process. Other processes may have begun more episodes in these steps.
        self._next_trajectory = state["next_trajectory"] + (state["env_steps"] if self._rank else 0)
        self._begin_rank()
        self._is_interrupted = True
        if self._assignment is not None and state["tasks"] is not None:
            self._assignment.load_state_dict(state["tasks"])
        self._information.missing = {*self._information.keys} & {*state["missing_information"]}


class TaskAssignment:
    """Sets each environment's task ahead of its reset. ``progress`` makes signals of returns."""

    def __init__(self, replay: TrainingReplay, progress: ReturnProgress | None) -> None:
        self.replay = replay
        self._progress = progress
        self._next: list[int] = []
        self.running: np.ndarray = np.zeros(0, dtype=np.int64)

    def begin(self, environments: VectorEnv[Any, Any, Any]) -> None:
        """Sets the tasks of the first episodes, before environments are reset."""
        # As many environments as before keep their tasks.
        count = environments.num_envs
        self._assign(environments, self._next if len(self._next) == count else self.replay.actor_tasks(count))
        self.running = np.array(self._next, dtype=np.int64)

    def finish(self, environments: VectorEnv[Any, Any, Any], ended: np.ndarray, returns: Sequence[float]) -> None:
        """Reports the returns of ended episodes, bool ``[num_envs]``, and sets the tasks after the next."""
        # The environments of these episodes already play the next, of the tasks that were set before.
        names = self.replay.tasks
        for task, episode_return in zip(self.running[ended], returns, strict=True):
            signal = None if self._progress is None else self._progress.episode(int(task), episode_return)
            if signal is not None:
                self.replay.progress(names[task], signal)
        self.running[ended] = np.array(self._next)[ended]
        tasks = list(self.replay.actor_tasks(environments.num_envs))
        if tasks != self._next:
            self._assign(environments, tasks)

    def _assign(self, environments: VectorEnv[Any, Any, Any], tasks: Sequence[int]) -> None:
        self._next = [int(task) for task in tasks]
        environments.set_attr("task", [self.replay.tasks[task] for task in self._next])  # type: ignore[attr-defined]  # both of Gymnasium's vectors have it

    def state_dict(self) -> dict[str, Any]:
        """Returns the tasks of the next episodes and the state of the progress signal."""
        return {
            "next": [self.replay.tasks[task] for task in self._next],
            "progress": self._progress and self._progress.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self._next = [self.replay.tasks.index(name) for name in state["next"]]
        if self._progress is not None and state["progress"] is not None:
            self._progress.load_state_dict(state["progress"])


def check_tasks(environment: gymnasium.Env[Any, Any], tasks: Sequence[str]) -> None:
    """Raises ``ValueError`` if an environment cannot play the tasks of a replay."""
    if not (environment.has_wrapper_attr("TASKS") and environment.has_wrapper_attr("task")):
        raise ValueError(
            f"the replay has the tasks {list(tasks)}, but {environment} has no TASKS and no task to set. Give the "
            "environment both (lightning_replay.envs.building.TaskChoice), or use a replay without tasks."
        )
    known = list(environment.get_wrapper_attr("TASKS"))
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise ValueError(f"the replay has the tasks {unknown}, which {environment} does not have; it has {known}.")
    try:
        environment.set_wrapper_attr("task", tasks[0])
    except AttributeError as error:  # now, not in the run
        raise ValueError(
            f"the task of {environment} cannot be set ({error}); collecting for a replay with tasks sets it before "
            "each reset. Make it an attribute, or give its property a setter."
        ) from error


class InformationColumns:
    """Reads some keys of the steps' infos as float32 ``[N]``, 0 if an environment's info lacks the key."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self.keys: tuple[str, ...] = checked_info_keys(keys)
        self.missing: set[str] = set(keys)
        self._offered: set[str] = set()

    def read(self, infos: dict[str, Any], done: Any) -> dict[str, Any]:
        """Returns a column ``[N]`` for each key. ``done`` marks the environments whose last info is the final one."""
        # If an episode ended, its infos come from the reset, and final_info has the infos of its last step.
        sources = ((infos, ~done), (infos.get("final_info", {}), done))
        if self.missing:
            self._offered |= {key for source, where in sources for key in source if _has(key, source, where).any()}
        columns = {key: np.zeros(len(done), np.float32) for key in self.keys}
        for key, column in columns.items():
            for source, where in sources:
                has_key = _has(key, source, where)
                if has_key.any():
                    self.missing.discard(key)
                    column[has_key] = _numbers(key, source[key], has_key)
        return columns

    def check(self) -> None:
        """Refuses keys that no info had. Call it once episodes have ended."""
        if self.missing:
            raise ValueError(
                f"info_keys has {sorted(self.missing)}, which no step's info had during the warm-up and its first "
                f"episodes; seen were {sorted(self._offered)}. Correct the name; a key that is rare must be in every "
                "info, as 0."
            )


def _has(key: str, infos: dict[str, Any], where: np.ndarray) -> np.ndarray:
    given = infos.get(f"_{key}")  # Gymnasium's mask of the environments that gave the key
    return np.zeros_like(where) if given is None else given & where


def _numbers(key: str, values: Any, has_key: np.ndarray) -> np.ndarray:
    with suppress(TypeError, ValueError):
        given = list(values[has_key])
        others = (str, bytes, complex, np.complexfloating)  # float takes texts
        if not any(isinstance(value, others) for value in given):
            return np.array([float(value) for value in given])  # NumPy would make NaN of None
    raise ValueError(
        f"info {key!r} holds {' '.join(str(values).split())}; info_keys takes one number or flag per environment and "
        "step. Leave it out, or put a number into the info by a wrapper."
    )


class UpdateSchedule(Stateful):
    """``updates_due = floor((steps - warmup_steps) * updates_per_env_step)``, counted exactly for any ratio."""

    # The ratio, and the clocks from which it counts.
    saved_attributes: tuple[str, ...] = ("_ratio", "_first_step", "_first_update")

    def __init__(self, env_steps: int, warmup_steps: int, updates_per_env_step: float) -> None:
        self.env_steps: int = checked_count("env_steps", env_steps)
        # 0 for a replay that holds rows, which the data module checks.
        self.warmup_steps: int = checked_count("warmup_steps", warmup_steps, 0)
        if env_steps <= warmup_steps:
            raise ValueError(
                f"env_steps is {env_steps} and warmup_steps {warmup_steps}; env_steps counts the warm-up too and must "
                "be above it. Raise env_steps or lower warmup_steps."
            )
        ratio = checked_number("updates_per_env_step", updates_per_env_step, 1e-6)
        # 0.1 means a tenth, not its nearest binary fraction: an update must not slip by one step.
        self._ratio = Fraction(ratio).limit_denominator(1_000_000).as_integer_ratio()
        self._begin(self.warmup_steps, 0)

    def _begin(self, first_step: int, first_update: int) -> None:
        self._first_step = first_step
        self._first_update = first_update
        self.total_updates: int = self.updates_due(self.env_steps)

    def updates_due(self, steps: int) -> int:
        """Returns the number of updates due after environment steps."""
        return self._first_update + max(0, steps - self._first_step) * self._ratio[0] // self._ratio[1]

    def steps_for(self, update: int) -> int:
        """Returns the environment steps before an update, counted from 1."""
        if update >= self.total_updates:  # all steps before the last update
            return self.env_steps
        return self._first_step - ((self._first_update - update) * self._ratio[1] // self._ratio[0])  # rounded up

    def resume(self, state: Mapping[str, Any], env_steps: int, updates: int) -> None:
        """Goes on as the saved run, or with another ratio from its clocks."""
        # With another ratio the schedule goes on from these clocks. Without updates the present warm-up is due.
        if updates and state["ratio"] == self._ratio:
            self._begin(state["first_step"], state["first_update"])
        elif updates:
            first = self.warmup_steps if state["ratio"] is None else 0  # the saved run collected nothing
            self._begin(max(env_steps, first), updates)


class OfflineSchedule(Stateful):
    """``updates`` on rows that are there, without environment steps."""

    saved_attributes: tuple[str, ...] = ("_ratio",)
    env_steps = warmup_steps = 0

    def __init__(self, updates: int) -> None:
        self._ratio = None
        self.total_updates: int = checked_count("updates", updates)

    def steps_for(self, update: int) -> int:
        """Returns 0: no update waits for environment steps."""
        return 0

    def resume(self, state: Mapping[str, Any], env_steps: int, updates: int) -> None:
        """Does nothing: ``updates`` also counts the updates of a checkpoint."""


class RolloutSchedule:
    """Rollouts of ``num_envs * rollout_length`` steps. The last is shorter if they do not divide ``env_steps``."""

    def __init__(self, env_steps: int, num_envs: int, rollout_length: int) -> None:
        self.env_steps: int = checked_count("env_steps", env_steps)
        self.num_envs: int = checked_count("num_envs", num_envs)
        self.rollout_length: int = checked_count("rollout_length", rollout_length)

    def length_after(self, steps: int) -> int:
        """Returns the length of the next rollout."""
        return min(self.rollout_length, -(-max(0, self.env_steps - steps) // self.num_envs))

    def updates_after(self, steps: int) -> int:
        """Returns the number of rollouts that remain."""
        return -(-max(0, self.env_steps - steps) // (self.num_envs * self.rollout_length))
