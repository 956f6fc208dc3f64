# SPDX-License-Identifier: Apache-2.0
"""Returns over several steps: formed when rows are drawn, or before they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.returns import EpisodeTracker
from lightning_replay.options import checked_counts
from lightning_replay.parts import as_replay_writer
from lightning_replay.state import SeededStateful
from lightning_replay.transforms import NStepTransitions

if TYPE_CHECKING:
    import numpy as np

    from lightning_replay.replay import Replay

MAX_LAG = 16  # calls of add() without a step of an episode, after which its partial transitions are flushed


class SampledReturns(SeededStateful, EpisodeTracker):
    """Forms returns over ``n_step`` steps, or a number drawn for each row. They are shorter if an episode ends earlier.

    Call :meth:`set_length` before each draw. RLlib's own buffers draw another row instead of a shorter return.
    """

    def __init__(self, seed: int | None = None) -> None:
        EpisodeTracker.__init__(self, n_steps=1, discount=0.99)
        # An offset: from the same seed as the sampler, lengths would be a function of the slots drawn.
        self._seed_generator(None if seed is None else seed + 1_000_003)
        self._shortest = 1
        self.is_attached: bool = False  # whether the rows of a replay are linked

    def attach(self, replay: Replay) -> None:
        """Links the rows of a replay to their successors from now on, stored ones included."""
        if not self.is_attached:
            replay.follow_episodes(self)
            self.is_attached = True

    def set_length(self, n_step: int | tuple[int, int] | list[int], gamma: float) -> None:
        """Sets the range of n, and γ. Raises ``ValueError`` for other lengths than one or two counts in order."""
        lengths = checked_counts("n_step", n_step if isinstance(n_step, list | tuple) else [n_step])
        if not 1 <= len(lengths) <= 2 or lengths[0] > lengths[-1]:
            raise ValueError(f"n_step is {n_step}; it must be a whole number from 1 on, or two of them in order")
        self._shortest = lengths[0]
        self.n_steps: int = lengths[-1]
        self.discount: float = gamma

    def _chain(self, index: Tensor, storage: Storage) -> tuple[Tensor, Tensor, Tensor]:
        # The longest returns first. If an interval was given, each row's return is cut to the length drawn for it.
        slots, last, steps_used = EpisodeTracker._chain(self, index, storage)
        if self._shortest == self.n_steps:
            return slots, last, steps_used
        longest = self.n_steps
        size = index.shape[:1]
        drawn = torch.randint(self._shortest, longest + 1, size, generator=self._generator, device="cpu")
        drawn = drawn.view(-1, *[1] * (index.ndim - 1)).expand(index.shape)
        steps_used = torch.minimum(steps_used, drawn.flatten())
        return slots, slots.gather(1, steps_used.unsqueeze(1) - 1).squeeze(1), steps_used

    def load_state_dict(self, state_dict: dict[str, Any], storage: Storage) -> None:  # type: ignore[override]
        """Restores the links and the generator."""
        EpisodeTracker.load_state_dict(self, state_dict, storage)
        self._restore_generator(state_dict)


class StoredReturns:
    """Returns formed by ``NStepTransitions`` at the insertion, and the flush of partial ones of lost episodes.

    An episode that breaks off, because its EnvRunner was lost or the algorithm was restored, leaves up to n - 1 partial
    transitions. EnvRunners send steps of every running episode with each round. If an episode sends none in
    :data:`MAX_LAG` calls, its partial transitions are flushed. If it continues after all, these returns are just
    shorter.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        transforms = (one for one in replay.transform if isinstance(one, NStepTransitions))
        self._transform: NStepTransitions | None = next(transforms, None)
        self._calls = 0
        self._continued: dict[int, int] = {}  # running trajectory -> the call that brought its newest step

    @classmethod
    def of(cls, replay: Replay) -> StoredReturns | None:
        """Returns ``None`` for replays that form returns at the draw."""
        returns = cls(replay)
        may_refuse = as_replay_writer(replay.writer).may_refuse
        return returns if may_refuse or returns._transform is not None else None

    def check(self, n_step: int | tuple[int, int], gamma: float) -> None:
        """Raises ``ValueError`` if a draw asks for other returns than were formed before rows were stored."""
        formed = self._transform
        n_steps, discount = (1, gamma) if formed is None else (formed.n_steps, formed.discount)
        if n_step == n_steps and (n_steps == 1 or gamma == discount):
            return
        stored = f"over {n_steps} step" + (f"s with gamma {discount}" if n_steps > 1 else "")
        raise ValueError(
            f"n_step is {n_step} with gamma {gamma}, and the returns of this buffer are formed before they are stored, "
            f"{stored}. Call rllib_ext.configure(config) last, which gives a recipe the values of "
            ".training(n_step=..., gamma=...); with a writer of your own, give the transform NStepTransitions(n, gamma)"
        )

    def on_extend(self, trajectory: np.ndarray, done: np.ndarray) -> int:
        """Flushes episodes that broke off, and returns the number of rows stored."""
        if self._transform is None:
            return 0
        self._calls += 1
        newest = dict(zip(trajectory.tolist(), done.flatten().tolist(), strict=True))
        for episode, has_ended in newest.items():
            self._continued.pop(episode, None)
            if not has_ended:
                self._continued[episode] = self._calls
        broken_off = [episode for episode, call in self._continued.items() if self._calls - call >= MAX_LAG]
        for episode in broken_off:
            del self._continued[episode]
        return len(self._replay.store_pending(broken_off)) if broken_off else 0

    def clear(self) -> None:
        """Forgets the steps that wait for their returns."""
        self._continued.clear()
