# SPDX-License-Identifier: Apache-2.0
"""Samplers: the slots of a batch, and their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_replay.lazy import Getter, lazy_names

if TYPE_CHECKING:
    from lightning_replay.samplers.continuous_correction import ContinuousCorrectionSampler
    from lightning_replay.samplers.neighborhood_mixup import NeighborhoodMixupSampler
    from lightning_replay.samplers.pairs import ContinuousTransitionSampler, PairSampler, RandomPairSampler
    from lightning_replay.samplers.prioritized import PrioritizedSampler
    from lightning_replay.samplers.recency import RecencySampler
    from lightning_replay.samplers.reshuffled import ReshuffledSampler
    from lightning_replay.samplers.reverse_sweep import ReverseSweepSampler
    from lightning_replay.samplers.row_groups import GroupSampler
    from lightning_replay.samplers.sequences import SequenceSampler, sequence_priorities
    from lightning_replay.samplers.tables import ScheduledSampler, TableShares
    from lightning_replay.samplers.uniform import UniformSampler

__all__ = [
    "ContinuousCorrectionSampler",
    "ContinuousTransitionSampler",
    "GroupSampler",
    "NeighborhoodMixupSampler",
    "PairSampler",
    "PrioritizedSampler",
    "RandomPairSampler",
    "RecencySampler",
    "ReshuffledSampler",
    "ReverseSweepSampler",
    "ScheduledSampler",
    "SequenceSampler",
    "TableShares",
    "UniformSampler",
    "sequence_priorities",
]

# Saves find the classes and functions here by name, even if ``__all__`` does not export them.
__getattr__: Getter = lazy_names(
    __name__,
    {
        ".continuous_correction": ("ContinuousCorrectionSampler",),
        ".neighborhood_mixup": ("NeighborhoodMixupSampler",),
        ".pairs": ("ContinuousTransitionSampler", "PairSampler", "RandomPairSampler"),
        ".prioritized": ("PrioritizedSampler",),
        ".recency": ("RecencySampler",),
        ".reshuffled": ("ReshuffledSampler",),
        ".reverse_sweep": ("ReverseSweepSampler",),
        ".row_groups": ("GroupSampler",),
        ".sequences": ("SequenceSampler", "sequence_priorities"),
        ".tables": ("ScheduledSampler", "TableShares", "lemma2", "lemma2_exact", "mixture"),
        ".uniform": ("UniformSampler",),
    },
)
