# SPDX-License-Identifier: Apache-2.0
"""Fills a replay from environments and counts the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from gymnasium.vector import VectorEnv

from lightning_replay.agents.foreign import acting_agent
from lightning_replay.lit.collectors.vector import Collector, Rollout
from lightning_replay.lit.environments import random_actions
from lightning_replay.lit.info_columns import InformationColumns
from lightning_replay.lit.policy import act_on, acting
from lightning_replay.lit.task_assignment import TaskAssignment
from lightning_replay.replay import Replay

__all__ = ["ROWS_PER_WRITE", "Collection"]

ROWS_PER_WRITE = 1_024


class Collection(Collector):
    """Clock and state of collecting. Environments are built at the first step, and anew after :meth:`close` or a load.

    Just before the next step, episodes that a close or a load interrupted are marked truncated in the replay, and their
    partial n-step transitions are flushed: until then the buffer is exactly what it was.

    Args:
        replay: where the steps go.
        environments: builds a vector of environments.
        warmup_steps: steps with random actions.
        env_steps: steps after which nothing is collected; a larger last step of several environments is cut.
        seed: of environments and random actions.
        assignment: of tasks to environments; ``None`` where the replay has none.
        info_keys: of the infos that become columns.
    """

    def __init__(
        self,
        replay: Replay,
        environments: Callable[[], VectorEnv],
        warmup_steps: int,
        env_steps: int,
        seed: int | None,
        assignment: TaskAssignment | None = None,
        info_keys: Sequence[str] = (),
    ) -> None:
        super().__init__(seed, kept_episodes=1_000)
        self._replay = replay
        self._environments = environments
        self._warmup_steps = warmup_steps
        self._last_step = env_steps
        self._assignment = assignment
        self._information = InformationColumns(info_keys)
        self._rollout: Rollout | None = None
        self._next_trajectory = 0
        self._is_interrupted = False
        self._stored_steps = 0

    def collect_until(self, env_steps: int, agent: L.LightningModule) -> None:
        """Steps until ``env_steps`` are stored, with random actions at first and the agent's after.

        If a step raises, those before it are stored and counted.
        """
        if self.env_steps >= env_steps:
            return
        policy = acting_agent(agent)
        rollout = self._start() if self._rollout is None else self._rollout
        with acting(policy):
            try:
                while self.env_steps < env_steps:
                    if self.env_steps < self._warmup_steps:
                        space = rollout.environments.single_action_space
                        action = random_actions(space, rollout.num_envs, self._generator)
                    else:
                        action = act_on(policy, rollout.observation, True, rollout.read_actions)
                    self.env_steps += rollout.num_envs
                    self.episodes.extend(rollout.step(action, self.env_steps))
                    if self.env_steps >= env_steps or rollout.pending_rows >= ROWS_PER_WRITE:
                        self._store(rollout)
            except BaseException:
                self._store_finished(rollout)
                raise
        if self._information.missing and self.env_steps >= self._warmup_steps and self.episodes:
            self._information.check()

    def _store_finished(self, rollout: Rollout) -> None:
        """Counts the steps that were finished before an exception, and stores those that are pending."""
        self.env_steps = self._stored_steps + rollout.pending_rows
        try:
            if rollout.pending_rows:
                self._store(rollout)
        except (TypeError, ValueError):  # rows that the replay refuses are collected again
            self.env_steps = self._stored_steps

    def _start(self) -> Rollout:
        if self._is_interrupted:
            self._replay.end_episodes(range(self._next_trajectory))  # of which those that ended stay as they are
            self._is_interrupted = False
        seed = int(self._generator.integers(2**31))
        self._rollout = Rollout(self._environments(), seed, self._next_trajectory, self._assignment, self._information)
        return self._rollout

    def _store(self, rollout: Rollout) -> None:
        excess = max(0, self.env_steps - self._last_step)
        rows = rollout.take_rows(rollout.pending_rows - excess)
        self._replay.extend(rows)
        if excess:
            self.env_steps = self._last_step
            self.close()
        self._stored_steps = self.env_steps

    def close(self) -> None:
        """Closes the environments; their episodes are interrupted."""
        if self._rollout is None:
            return
        self._is_interrupted = True
        self._next_trajectory = self._rollout.next_trajectory
        self._rollout.close()
        self._rollout = None

    def state_dict(self) -> dict[str, Any]:
        """Clock and generator, as plain values."""
        rollout = self._rollout
        return super().state_dict() | {
            "next_trajectory": self._next_trajectory if rollout is None else rollout.next_trajectory,
            "tasks": None if self._assignment is None else self._assignment.state_dict(),
            "missing_information": self._information.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, with the open episodes interrupted."""
        super().load_state_dict(state)
        self._stored_steps = self.env_steps
        self._next_trajectory = state["next_trajectory"]
        self._is_interrupted = True
        if self._assignment is not None and state.get("tasks") is not None:
            self._assignment.load_state_dict(state["tasks"])
        self._information.load_state_dict(state.get("missing_information", self._information.keys))
