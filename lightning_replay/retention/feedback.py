# SPDX-License-Identifier: Apache-2.0
"""Surprise and on-policyness of rows and of candidates for a full buffer, validated."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_replay.priority_updates import real_numbers
from lightning_replay.retention.rules import RetentionRule
from lightning_replay.retention.surprise import squared_td_error

_LARGEST = torch.finfo(torch.float32).max


class Factors(NamedTuple):
    """Surprise, on-policyness and the priority of both, float32 ``[n]`` on the CPU each.

    ``is_known`` is false of new rows without feedback: a priority of NaN stands for the largest seen, and they enter
    also when equal to the lowest.
    """

    surprise: Tensor
    on_policyness: Tensor
    priority: Tensor
    is_known: bool = True

    @classmethod
    @functools.lru_cache(maxsize=8)  # they are not written
    def unknown(cls, count: int) -> Factors:
        """Returns the factors of new rows whose surprise was not computed."""
        nothing = torch.full((count,), torch.nan, device="cpu")
        return cls(nothing, torch.ones(count, device="cpu"), nothing, is_known=False)

    def rows(self, kept: Tensor) -> Factors:
        return Factors(self.surprise[kept], self.on_policyness[kept], self.priority[kept], self.is_known)

    def twice(self) -> Factors:
        """Returns the factors of all rows, and of all again."""
        surprise, weight, priority = (torch.cat((part, part)) for part in self[:3])
        return Factors(surprise, weight, priority, self.is_known)


def first_surprise(given: Any, count: int) -> Tensor:
    """Returns the result of ``initial_surprise`` for ``count`` new rows, validated, as float32 ``[count]``."""
    if not isinstance(given, Tensor):
        raise ValueError(
            f"initial_surprise returned {type(given).__name__} for {count} rows; a torch tensor [{count}] is accepted. "
            "Nothing was stored"
        )
    if given.shape not in ((count,), (count, 1)):
        raise ValueError(
            f"initial_surprise returned {list(given.shape)} for {count} rows; one number for each is accepted, "
            f"[{count}]. Nothing was stored; reduce it over everything but the rows"
        )
    given = real_numbers("what initial_surprise returned", given, "Nothing was stored")
    return _as_surprise(given, "initial_surprise returned", "Nothing was stored")


def read_factors(rule: RetentionRule, count: int, td_error: Tensor | None, signals: Mapping[str, Any]) -> Factors:
    """Returns the factors in feedback for ``count`` rows, validated; only TD errors may still be infinite or NaN."""
    if signals.get("surprise") is not None:
        given = real_numbers("surprise", signals["surprise"], "No priority was changed")
        if given.shape not in ((count,), (count, 1)):
            raise ValueError(
                f"surprise must hold one number for each of the {count} rows of the batch; got {list(given.shape)}. "
                "No priority was changed"
            )
        measured = _as_surprise(given, "surprise is", "No priority was changed")
    elif td_error is not None:
        measured = squared_td_error(td_error.reshape(-1).to("cpu", torch.float32)).clamp_max(_LARGEST)
    elif rule.takes_surprise:
        raise ValueError(
            f"update_priority got neither td_error nor surprise, and {type(rule).__name__} keeps rows by their "
            "surprise; pass one of them. No priority was changed"
        )
    else:
        measured = torch.full((count,), torch.nan, device="cpu")  # unknown, and not used
    weight = _on_policyness(rule, count, signals)
    return Factors(measured, weight, rule.priority(measured, weight) if len(measured) == count else measured)


def _on_policyness(rule: RetentionRule, count: int, signals: Mapping[str, Any]) -> Tensor:
    action_values, action = signals.get("action_values"), signals.get("action")
    if not rule.weighs_actions:
        return torch.ones(count, device="cpu")
    if action_values is None:
        if rule.needs_actions:
            raise ValueError(
                f"{type(rule).__name__} learns from action_values [B, A] and action [B] alone, and update_priority got "
                "none; pass both. No priority was changed"
            )
        return torch.ones(count, device="cpu")
    if action is None:
        raise ValueError("update_priority got action_values without action; pass action=batch['action'] as well")
    action_values = real_numbers("action_values", action_values, "No priority was changed")
    if action_values.ndim != 2 or action_values.shape[0] != count:
        raise ValueError(
            f"action_values must be [{count}, A], the values of all actions for each row of the batch; got "
            f"{list(action_values.shape)}. No priority was changed"
        )
    action = real_numbers("action", action, "No priority was changed").to(action_values.device)
    weight = rule.on_policyness(action_values, action).to("cpu", torch.float32)
    if bool(weight.isnan().any()):
        rows = weight.isnan().nonzero().flatten().tolist()
        raise ValueError(
            f"action_values are NaN or infinite in rows {rows[:10]} of the batch; finite ones are accepted, and -inf "
            "for illegal actions. No priority was changed"
        )
    return weight


def _as_surprise(given: Tensor, what: str, outcome: str) -> Tensor:
    values = given.detach().reshape(-1).to("cpu", torch.float32)
    array = values.numpy()
    if len(array) and not (array.min() >= 0 and array.max() < np.inf):  # of NaN neither is true
        rows = np.flatnonzero(~((array >= 0) & (array < np.inf))).tolist()
        raise ValueError(
            f"{what} {values[rows[0]].item()} in rows {rows[:10]}; surprise is finite and not negative. {outcome}"
        )
    return values
