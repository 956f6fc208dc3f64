# SPDX-License-Identifier: Apache-2.0
"""TD errors and signals for a batch of a sharded replay, checked before they are sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.parts import WriterHooks
from lightning_replay.priority_updates import real_numbers, row_generations, row_numbers, td_error_of
from lightning_replay.replay import SIGNALS
from lightning_replay.sharded.batch_index import row_ids_of
from lightning_replay.sharded.draws import check_td_errors
from lightning_replay.sharded.row_ids import RowIds


def checked_feedback(
    index: Tensor | TensorDictBase,
    td_error: Tensor | None,
    generation: Tensor | None,
    signals: dict[str, Any],
    key: int,
    writer: WriterHooks,
) -> tuple[RowIds, np.ndarray, dict[str, np.ndarray]]:
    """Returns the arguments of :meth:`ShardedReplay.update_priority
    <lightning_replay.sharded.replay.ShardedReplay.update_priority>`: rows, TD errors ``[B]``, and signals by name."""
    if isinstance(index, TensorDictBase):
        batch, index, generation = index, index.get("index", None), index.get("generation", generation)
        if index is None:
            raise TypeError(
                f"update_priority got a batch without 'index'; it has {sorted(map(str, batch.keys()))}. Give the batch "
                "that sample() returned"
            )
    index = row_numbers("index", index, "the batch that was drawn, or its 'index', int64 [B] or [B, 2]")
    if generation is None:
        raise TypeError("update_priority got no generation; give the batch, or generation=batch['generation']")
    td_error = td_error_of(td_error, signals)
    for name in set(signals) - set(SIGNALS):
        raise TypeError(f"update_priority got the signal {name!r}; the signals are {', '.join(SIGNALS)}")
    if td_error is None:
        raise TypeError("update_priority got no td_error; give one for each row of the batch")
    errors = real_numbers("td_error", td_error, "No priority was changed").detach().cpu().float().reshape(-1).numpy()
    check_td_errors(errors, len(index))
    given = {name: torch.as_tensor(value).detach().cpu().numpy() for name, value in signals.items()}
    for name, value in given.items():
        if len(value) != len(index):
            raise ValueError(f"{name} has {len(value)} rows and the batch {len(index)}. No priority was changed")
    if writer.needs_feedback:  # an error in the shard would come too late
        writer.read_feedback(len(index), torch.from_numpy(errors), signals)
    numbers = row_generations(generation).cpu().numpy()
    if len(numbers) != len(index):
        raise ValueError(f"generation has {len(numbers)} rows and index {len(index)}; give those of one batch")
    ids, is_own = row_ids_of(index.cpu().numpy(), numbers, key)
    if not is_own.all():
        raise ValueError(
            f"{np.count_nonzero(~is_own)} of {len(index)} rows were not drawn from this sharded replay; give it the "
            "batches that its own sample() returned. No priority was changed"
        )
    return ids, errors, given
