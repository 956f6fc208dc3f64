# SPDX-License-Identifier: Apache-2.0
"""Methods that mix stored transitions into new ones, or add noise to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from lightning_replay.recipes.options import ReplayOptions, assemble, prioritized_or_uniform, recipe
from lightning_replay.replay import Replay
from lightning_replay.samplers import (
    ContinuousTransitionSampler,
    NeighborhoodMixupSampler,
    RandomPairSampler,
    UniformSampler,
)
from lightning_replay.samplers.neighborhood_mixup import FEATURE_KEYS
from lightning_replay.schedules import Schedule
from lightning_replay.transforms import GaussianNoise, MixPairs, MixStates
from lightning_replay.transforms.mixup import MIXED_KEYS
from lightning_replay.transforms.noise import NOISY_KEYS


@recipe
def neighborhood_mixup(
    capacity: int,
    batch_size: int | None = None,
    *,
    num_neighbors: int = 10,
    mixup_concentration: float = 0.75,
    fraction: float = 1.0,
    priority_exponent: float = 0.0,
    importance_exponent: float | Schedule = 0.4,
    update_partners: bool = False,
    refresh_interval: int = 64,
    backend: str = "exact",
    discrete: str | None = None,
    feature_keys: Sequence[str | tuple[str, ...]] = FEATURE_KEYS,
    keys: Sequence[str | tuple[str, ...]] = MIXED_KEYS,
    **options: Unpack[ReplayOptions],
) -> Replay:
    """Mixes each drawn transition with one of its nearest neighbours (NMER, Sander et al. 2022).

    Neighborhood Mixup Experience Replay, https://proceedings.mlr.press/v168/sander22a.html. Neighbours are found in
    standardised observations and actions; terminal transitions stay as they are. Meant for continuous actions.

    Args:
        num_neighbors: K, candidates for mixing.
        priority_exponent: α of prioritized draws of the first of each pair; 0 draws it uniformly.
        importance_exponent: β of their correction.
        update_partners: pass TD errors to both of a pair instead of the first alone.
        refresh_interval: insertions between updates of the neighbour lists; 1 is the paper's definition.
        backend: search that builds the lists: ``exact``, ``faiss_flat`` or ``faiss_ivf``.
        discrete: ``"same_action"`` restricts neighbours to the same discrete action; otherwise refused.
        feature_keys: columns whose concatenation neighbours are close in; floats, the last may be a discrete action.
            A nested column, such as a Dict observation, includes every entry under it.
        check_finite: refuse rows with NaN or infinity in rewards or observations. With ``False``, observations and
            actions must still be finite, since the search for neighbours needs distances.
    """
    sampler = NeighborhoodMixupSampler(
        num_neighbors=num_neighbors,
        first=prioritized_or_uniform(capacity, priority_exponent, importance_exponent),
        refresh_interval=refresh_interval,
        backend=backend,
        discrete=discrete,
        update_partners=update_partners,
        feature_keys=feature_keys,
    )
    if discrete is not None:  # equal in both of a pair
        keys = [key for key in keys if key != feature_keys[-1]]
    transform = MixPairs(mixup_concentration=mixup_concentration, fraction=fraction, keys=keys)
    return assemble(Replay, capacity, batch_size, options, sampler, transform=transform)


@recipe
def continuous_transition(
    capacity: int,
    batch_size: int | None = None,
    *,
    mixup_concentration: float = 0.75,
    fraction: float = 1.0,
    keys: Sequence[str | tuple[str, ...]] = MIXED_KEYS,
    **options: Unpack[ReplayOptions],
) -> Replay:
    """Mixes each drawn transition with the next one of its episode (CT, Lin et al. 2021, arXiv:2011.14487).

    As in NMER's baseline, the mixing temperature is not tuned.
    """
    transform = MixPairs(mixup_concentration=mixup_concentration, fraction=fraction, keys=keys)
    sampler = ContinuousTransitionSampler(check_continuity=options["check_continuity"])
    return assemble(Replay, capacity, batch_size, options, sampler, transform=transform)


@recipe
def mixup(
    capacity: int,
    batch_size: int | None = None,
    *,
    mixup_concentration: float = 0.75,
    fraction: float = 1.0,
    keys: Sequence[str | tuple[str, ...]] = MIXED_KEYS,
    **options: Unpack[ReplayOptions],
) -> Replay:
    """Mixes each drawn transition with any other (naive mixup, Zhang et al. 2018, arXiv:1710.09412).

    A baseline of NMER.
    """
    transform = MixPairs(mixup_concentration=mixup_concentration, fraction=fraction, keys=keys)
    return assemble(Replay, capacity, batch_size, options, RandomPairSampler(), transform=transform)


@recipe
def s4rl(
    capacity: int,
    batch_size: int | None = None,
    *,
    mixup_concentration: float = 0.75,
    keys: Sequence[str | tuple[str, ...]] = ("observation",),
    **options: Unpack[ReplayOptions],
) -> Replay:
    """Mixes each observation with its own next observation (S4RL, Sinha et al. 2022, arXiv:2103.06326).

    Args:
        keys: the observations, each mixed with the one of the same name under ``"next"``; a key includes every entry
            nested under it.
    """
    transform = MixStates(mixup_concentration=mixup_concentration, keys=keys)
    return assemble(Replay, capacity, batch_size, options, UniformSampler(), transform=transform)


@recipe
def noisy(
    capacity: int,
    batch_size: int | None = None,
    *,
    sigma: float = 0.1,
    keys: Sequence[str | tuple[str, ...]] = NOISY_KEYS,
    kind: str = "additive",
    **options: Unpack[ReplayOptions],
) -> Replay:
    """Adds Gaussian noise to the state, action, reward and next state of every drawn transition, a baseline of NMER.

    See :class:`~lightning_replay.transforms.GaussianNoise`. Meant for continuous actions; with discrete ones, pass
    ``keys`` without the action.

    Args:
        sigma: standard deviation of the noise.
        keys: floating-point entries that noise is added to.
        kind: ``"additive"`` as in the paper, or ``"multiplicative"`` as in the authors' code, ``value * (1 + noise)``.
    """
    transform = GaussianNoise(sigma=sigma, keys=keys, kind=kind)
    return assemble(Replay, capacity, batch_size, options, UniformSampler(), transform=transform)
