# SPDX-License-Identifier: Apache-2.0
"""Writers, which place new transitions and choose the ones that leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_replay.lazy import Getter, lazy_names

if TYPE_CHECKING:
    from lightning_replay.retention.rules import (
        OldestLeaves,
        OnPolicynessOnly,
        RetentionRule,
        SmallestReturnLeaves,
        StochasticExploration,
        StochasticSurprise,
        SurpriseOnly,
        SurpriseOnPolicyness,
    )
    from lightning_replay.writers.first_in_first_out import FirstInFirstOutWriter
    from lightning_replay.writers.retention import RetentionWriter
    from lightning_replay.writers.rows import write_rows
    from lightning_replay.writers.tables import EventTableWriter, TaskTableWriter

__all__ = [
    "EventTableWriter",
    "FirstInFirstOutWriter",
    "OldestLeaves",
    "OnPolicynessOnly",
    "RetentionRule",
    "RetentionWriter",
    "SmallestReturnLeaves",
    "StochasticExploration",
    "StochasticSurprise",
    "SurpriseOnPolicyness",
    "SurpriseOnly",
    "TaskTableWriter",
    "write_rows",
]

__getattr__: Getter = lazy_names(
    __name__,
    {
        "lightning_replay.retention.rules": (
            "OldestLeaves",
            "OnPolicynessOnly",
            "RetentionRule",
            "SmallestReturnLeaves",
            "StochasticExploration",
            "StochasticSurprise",
            "SurpriseOnly",
            "SurpriseOnPolicyness",
        ),
        ".first_in_first_out": ("FirstInFirstOutWriter",),
        ".retention": ("RetentionWriter",),
        ".rows": ("write_rows",),
        ".tables": ("EventTableWriter", "TaskTableWriter"),
    },
)
