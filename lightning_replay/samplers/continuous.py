# SPDX-License-Identifier: Apache-2.0
"""Pairs of consecutive steps."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from lightning_replay.samplers.linked import LinkedSampler
from lightning_replay.samplers.pairs import PairSampler
from lightning_replay.saving.spec import recorded
from lightning_replay.storage.access import read_columns


@recorded
class ContinuousTransitionSampler(LinkedSampler, PairSampler):
    """Pairs each drawn row with the next step of its episode; with itself where there is none.

    The last row of an episode and the newest row of a running one have no next step and stay unmixed. Rows of several
    environments need ``trajectory`` (or ``("collector", "traj_ids")``); without it all rows are one environment in
    order. A row that starts with another observation than the row before ended with is not its next step. Continuous
    Transition, Lin et al. 2021, https://arxiv.org/abs/2011.14487, without its tuning of the mixing
    temperature, as in the NMER paper.

    Args:
        done_key: the flag of rows that ended their episode, terminated or truncated.
        check_continuity: whether observations are compared, see :class:`~lightning_replay.episodes.links.Continuity`.
        first, update_partners, seed: as in :class:`PairSampler`, and so are the sampled keys.

    Raises:
        ValueError: rows without ``done_key``; before anything is stored by ``Replay``.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = ContinuousTransitionSampler(seed=0)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler, batch_size=4)
        >>> _ = buffer.extend(TensorDict({"next": {"done": torch.tensor([[False], [True], [False]])}}, [3]))
        >>> sampler.partners(torch.tensor([0, 1, 2]), buffer.storage)
        tensor([1, 1, 2])
    """

    def __init__(
        self,
        first: Sampler | None = None,
        update_partners: bool = False,
        done_key: NestedKey = ("next", "done"),
        check_continuity: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(first=first, update_partners=update_partners, seed=seed)
        self._set_up_links(done_key, check_continuity)

    def partners(self, index: Tensor, storage: Storage) -> Tensor:
        """Returns the next step of each row, int64 ``[B]``; the row itself where there is none."""
        assert self._links is not None
        following = self._links.successor[index]
        return torch.where(following < 0, index, following)

    def check_rows(self, rows: TensorDictBase) -> None:
        super().check_rows(rows)
        self._check_done(rows, "pairs of consecutive steps")

    def on_insert(self, index: Tensor, storage: Storage) -> None:
        if self._links is None:
            (done,) = read_columns(storage, index, [self._done_key])
            self._allocate(storage.max_size, done.device)
        assert self._links is not None
        self._write_links(index.to(self._links.successor.device), storage)
        self._warn()

    def forget(self) -> None:
        self._links = None

    @property
    def learned_nbytes(self) -> int:
        return 0 if self._links is None else self._links.nbytes

    def learned_state(self) -> dict[str, Any]:
        return {"links": None if self._links is None else self._links.state_dict()}

    def load_learned_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`learned_state` returned."""
        self._links = None
        if state["links"] is not None:
            successor = state["links"]["successor"]
            self._allocate(successor.numel(), successor.device).load_state_dict(state["links"])
