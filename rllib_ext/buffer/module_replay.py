# SPDX-License-Identifier: Apache-2.0
"""The replay of one module: episodes in, pieces of a train batch out, TD errors back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_ext.buffer.draws import Draws
from rllib_ext.buffer.feedback import Feedback, MeasureSurprise
from rllib_ext.buffer.intake import Intake
from rllib_ext.episodes.convert import EpisodeConverter
from rllib_ext.episodes.info_columns import Information
from rllib_ext.learner.batch_layouts import Piece

if TYPE_CHECKING:
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from tensordict import TensorDictBase

    from lightning_replay.replay import Replay
    from lightning_replay.schedulers.progress import ReturnProgress
    from rllib_ext.buffer.min_sizes import MinSizes


class ModuleReplay:
    """A :class:`~lightning_replay.replay.Replay` for RLlib's episodes, TD errors and Learners.

    Call :meth:`Intake.flatten` and :meth:`Intake.add` with what EnvRunners send, :meth:`draw` for a batch,
    :meth:`expect` with the order in which its TD errors will come back, and :meth:`Feedback.update` with them.

    Args:
        replay: where the rows are.
        layout: of drawn rows, a key of :data:`~rllib_ext.learner.batch_layouts.LAYOUTS`.
        seed: of the lengths of random n-step returns.
        module_id: the module, where there are several agents.
        information: which columns come from the infos.
        progress: turns returns into progress signals, where the replay has a curriculum.
        min_sizes: least sizes of tables, where the replay has tables.
        measure: the surprise of new rows, for replays that keep rows by it and have no measure of their own.

    Attributes:
        converter: from episodes to rows; describes the stored columns.
        intake, draws, feedback: the three directions.
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
        from rllib_ext.buffer.sampled_n_step import AskedReturns
        from rllib_ext.buffer.stored_n_step import FormedReturns

        self.replay = replay
        self.converter = EpisodeConverter(information)
        self._returns, self._formed = AskedReturns(seed), FormedReturns.of(replay)
        self.intake = Intake(replay, self.converter, self._returns, self._formed, module_id, progress)
        self.draws = Draws(replay, self.converter, self._returns, self._formed, layout, module_id, min_sizes)
        self.feedback = Feedback(replay, self.draws, module_id)
        self._batch: TensorDictBase | None = None
        if measure is not None:
            self.feedback.set_initial_surprise(measure)

    def __len__(self) -> int:
        return len(self.replay)

    def draw(self, num_items: int, n_step: int | tuple[int, int], gamma: float) -> list[Piece]:
        """Draws ``num_items`` rows as pieces, see :meth:`Draws.rows`."""
        self._batch, pieces = self.draws.rows(num_items, n_step, gamma)
        return pieces

    def expect(self, places: np.ndarray) -> None:
        """Passes the rows of :meth:`draw` on to :meth:`Feedback.expect`."""
        assert self._batch is not None and self.converter.action is not None
        leaves = self.converter.action.leaves
        weighs = self._formed is not None and len(leaves) == 1  # others need no actions
        self.feedback.expect(self._batch, places, leaves[0].key if weighs else None)
        self._batch = None

    def draw_sequences(self, num_steps: int, longest: int, burn_in: int, num_learners: int) -> list[SingleAgentEpisode]:
        """Draws sequences as episodes, see :meth:`Draws.sequences`, for a number of Learners."""
        drawn, episodes = self.draws.sequences(num_steps, longest, burn_in)
        self.feedback.expect_sequences(drawn, num_learners, longest, burn_in)
        return episodes

    def state(self) -> dict[str, Any]:
        """Returns plain values beside the replay's own state."""
        return {
            "converter": self.converter.state(),
            "draws": self.draws.count,
            "follows_episodes": self._returns.is_attached,
            **self.intake.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state`; call it before the replay is loaded.

        The episodes that ran are truncated once new steps arrive; until then contents and draws are those of the saved
        buffer.
        """
        self.converter.load_state(state["converter"])
        self.draws.count = state["draws"]
        self.intake.load_state(state)
        if state["follows_episodes"]:
            self._returns.attach(self.replay)
        self.feedback.clear()
        self._batch = None
