# SPDX-License-Identifier: Apache-2.0
"""n-step rows whose length RLlib passes with each draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.tracker import EpisodeTracker
from lightning_replay.seeded import Seeded
from lightning_replay.validation import checked_counts

if TYPE_CHECKING:
    from lightning_replay.replay import Replay


class AskedReturns(Seeded, EpisodeTracker):
    """Forms returns over ``n_step`` steps, or over a number drawn for each row from a closed interval.

    RLlib passes ``n_step`` and ``gamma`` when it samples, long after the buffer was built: call :meth:`ask` before each
    draw. Where an episode, or its stored part, ends earlier, the return is shorter, by ``steps_to_next_obs``. RLlib's
    own buffers draw another row instead, and so never start in the last ``n_step - 1`` steps of an episode.

    Args:
        seed: of the lengths drawn.

    Attributes:
        is_attached: whether the rows of a replay are linked.
    """

    def __init__(self, seed: int | None = None) -> None:
        EpisodeTracker.__init__(self, n_steps=1, discount=0.99)
        # An offset: from the same seed as the sampler, lengths would be a function of the slots drawn.
        self._seed_generator(None if seed is None else seed + 1_000_003)
        self._shortest = 1
        self.is_attached = False

    def attach(self, replay: Replay) -> None:
        """Links the rows of a replay to their successors from now on, those already stored included."""
        if not self.is_attached:
            replay.follow_episodes(self)
            self.is_attached = True

    def ask(self, n_step: int | tuple[int, int] | list[int], gamma: float) -> None:
        """Sets the length and the discount of the next draws.

        Raises:
            ValueError: neither a number from 1 on nor two such numbers in order.
        """
        lengths = checked_counts("n_step", n_step if isinstance(n_step, list | tuple) else [n_step])
        if not 1 <= len(lengths) <= 2 or lengths[0] > lengths[-1]:
            raise ValueError(f"n_step is {n_step}; it must be a whole number from 1 on, or two of them in order")
        shortest, longest = lengths[0], lengths[-1]
        self._shortest, self.n_steps, self.discount = shortest, longest, gamma

    def _chain(self, index: Tensor, storage: Storage) -> tuple[Tensor, Tensor, Tensor]:
        slots, last, steps_used = EpisodeTracker._chain(self, index, storage)
        if self._shortest == self.n_steps:
            return slots, last, steps_used
        drawn = torch.randint(self._shortest, self.n_steps + 1, index.shape[:1], generator=self._generator)
        drawn = drawn.to(slots.device).view(-1, *[1] * (index.ndim - 1)).expand(index.shape)
        steps_used = torch.minimum(steps_used, drawn.flatten())
        return slots, slots.gather(1, steps_used.unsqueeze(1) - 1).squeeze(1), steps_used

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of links and generator."""
        return {**super().state_dict(), "generator": self.generator_state()}

    def load_state_dict(self, state_dict: dict[str, Any], storage: Storage) -> None:
        """Restores :meth:`state_dict`."""
        super().load_state_dict(state_dict, storage)
        self.set_generator_state(state_dict["generator"])
