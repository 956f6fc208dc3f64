# SPDX-License-Identifier: Apache-2.0
"""Returns over several steps that are formed before their rows are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_replay.parts import declared_writer
from lightning_replay.transforms import NStepTransitions

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from lightning_replay.replay import Replay

PATIENCE = 16  # calls of add() without a step of an episode, after which its partial transitions are flushed


class FormedReturns:
    """Returns formed by ``NStepTransitions`` at the insertion, and the flush of partial ones of lost episodes.

    Rows that are kept by importance are scattered: the steps that follow a drawn row may be evicted. So a row is stored
    n - 1 steps after it arrived. An episode that breaks off, because its EnvRunner was lost or the algorithm was
    restored, leaves up to n - 1 partial transitions. EnvRunners send steps of every running episode with each round, so
    the partial transitions of an episode without any in :data:`PATIENCE` calls are flushed, bootstrapped from its last
    observation. If it continues after all, these returns are just shorter.

    Args:
        replay: see :meth:`of`.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        transforms = (one for one in replay.transform if isinstance(one, NStepTransitions))
        self._transform: NStepTransitions | None = next(transforms, None)
        self._calls = 0
        self._continued: dict[int, int] = {}  # running trajectory -> the call that brought its newest step, in order

    @classmethod
    def of(cls, replay: Replay) -> FormedReturns | None:
        """Returns ``None`` for replays that form returns at the draw."""
        formed = cls(replay)
        is_scattered = declared_writer(replay.writer).may_refuse
        return formed if is_scattered or formed.waits else None

    @property
    def n_steps(self) -> int:
        """Number of rewards in a return."""
        return 1 if self._transform is None else self._transform.n_steps

    @property
    def waits(self) -> bool:
        """Whether rows are stored later than their steps come."""
        return self._transform is not None

    def check(self, n_step: int | tuple[int, int], gamma: float) -> None:
        """Refuses other returns than those that are stored."""
        discount = gamma if self._transform is None else self._transform.discount
        if n_step == self.n_steps and (self.n_steps == 1 or gamma == discount):
            return
        stored = f"over {self.n_steps} step" + (f"s with gamma {discount}" if self.n_steps > 1 else "")
        raise ValueError(
            f"n_step is {n_step} with gamma {gamma}, and the returns of this buffer are formed before they are stored, "
            f"{stored}. Call rllib_ext.configure(config) last, which tells the buffer what .training(n_step=..., "
            "gamma=...) says"
        )

    def follow(self, rows: TensorDictBase) -> int:
        """Notes the rows of an ``extend``; flushes episodes that broke off and returns the number of rows stored."""
        if self._transform is None:
            return 0
        self._calls += 1
        newest = dict(zip(rows["trajectory"].tolist(), rows["next", "done"].flatten().tolist(), strict=True))
        for trajectory, done in newest.items():
            self._continued.pop(trajectory, None)
            if not done:
                self._continued[trajectory] = self._calls
        broken_off = []
        for trajectory, call in self._continued.items():
            if self._calls - call < PATIENCE:
                break
            broken_off.append(trajectory)
        for trajectory in broken_off:
            del self._continued[trajectory]
        return len(self._replay.flush(broken_off)) if broken_off else 0

    def forget(self) -> None:
        """Forgets the running episodes, all of which have ended."""
        self._continued.clear()
