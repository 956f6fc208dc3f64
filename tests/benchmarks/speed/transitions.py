# SPDX-License-Identifier: Apache-2.0
"""Random transitions shaped like HalfCheetah's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict

OBSERVATION, ACTION = 17, 6


def half_cheetah(rows: int, *, episode_length: int = 1000, seed: int = 0) -> TensorDict:
    """``rows`` steps of one environment whose episodes are truncated every ``episode_length`` steps."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(rows + 1, OBSERVATION, generator=generator)
    last = (torch.arange(1, rows + 1) % episode_length == 0).unsqueeze(1)
    return TensorDict(
        {
            "observation": observation[:-1],
            "action": torch.rand(rows, ACTION, generator=generator) * 2 - 1,
            "next": {
                "observation": observation[1:],
                "reward": torch.randn(rows, 1, generator=generator),
                "terminated": torch.zeros(rows, 1, dtype=torch.bool),
                "truncated": last,
                "done": last.clone(),
            },
        },
        [rows],
    )


def in_chunks(rows: int, *, chunk: int = 50_000) -> Iterator[TensorDict]:
    """The same number of rows a chunk at a time, so that the source does not double the memory."""
    for start in range(0, rows, chunk):
        yield half_cheetah(min(chunk, rows - start), seed=start)
