# SPDX-License-Identifier: Apache-2.0
"""Published replay methods, each as one function that returns a ready buffer."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from torchrl.data.replay_buffers import Sampler
from torchrl.envs import Transform

from lightning_replay.replay import Replay
from lightning_replay.samplers import (
    ContinuousTransitionSampler,
    NeighborhoodMixupSampler,
    PrioritizedSampler,
    RandomPairSampler,
    UniformSampler,
)
from lightning_replay.schedules import Schedule
from lightning_replay.storage import PackedStorage
from lightning_replay.table_recipes import event_tables, parallel_curriculum
from lightning_replay.transforms import GaussianNoise, MixPairs, MixStates

__all__ = [
    "continuous_transition",
    "event_tables",
    "known",
    "mixup",
    "neighborhood_mixup",
    "noisy",
    "parallel_curriculum",
    "prioritized",
    "s4rl",
    "uniform",
]


def uniform(
    capacity: int,
    batch_size: int = 256,
    *,
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    prefetch: int | None = None,
    seed: int | None = None,
) -> Replay:
    """Uniform draws, the oldest leaves: experience replay as it began (Lin 1992).

    Args:
        capacity: most transitions kept.
        batch_size: transitions per batch.
        n_steps: rewards summed into one return when a row is drawn.
        discount: γ of that return.
        device: where transitions are kept.
        memmap: a directory for a scratch file that holds the transitions, for buffers larger than memory.
        prefetch: batches drawn ahead in threads.
        seed: of every draw; ``None`` seeds from torch's global generator.
    """
    return _assemble(capacity, batch_size, UniformSampler(), None, n_steps, discount, device, memmap, prefetch, seed)


def prioritized(
    capacity: int,
    batch_size: int = 256,
    *,
    priority_exponent: float = 0.6,
    importance_exponent: float | Schedule = 0.4,
    priority_offset: float = 1e-6,
    normalize_over_batch: bool = False,
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    prefetch: int | None = None,
    seed: int | None = None,
) -> Replay:
    """Rows with large TD errors are drawn more often (Schaul et al. 2016, https://arxiv.org/abs/1511.05952).

    Multiply the loss by ``batch["priority_weight"]`` and return TD errors with ``replay.update_priority``.

    Args:
        capacity: most transitions kept.
        batch_size: transitions per batch.
        priority_exponent: α; 0 draws uniformly, 1 in proportion to the priority.
        importance_exponent: β of the correction; a number or a schedule.
        priority_offset: ε, added to every priority.
        normalize_over_batch: divide weights by the batch's largest instead of the memory's.
        n_steps: rewards summed into one return when a row is drawn.
        discount: γ of that return.
        device: where transitions are kept.
        memmap: a directory for a scratch file that holds the transitions.
        prefetch: batches drawn ahead in threads.
        seed: of every draw.
    """
    sampler = PrioritizedSampler(
        capacity=capacity,
        priority_exponent=priority_exponent,
        importance_exponent=importance_exponent,
        priority_offset=priority_offset,
        normalize_over_batch=normalize_over_batch,
    )
    return _assemble(capacity, batch_size, sampler, None, n_steps, discount, device, memmap, prefetch, seed)


def neighborhood_mixup(
    capacity: int,
    batch_size: int = 256,
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
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    prefetch: int | None = None,
    seed: int | None = None,
) -> Replay:
    """Each drawn transition is mixed with one of its nearest neighbours (NMER, Sander et al. 2022).

    Neighborhood Mixup Experience Replay, https://proceedings.mlr.press/v168/sander22a.html. Neighbours are found in
    standardised observations and actions; terminal transitions stay as they are. Meant for continuous actions.

    Args:
        capacity: most transitions kept.
        batch_size: transitions per batch.
        num_neighbors: K, candidates for mixing.
        mixup_concentration: both parameters of the Beta draw of the mixing coefficient.
        fraction: share of rows that are mixed.
        priority_exponent: α of a prioritized draw of the first of each pair; 0 draws it uniformly.
        importance_exponent: β of its correction.
        update_partners: return TD errors to both of a pair, not to the first alone.
        refresh_interval: insertions between updates of the neighbour lists; 1 is the paper's definition.
        backend: search that builds the lists: ``exact``, ``faiss_flat`` or ``faiss_ivf``.
        discrete: ``"same_action"`` restricts neighbours to the same discrete action; otherwise refused.
        n_steps: rewards summed into one return when a row is drawn.
        discount: γ of that return.
        device: where transitions are kept.
        memmap: a directory for a scratch file that holds the transitions.
        prefetch: batches drawn ahead in threads.
        seed: of every draw.
    """
    first: Sampler = UniformSampler()
    if priority_exponent != 0:
        first = PrioritizedSampler(
            capacity=capacity, priority_exponent=priority_exponent, importance_exponent=importance_exponent
        )
    sampler = NeighborhoodMixupSampler(
        num_neighbors=num_neighbors,
        first=first,
        refresh_interval=refresh_interval,
        backend=backend,
        discrete=discrete,
        update_partners=update_partners,
    )
    transform = MixPairs(mixup_concentration=mixup_concentration, fraction=fraction)
    return _assemble(capacity, batch_size, sampler, transform, n_steps, discount, device, memmap, prefetch, seed)


def continuous_transition(
    capacity: int,
    batch_size: int = 256,
    *,
    mixup_concentration: float = 0.75,
    fraction: float = 1.0,
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    prefetch: int | None = None,
    seed: int | None = None,
) -> Replay:
    """Each drawn transition is mixed with the next one of its episode (CT, Lin et al. 2021, arXiv:2011.14487).

    As NMER's baseline: without the tuning of the mixing temperature. Arguments as :func:`neighborhood_mixup`.

    Args:
        capacity: most transitions kept.
        batch_size: transitions per batch.
        mixup_concentration: both parameters of the Beta draw of the mixing coefficient.
        fraction: share of rows that are mixed.
        n_steps: rewards summed into one return when a row is drawn.
        discount: γ of that return.
        device: where transitions are kept.
        memmap: a directory for a scratch file that holds the transitions.
        prefetch: batches drawn ahead in threads.
        seed: of every draw.
    """
    transform = MixPairs(mixup_concentration=mixup_concentration, fraction=fraction)
    sampler = ContinuousTransitionSampler()
    return _assemble(capacity, batch_size, sampler, transform, n_steps, discount, device, memmap, prefetch, seed)


def mixup(
    capacity: int,
    batch_size: int = 256,
    *,
    mixup_concentration: float = 0.75,
    fraction: float = 1.0,
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    prefetch: int | None = None,
    seed: int | None = None,
) -> Replay:
    """Each drawn transition is mixed with any other (naive mixup, Zhang et al. 2018, arXiv:1710.09412).

    NMER's baseline; arguments as :func:`continuous_transition`.

    Args:
        capacity: most transitions kept.
        batch_size: transitions per batch.
        mixup_concentration: both parameters of the Beta draw of the mixing coefficient.
        fraction: share of rows that are mixed.
        n_steps: rewards summed into one return when a row is drawn.
        discount: γ of that return.
        device: where transitions are kept.
        memmap: a directory for a scratch file that holds the transitions.
        prefetch: batches drawn ahead in threads.
        seed: of every draw.
    """
    transform = MixPairs(mixup_concentration=mixup_concentration, fraction=fraction)
    sampler = RandomPairSampler()
    return _assemble(capacity, batch_size, sampler, transform, n_steps, discount, device, memmap, prefetch, seed)


def s4rl(
    capacity: int,
    batch_size: int = 256,
    *,
    mixup_concentration: float = 0.75,
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    prefetch: int | None = None,
    seed: int | None = None,
) -> Replay:
    """Each observation is mixed with its own next observation (S4RL, Sinha et al. 2022, arXiv:2103.06326).

    Args:
        capacity: most transitions kept.
        batch_size: transitions per batch.
        mixup_concentration: both parameters of the Beta draw of the mixing coefficient.
        n_steps: rewards summed into one return when a row is drawn.
        discount: γ of that return.
        device: where transitions are kept.
        memmap: a directory for a scratch file that holds the transitions.
        prefetch: batches drawn ahead in threads.
        seed: of every draw.
    """
    transform = MixStates(mixup_concentration=mixup_concentration)
    return _assemble(
        capacity, batch_size, UniformSampler(), transform, n_steps, discount, device, memmap, prefetch, seed
    )


def noisy(
    capacity: int,
    batch_size: int = 256,
    *,
    sigma: float = 0.1,
    n_steps: int = 1,
    discount: float = 0.99,
    device: str = "cpu",
    memmap: str | None = None,
    prefetch: int | None = None,
    seed: int | None = None,
) -> Replay:
    """Gaussian noise on every observation drawn, NMER's baseline of that name.

    Args:
        capacity: most transitions kept.
        batch_size: transitions per batch.
        sigma: standard deviation of the noise.
        n_steps: rewards summed into one return when a row is drawn.
        discount: γ of that return.
        device: where transitions are kept.
        memmap: a directory for a scratch file that holds the transitions.
        prefetch: batches drawn ahead in threads.
        seed: of every draw.
    """
    transform = GaussianNoise(sigma=sigma)
    return _assemble(
        capacity, batch_size, UniformSampler(), transform, n_steps, discount, device, memmap, prefetch, seed
    )


def known() -> dict[str, Callable[..., Replay]]:
    """Every recipe by name."""
    return {name: globals()[name] for name in __all__ if name != "known"}


def by_name(name: str) -> Callable[..., Replay]:
    """The recipe of that name.

    Raises:
        ValueError: unknown; the message lists the known ones.
    """
    recipes = known()
    if name in recipes:
        return recipes[name]
    near = difflib.get_close_matches(name, recipes, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"there is no recipe {name!r}; known are {', '.join(sorted(recipes))}.{hint}")


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return by_name(name)
    except ValueError as error:
        raise AttributeError(str(error)) from None


def _assemble(
    capacity: int,
    batch_size: int,
    sampler: Sampler,
    transform: Transform | None,
    n_steps: int,
    discount: float,
    device: str,
    memmap: str | None,
    prefetch: int | None,
    seed: int | None,
) -> Replay:
    return Replay(
        storage=PackedStorage(capacity, device=device, memmap=memmap),
        sampler=sampler,
        transform=transform,
        batch_size=batch_size,
        n_steps=n_steps,
        discount=discount,
        prefetch=prefetch,
        seed=seed,
    )
