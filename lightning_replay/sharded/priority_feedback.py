# SPDX-License-Identifier: Apache-2.0
"""TD errors and signals for a batch of a sharded replay, checked before they are sent."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.parts import WriterHooks
from lightning_replay.priority_updates import real_numbers, row_generations, row_numbers, td_error_of
from lightning_replay.replay import SIGNALS
from lightning_replay.sharded.batch_index import row_ids_of
from lightning_replay.sharded.row_ids import RowIds


class Feedback(NamedTuple):
    """TD errors and signals for B rows, and the identities of the rows."""

    ids: RowIds
    td_errors: np.ndarray  # float32 [B]
    signals: dict[str, np.ndarray]  # [B, ...] by name


def checked_feedback(
    index: Tensor | TensorDictBase,
    td_error: Tensor | None,
    generation: Tensor | None,
    signals: dict[str, Any],
    key: int,
    writer: WriterHooks,
) -> Feedback:
    """Returns the arguments of :meth:`ShardedReplay.update_priority
    <lightning_replay.sharded.replay.ShardedReplay.update_priority>` as arrays; errors are those of that method."""
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
    errors = real_numbers("td_error", td_error, "No priority was changed").detach().cpu().float().numpy()
    if errors.size != len(index) or not np.isfinite(errors).all():
        raise ValueError(
            f"td_error must hold one finite value for each of the {len(index)} rows of the batch; got shape "
            f"{list(errors.shape)}, {np.count_nonzero(~np.isfinite(errors))} of them NaN or infinite. No priority was "
            "changed"
        )
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
    return Feedback(ids, errors.reshape(-1), given)
