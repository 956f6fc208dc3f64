# SPDX-License-Identifier: Apache-2.0
"""Rows that were drawn from the replay of a module, and wait for their TD errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from torch import Tensor

    from lightning_replay.draw_parts import PartDraw
    from rllib_ext.buffer.sequence_priorities import SequencePriorities


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
