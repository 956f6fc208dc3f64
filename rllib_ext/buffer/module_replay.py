# SPDX-License-Identifier: Apache-2.0
"""The replay of one module: episodes in, pieces of a train batch out, TD errors back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_ext.buffer.building import built
from rllib_ext.buffer.images import check_stacks
from rllib_ext.episodes import TASK, EpisodeConverter, FlatEpisode, Information, TaskProgress
from rllib_ext.learner.blocks import LAYOUTS, DrawnRows, Piece

if TYPE_CHECKING:
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from tensordict import TensorDictBase
    from torch import Tensor

    from lightning_replay.parts import DrawPart, PartDraw
    from lightning_replay.replay import Replay
    from lightning_replay.samplers.tables import ScheduledSampler, TableShares
    from lightning_replay.schedulers import ReturnProgress
    from rllib_ext.buffer.sequences import SequencePriorities

ROWS_PER_PASS = 512  # new rows whose surprise is computed at once: 0.1 GB of Atari's stacks as floats
MeasureSurprise = Callable[[str, Sequence[Any]], np.ndarray]  # of a module's rows, pieces of a batch, in its order


class ModuleReplay:
    """A :class:`~lightning_replay.replay.Replay` for RLlib's episodes, TD errors and Learners.

    Call :meth:`flatten` and :meth:`add` with the episodes of EnvRunners, :meth:`draw` for a batch, :meth:`expect` with
    the order in which its TD errors will come back, and :meth:`update` with them.

    Args:
        replay: stores the rows.
        layout: of drawn rows, a key of :data:`~rllib_ext.learner.blocks.LAYOUTS`.
        seed: of the lengths of random n-step returns.
        module_id: the module, where there are several agents.
        information: which columns come from the infos.
        progress: turns returns into progress signals of a curriculum.
        min_sizes: least sizes of the replay's tables, if they follow the size of the batch.
        measure: see :meth:`set_initial_surprise`.

    Attributes:
        converter: from episodes to rows; describes the stored columns.
        task_progress: of a curriculum.
        mean_n_step: steps per row of the last draw.
    """

    def __init__(
        self,
        replay: Replay,
        layout: str,
        seed: int | None,
        module_id: str | None,
        *,
        information: Information,
        progress: ReturnProgress | None,
        min_sizes: MinSizes | None,
        measure: MeasureSurprise | None,
    ) -> None:
        from lightning_replay.table_replay import CurriculumReplay
        from rllib_ext.buffer.n_step import SampledReturns, StoredReturns

        self.replay: Replay = replay
        self.layout: str = layout
        self.converter: EpisodeConverter = EpisodeConverter(information)
        self.task_progress: TaskProgress | None = (
            TaskProgress(replay, progress) if isinstance(replay, CurriculumReplay) else None
        )
        self._returns, self._stored_returns = SampledReturns(seed), StoredReturns.of(replay)
        self._module_id, self._min_sizes = module_id, min_sizes
        self._interrupted = False
        self._num_draws = 0
        self.mean_n_step: float = 1.0
        self._batch: TensorDictBase | None = None
        self._expected: Expected | None = None
        if measure is not None:
            self.set_initial_surprise(measure)

    def __len__(self) -> int:
        return len(self.replay)

    @property
    def max_rows(self) -> int:
        """Most rows that can be stored at once; of a curriculum, of each task."""
        tables = self.replay.tables
        return self.replay.capacity if tables is None else int(tables.capacity[0])

    def flatten(self, episodes: Sequence[SingleAgentEpisode]) -> list[FlatEpisode]:
        flat = self.converter.flatten(episodes)
        if not flat:
            return flat
        columns = flat[0].columns
        if not self.converter.columns:  # the first rows decide what fits
            check_stacks(self.replay.storage, columns["observation"])
        steps, max_rows = sum(len(one.episode) for one in flat), self.max_rows
        if (TASK,) in flat[0].arrays and len(self.replay.tables or ()) > 1:  # a table for each task
            steps = int(np.bincount(np.concatenate([one.arrays[(TASK,)] for one in flat])).max())
        if steps > max_rows:
            raise ValueError(
                f"capacity is {max_rows}, and {steps} steps came with one add(). Raise the capacity to that of "
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
                f"{type(self.replay.writer).__name__} keeps single transitions, scattered over the episodes. Use "
                'replay_config("uniform", ...) or replay_config("prioritized", ...), or a module without state'
            )
        return flat

    def add(self, flat: Sequence[FlatEpisode]) -> Added:
        fragments, stored = self.converter.fragments, 0
        rows_before, episodes_before = len(self.replay), fragments.episodes
        if flat and self._interrupted:  # the episodes that ran before a load
            stored = len(self.replay.end_episodes())
            self._interrupted = False
            fragments.forget_running()
            if self._stored_returns is not None:
                self._stored_returns.clear()
            if self.task_progress is not None:
                self.task_progress.forget_running()
        rows = self.converter.transitions(flat)
        if rows is None:  # each fragment was sent before
            return Added(0, rows_before + stored - len(self.replay), 0)
        if "state_out" in self.converter.columns:
            self._returns.attach(self.replay)  # from the first row on: sequences are drawn along the links
        try:
            stored += len(self.replay.extend_columns(rows))
        except Exception:  # the Learner that measures new rows was lost, or a function of the user's raised
            fragments.forget_running()  # the next fragments follow rows that are missing
            raise
        trajectory = rows[("trajectory",)]
        if self._stored_returns is not None:
            stored += self._stored_returns.on_extend(trajectory, rows["next", "done"])
        if self.task_progress is not None:
            self.task_progress.update(self.converter.slices)
        # Schedules by environment steps go on after the rows are in: a refused add changes none.
        self.replay.advance(env_steps=fragments.steps)
        return Added(len(trajectory), rows_before + stored - len(self.replay), fragments.episodes - episodes_before)

    def draw(self, num_items: int, n_step: int | tuple[int, int], gamma: float) -> list[Piece]:
        """Draws ``num_items`` rows as pieces, the longest first."""
        self._set_returns(n_step, gamma)
        self._advance()
        if self._min_sizes is not None:
            self._min_sizes.update(num_items)
        self._batch = self.replay.sample(num_items)
        rows = self._drawn_rows(self._batch)
        self.mean_n_step = rows.mean_n_step
        return LAYOUTS[self.layout](rows)

    def draw_part(
        self, part: DrawPart, n_step: int | tuple[int, int], gamma: float, *, env_steps: int, updates: int
    ) -> DrawnPart:
        """Draws this replay's rows of a batch divided over several replays, by the clocks of all of them together."""
        self._set_returns(n_step, gamma)
        self._num_draws = updates
        self.replay.advance(env_steps=env_steps, updates=updates)
        batch, reply = self.replay.sample_part(part)
        rows = self._drawn_rows(batch)
        self.mean_n_step = rows.mean_n_step
        (piece,) = rows.flagged()
        slot, generation = (batch[name].cpu().numpy() for name in ("index", "generation"))
        return DrawnPart(piece.episode, slot, generation, reply, self.mean_n_step)

    def set_min_sizes(self, batch_size: int, held: np.ndarray) -> None:
        if self._min_sizes is not None:
            self._min_sizes.update(batch_size, held)

    def expect(self, places: np.ndarray) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        if self.replay.takes_feedback:
            key = self.converter.columns["action"].leaves[0].key
            actions = batch.get(key)[places] if self._reads_actions else None
            self._expected = Expected(batch["index"][places], batch["generation"][places], actions)

    def draw_sequences(self, num_steps: int, longest: int, burn_in: int, num_learners: int) -> list[SingleAgentEpisode]:
        """Draws sequences of ``num_steps`` steps together; from the first ``burn_in`` of each nothing is learned."""
        from rllib_ext.buffer.sequences import SequencePriorities, check_sequences, draw_sequences, read_episodes

        check_sequences(self.replay)
        if longest <= burn_in:
            raise ValueError(
                f"burn_in_len is {burn_in} and max_seq_len is {longest}: nothing is left to learn from. "
                "Give sequences longer than the burn-in"
            )
        if not len(self.replay):
            raise RuntimeError("cannot sample from an empty replay buffer; call add first")
        if "state_out" not in self.converter.columns:
            raise ValueError(
                f"batch_length_T is {longest}: a recurrent module learns from sequences with its state, and the stored "
                "episodes carry no state_out among their extra model outputs. Fill the buffer with episodes that the "
                "module itself has played, from a new buffer on"
            )
        self._advance()
        assert self._returns.links is not None
        drawn = draw_sequences(self.replay, self._returns.links, num_steps, longest, shortest=burn_in + 1)
        self.mean_n_step = 1.0
        episodes = read_episodes(drawn, self.replay.storage, self.converter.columns)
        priorities = SequencePriorities(drawn.lengths.tolist(), num_learners, longest, burn_in)
        if self.replay.is_prioritized:
            self._expected = Expected(drawn.drawn, drawn.generation, sequences=priorities)
        return episodes

    def update(self, td_errors: Any) -> None:
        """Updates the rows drawn last; replays without feedback ignore TD errors.

        Args:
            td_errors: one for each row, or ``[B, 2 + A]`` of :func:`~rllib_ext.learner.signals.report_signals`.
        """
        if not self.replay.takes_feedback:
            return
        if self._expected is None:
            raise ValueError(
                "update_priorities got TD errors, but nothing was drawn since the last update; sample first"
            )
        # The generations are those of the draw: rows written anew since then get no TD error.
        index, generation, action, sequences = self._expected
        given: Any = np.asarray(td_errors)
        if sequences is not None:
            learned, given = sequences.of(given)
            index, generation = index[learned], generation[learned]
        self._update_rows(index, generation, given, action)
        self._expected = None  # after the update: refused TD errors may be given again, corrected

    def update_part(self, slot: np.ndarray, generation: np.ndarray, td_errors: np.ndarray) -> None:
        """Updates rows that :meth:`draw_part` drew, in any order; arguments as there and as for :meth:`update`."""
        if not self.replay.takes_feedback:
            return
        import torch

        from lightning_replay.storage.packed import read_columns

        # Copies, because arrays from Ray's object store cannot be written to, of which torch warns.
        index, action = torch.tensor(slot, device="cpu"), None
        if self._reads_actions and td_errors.ndim == 2:
            (action,) = read_columns(self.replay.storage, index, [self.converter.columns["action"].leaves[0].key])
        self._update_rows(index, torch.tensor(generation, device="cpu"), td_errors.copy(), action)

    @property
    def _reads_actions(self) -> bool:
        return self._stored_returns is not None and len(self.converter.columns["action"].leaves) == 1

    def _update_rows(self, index: Tensor, generation: Tensor, given: np.ndarray, action: Tensor | None) -> None:
        import torch

        signals: dict[str, Tensor] = {}
        if given.ndim == 2 and given.shape[1] > 2:
            columns = torch.as_tensor(given, dtype=torch.float32, device="cpu")
            if action is not None:
                signals = {"surprise": columns[:, 1], "action_values": columns[:, 2:], "action": action}
            given = given[:, 0]  # the TD errors alone are priorities
        td_error = torch.as_tensor(given, device="cpu").reshape(-1)
        self.replay.update_priority(index, td_error, generation=generation, **signals)

    def set_initial_surprise(self, measure: MeasureSurprise) -> None:
        """Gives a replay that keeps rows by surprise a measure of it for new rows, unless it has one."""
        from lightning_replay.parts import declared_writer

        def surprise_of(rows: TensorDictBase) -> Tensor:
            import torch

            surprise = np.empty(len(rows), dtype=np.float32)
            for start in range(0, len(rows), ROWS_PER_PASS):
                # In the form of drawn rows, and copied: connectors may write into them.
                pieces = LAYOUTS[self.layout](self._drawn_rows(rows[start : start + ROWS_PER_PASS].clone()))
                places = np.concatenate([piece.places for piece in pieces])
                module_id = self._module_id or DEFAULT_MODULE_ID
                surprise[start + places] = measure(module_id, [piece.episode for piece in pieces])
            return torch.from_numpy(surprise)

        writer = declared_writer(self.replay.writer)
        if writer.needs_initial_surprise:
            writer.set_initial_surprise(surprise_of)

    def state(self) -> dict[str, Any]:
        return {
            "converter": self.converter.state(),
            "draws": self._num_draws,
            "follows_episodes": self._returns.is_attached,
            "task_progress": None if self.task_progress is None else self.task_progress.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.converter.load_state(state["converter"])
        self._num_draws = state["draws"]
        # Episodes that ran are truncated once new steps arrive; until then contents and draws are those of the save.
        self._interrupted = True
        if self._stored_returns is not None:
            self._stored_returns.clear()
        if self.task_progress is not None:
            self.task_progress.load_state(state["task_progress"])
        if state["follows_episodes"]:
            self._returns.attach(self.replay)
        self._batch = self._expected = None

    def _set_returns(self, n_step: int | tuple[int, int], gamma: float) -> None:
        if self._stored_returns is not None:
            self._stored_returns.check(n_step, gamma)
        elif n_step != 1 or self._returns.is_attached:
            self._returns.set_length(n_step, gamma)
            self._returns.attach(self.replay)

    def _advance(self) -> None:
        self._num_draws += 1
        self.replay.advance(updates=self._num_draws)

    def _drawn_rows(self, rows: TensorDictBase) -> DrawnRows:
        columns = self.converter.columns
        return DrawnRows(rows, columns["observation"], columns["action"], self._module_id)


class Added(NamedTuple):
    """What a call of :meth:`ModuleReplay.add` changed; ``rows_evicted`` counts rows that a writer refused too."""

    steps: int
    rows_evicted: int
    episodes: int


class Expected(NamedTuple):
    """Rows in the order in which their TD errors will come back."""

    slots: Tensor
    generation: Tensor
    action: Tensor | None = None
    sequences: SequencePriorities | None = None


class DrawnPart(NamedTuple):
    """Rows of a batch that is divided over several replays.

    Attributes:
        block: the rows, a :class:`~rllib_ext.learner.blocks.FlaggedBlock`.
        slot: int64 ``[n]``, or ``[n, 2]`` of pairs.
        generation: int64, of the slots.
        reply: how likely each row was, and the totals of the replay.
        mean_n_step: steps per row.
    """

    block: SingleAgentEpisode
    slot: np.ndarray
    generation: np.ndarray
    reply: PartDraw
    mean_n_step: float


class MinSizes:
    """Sets the least sizes that were not given to the size of the batch, which RLlib passes with each draw.

    RLlib draws as soon as its warm-up is over: while no table with a share holds a whole batch, the longest is drawn
    from. A ``min_size`` that is given in the ``options`` of the recipe is kept.
    """

    def __init__(self, replay: Replay, options: Mapping[str, Any]) -> None:
        from lightning_replay.samplers.tables import ScheduledSampler, TableShares
        from lightning_replay.writers.tables import DEFAULT_TABLE

        sampler, is_unset = replay.sampler, options.get("min_size") is None
        self._replay = replay
        self._scheduled: ScheduledSampler | None = None
        self._shares: TableShares | None = None
        if isinstance(sampler, ScheduledSampler) and "tasks" in options and is_unset:
            self._scheduled = sampler
        if isinstance(sampler, TableShares) and "tables" in options:
            self._shares = sampler
            self._unset = [table.name for table in built(options["tables"], "tables") if table.min_size is None]
            if is_unset:
                self._unset.append(DEFAULT_TABLE)

    def update(self, batch_size: int, held: np.ndarray | None = None) -> None:
        """Sets the sizes before a draw; ``held`` are the entries of each table, where they lie in other replays."""
        if self._scheduled is None and self._shares is None:
            return
        tables = self._replay.tables
        assert tables is not None
        held = tables.length if held is None else held
        if self._shares is not None:
            held = held[[self._shares.table_shares[name] > 0 for name in tables.names]]
        reachable = min(batch_size, max(1, int(held.max())))
        if self._scheduled is not None:
            self._scheduled.min_size = min(reachable, int(tables.capacity[0]))
        if self._shares is not None:
            sizes = {name: min(reachable, int(tables.capacity[tables.number(name)])) for name in self._unset}
            if not sizes.items() <= self._shares.min_sizes.items():
                self._shares.set_min_sizes(sizes)
