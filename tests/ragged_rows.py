# SPDX-License-Identifier: Apache-2.0
"""Rows of rollouts of different lengths, numbered so that every element tells its row and its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.replay import Replay

KEYS = ("tokens", "log_prob")


def tokens_of(number: int, length: int) -> Tensor:
    """Returns 100 times the number of the row plus the place of each element, int64 ``[length]``."""
    return 100 * number + torch.arange(length)


def log_prob_of(number: int, length: int) -> Tensor:
    """Returns the negative places of the elements and a constant, bfloat16 ``[length, 2]``."""
    return torch.stack([-torch.arange(length), torch.full([length], number % 7)], 1).to(torch.bfloat16)


def columns(lengths: Sequence[int], first: int = 0) -> dict[str, Any]:
    """Returns columns with lists of tensors, of rows numbered from ``first`` on."""
    numbered = [*enumerate(lengths, first)]
    return {
        "tokens": [tokens_of(number, length) for number, length in numbered],
        "log_prob": [log_prob_of(number, length) for number, length in numbered],
        "number": torch.arange(first, first + len(lengths)),
    }


def nested(tensors: Sequence[Tensor], layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.as_nested_tensor([*tensors], layout=layout)


def rows(lengths: Sequence[int], first: int = 0, layout: torch.layout = torch.jagged) -> TensorDict:
    """Returns the same rows with nested tensors, TensorDict ``[N]``."""
    given = columns(lengths, first)
    ragged = {key: nested(given[key], layout) for key in KEYS}
    return TensorDict({**ragged, "number": given["number"]}, [len(lengths)])


def ragged(recipe: str = "uniform", **options: Any) -> Replay:
    given = {"capacity": 6, "batch_size": 4, "ragged": KEYS, "element_capacity": 10, "seed": 0} | options
    return recipes.by_name(recipe)(**given)


def sequences_of(batch: TensorDict) -> list[tuple[int, Tensor, Tensor]]:
    """Returns number, tokens, and log-probabilities of each row of a padded or jagged batch."""
    if batch["tokens"].is_nested:
        each = batch["tokens"].unbind(), batch["log_prob"].unbind()
    else:
        mask = batch["mask"]
        assert mask.shape[1] == int(mask.sum(1).max())  # no wider than the longest
        assert not batch["tokens"][~mask].any() and not batch["log_prob"][~mask].any()
        each = tuple([column[kept] for column, kept in zip(batch[key], mask, strict=True)] for key in KEYS)
    return [*zip(batch["number"].tolist(), *each, strict=True)]
