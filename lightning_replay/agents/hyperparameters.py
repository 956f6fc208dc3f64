# SPDX-License-Identifier: Apache-2.0
"""Ranges of the agents' options: an option of one name has the same range in every agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning_replay.schedules import checked_schedule
from lightning_replay.validation import (
    ABOVE_ZERO,
    BELOW_ONE,
    checked_count,
    checked_counts,
    checked_flag,
    checked_number,
    checked_numbers,
    checked_share,
)

__all__ = ["check_hyperparameters"]

_from_zero = partial(checked_number, lowest=0.0)
_above_zero = partial(checked_number, lowest=ABOVE_ZERO)
_limit = partial(checked_number, lowest=ABOVE_ZERO, accepted="a finite number above 0, or None for no limit")

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "action_high": checked_numbers,
    "action_low": checked_numbers,
    "actor_learning_rate": _from_zero,
    "actor_regularization": _from_zero,
    "adam_epsilon": _above_zero,
    "atoms": partial(checked_count, lowest=2),
    "categories": checked_counts,
    "channels": checked_counts,
    "clip_range": _above_zero,
    "conflict_aversion": partial(checked_schedule, highest=BELOW_ONE),
    "critic_learning_rate": _from_zero,
    "cross_entropy": checked_flag,
    "discount": checked_share,
    "distributional": checked_flag,
    "double": checked_flag,
    "dueling": checked_flag,
    "entropy_coefficient": _from_zero,
    "entropy_learning_rate": _from_zero,
    "epochs": checked_count,
    "exploration_end": checked_share,
    "exploration_noise": _from_zero,
    "exploration_start": checked_share,
    "exploration_steps": partial(checked_count, lowest=0),
    "gae_lambda": checked_share,
    "gradient_clip": _above_zero,
    "gradient_norm": _limit,
    "hidden_size": checked_count,
    "hidden_sizes": checked_counts,
    "initial_entropy_coefficient": _above_zero,
    "kernel_sizes": checked_counts,
    "learning_rate": _from_zero,
    "minibatches": checked_count,
    "noise_deviation": _from_zero,
    "noisy": checked_flag,
    "num_actions": checked_count,
    "observation_high": _above_zero,
    "observation_shape": checked_counts,
    "observation_size": checked_count,
    "parameter_high": checked_numbers,
    "parameter_learning_rate": _from_zero,
    "parameter_low": checked_numbers,
    "parameter_sizes": partial(checked_counts, lowest=0),
    "policy_delay": checked_count,
    "samples_by_surprise": checked_flag,
    "strides": checked_counts,
    "target_entropy": checked_number,
    "target_high": checked_number,
    "target_low": checked_number,
    "target_noise": _from_zero,
    "target_noise_clip": _from_zero,
    "target_update_every": checked_count,
    "target_update_rate": checked_share,
    "value_clip": _limit,
    "value_coefficient": _from_zero,
    "value_high": checked_number,
    "value_learning_rate": _from_zero,
    "value_low": checked_number,
}


# Read from the environment, or left out.
_MAY_BE_NONE = {
    "action_high",
    "action_low",
    "categories",
    "gradient_norm",
    "num_actions",
    "observation_high",
    "observation_shape",
    "observation_size",
    "parameter_high",
    "parameter_low",
    "parameter_sizes",
    "target_entropy",
    "target_high",
    "target_low",
    "value_clip",
}


def check_hyperparameters(given: Mapping[str, Any]) -> None:
    """Refuses the options of an agent that are of another kind or out of their range.

    Args:
        given: by name; others are passed over, so that ``locals()`` at the start of a constructor may be given. (With a
            command line, Lightning's ``hparams`` hold class paths in place of objects.)

    Raises:
        TypeError: another kind.
        ValueError: out of the range, infinite or NaN.
    """
    for name, value in given.items():
        if name in _CHECKS and (value is not None or name not in _MAY_BE_NONE):
            _CHECKS[name](name, value)
