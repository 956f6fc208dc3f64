# SPDX-License-Identifier: Apache-2.0
"""Samplers: the slots of a batch, and their weights."""

from __future__ import annotations

from lightning_replay.samplers.continuous import ContinuousTransitionSampler
from lightning_replay.samplers.continuous_correction import ContinuousCorrectionSampler
from lightning_replay.samplers.neighborhood_mixup import NeighborhoodMixupSampler
from lightning_replay.samplers.pairs import PairSampler, RandomPairSampler
from lightning_replay.samplers.prioritized import PrioritizedSampler
from lightning_replay.samplers.reverse_sweep import ReverseSweepSampler
from lightning_replay.samplers.scheduled import ScheduledSampler
from lightning_replay.samplers.table_corrections import lemma2, lemma2_exact, mixture  # noqa: F401  as saves name them
from lightning_replay.samplers.table_shares import TableShares
from lightning_replay.samplers.uniform import UniformSampler

__all__ = [
    "ContinuousCorrectionSampler",
    "ContinuousTransitionSampler",
    "NeighborhoodMixupSampler",
    "PairSampler",
    "PrioritizedSampler",
    "RandomPairSampler",
    "ReverseSweepSampler",
    "ScheduledSampler",
    "TableShares",
    "UniformSampler",
]
