# SPDX-License-Identifier: Apache-2.0
"""Episodes into the replay of one module: checked, converted to rows, stored, and their ends tracked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_ext.buffer.frame_stacks import check_stacks
from rllib_ext.episodes.convert import EpisodeConverter, FlatEpisode
from rllib_ext.episodes.task_progress import TaskProgress

if TYPE_CHECKING:
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    from lightning_replay.replay import Replay
    from lightning_replay.schedulers.progress import ReturnProgress
    from rllib_ext.buffer.n_step import SampledReturns, StoredReturns


class Intake:
    """Stores the new steps of RLlib's episodes. Call :meth:`flatten` with fragments, then :meth:`add`.

    Arguments are those of :class:`~rllib_ext.buffer.module_replay.ModuleReplay`, and its two kinds of returns.
    """

    def __init__(
        self,
        replay: Replay,
        converter: EpisodeConverter,
        returns: SampledReturns,
        stored_returns: StoredReturns | None,
        module_id: str | None,
        progress: ReturnProgress | None,
    ) -> None:
        from lightning_replay.table_replay import CurriculumReplay

        self._replay, self._converter, self._module_id = replay, converter, module_id
        self._returns, self._stored_returns = returns, stored_returns
        self.task_progress: TaskProgress | None = (
            TaskProgress(replay, progress) if isinstance(replay, CurriculumReplay) else None
        )
        self._interrupted = False

    @property
    def max_rows(self) -> int:
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
        if not flat:
            return flat
        columns, tables = flat[0].columns, self._replay.tables
        if not self._converter.columns:
            check_stacks(self._replay.storage, columns["observation"])
        steps = sum(len(one.episode) for one in flat)
        if flat[0].tasks is not None and tables is not None and len(tables) > 1:  # a table for each task
            steps = int(np.bincount(np.concatenate([one.tasks for one in flat])).max())
        if steps > self.max_rows:
            raise ValueError(
                f"capacity is {self.max_rows}, and {steps} steps came with one add(). Raise the capacity to that of "
                "several rounds of all EnvRunners, or shorten rollout_fragment_length"
            )
        if "state_out" in columns and self._module_id is not None:
            raise ValueError(
                f"module {self._module_id!r} is recurrent (its episodes carry state_out); recurrent modules are "
                "supported with one agent. Use modules without state"
            )
        if "state_out" in columns and self._stored_returns is not None:
            raise ValueError(
                "the module is recurrent (its episodes carry state_out) and learns from sequences of steps, and "
                f"{type(self._replay.writer).__name__} keeps single transitions, scattered over the episodes. Use "
                'replay_config("uniform", ...) or replay_config("prioritized", ...), or a module without state'
            )
        return flat

    def add(self, flat: Sequence[FlatEpisode]) -> tuple[int, int]:
        """Stores the new rows of checked episodes with one ``extend_columns``.

        Returns:
            The number of new steps, and of rows stored: writers may refuse rows or delay them.
        """
        stored = self._end_interrupted() if flat and self._interrupted else 0
        rows = self._converter.transitions(flat)
        if rows is None:
            return 0, stored
        if "state_out" in self._converter.columns:
            self._returns.attach(self._replay)  # from the first row on: sequences are drawn along the links
        try:
            index = self._replay.extend_columns(rows)
        except Exception:  # the Learner that measures new rows was lost, or a function of the user's raised
            self._converter.fragments.forget_running()  # the next fragments follow rows that are missing
            raise
        stored += len(index)
        if self._stored_returns is not None:
            stored += self._stored_returns.on_extend(rows[("trajectory",)], rows["next", "done"])
        if self.task_progress is not None:
            self.task_progress.update(self._converter.slices)
        self._replay.advance(env_steps=self._converter.fragments.steps)
        return len(rows[("trajectory",)]), stored

    def state(self) -> dict[str, Any]:
        """Returns plain values for :meth:`load_state`."""
        return {"task_progress": None if self.task_progress is None else self.task_progress.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state`. The episodes that ran are truncated once new steps arrive."""
        if self._stored_returns is not None:
            self._stored_returns.clear()
        self._interrupted = True
        if self.task_progress is not None:
            self.task_progress.load_state(state["task_progress"])

    def _end_interrupted(self) -> int:
        stored = len(self._replay.end_episodes())
        if self._stored_returns is not None:
            self._stored_returns.clear()
        self._converter.fragments.forget_running()
        if self.task_progress is not None:
            self.task_progress.forget_running()
        self._interrupted = False
        return stored
