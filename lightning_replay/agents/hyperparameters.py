# SPDX-License-Identifier: Apache-2.0
"""Ranges of the agents' options, the same for options of one name in all agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

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

_limit = partial(checked_number, lowest=ABOVE_ZERO, accepted="a finite number above 0, or None for no limit")

_RANGES: tuple[tuple[Callable[[str, Any], Any], str], ...] = (
    (
        partial(checked_number, lowest=0.0),
        "actor_learning_rate actor_regularization critic_learning_rate entropy_coefficient entropy_learning_rate "
        "exploration_noise learning_rate noise_deviation parameter_learning_rate target_noise target_noise_clip "
        "value_coefficient value_learning_rate",
    ),
    (
        partial(checked_number, lowest=ABOVE_ZERO),
        "adam_epsilon clip_range gradient_clip initial_entropy_coefficient observation_high",
    ),
    (_limit, "gradient_norm value_clip"),
    (checked_number, "target_entropy target_high target_low value_high value_low"),
    (checked_share, "discount exploration_end exploration_start gae_lambda target_update_rate"),
    (partial(checked_schedule, highest=BELOW_ONE), "conflict_aversion"),
    (
        checked_count,
        "epochs hidden_size minibatches num_actions observation_size policy_delay target_update_every",
    ),
    (partial(checked_count, lowest=0), "exploration_steps"),
    (partial(checked_count, lowest=2), "atoms"),
    (checked_counts, "categories channels hidden_sizes kernel_sizes observation_shape strides"),
    (partial(checked_counts, lowest=0), "parameter_sizes"),
    (checked_numbers, "action_high action_low parameter_high parameter_low"),
    (checked_flag, "cross_entropy distributional double dueling noisy samples_by_surprise"),
)
_CHECKS = {name: check for check, names in _RANGES for name in names.split()}
# read from the environment, or optional
_MAY_BE_NONE = {
    *("observation_shape", "observation_size", "observation_high", "num_actions", "action_low", "action_high"),
    *("parameter_sizes", "parameter_low", "parameter_high", "target_low", "target_high", "target_entropy"),
    *("categories", "gradient_norm", "value_clip"),
}


def plain_hyperparameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those options of an agent that hold arrays, tensors or NumPy numbers, as lists and plain numbers."""
    plain = {name: _plain(value) for name, value in given.items() if name in _CHECKS}
    return {name: value for name, value in plain.items() if value is not given[name]}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple) and any(isinstance(entry, Tensor | np.generic) for entry in value):
        return [_plain(entry) for entry in value]
    return value


def check_hyperparameters(given: Mapping[str, Any]) -> None:
    """Checks the options of an agent; ``given`` may be ``locals()`` of its constructor, other names are ignored.

    Not ``hparams``, in which Lightning has class paths in place of objects with a command line.

    Raises:
        TypeError: a value of another type.
        ValueError: a value out of range, infinite or NaN.
    """
    for name, value in given.items():
        if name in _CHECKS and (value is not None or name not in _MAY_BE_NONE):
            _CHECKS[name](name, value)
    low, high = given.get("target_low"), given.get("target_high")
    if low is not None and high is not None and low > high:
        raise ValueError(
            f"target_low {low} is above target_high {high}; give the smallest and the largest return that can be "
            "reached."
        )
    low, high = given.get("value_low", 0.0), given.get("value_high", 1.0)
    if not low < high:
        raise ValueError(f"value_low is {low} and value_high {high}; give ascending bounds of the atoms.")
