# SPDX-License-Identifier: Apache-2.0
"""Published replay methods, each a function that returns a complete replay buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_replay.recipes.mixing import continuous_transition, mixup, neighborhood_mixup, noisy, s4rl
from lightning_replay.recipes.plain import prioritized, reverse_sweep, uniform
from lightning_replay.recipes.retention import surprise_retention
from lightning_replay.recipes.tables import event_tables, parallel_curriculum
from lightning_replay.replay import Replay
from lightning_replay.validation import did_you_mean

__all__ = [
    "continuous_transition",
    "event_tables",
    "known",
    "mixup",
    "neighborhood_mixup",
    "noisy",
    "parallel_curriculum",
    "prioritized",
    "reverse_sweep",
    "s4rl",
    "surprise_retention",
    "uniform",
]


def known() -> dict[str, Callable[..., Replay]]:
    """Returns every recipe by its name."""
    return {name: globals()[name] for name in __all__ if name != "known"}


def by_name(name: str) -> Callable[..., Replay]:
    """Returns the recipe of that name; raises ``ValueError`` with the known names for an unknown one."""
    recipes = known()
    if name not in recipes:
        known_names = ", ".join(sorted(recipes))
        raise ValueError(f"there is no recipe {name!r}; known are {known_names}{did_you_mean(name, recipes)}")
    return recipes[name]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return by_name(name)
    except ValueError as error:
        raise AttributeError(str(error)) from None
