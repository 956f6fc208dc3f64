# SPDX-License-Identifier: Apache-2.0
"""Returns over several steps that are formed before their rows are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_replay.transforms import NStepTransitions
from lightning_replay.writers import RetentionWriter

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torch import Tensor

    from lightning_replay.replay import Replay

PATIENCE = 16  # calls of add() without a step of an episode, after which nobody waits for its next one


class FormedReturns:
    """Knows over how many steps a replay forms its returns, and stores what waits for steps that never come.

    Rows that are kept by importance are scattered: the steps that follow a drawn row need not be there any more. So
    their returns are formed on the way in, by ``NStepTransitions``, and a row is stored n - 1 steps after it came. An
    episode that breaks off, because its EnvRunner was lost or the algorithm was restored, leaves up to n - 1 steps
    waiting. EnvRunners send steps of every running episode with each round, so an episode that got none in
    :data:`PATIENCE` calls is taken to have broken off; its last steps are stored with the rewards there are and
    bootstrapped from the last observation there is. Should it go on after all, nothing is wrong: these returns are just
    shorter.

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
        """``None`` for replays that form returns when they draw."""
        formed = cls(replay)
        is_scattered = isinstance(replay.writer, RetentionWriter)
        return formed if is_scattered or formed.waits else None

    @property
    def n_steps(self) -> int:
        """Rewards in a return."""
        return 1 if self._transform is None else self._transform.n_steps

    @property
    def waits(self) -> bool:
        """Whether rows are stored later than their steps come."""
        return self._transform is not None

    def check(self, n_step: int | tuple[int, int], gamma: float) -> None:
        """Refuses other returns than those that are stored.

        Raises:
            ValueError: with what is stored and what was asked for.
        """
        discount = gamma if self._transform is None else self._transform.discount
        if n_step == self.n_steps and (self.n_steps == 1 or gamma == discount):
            return
        stored = f"over {self.n_steps} step" + (f"s with gamma {discount}" if self.n_steps > 1 else "")
        raise ValueError(
            f"n_step is {n_step} with gamma {gamma}, and the returns of this buffer are formed before they are stored, "
            f"{stored}. Call rllib_ext.configure(config) last, which tells the buffer what .training(n_step=..., "
            "gamma=...) says"
        )

    def follow(self, rows: TensorDictBase, index: Tensor) -> int:
        """Called with what was given to ``extend``; how many rows of episodes that broke off were stored."""
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

    def close(self) -> int:
        """Stores all that waits: every episode was interrupted; how many rows entered."""
        self._continued.clear()
        return 0 if self._transform is None else len(self._replay.flush())

    def state(self) -> list[list[int]]:
        """Nothing: what waits is saved with the replay, and closed by the first steps after a restore."""
        return []

    def load_state(self, state: list[list[int]]) -> None:
        """Restores what :meth:`state` returned."""
        self._continued.clear()
