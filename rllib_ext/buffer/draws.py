# SPDX-License-Identifier: Apache-2.0
"""Batches from the replay of one module, as episodes for the Learners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rllib_ext.episodes.convert import EpisodeConverter
from rllib_ext.learner.batch_layouts import LAYOUTS, DrawnRows, Piece

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from lightning_replay.replay import Replay
    from rllib_ext.buffer.min_sizes import MinSizes
    from rllib_ext.buffer.sampled_n_step import AskedReturns
    from rllib_ext.buffer.sequences import Sequences
    from rllib_ext.buffer.stored_n_step import FormedReturns


class Draws:
    """Draws rows, or sequences for a recurrent module.

    Arguments are those of :class:`~rllib_ext.buffer.module_replay.ModuleReplay`, and its two kinds of returns.

    Attributes:
        count: draws since the start.
        mean_n_step: steps per row of the last draw.
    """

    def __init__(
        self,
        replay: Replay,
        converter: EpisodeConverter,
        returns: AskedReturns,
        formed: FormedReturns | None,
        layout: str,
        module_id: str | None,
        min_sizes: MinSizes | None,
    ) -> None:
        self._replay, self._converter, self._returns, self._formed = replay, converter, returns, formed
        self._module_id, self._min_sizes = module_id, min_sizes
        self.layout = layout
        self.count = 0
        self.mean_n_step = 1.0

    def rows(self, num_items: int, n_step: int | tuple[int, int], gamma: float) -> tuple[TensorDictBase, list[Piece]]:
        """Draws ``num_items`` rows; returns them, and their pieces, the longest first.

        Raises:
            ValueError: other returns than those stored.
        """
        if self._formed is not None:
            self._formed.check(n_step, gamma)
        elif n_step != 1 or self._returns.is_attached:
            self._returns.ask(n_step, gamma)
            self._returns.attach(self._replay)
        self._advance()
        if self._min_sizes is not None:
            self._min_sizes.follow(num_items)
        batch = self._replay.sample(num_items)
        rows = self._as_drawn(batch)
        self.mean_n_step = rows.mean_n_step
        return batch, LAYOUTS[self.layout](rows)

    def pieces(self, rows: TensorDictBase) -> list[Piece]:
        """Returns any rows in the form of drawn ones."""
        return LAYOUTS[self.layout](self._as_drawn(rows))

    def sequences(self, num_steps: int, longest: int, burn_in: int) -> tuple[Sequences, list[Any]]:
        """Draws sequences of ``num_steps`` steps together; returns them, and an episode for each.

        See :func:`~rllib_ext.buffer.sequences.draw_sequences`; from the first ``burn_in`` steps nothing is learned.

        Raises:
            ValueError: the rows or the recipe cannot give sequences, or none is longer than the burn-in.
        """
        from rllib_ext.buffer.sequences import check_sequences, draw_sequences, read_episodes

        check_sequences(self._replay)
        converter = self._converter
        if longest <= burn_in:
            raise ValueError(
                f"burn_in_len is {burn_in} and max_seq_len is {longest}: nothing is left to learn from. "
                "Give sequences longer than the burn-in"
            )
        if not len(self._replay):
            raise RuntimeError("cannot sample from an empty replay buffer; call add first")
        if converter.state_out is None:
            raise ValueError(
                f"batch_length_T is {longest}: a recurrent module learns from sequences with its state, and the stored "
                "episodes carry no state_out among their extra model outputs. Fill the buffer with episodes that the "
                "module itself has played, from a new buffer on"
            )
        self._advance()
        assert self._returns.links is not None and converter.observation is not None and converter.action is not None
        drawn = draw_sequences(self._replay, self._returns.links, num_steps, longest, shortest=burn_in + 1)
        self.mean_n_step = 1.0
        storage = self._replay.storage
        return drawn, read_episodes(drawn, storage, converter.observation, converter.action, converter.state_out)

    def _advance(self) -> None:
        self.count += 1
        self._replay.advance(updates=self.count)

    def _as_drawn(self, rows: TensorDictBase) -> DrawnRows:
        assert self._converter.observation is not None and self._converter.action is not None
        return DrawnRows(rows, self._converter.observation, self._converter.action, self._module_id)
