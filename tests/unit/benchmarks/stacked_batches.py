# SPDX-License-Identifier: Apache-2.0
"""What tests of stacked agents share: random batches of several runs, and the weights of one run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDict


class PlainBatches(list):
    """Batches of a list: Lightning takes an iterable with a length for a loader."""


def continuous_batches(runs: int, updates: int, rows: int, sizes: tuple[int, int], is_weighted: bool) -> TensorDict:
    """Random rows ``[runs, updates, rows]`` with observations and actions of these sizes, the latter in [-1, 1]."""
    shape = [runs, updates, rows]
    observation, action = sizes
    following = {
        "observation": torch.randn(*shape, observation),
        "reward": torch.randn(*shape, 1),
        "terminated": torch.rand(*shape, 1) < 0.2,
    }
    columns = {"observation": torch.randn(*shape, observation), "action": torch.rand(*shape, action) * 2 - 1}
    if is_weighted:
        columns["priority_weight"] = torch.rand(shape)
    return TensorDict(columns | {"next": following}, shape)


def weights_of(network: Iterable[torch.Tensor], run: int) -> list[torch.Tensor]:
    """Returns the parameters of one run, transposed as ``torch.nn.Linear`` has them."""
    return [parameter[run].detach().T.squeeze(-1) for parameter in network]
