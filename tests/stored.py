# SPDX-License-Identifier: Apache-2.0
"""What a replay holds, read from its storage and its sampler."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


def stored_rows(replay: Any) -> TensorDict:
    """Returns the rows of a ring by slot, as they are stored."""
    return replay.storage.get(torch.arange(len(replay)))


def stored_numbers(replay: Any) -> list[int]:
    """Returns the first entry of each stored observation: in most tests the number of the step."""
    return stored_rows(replay)["observation"][:, 0].int().tolist()


def tree_leaves(replay: Any) -> Tensor:
    """Returns the values of all slots in the sampler's tree, by which rows are drawn."""
    return replay.sampler.state_dict()["tree"]["leaves"]
