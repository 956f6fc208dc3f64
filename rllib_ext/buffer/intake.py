# SPDX-License-Identifier: Apache-2.0
"""Episodes into the replay of one module: checked, converted to rows, stored, and their ends tracked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rllib_ext.buffer.frame_stacks import check_stacks
from rllib_ext.episodes.convert import EpisodeConverter, FlatEpisode
from rllib_ext.episodes.task_progress import TaskProgress

if TYPE_CHECKING:
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    from lightning_replay.replay import Replay
    from lightning_replay.schedulers.progress import ReturnProgress
    from rllib_ext.buffer.sampled_n_step import AskedReturns
    from rllib_ext.buffer.stored_n_step import FormedReturns


class Added(NamedTuple):
    """Number of new steps of an ``add``, and of rows that were stored."""

    steps: int
    stored: int


class Intake:
    """Stores the new steps of RLlib's episodes. Call :meth:`flatten` with fragments, then :meth:`add`.

    Arguments are those of :class:`~rllib_ext.buffer.module_replay.ModuleReplay`, and its two kinds of returns.
    """

    def __init__(
        self,
        replay: Replay,
        converter: EpisodeConverter,
        returns: AskedReturns,
        formed: FormedReturns | None,
        module_id: str | None,
        progress: ReturnProgress | None,
    ) -> None:
        from lightning_replay.table_replay import CurriculumReplay

        self._replay, self._converter, self._returns = replay, converter, returns
        self._formed, self._module_id = formed, module_id
        self.task_progress = TaskProgress(replay, progress) if isinstance(replay, CurriculumReplay) else None
        self._interrupted = False

    @property
    def room(self) -> int:
        """Most rows that can be stored at once; of a curriculum, of each task."""
        tables = self._replay.tables
        return self._replay.capacity if tables is None else int(tables.capacity[0])

    def flatten(self, episodes: Sequence[SingleAgentEpisode]) -> list[FlatEpisode]:
        """Checks episodes without storing them.

        Raises:
            ValueError: rows that do not fit the first ones, more of them than the buffer holds, observations whose
                frames cannot be stored once, or the steps of a recurrent module where there are several agents or rows
                are kept by importance.
        """
        flat = self._converter.flatten(episodes)
        if flat and self._converter.observation is None:
            check_stacks(self._replay.storage, flat[0].observation)
        self._check_room(flat)
        if flat and flat[0].state is not None:
            self._check_recurrent()
        return flat

    def add(self, flat: Sequence[FlatEpisode]) -> Added:
        """Stores the new rows of checked episodes with one ``extend``; writers may refuse rows or delay them."""
        stored = self._close_interrupted() if flat and self._interrupted else 0
        rows = self._converter.transitions(flat)
        if rows is None:
            return Added(0, stored)
        if self._converter.state_out is not None:
            self._returns.attach(self._replay)  # from the first row on: sequences are drawn along the links
        try:
            index = self._replay.extend(rows)
        except Exception:  # the Learner that measures new rows was lost, or a function of the user's raised
            self._converter.fragments.forget_running()  # the next fragments follow on rows that are missing
            raise
        stored += len(index)
        if self._formed is not None:
            stored += self._formed.follow(rows)
        if self.task_progress is not None:
            self.task_progress.update(self._converter.slices)
        self._replay.advance(env_steps=self._converter.fragments.steps)
        return Added(len(rows), stored)

    def state(self) -> dict[str, Any]:
        """Returns plain values from which :meth:`load_state` restores the progress of tasks."""
        progress = None if self.task_progress is None else self.task_progress.state()
        return {"task_progress": progress}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state`. The episodes that ran are truncated once new steps arrive."""
        if self._formed is not None:
            self._formed.forget()
        self._interrupted = True
        if self.task_progress is not None:
            self.task_progress.load_state(state["task_progress"])

    def _close_interrupted(self) -> int:
        stored = len(self._replay.end_episodes())
        if self._formed is not None:
            self._formed.forget()
        self._converter.fragments.forget_running()
        if self.task_progress is not None:
            self.task_progress.forget_running()
        self._interrupted = False
        return stored

    def _check_room(self, flat: Sequence[FlatEpisode]) -> None:
        steps = sum(len(one.episode) for one in flat)
        tasks = [one.tasks for one in flat if one.tasks is not None]
        if tasks and self._replay.tables is not None and len(self._replay.tables) > 1:  # one for each task
            steps = int(np.bincount(np.concatenate(tasks)).max())
        if steps > self.room:
            raise ValueError(
                f"capacity is {self.room}, and {steps} steps came with one add(). Give the buffer room for several "
                "rounds of all EnvRunners, or shorten rollout_fragment_length"
            )

    def _check_recurrent(self) -> None:
        if self._module_id is not None:
            raise ValueError(
                f"module {self._module_id!r} is recurrent (its episodes carry state_out); recurrent modules are "
                "supported with one agent. Use modules without state, or RLlib's own MultiAgentEpisodeReplayBuffer"
            )
        if self._formed is not None:
            raise ValueError(
                "the module is recurrent (its episodes carry state_out) and learns from sequences of steps, and "
                f"{type(self._replay.writer).__name__} keeps single transitions, scattered over the episodes. Use "
                'replay_config("uniform", ...) or replay_config("prioritized", ...), or a module without state'
            )
