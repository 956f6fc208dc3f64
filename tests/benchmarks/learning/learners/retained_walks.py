# SPDX-License-Identifier: Apache-2.0
"""Walks through three rooms with a retention buffer, event tables, or both: batches from two buffers."""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import Replay
from lightning_replay.writers import RetentionWriter
from tests.benchmarks.learning.learners.room_walks import StackedWalks
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN

_LEARNED = ("observation", "action", "next")


class SideBySide:
    """One or two buffers, each given every step, and batches with the rows of the first before those of the second.

    A buffer has one writer, so retention with event tables takes two buffers.

    Args:
        replays: the buffers, with batch sizes of their own.
    """

    def __init__(self, *replays: Replay) -> None:
        self.replays = replays

    def extend(self, steps: TensorDict) -> None:
        """Stores steps ``[N]`` in every buffer."""
        for replay in self.replays:
            replay.extend(steps)

    def sample(self) -> list[TensorDict]:
        """Returns a batch of each."""
        return [replay.sample() for replay in self.replays]

    def feed(self, batches: list[TensorDict], td_error: Tensor, values: Tensor) -> None:
        """Updates a retention buffer by TD errors ``[B]`` and action values ``[B, A]`` of the joined batches."""
        sizes = [len(batch) for batch in batches]
        parts = zip(self.replays, batches, td_error.split(sizes), values.split(sizes), strict=True)
        for replay, batch, errors, action_values in parts:
            if isinstance(replay.writer, RetentionWriter):
                replay.update_priority(batch, errors, action_values=action_values, action=batch["action"])


class RetainedWalks(StackedWalks):
    """The runs of :class:`StackedWalks`, whose buffers may retain by surprise.

    Updates have equal parts of every buffer and table: the rows of a draw are dealt to them in turn.
    """

    _replays: list[SideBySide]

    def advance(self) -> None:
        """Plays the steps of one draw, stores them, draws and learns."""
        for replay, steps in zip(self._replays, self._play().unbind(0), strict=True):
            replay.extend(steps)
        batches = [replay.sample() for replay in self._replays]
        rows = [torch.cat([batch.select(*_LEARNED) for batch in parts]) for parts in batches]
        td_errors, _ = self._agent.learn(rows, self._settings["updates_per_draw"], in_turn=True)
        values = self._agent.values(torch.stack([batch["observation"] for batch in rows]))  # after the updates
        fed = zip(self._replays, batches, td_errors, values, strict=True)
        for replay, parts, td_error, values in fed:
            replay.feed(parts, td_error, values)


def measure_surprise(agent: StackedDQN, run: int, replay: Replay) -> None:
    """Sets the surprise of a buffer's new rows, where it retains: the squared TD error of the run's agent."""
    if isinstance(replay.writer, RetentionWriter):
        replay.writer.initial_surprise = partial(agent.surprise, run)
