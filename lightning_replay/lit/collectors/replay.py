# SPDX-License-Identifier: Apache-2.0
"""Fills a replay from environments and counts the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from lightning_replay.agents.foreign import acting_agent
from lightning_replay.collecting import Columns, VectorSteps
from lightning_replay.lit.collectors import Collector, Episode
from lightning_replay.lit.collectors.running_episodes import RunningEpisodes
from lightning_replay.lit.environments import random_actions
from lightning_replay.lit.info_columns import InformationColumns
from lightning_replay.lit.policy import Action, act_on, acting
from lightning_replay.lit.task_assignment import TaskAssignment
from lightning_replay.replay import Replay
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.training_replay import TrainingReplay

__all__ = ["Collection", "Rollout"]

_ROWS_PER_WRITE = 1_024


class Rollout(RunningEpisodes):
    """Environments in progress. Call :meth:`step` per action, :meth:`take_columns` before the replay is drawn from.

    Rows are those of :class:`~lightning_replay.collecting.VectorSteps`. Each also carries ``task``, that of the running
    episode, where environments have tasks, and the columns that are read from infos.

    Args:
        environments: a vector that resets in the same step.
        seed: of the first reset, and of random actions in ``action_space``.
        first_trajectory: number of the first episode; the others count on from there.
        assignment: of tasks to environments; ``None`` where there are none.
        information: the columns that are read from infos.
    """

    environments: VectorSteps

    def __init__(
        self,
        environments: VectorEnv[Any, Any, Any],
        seed: int,
        first_trajectory: int = 0,
        assignment: TaskAssignment | None = None,
        information: InformationColumns | None = None,
    ) -> None:
        if assignment is not None:
            assignment.begin(environments)
        super().__init__(VectorSteps(environments, first_trajectory=first_trajectory), seed)
        self.action_space = deepcopy(self.action_space)  # for random actions: a space may be shared by environments
        self.action_space.seed(seed)
        self._assignment = assignment
        self._information = information or InformationColumns()
        self._pending: list[Columns] = []

    @property
    def pending_rows(self) -> int:
        return len(self._pending) * self.num_envs

    def step(self, action: Action, env_steps: int) -> list[Episode]:
        """Applies one action per environment; returns the episodes this ended."""
        actions = self.read_actions.actions
        taken = action if actions is None else actions.for_environments(*action)
        following, reward, _, _, infos = self.environments.step(taken)
        row = self.environments.columns
        done = row["next", "done"][:, 0]
        if isinstance(action, tuple):  # stored as the agent gives it, with the parameters of all actions
            row = {key: column for key, column in row.items() if key[0] != "action"}
            row["action", "discrete"] = action[0].copy()
            row["action", "parameters"] = action[1].astype(np.float32)
        if self._assignment is not None:
            row["task"] = self._assignment.running.copy()
        if self._information.keys:
            for key, column in self._information.read(infos, done).items():
                row["next", key] = column[:, None]
        self._pending.append(row)
        self.observation = following
        ended = self.count_step(reward, done)
        if not ended:
            return []
        if self._assignment is not None:
            returns = [episode_return for _, episode_return, _ in ended]
            self._assignment.finish(self.environments.env, np.flatnonzero(done), returns)
        return [Episode(env_steps, episode_return, length) for _, episode_return, length in ended]

    def take_columns(self, most: int) -> Columns:
        """Returns the steps since the last call, the first ``most`` at most, as columns ``[N, ...]``, oldest first."""
        steps = self._pending
        self._pending = []
        if len(steps) == 1 and most >= self.num_envs:
            return steps[0]
        return {key: np.concatenate([step[key] for step in steps])[:most] for key in steps[0]}


class Collection(Collector):
    """Clock and state of collecting. Environments are built at the first step after the start, :meth:`close` or a load.

    Episodes that a close or a load interrupted are marked truncated in the replay, and their partial n-step transitions
    flushed, only just before the next step: until then the buffer is unchanged.

    Rows beyond ``env_steps``, of the last step of several environments, are dropped. The arguments are those of
    :class:`~lightning_replay.lit.ReplayDataModule`, and a function that builds a vector of environments.
    """

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
        self._environments = environments
        self._steps_of_all = self._warmup_steps, self._last_step = warmup_steps, env_steps
        self._assignment = assignment
        self._information = InformationColumns(info_keys)
        self._rollout: Rollout | None = None
        self._next_trajectory = 0
        self._is_interrupted = False
        self._has_single_stream = False
        self._stored_steps = 0
        self._rank, self._world_size = 0, 1

    def collect_share(self, replay: TrainingReplay, rank: int, world_size: int) -> None:
        """Collects one of ``world_size`` equal shares of the steps from now on, into the replay of this process."""
        self._replay = replay
        if self._assignment is not None:
            self._assignment.replay = replay
        self._rank, self._world_size = rank, world_size
        self._warmup_steps, self._last_step = (-(-steps // world_size) for steps in self._steps_of_all)
        self._begin_rank()

    def _begin_rank(self) -> None:
        if self._rank:
            seeds = self._generator.integers(2**63, size=2)
            self._generator = np.random.default_rng([self._rank, *seeds.tolist()])

    def collect_until(self, env_steps: int, agent: Any, pause_hooks: Iterable[Callable[[bool], None]] = ()) -> None:
        """Steps until ``env_steps`` are stored, with random actions at first and the agent's after.

        If a step raises, earlier ones are stored and counted. The hooks are called with ``False`` about every 1,024
        steps, so that a signal need not wait for a whole warm-up; they may :meth:`close` the environments.
        """
        if self.env_steps >= env_steps:
            return
        with acting(agent):
            try:
                while self.env_steps < env_steps:
                    rollout = self._rollout or self._start(agent)
                    if self.env_steps < self._warmup_steps:
                        action = random_actions(rollout.action_space, rollout.num_envs)
                    else:
                        action = act_on(agent, rollout.observation, True, rollout.read_actions)
                    self.env_steps += rollout.num_envs
                    self.episodes.extend(rollout.step(action, self.env_steps))
                    if self.env_steps < env_steps and rollout.pending_rows < _ROWS_PER_WRITE:
                        continue
                    self._store(rollout)
                    if self._information.missing and self.env_steps >= self._warmup_steps and self.episodes:
                        self._information.check()
                    for hook in pause_hooks if self.env_steps < env_steps else ():
                        hook(False)
            except BaseException:
                self._store_finished()
                raise

    def _start(self, agent: Any) -> Rollout:
        acting_agent(agent)
        if self._is_interrupted:
            self._replay.end_episodes(range(self._next_trajectory))  # those that had ended stay as they are
            self._is_interrupted = False
        elif len(self._replay):  # rows of another run, or demonstrations, which these environments do not continue
            self._replay.end_episodes()
        seed = int(self._generator.integers(2**31))
        rollout = Rollout(self._environments(), seed, self._next_trajectory, self._assignment, self._information)
        # Rows that were stored before without a number of their episode, such as demonstrations, go on without.
        is_filled = isinstance(self._replay, Replay) and len(self._replay) > 0
        self._has_single_stream = rollout.num_envs == 1 and is_filled and not self._has_trajectory()
        self._rollout = rollout
        return rollout

    def _has_trajectory(self) -> bool:
        assert isinstance(self._replay, Replay)
        storage: Any = self._replay.storage  # not the replay, whose transforms may refuse single rows
        if isinstance(storage, PackedStorage):
            return bool(storage.has_column("trajectory"))
        return storage.get(slice(0, 1)).get("trajectory", None) is not None

    def _store(self, rollout: Rollout) -> None:
        excess = max(0, self.env_steps - self._last_step)
        columns = rollout.take_columns(rollout.pending_rows - excess)
        if self._has_single_stream:
            del columns["trajectory"]
        self._replay.extend_columns(columns)
        if excess:
            self.env_steps: int = self._last_step
            self.close()
        self._stored_steps = self.env_steps

    def _store_finished(self) -> None:
        """Counts the steps that were finished before an exception, and stores those that are pending."""
        self.env_steps = self._stored_steps
        if self._rollout is not None and self._rollout.pending_rows:
            self.env_steps += self._rollout.pending_rows
            try:
                self._store(self._rollout)
            except (TypeError, ValueError):  # rows that the replay refuses are collected again
                self.env_steps = self._stored_steps

    def close(self) -> None:
        if self._rollout is not None:
            self._is_interrupted = True
            self._next_trajectory = self._rollout.environments.next_trajectory
            self._rollout.environments.close()
            self._rollout = None

    def state_dict(self) -> dict[str, Any]:
        rollout = self._rollout
        return super().state_dict() | {
            "processes": self._world_size,
            "next_trajectory": self._next_trajectory if rollout is None else rollout.environments.next_trajectory,
            "tasks": None if self._assignment is None else self._assignment.state_dict(),
            "missing_information": self._information.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steps_of_all = state["env_steps"] * state["processes"]
        super().load_state_dict(state | {"env_steps": -(-steps_of_all // self._world_size)})
        self._stored_steps = self.env_steps
        # The state is that of the first of several processes; the others may have begun more episodes in these steps.
        self._next_trajectory = state["next_trajectory"] + (state["env_steps"] if self._rank else 0)
        self._begin_rank()
        self._is_interrupted = True
        if self._assignment is not None and state["tasks"] is not None:
            self._assignment.load_state_dict(state["tasks"])
        self._information.load_state_dict(state["missing_information"])
