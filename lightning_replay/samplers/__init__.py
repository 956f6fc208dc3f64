# SPDX-License-Identifier: Apache-2.0
"""Samplers: the slots of a batch, and their weights."""

from lightning_replay.samplers.combined import CombinedSampler
from lightning_replay.samplers.continuous_correction import ContinuousCorrectionSampler
from lightning_replay.samplers.neighborhood_mixup import NeighborhoodMixupSampler
from lightning_replay.samplers.pairs import ContinuousTransitionSampler, PairSampler, RandomPairSampler
from lightning_replay.samplers.prioritized import PrioritizedSampler
from lightning_replay.samplers.reliability import ReliabilityAdjustedSampler
from lightning_replay.samplers.reshuffled import ReshuffledSampler
from lightning_replay.samplers.reverse_sweep import ReverseSweepSampler
from lightning_replay.samplers.sequences import SequenceSampler, sequence_priorities
from lightning_replay.samplers.tables import (  # noqa: F401  saves find these here, or are imported for their effect
    ScheduledSampler,
    TableShares,
    lemma2,
    lemma2_exact,
    mixture,
)
from lightning_replay.samplers.uniform import UniformSampler

__all__ = [
    "CombinedSampler",
    "ContinuousCorrectionSampler",
    "ContinuousTransitionSampler",
    "NeighborhoodMixupSampler",
    "PairSampler",
    "PrioritizedSampler",
    "RandomPairSampler",
    "ReliabilityAdjustedSampler",
    "ReshuffledSampler",
    "ReverseSweepSampler",
    "ScheduledSampler",
    "SequenceSampler",
    "TableShares",
    "UniformSampler",
    "sequence_priorities",
]
