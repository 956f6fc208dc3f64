# SPDX-License-Identifier: Apache-2.0
"""The replay of one module: episodes in, pieces of a train batch out, TD errors back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_ext.buffer.frame_stacks import check_stacks
from rllib_ext.episodes.convert import EpisodeConverter, FlatEpisode
from rllib_ext.episodes.info_columns import Information
from rllib_ext.episodes.running import RunningEpisodes
from rllib_ext.episodes.task_progress import TaskProgress
from rllib_ext.learner.batch_layouts import LAYOUTS, DrawnRows, Piece

if TYPE_CHECKING:
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from tensordict import TensorDictBase
    from torch import Tensor

    from lightning_replay.replay import Replay
    from lightning_replay.schedulers.progress import ReturnProgress
    from rllib_ext.buffer.min_sizes import MinSizes
    from rllib_ext.buffer.sequence_priorities import SequencePriorities
    from rllib_ext.buffer.stored_n_step import FormedReturns


ROWS_PER_PASS = 512  # of newcomers whose surprise is computed: 0.1 GB of Atari's stacks as floats

MeasureSurprise = Callable[[str, Sequence[Any]], np.ndarray]  # of a module's rows, pieces of a batch, in its order


class Added(NamedTuple):
    """What came of an ``add``: steps that are new, and rows that entered."""

    steps: int
    stored: int


class _Expected(NamedTuple):
    """Rows in the order in which their TD errors will come back."""

    slots: Tensor
    generation: Tensor
    action: Tensor | None
    sequences: SequencePriorities | None


class ModuleReplay:
    """A :class:`~lightning_replay.replay.Replay` that takes RLlib's episodes and gives the Learner's.

    Call :meth:`flatten` and :meth:`add` with what EnvRunners send, :meth:`draw` for a batch, :meth:`expect` with the
    order in which its TD errors will come back, and :meth:`update` with them.

    Args:
        replay: where the rows are.
        layout: how drawn rows travel, a key of :data:`~rllib_ext.learner.batch_layouts.LAYOUTS`.
        seed: of the lengths of random n-step returns.
        module_id: the module, where there are several agents.
        information: which columns come from the infos.
        progress: what turns returns into progress signals, where the replay has a curriculum.
        min_sizes: how much a table must hold, where the replay has tables.
        measure: the surprise of newcomers, for replays that keep rows by it and have no measure of their own.
    """

    def __init__(
        self,
        replay: Replay,
        layout: str,
        seed: int | None = None,
        module_id: str | None = None,
        *,
        information: Information | None = None,
        progress: ReturnProgress | None = None,
        min_sizes: MinSizes | None = None,
        measure: MeasureSurprise | None = None,
    ) -> None:
        from lightning_replay.table_replay import CurriculumReplay
        from rllib_ext.buffer.sampled_n_step import AskedReturns
        from rllib_ext.buffer.stored_n_step import FormedReturns

        self.replay = replay
        self.converter = EpisodeConverter(information)
        self.task_progress = TaskProgress(replay, progress) if isinstance(replay, CurriculumReplay) else None
        self._min_sizes = min_sizes
        self.mean_n_step = 1.0
        self.layout = layout
        self._module_id = module_id
        self._returns = AskedReturns(seed)
        self._formed = FormedReturns.of(replay)
        self._follows_episodes = False
        self._draws = 0
        self._open: RunningEpisodes | FormedReturns = (
            self._formed
            if self._formed is not None and self._formed.waits
            else RunningEpisodes(replay, self.converter.fragments)
        )
        self._interrupted = False
        self._batch: TensorDictBase | None = None
        self._expected: _Expected | None = None
        if measure is not None:
            self.measure_newcomers(measure)

    def __len__(self) -> int:
        return len(self.replay)

    def measure_newcomers(self, measure: MeasureSurprise) -> None:
        """Gives a replay that keeps rows by surprise a measure of it for newcomers, unless it has one."""
        writer: Any = self.replay.writer
        if getattr(writer, "initial_surprise", measure) is None and writer.rule.takes_surprise:
            self._measure = measure
            writer.initial_surprise = self._surprise_of

    @property
    def room(self) -> int:
        """Most rows that can be stored at once; of a curriculum, of each task."""
        tables = self.replay.tables
        return self.replay.capacity if tables is None else int(tables.capacity[0])

    def flatten(self, episodes: Sequence[SingleAgentEpisode]) -> list[FlatEpisode]:
        """Checks episodes without storing them.

        Raises:
            ValueError: rows that do not fit the first ones, more of them than the buffer holds, observations whose
                frames cannot be stored once, or the steps of a recurrent module where there are several agents or rows
                are kept by importance.
        """
        flat = self.converter.flatten(episodes)
        if flat and self.converter.observation is None:
            check_stacks(self.replay.storage, flat[0].observation)
        self._check_room(flat)
        if flat and flat[0].state is not None:
            self._check_recurrent()
        return flat

    def add(self, flat: Sequence[FlatEpisode]) -> Added:
        """Stores the new rows of checked episodes with one ``extend``; writers may refuse rows or keep them back."""
        stored = self._close_interrupted() if flat and self._interrupted else 0
        rows = self.converter.transitions(flat)
        if rows is None:
            return Added(0, stored)
        if self.converter.state_out is not None:
            self.follow_episodes()  # from the first row on: sequences are drawn along the links
        try:
            index = self.replay.extend(rows)
        except Exception:  # the Learner that measures newcomers was lost, or a function of the user's raised
            self.converter.fragments.forget_running()  # what comes next follows on rows that are missing
            raise
        stored += len(index)
        stored += self._open.follow(rows, index)
        if self.task_progress is not None:
            self.task_progress.follow(self.converter.stretches)
        self.replay.advance(env_steps=self.converter.fragments.steps)
        return Added(len(rows), stored)

    def draw(self, num_items: int, n_step: int | tuple[int, int], gamma: float) -> list[Piece]:
        """Draws ``num_items`` rows as pieces, the longest first; see :meth:`RecipeEpisodeReplayBuffer.sample`."""
        if self._formed is not None:
            self._formed.check(n_step, gamma)
        elif n_step != 1 or self._follows_episodes:
            self._returns.ask(n_step, gamma)
            self.follow_episodes()
        self._count_draw()
        if self._min_sizes is not None:
            self._min_sizes.follow(num_items)
        self._batch = self.replay.sample(num_items)
        rows = self._as_drawn(self._batch)
        self.mean_n_step = rows.mean_n_step
        return LAYOUTS[self.layout](rows)

    def draw_sequences(self, num_steps: int, longest: int, burn_in: int, num_learners: int) -> list[SingleAgentEpisode]:
        """Draws sequences of ``num_steps`` steps together; see :func:`~rllib_ext.buffer.sequences.draw_sequences`.

        Args:
            num_steps: steps of the train batch.
            longest: ``max_seq_len`` of the module.
            burn_in: steps at the start of each sequence from which nothing is learned.
            num_learners: Learners the sequences are dealt out to.

        Raises:
            ValueError: the rows or the recipe cannot give sequences, or none is longer than the burn-in.
        """
        from rllib_ext.buffer.sequence_priorities import SequencePriorities
        from rllib_ext.buffer.sequences import draw_sequences, read_episodes

        self._check_sequences(longest, burn_in)
        self._count_draw()
        links, converter = self._returns.links, self.converter
        assert links is not None and converter.observation is not None
        assert converter.action is not None and converter.state_out is not None
        sequences = draw_sequences(self.replay, links, num_steps, longest, shortest=burn_in + 1)
        priorities = SequencePriorities(sequences.lengths.tolist(), num_learners, longest, burn_in)
        self.mean_n_step = 1.0
        if self.replay.is_prioritized:
            self._expected = _Expected(sequences.drawn, sequences.generation, None, priorities)
        return read_episodes(
            sequences, self.replay.storage, converter.observation, converter.action, converter.state_out
        )

    def expect(self, places: np.ndarray) -> None:
        """Keeps index and generation of the drawn rows in the order in which their TD errors will come back."""
        if self.replay.takes_feedback:
            assert self._batch is not None and self.converter.action is not None
            leaves = self.converter.action.leaves
            weighs = self._formed is not None and len(leaves) == 1  # others need no actions
            action = self._batch.get(leaves[0].key)[places] if weighs else None
            self._expected = _Expected(self._batch["index"][places], self._batch["generation"][places], action, None)
        self._batch = None

    def update(self, td_errors: Any) -> None:
        """Returns TD errors to the rows expected; replays that learn nothing from them ignore them.

        Args:
            td_errors: one for each row, or with what :func:`~rllib_ext.learner.signals.report_signals` adds,
                ``[B, 2 + A]``.

        Raises:
            ValueError: another number of them than of rows, no draw to update, or NaN or infinite values.
        """
        if not self.replay.takes_feedback:
            return
        if self._expected is None:
            raise ValueError(
                "update_priorities got TD errors, but nothing was drawn since the last update; sample first"
            )
        import torch

        index, generation, action, sequences = self._expected
        given: Any = np.asarray(td_errors)
        signals: dict[str, Tensor] = {}
        if sequences is not None:
            learned, given = sequences.of(given)
            index, generation = index[learned], generation[learned]
        elif given.ndim == 2 and given.shape[1] > 2:
            from rllib_ext.learner.signals import read_signals

            given, signals = read_signals(given, action)
        td_error = torch.as_tensor(given).reshape(-1)
        self.replay.update_priority(index, td_error, generation=generation, **signals)
        self._expected = None

    def follow_episodes(self) -> None:
        """Links rows to their successors from now on, those already stored included."""
        if not self._follows_episodes:
            self.replay.follow_episodes(self._returns)
            self._follows_episodes = True

    def state(self) -> dict[str, Any]:
        """Plain values beside the replay's own state: what is known of episodes and columns."""
        return {
            "converter": self.converter.state(),
            "draws": self._draws,
            "running": self._open.state(),
            "follows_episodes": self._follows_episodes,
            "task_progress": None if self.task_progress is None else self.task_progress.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned; call it before the replay is loaded.

        The episodes that ran are interrupted: they are closed as truncated once new steps arrive, until when contents
        and draws are those of the saved buffer.
        """
        self.converter.load_state(state["converter"])
        self._draws = state["draws"]
        self._open.load_state(state["running"])
        self._interrupted = True
        if self.task_progress is not None:
            self.task_progress.load_state(state["task_progress"])
        if state["follows_episodes"]:
            self.follow_episodes()
        self._batch = self._expected = None

    def _as_drawn(self, rows: TensorDictBase) -> DrawnRows:
        assert self.converter.observation is not None and self.converter.action is not None
        return DrawnRows(rows, self.converter.observation, self.converter.action, self._module_id)

    def _surprise_of(self, rows: TensorDictBase) -> Tensor:
        """Surprise ``[M]`` of new rows, which go to the Learner in the form in which they would be drawn."""
        import torch

        surprise = np.empty(len(rows), dtype=np.float32)
        for start in range(0, len(rows), ROWS_PER_PASS):
            part = rows[start : start + ROWS_PER_PASS].clone()  # connectors may write into what they get
            pieces = LAYOUTS[self.layout](self._as_drawn(part))
            places = np.concatenate([piece.places for piece in pieces])
            name = self._module_id or DEFAULT_MODULE_ID
            surprise[start + places] = self._measure(name, [piece.episode for piece in pieces])
        return torch.from_numpy(surprise)

    def _check_recurrent(self) -> None:
        if self._module_id is not None:
            raise ValueError(
                f"module {self._module_id!r} is recurrent (its episodes carry state_out); recurrent modules are "
                "supported with one agent. Use modules without state, or RLlib's own MultiAgentEpisodeReplayBuffer"
            )
        if self._formed is not None:
            raise ValueError(
                "the module is recurrent (its episodes carry state_out) and learns from sequences of steps, and "
                f"{type(self.replay.writer).__name__} keeps single transitions, scattered over the episodes. Use "
                'replay_config("uniform", ...) or replay_config("prioritized", ...), or a module without state'
            )

    def _check_room(self, flat: Sequence[FlatEpisode]) -> None:
        steps = sum(len(one.episode) for one in flat)
        tasks = [one.tasks for one in flat if one.tasks is not None]
        if tasks and self.replay.tables is not None and len(self.replay.tables) > 1:  # one for each task
            steps = int(np.bincount(np.concatenate(tasks)).max())
        if steps > self.room:
            raise ValueError(
                f"capacity is {self.room}, and {steps} steps came with one add(). Give the buffer room for several "
                "rounds of all EnvRunners, or shorten rollout_fragment_length"
            )

    def _count_draw(self) -> None:
        self._draws += 1
        self.replay.advance(updates=self._draws)

    def _check_sequences(self, longest: int, burn_in: int) -> None:
        from rllib_ext.buffer.sequences import check_sequences

        check_sequences(self.replay)
        if longest <= burn_in:
            raise ValueError(
                f"burn_in_len is {burn_in} and max_seq_len is {longest}: nothing is left to learn from. "
                "Give sequences longer than the burn-in"
            )
        if not len(self):
            raise RuntimeError("cannot sample from an empty replay buffer; call add first")
        if self.converter.state_out is None:
            raise ValueError(
                f"batch_length_T is {longest}: a recurrent module learns from sequences with its state, and the stored "
                "episodes carry no state_out among their extra model outputs. Fill the buffer with episodes that the "
                "module itself has played, from a new buffer on"
            )

    def _close_interrupted(self) -> int:
        """Ends the episodes that were running when the buffer was saved; how many rows entered."""
        stored = self._open.close()
        self.converter.fragments.forget_running()
        if self.task_progress is not None:
            self.task_progress.forget_running()
        self._interrupted = False
        return stored
