# SPDX-License-Identifier: Apache-2.0
"""Events of a run, the tables that keep the steps leading up to them, and conditions over steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_replay.lazy import Getter, lazy_names

if TYPE_CHECKING:
    from lightning_replay.events.conditions import (
        AnyOf,
        Condition,
        ConditionError,
        ConditionLike,
        EpisodeCondition,
        EveryOf,
        any_of,
        every_of,
        first_in_episode,
        holds,
        info_key,
        key_in_region,
        load_state_of,
        reestablished,
        reward_at_least,
        reward_below,
        state_of,
        sustained,
        terminal_with_reward,
    )
    from lightning_replay.events.event_table import Event, EventTable, suggest_events

__all__ = [
    "AnyOf",
    "Condition",
    "ConditionError",
    "ConditionLike",
    "EpisodeCondition",
    "Event",
    "EventTable",
    "EveryOf",
    "any_of",
    "every_of",
    "first_in_episode",
    "holds",
    "info_key",
    "key_in_region",
    "load_state_of",
    "reestablished",
    "reward_at_least",
    "reward_below",
    "state_of",
    "suggest_events",
    "sustained",
    "terminal_with_reward",
]

# Saves find the classes and functions here by name, also if ``__all__`` does not export them.
__getattr__: Getter = lazy_names(
    __name__,
    {
        ".conditions": (
            "AnyOf",
            "Condition",
            "ConditionError",
            "ConditionLike",
            "EpisodeCondition",
            "EveryOf",
            "FirstInEpisode",
            "InfoKey",
            "KeyInRegion",
            "Reestablished",
            "RewardAtLeast",
            "RewardBelow",
            "Sustained",
            "TerminalWithReward",
            "any_of",
            "every_of",
            "first_in_episode",
            "holds",
            "info_key",
            "key_in_region",
            "load_state_of",
            "reestablished",
            "reward_at_least",
            "reward_below",
            "state_of",
            "sustained",
            "terminal_with_reward",
        ),
        ".event_table": ("Event", "EventTable", "suggest_events"),
    },
)
