# SPDX-License-Identifier: Apache-2.0
"""TD errors of the Learners back to the rows of one module, and the surprise of new rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_ext.buffer.draws import Draws

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torch import Tensor

    from lightning_replay.replay import Replay
    from rllib_ext.buffer.sequence_priorities import SequencePriorities
    from rllib_ext.buffer.sequences import Sequences

ROWS_PER_PASS = 512  # new rows whose surprise is computed at once: 0.1 GB of Atari's stacks as floats

MeasureSurprise = Callable[[str, Sequence[Any]], np.ndarray]  # of a module's rows, pieces of a batch, in its order


class Expected(NamedTuple):
    """Rows in the order in which their TD errors will come back."""

    slots: Tensor
    generation: Tensor
    action: Tensor | None = None
    sequences: SequencePriorities | None = None


class Feedback:
    """Updates priorities and surprise of the rows drawn last.

    Call :meth:`expect` or :meth:`expect_sequences` after a draw, and :meth:`update` with the TD errors.

    Args:
        replay: whose rows are updated.
        draws: of it.
        module_id: the module, where there are several agents.
    """

    def __init__(self, replay: Replay, draws: Draws, module_id: str | None) -> None:
        self._replay, self._draws, self._module_id = replay, draws, module_id
        self._expected: Expected | None = None

    def set_initial_surprise(self, measure: MeasureSurprise) -> None:
        """Gives a replay that keeps rows by surprise a measure of it for new rows, unless it has one."""
        from lightning_replay.parts import declared_writer

        def surprise_of(rows: TensorDictBase) -> Tensor:
            import torch

            surprise = np.empty(len(rows), dtype=np.float32)
            for start in range(0, len(rows), ROWS_PER_PASS):
                # In the form of drawn rows, and copied: connectors may write into them.
                pieces = self._draws.pieces(rows[start : start + ROWS_PER_PASS].clone())
                places = np.concatenate([piece.places for piece in pieces])
                module_id = self._module_id or DEFAULT_MODULE_ID
                surprise[start + places] = measure(module_id, [piece.episode for piece in pieces])
            return torch.from_numpy(surprise)

        writer = declared_writer(self._replay.writer)
        if writer.needs_initial_surprise:
            writer.set_initial_surprise(surprise_of)

    def expect(self, batch: TensorDictBase, places: np.ndarray, action: tuple[str, ...] | None) -> None:
        """Keeps the identity of drawn rows.

        Args:
            batch: that was drawn.
            places: in the batch, int64 ``[B]``, in the order in which the TD errors will come back.
            action: column of the actions, where the replay keeps rows by action values.
        """
        if self._replay.takes_feedback:
            actions = None if action is None else batch.get(action)[places]
            self._expected = Expected(batch["index"][places], batch["generation"][places], actions)

    def expect_sequences(self, drawn: Sequences, num_learners: int, longest: int, burn_in: int) -> None:
        """Keeps the identity of the rows from which sequences were drawn.

        Raises:
            ValueError: a Learner would get nothing but burn-in.
        """
        from rllib_ext.buffer.sequence_priorities import SequencePriorities

        priorities = SequencePriorities(drawn.lengths.tolist(), num_learners, longest, burn_in)
        if self._replay.is_prioritized:
            self._expected = Expected(drawn.drawn, drawn.generation, sequences=priorities)

    def update(self, td_errors: Any) -> None:
        """Returns TD errors to the rows expected; replays without feedback ignore them.

        Args:
            td_errors: one for each row, or with what :func:`~rllib_ext.learner.signals.report_signals` adds,
                ``[B, 2 + A]``.

        Raises:
            ValueError: another number of them than of rows, no draw to update, or NaN or infinite values.
        """
        if not self._replay.takes_feedback:
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
        self._replay.update_priority(index, td_error, generation=generation, **signals)
        self._expected = None

    def clear(self) -> None:
        """Removes the expectation, as after a restore."""
        self._expected = None
