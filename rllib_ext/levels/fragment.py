# SPDX-License-Identifier: Apache-2.0
"""What a Learner tells the level buffer of consecutive steps of one episode."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Consecutive steps of one episode with the values that the Learner's module gives them.

    Args:
        episode_id: RLlib's.
        t_started: number of the first step in its episode.
        reward: float32 ``[T]``, those the Learner learns from.
        state_value: float32 ``[T + 1]``, the last of the observation behind the last step.
        terminated: whether the last step ended the episode for good.
        truncated: whether it ended it otherwise, as by a time limit.
        logits: float32 ``[T, A]`` of the policy that acted, where actions are discrete.
    """

    episode_id: str
    t_started: int
    reward: np.ndarray
    state_value: np.ndarray
    terminated: bool
    truncated: bool
    logits: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def is_done(self) -> bool:
        """Whether the episode ends here."""
        return self.terminated or self.truncated

    def steps(self) -> TensorDict:
        """The steps in TorchRL's layout, ``[T]``."""
        import torch
        from tensordict import TensorDict

        length = len(self)
        ends = {
            name: torch.zeros(length, dtype=torch.bool).index_fill(0, torch.tensor([length - 1]), flag)
            for name, flag in (("terminated", self.terminated), ("truncated", self.truncated), ("done", self.is_done))
        }
        values = torch.from_numpy(np.array(self.state_value, np.float32))
        following = {"reward": torch.from_numpy(np.array(self.reward, np.float32)), "state_value": values[1:], **ends}
        columns = {"state_value": values[:-1], "next": following}
        if self.logits is not None:
            columns["logits"] = torch.from_numpy(np.array(self.logits, np.float32))
        return TensorDict(columns, [length])
