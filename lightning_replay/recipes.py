# SPDX-License-Identifier: Apache-2.0
"""Published replay methods, each a function that returns a complete replay buffer.

``capacity`` is the most transitions kept, and ``batch_size`` the transitions of a batch: by default 256, or
``capacity`` if that is less. :class:`ReplayOptions` are the options that all share.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler
from torchrl.envs import Compose, Transform

from lightning_replay.ages import Age
from lightning_replay.events.event_table import ConditionLike, EventTable
from lightning_replay.mixed_replay import MixedReplay
from lightning_replay.options import (
    check_kind,
    checked_choice,
    checked_count,
    checked_flag,
    checked_number,
    checked_share,
    did_you_mean,
    with_named_arguments,
)
from lightning_replay.replay import Replay, given_batch_size
from lightning_replay.samplers import (
    ContinuousTransitionSampler,
    GroupSampler,
    NeighborhoodMixupSampler,
    PrioritizedSampler,
    RandomPairSampler,
    RecencySampler,
    ReshuffledSampler,
    ReverseSweepSampler,
    SequenceSampler,
    UniformSampler,
)
from lightning_replay.samplers.continuous_correction import ContinuousCorrectionSampler
from lightning_replay.samplers.distinct import checked_replace
from lightning_replay.samplers.neighborhood_mixup import FEATURE_KEYS
from lightning_replay.samplers.sequences import MAX_SHARE
from lightning_replay.samplers.tables import CORRECTIONS, NEEDS_COUNTS, ScheduledSampler, TableShares
from lightning_replay.schedulers import Scheduler, UniformTasks
from lightning_replay.schedules import Schedule, checked_schedule
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.storage.observations_once import ObservationStorage
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.storage.ragged import RaggedStorage
from lightning_replay.table_replay import CurriculumReplay, TableReplay
from lightning_replay.transforms import GaussianNoise, MixPairs, MixStates, NStepTransitions, RelabelGoals
from lightning_replay.transforms.goals import ACHIEVED_GOAL, DESIRED_GOAL, GoalFunction
from lightning_replay.transforms.mixup import MIXED_KEYS
from lightning_replay.transforms.noise import NOISY_KEYS
from lightning_replay.writers import RetentionRule, RetentionWriter, SurpriseOnPolicyness
from lightning_replay.writers.tables import DEFAULT_TABLE, EventTableWriter, TaskTableWriter, check_tables

__all__ = [
    "continuous_transition",
    "event_tables",
    "groups",
    "hindsight",
    "known",
    "mixed",
    "mixup",
    "neighborhood_mixup",
    "noisy",
    "parallel_curriculum",
    "prioritized",
    "reverse_sweep",
    "s4rl",
    "sequences",
    "surprise_retention",
    "uniform",
]

B = TypeVar("B", bound=Replay)
ImageKey = str | list[str | tuple[str, ...]] | tuple[str, ...]  # Files have only lists; there, a list is several keys.


class ReplayOptions(TypedDict, total=False):
    """Options of every recipe.

    Args:
        n_steps: rewards summed into one return when a row is drawn, 1 by default.
        discount: γ of that return, 0.99 by default.
        device: device of the transitions and the batches, the CPU by default.
        draws_on: ``"cpu"`` (the default), or ``"device"``: slots are drawn on the device of the transitions.
            Priorities, generations, and links between steps are then also kept there, and no call waits for it. For
            :func:`uniform`, :func:`prioritized`, :func:`sequences`, and :func:`hindsight`.
        memmap: a directory for a scratch file that holds the transitions, for buffers larger than memory.
        observations: ``"once"`` stores an observation that is also the next observation of another row once, see
            :class:`~lightning_replay.storage.observations_once.ObservationStorage`, ``"twice"`` by default.
        ragged: keys of columns whose rows have different lengths, such as tokens, packed end to end, see
            :class:`~lightning_replay.storage.ragged.RaggedStorage`, none by default. Rows leave first in, first out.
        element_capacity: most elements kept of each ragged column, over all rows, needed with ``ragged``.
        jagged: draw ragged columns as jagged tensors. By default, they are padded, with ``mask``.
        prefetch: batches drawn ahead in threads.
        check_finite: refuse rows with NaN or infinity in rewards or observations, on by default.
        check_every: calls between two reads of what was refused on the device, with ``draws_on="device"``, see
            :class:`~lightning_replay.Replay`.
        check_continuity: a row follows another only if it starts with the observation that the other ended with, bit
            for bit, on by default, see :class:`~lightning_replay.episodes.links.Continuity`.
        age: :class:`~lightning_replay.Age`, or a mapping of its options such as ``{"half_life": 10_000}``, by
            which rows become less likely as they age, ``None`` by default. Not for :func:`reverse_sweep`.
        replace: whether a batch may have a row, a sequence, or a group several times, yes by default. ``False`` draws
            one after the other, each in proportion to its weight among the rows that are left. Importance weights stay
            equal to draws with replacement. ``"pass"`` draws each once before any again, see
            :class:`~lightning_replay.samplers.ReshuffledSampler`: rows or groups, uniformly, without an age. Of pairs,
            it is the first row. Draws are made on the CPU. Not for :func:`reverse_sweep`.
        transform: applied to drawn batches after the recipe's own, such as
            :class:`~lightning_replay.transforms.RelabelGoals`, none by default.
        seed: seed of every draw. ``None`` seeds from torch's global generator.
    """

    n_steps: int
    discount: float
    device: str
    draws_on: str
    memmap: str | None
    observations: str
    ragged: Sequence[str | tuple[str, ...]] | None
    element_capacity: int | None
    jagged: bool
    prefetch: int | None
    check_finite: bool
    check_every: int | None
    check_continuity: bool
    age: Age | Mapping[str, Any] | None
    replace: bool | str
    transform: Transform | None
    seed: int | None


class FrameOptions(ReplayOptions, total=False):
    """Options of recipes that can store each frame once.

    Args:
        frame_stack: frames in each stack under ``image_key``. Each frame is then stored once, see
            :class:`~lightning_replay.storage.frames.FrameStorage`. ``None`` stores rows unchanged.
        image_key: key of the stacks, uint8 ``[N, frame_stack, H, W]``, and under ``"next"`` of their successors,
            ``"pixels"`` by default. A tuple is one nested key. A list has the keys of several cameras.
        frame_capacity: most frames kept of each camera. A full frame store evicts the oldest transitions, with tables
            the oldest entries of the fullest one. By default an eighth more than ``capacity`` for stacks of 4, enough
            for episodes (with tables: runs) of 32 steps or more.
    """

    frame_stack: int | None
    image_key: ImageKey
    frame_capacity: int | None


class PriorityOptions(FrameOptions, total=False):
    """Options of recipes that can draw by priority.

    Args:
        priority_exponent: α of prioritized draws, see :func:`prioritized`. 0 draws uniformly, by default except in
            :func:`surprise_retention` with its 0.5.
        importance_exponent: β of their correction, a number or a schedule, 0.4 by default.
        priority_offset: ε, added to every priority, 1e-6 by default.
    """

    priority_exponent: float
    importance_exponent: float | Schedule
    priority_offset: float


class MixingOptions(ReplayOptions, total=False):
    """Options of recipes that mix two transitions.

    Args:
        mixup_concentration: both parameters of the Beta distribution of the mixing coefficient, 0.75 by default.
        fraction: share of rows that are mixed, a number or a schedule, by default all.
        keys: floating columns that are mixed, by default observation, action, reward and next observation. A key
            includes every entry nested under it. Integers, such as discrete actions, are refused. Columns that are not
            named keep the values of the first transition.
    """

    mixup_concentration: float
    fraction: float | Schedule
    keys: Sequence[str | tuple[str, ...]]


# jsonargparse prints what the docstring of a class describes, and a TypedDict has no base class to look in.
for _kind, _base in ((FrameOptions, ReplayOptions), (PriorityOptions, FrameOptions), (MixingOptions, ReplayOptions)):
    if _kind.__doc__ and _base.__doc__:  # python -OO has none
        _kind.__doc__ = _kind.__doc__.rstrip() + _base.__doc__.partition("Args:")[2]


def storage_for(
    capacity: int,
    *,
    device: str = "cpu",
    memmap: str | None = None,
    observations: str = "twice",
    ragged: Sequence[str | tuple[str, ...]] | None = None,
    element_capacity: int | None = None,
    jagged: bool = False,
    frame_stack: int | None = None,
    image_key: ImageKey = "pixels",
    frame_capacity: int | None = None,
    default_frame_capacity: Callable[[int], int] | None = None,
    n_steps: int = 1,
) -> PackedStorage:
    """Returns a storage by :class:`FrameOptions`. ``default_frame_capacity`` is a function of ``frame_stack``."""
    is_once = checked_choice("observations", observations, ("twice", "once")) == "once"
    if element_capacity is not None:
        checked_count("element_capacity", element_capacity, of="elements")
    if (checked_flag("jagged", jagged) and ragged is None) or (ragged is None) != (element_capacity is None):
        raise ValueError(
            f"ragged is {ragged!r}, element_capacity is {element_capacity} and jagged is {jagged}; name the columns of "
            "different lengths and give the most elements kept of each, as ragged=['tokens'], "
            "element_capacity=1_000_000, or leave all three out"
        )
    if ragged is not None and element_capacity is not None:
        if frame_stack is not None or is_once:
            raise ValueError(
                f"ragged is {ragged!r}, with frame_stack or observations='once'; leave ragged or the other out"
            )
        return RaggedStorage(
            capacity, ragged, element_capacity=element_capacity, jagged=jagged, device=device, memmap=memmap
        )
    if frame_stack is None:
        name, value = ("image_key", image_key) if frame_capacity is None else ("frame_capacity", frame_capacity)
        if value != "pixels":
            raise ValueError(
                f"{name} is {value!r} and frame_stack is not given; frames are stored once only where frame_stack is "
                f"their number in a stack. Pass frame_stack=4, for example, or leave {name} out"
            )
        return (ObservationStorage if is_once else PackedStorage)(capacity, device=device, memmap=memmap)
    if is_once:
        raise ValueError(
            f"observations is 'once' and frame_stack is {frame_stack}; with frame_stack, frames are stored once and "
            "other observations twice. Leave one of the two out"
        )
    # Before they are compared and multiplied: that accepts flags, and fails without the name of the option.
    checked_count("capacity", capacity, of="transitions")
    if capacity < checked_count("frame_stack", frame_stack, of="frames") + checked_count("n_steps", n_steps):
        raise ValueError(
            f"capacity is {capacity}, below frame_stack + n_steps = {frame_stack} + {n_steps}: not even the frames of "
            "one return would be shared between transitions. Raise the capacity"
        )
    if frame_capacity is None:
        default = default_frame_capacity or functools.partial(frames_in_order, capacity)
        frame_capacity = max(default(frame_stack), 2 * frame_stack)  # one row whose two stacks share nothing
    return FrameStorage(capacity, frame_stack, image_key, frame_capacity=frame_capacity, device=device, memmap=memmap)


def frames_in_order(rows: int, frame_stack: int, run_length: int = 32) -> int:
    # Each run of consecutive steps has frame_stack more frames than rows. 64 trajectories may be running.
    return rows + frame_stack * (-(-rows // run_length) + 64)


def frames_at_worst(rows: int, frame_stack: int, n_steps: int) -> int:
    # Of rows that share none. The two stacks of one row overlap if n_steps is below frame_stack.
    return rows * (frame_stack + min(frame_stack, n_steps))


def assemble(
    kind: type[B],
    slots: int,
    batch_size: int | None,
    options: Any,
    sampler: Sampler,
    default_frame_capacity: Callable[[int], int] | None = None,
    **parts: Any,
) -> B:
    """Builds the buffer of a recipe from the options that recipes share and its own parts, which come before them."""
    if draw_device(options) is not None:
        raise ValueError(
            "draws_on is 'device', and this recipe draws slots on the CPU; the recipes uniform, prioritized, "
            "sequences, and hindsight draw on the device. Leave draws_on out"
        )
    if (age := options.pop("age", None)) is not None:
        raise ValueError(
            f"age is {age!r}, and {type(sampler).__name__} draws by a rule in which the age of a row has no "
            "meaning. Leave age out, or use the recipes uniform, prioritized, or event_tables"
        )
    if not checked_replace(options.pop("replace", True)):
        raise ValueError(
            f"replace is False, and {type(sampler).__name__} draws by a rule in which rows come again; give "
            "replace=True, or use another recipe"
        )
    storage = storage_for(
        slots,
        **taken(options, "device", "memmap", "observations", "ragged", "element_capacity", "jagged"),
        **taken(options, "frame_stack", "image_key", "frame_capacity"),
        n_steps=options.get("n_steps", 1),
        default_frame_capacity=default_frame_capacity,
    )
    own = parts.get("transform")
    given = options.pop("transform", None)
    if given is not None and own is not None:
        check_kind("transform", given, Callable, "a Transform of TorchRL or of this library, or a callable")
    parts["transform"] = given if own is None else own if given is None else Compose(own, given)
    # n_steps is of the storage, which is checked against it, and of the buffer, which forms the returns.
    return kind(storage=storage, sampler=sampler, batch_size=batch_size, **{**options, **parts})


def taken(options: Any, *names: str) -> dict[str, Any]:
    """Removes the options of these names that were given, and returns them."""
    return {name: options.pop(name) for name in names if name in options}


def draw_device(options: Any) -> str | None:
    """Takes ``draws_on`` out of the options of a recipe, and returns the device to draw on. ``None`` is the CPU."""
    draws_on = checked_choice("draws_on", options.pop("draws_on", "cpu"), ("cpu", "device"))
    return options.get("device", "cpu") if draws_on == "device" else None


def mixing(options: Any) -> MixPairs:
    """Takes the options of mixup out of the options of a recipe, and returns their transform."""
    return MixPairs(**taken(options, "mixup_concentration", "fraction", "keys"))


def priorities(options: Any) -> dict[str, Any]:
    """Takes the options of priorities, ages, and replacement out of the options of a recipe."""
    return taken(options, "priority_exponent", "importance_exponent", "priority_offset", "age", "replace")


def prioritized_or_uniform(
    capacity: int,
    priority_exponent: float = 0.0,
    importance_exponent: float | Schedule = 0.4,
    priority_offset: float = 1e-6,
    device: str | None = None,
    age: Age | Mapping[str, Any] | None = None,
    replace: Any = True,
) -> Sampler:
    """Returns a prioritized sampler, or without priorities one that draws by age or uniformly."""
    if priority_exponent != 0:
        exponents = (priority_exponent, importance_exponent, priority_offset)
        return PrioritizedSampler(capacity, *exponents, device=device, age=age, replace=replace)
    # Both options have no effect here, and are checked all the same.
    checked_schedule("importance_exponent", importance_exponent, highest=1.0)
    checked_number("priority_offset", priority_offset, 0.0)
    if age is None and device is None and isinstance(replace, str) and replace == "pass":
        return ReshuffledSampler()
    if age is None:
        return UniformSampler(device=device, replace=replace)
    if device is not None:
        raise ValueError(f"age is {age!r} and draws_on is 'device'; draws by age are made on the CPU. Leave one out")
    return RecencySampler(capacity, age, replace=replace)


def first_of_pairs(capacity: int, age: Age | Mapping[str, Any] | None = None, replace: Any = True) -> Sampler | None:
    """Returns the sampler of the first rows of pairs, or ``None`` for the uniform one of the pairs."""
    is_default = age is None and replace is True
    return None if is_default else prioritized_or_uniform(capacity, age=age, replace=replace)


@with_named_arguments
def neighborhood_mixup(
    capacity: int,
    batch_size: int | None = None,
    *,
    num_neighbors: int = 10,
    priority_exponent: float = 0.0,
    importance_exponent: float | Schedule = 0.4,
    update_partners: bool = False,
    refresh_interval: int = 64,
    backend: str = "exact",
    discrete: str | None = None,
    feature_keys: Sequence[str | tuple[str, ...]] = FEATURE_KEYS,
    **options: Unpack[MixingOptions],
) -> Replay:
    """Mixes each drawn transition with one of its nearest neighbors (NMER, Sander et al. 2022).

    Neighborhood Mixup Experience Replay, https://proceedings.mlr.press/v168/sander22a.html. Neighbors are found in
    standardized observations and actions. Terminal transitions stay as they are. Meant for continuous actions.

    Args:
        num_neighbors: K, candidates for mixing.
        priority_exponent: α of prioritized draws of the first of each pair. 0 draws it uniformly.
        importance_exponent: β of their correction.
        update_partners: pass TD errors to both of a pair instead of the first alone.
        refresh_interval: insertions between updates of the neighbor lists. 1 is the paper's definition.
        backend: search that builds the lists: ``exact``, ``faiss_flat`` or ``faiss_ivf``.
        discrete: ``"same_action"`` restricts neighbors to the same discrete action, which is otherwise refused.
        feature_keys: columns whose concatenation neighbors are close in: floats, the last may be a discrete action.
            A nested column, such as a Dict observation, includes every entry under it.

    With ``check_finite=False`` observations and actions must still be finite, since the search needs distances.
    """
    sampler = NeighborhoodMixupSampler(
        num_neighbors=num_neighbors,
        base_sampler=prioritized_or_uniform(
            capacity, priority_exponent, importance_exponent, **taken(options, "age", "replace")
        ),
        refresh_interval=refresh_interval,
        backend=backend,
        discrete=discrete,
        update_partners=update_partners,
        feature_keys=feature_keys,
    )
    if discrete is not None:  # the action is equal in both of a pair, and an integer
        options["keys"] = [key for key in options.get("keys", MIXED_KEYS) if key != feature_keys[-1]]
    return assemble(Replay, capacity, batch_size, options, sampler, transform=mixing(options))


@with_named_arguments
def continuous_transition(capacity: int, batch_size: int | None = None, **options: Unpack[MixingOptions]) -> Replay:
    """Mixes each drawn transition with the next one of its episode (CT, Lin et al. 2021, arXiv:2011.14487).

    As in NMER's baseline, the mixing temperature is not tuned.
    """
    base = first_of_pairs(capacity, **taken(options, "age", "replace"))
    sampler = ContinuousTransitionSampler(base, check_continuity=options.get("check_continuity", True))
    return assemble(Replay, capacity, batch_size, options, sampler, transform=mixing(options))


@with_named_arguments
def mixup(capacity: int, batch_size: int | None = None, **options: Unpack[MixingOptions]) -> Replay:
    """Mixes each drawn transition with any other, a baseline of NMER (Zhang et al. 2018, arXiv:1710.09412)."""
    sampler = RandomPairSampler(first_of_pairs(capacity, **taken(options, "age", "replace")))
    return assemble(Replay, capacity, batch_size, options, sampler, transform=mixing(options))


@with_named_arguments
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
        mixup_concentration: both parameters of the Beta distribution of the mixing coefficient.
        keys: the observations, each mixed with the one of the same name under ``"next"``. A key includes every entry
            nested under it.
    """
    transform = MixStates(mixup_concentration=mixup_concentration, keys=keys)
    sampler = prioritized_or_uniform(capacity, **taken(options, "age", "replace"))
    return assemble(Replay, capacity, batch_size, options, sampler, transform=transform)


@with_named_arguments
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

    See :class:`~lightning_replay.transforms.GaussianNoise`. Meant for continuous actions. With discrete ones, pass
    ``keys`` without the action.

    Args:
        sigma: standard deviation of the noise.
        keys: floating-point entries that noise is added to.
        kind: ``"additive"`` as in the paper, or ``"multiplicative"`` as in the authors' code, ``value * (1 + noise)``.
    """
    transform = GaussianNoise(sigma=sigma, keys=keys, kind=kind)
    sampler = prioritized_or_uniform(capacity, **taken(options, "age", "replace"))
    return assemble(Replay, capacity, batch_size, options, sampler, transform=transform)


@with_named_arguments
def uniform(capacity: int, batch_size: int | None = None, **options: Unpack[FrameOptions]) -> Replay:
    """Draws uniformly and evicts the oldest: experience replay as introduced by Lin (1992)."""
    sampler = prioritized_or_uniform(capacity, device=draw_device(options), **taken(options, "age", "replace"))
    return assemble(Replay, capacity, batch_size, options, sampler)


@with_named_arguments
def prioritized(
    capacity: int,
    batch_size: int | None = None,
    *,
    priority_exponent: float = 0.6,
    importance_exponent: float | Schedule = 0.4,
    priority_offset: float = 1e-6,
    normalize_over_batch: bool = False,
    min_priority: float = 0.0,
    **options: Unpack[FrameOptions],
) -> Replay:
    """Draws rows of large TD errors more often (Schaul et al. 2016, https://arxiv.org/abs/1511.05952).

    Multiply the loss by ``batch["priority_weight"]`` and return TD errors with ``replay.update_priority``.

    Args:
        priority_exponent: α. 0 draws uniformly, 1 in proportion to the priority.
        importance_exponent: β of the correction, a number or a schedule.
        priority_offset: ε, added to every priority.
        normalize_over_batch: divide weights by the batch's largest instead of the memory's.
        min_priority: smaller priorities are raised to it. Use 1, with ``priority_exponent=0.4`` and
            ``importance_exponent=0``, for loss-adjusted prioritization (LAP, https://arxiv.org/abs/2007.06049).
    """
    # Also if priority_exponent is 0: it may be set later, and TD errors are kept until then.
    sampler = PrioritizedSampler(
        capacity,
        priority_exponent,
        importance_exponent,
        priority_offset,
        normalize_over_batch,
        min_priority=min_priority,
        device=draw_device(options),
        **taken(options, "age", "replace"),
    )
    return assemble(Replay, capacity, batch_size, options, sampler)


@with_named_arguments
def hindsight(
    capacity: int,
    batch_size: int | None = None,
    *,
    env: Any = None,
    reward: GoalFunction | None = None,
    terminated: GoalFunction | None = None,
    strategy: str = "future",
    share: float = 0.8,
    achieved_key: str | tuple[str, ...] = ACHIEVED_GOAL,
    desired_key: str | tuple[str, ...] = DESIRED_GOAL,
    reward_keys: Sequence[str | tuple[str, ...]] = (),
    **options: Unpack[PriorityOptions],
) -> Replay:
    """Replaces goals of drawn rows by goals that their episodes achieved (HER, Andrychowicz et al. 2017).

    Hindsight Experience Replay, https://arxiv.org/abs/1707.01495, for environments whose observations hold an achieved
    and a desired goal. For other recipes give :class:`~lightning_replay.transforms.RelabelGoals` as ``transform``.

    Args:
        env: id of the goal environment, an environment, or a class or function that builds one. Its ``compute_reward``
            and ``compute_terminated`` are used if ``reward`` and ``terminated`` are not given.
        reward: ``(achieved, desired, info)`` of arrays ``[N, ...]`` to rewards ``[N]``. ``info`` holds the columns of
            ``reward_keys``.
        terminated: the same, to flags ``[N]``.
        strategy: ``"future"`` (a later step of the episode), ``"final"`` (the newest) or ``"episode"`` (any).
        share: probability that a row is relabeled, k / (k + 1) of the paper, 0.8 for k = 4.
        achieved_key: column of the achieved goal.
        desired_key: column of the desired goal.
        reward_keys: stored columns that ``reward`` and ``terminated`` read besides the goals, such as
            ``["action", ("next", "speed")]``: ``info["action"]`` and ``info["speed"]``.

    Raises:
        ValueError: neither ``reward`` nor an ``env`` that computes it.
    """
    sampler = prioritized_or_uniform(capacity, **priorities(options), device=draw_device(options))
    relabel = RelabelGoals(strategy, share, reward, env, terminated, achieved_key, desired_key, reward_keys)
    return assemble(Replay, capacity, batch_size, options, sampler, transform=relabel)


@with_named_arguments
def reverse_sweep(
    capacity: int,
    batch_size: int | None = None,
    *,
    goal: ConditionLike,
    sweep_share: float = 0.5,
    **options: Unpack[FrameOptions],
) -> Replay:
    """Replays episodes that reached a goal backwards in contiguous batches, mixed with uniform ones.

    A baseline of Stratified Sampling from Event Tables (arXiv:2211.00576), which reports no numbers for it.

    Args:
        batch_size: transitions per batch, and steps of an episode in one batch of a sweep.
        goal: which steps reach the goal, for instance :func:`lightning_replay.events.reward_at_least`.
        sweep_share: share of batches that are part of a sweep.
    """
    sampler = ReverseSweepSampler(
        goal=goal, sweep_share=sweep_share, check_continuity=options.get("check_continuity", True)
    )
    return assemble(Replay, capacity, batch_size, options, sampler)


@with_named_arguments
def surprise_retention(
    capacity: int,
    batch_size: int | None = None,
    *,
    q_inverse_temperature: float = 1.0,
    surprise_exponent: float | Schedule = 1.0,
    draw_discount: float = 1.0,
    rule: RetentionRule | None = None,
    always_admit: bool = False,
    initial_surprise: Callable[[TensorDictBase], Tensor] | None = None,
    **options: Unpack[PriorityOptions],
) -> Replay:
    """Evicts the row of lowest surprise times on-policyness, for small buffers (https://openreview.net/forum?id=SPRHpBKzJE).

    "Memory-efficient reinforcement learning with priority based on surprise and on-policyness" (2022). A full buffer
    refuses a new row that is itself lowest. ``extend`` returns the slots of the rows stored. Draws are prioritized
    independently. After every update call ``replay.update_priority(batch, td_error, action_values=...,
    action=batch["action"])``, which sets both priorities. Without ``action_values``, as of agents with continuous
    actions, rows are ranked by surprise alone. Not for sparse rewards: while all surprise is 0 the first rows are
    never evicted.

    Args:
        q_inverse_temperature: β, multiplies the action values inside the softmax of on-policyness.
        surprise_exponent: of the surprise. A schedule of ``updates`` or ``env_steps`` that falls towards 0 keeps long
            runs with large buffers from accumulating outliers.
        draw_discount: factor of the priority for each time that a row was drawn and its TD error reported, in (0, 1].
            With chance (sticky actions, returns over several steps) give 0.9, which is of this library: errors that no
            training removes then leave. 1 is the paper's rule.
        rule: another of :mod:`lightning_replay.writers`, such as ``StochasticSurprise()``, in place of the three above.
        always_admit: store every new row, even the lowest.
        initial_surprise: surprise ``[M]`` of new transitions ``[M]``. Without it they get the largest priority so far.
            Rules without surprise do not call it. See :class:`~lightning_replay.writers.RetentionWriter` for saves.

    Returns over ``n_steps`` are formed before they are stored, n - 1 steps later. The retention priorities are always
    on the CPU. A full frame store evicts the lowest transitions until a new one fits. Kept rows are scattered and share
    few frames: by default each has ``frame_stack + n_steps`` separate ones, at most ``2 * frame_stack``.

    Sampled keys:
        discount, steps_to_next_obs: ``[B, 1]``, with ``n_steps`` above 1.

    Raises:
        ValueError: ``rule`` with options of the rule it replaces, ``n_steps`` below 1, or a capacity below ``n_steps``
            (with frames below ``frame_stack + n_steps``).
    """
    of_rule: dict[str, Any] = {
        "q_inverse_temperature": q_inverse_temperature,
        "surprise_exponent": surprise_exponent,
        "draw_discount": draw_discount,
    }
    ignored = ", ".join(f"{name}={value}" for name, value in of_rule.items() if value != 1.0)
    if rule is not None and ignored:  # 1 is the default of all three, and what the user left out is not compared
        raise ValueError(
            f"rule is {type(rule).__name__}, so {ignored} would be ignored; leave it out, or give it to the rule if "
            "that has such an option"
        )
    n_steps = options.get("n_steps", 1)
    if checked_count("capacity", capacity, of="transitions") < checked_count("n_steps", n_steps):
        raise ValueError(
            f"capacity {capacity} is below n_steps {n_steps}: a single return spans more steps than are kept. "
            "Raise the capacity"
        )
    return assemble(
        Replay,
        capacity,
        batch_size,
        options,
        prioritized_or_uniform(capacity, **{"priority_exponent": 0.5} | priorities(options)),
        lambda frame_stack: frames_at_worst(capacity, frame_stack, n_steps),
        writer=RetentionWriter(
            SurpriseOnPolicyness(**of_rule) if rule is None else rule,
            initial_surprise=initial_surprise,
            always_admit=always_admit,
        ),
        transform=None
        if n_steps == 1
        else NStepTransitions(n_steps, options.get("discount", 0.99), options.get("check_continuity", True)),
        n_steps=1,  # The transform forms the returns, not the draws.
    )


@with_named_arguments
def event_tables(
    capacity: int,
    batch_size: int | None = None,
    *,
    tables: Sequence[EventTable],
    default_share: float = 0.5,
    min_size: int | None = None,
    correction: str = "none",
    multinomial: bool = False,
    at_least_one: bool = False,
    normalize_over_batch: bool = False,
    return_probabilities: bool = False,
    sequence_length: int | None = None,
    burn_in: int = 0,
    max_trajectories: int = 64,
    forget_stale: bool = False,
    **options: Unpack[PriorityOptions],
) -> TableReplay:
    """Draws a share of every batch from the steps that led to events (SSET, Kompella et al. 2022, arXiv:2211.00576).

    Stratified Sampling from Event Tables. Conditions are tested on new steps. The steps that led to an event stay in
    its table long after the default table evicted them, without a second copy. ``replay.table(name)`` returns a table.

    Args:
        capacity: most transitions in the default table, which every step enters.
        tables: the event tables. A ``share`` of ``None`` is an equal part of what the others and the default leave, a
            ``min_size`` of ``None`` is the batch size, or the table's capacity if that is less.
        default_share: η_0, share of a batch from the default table. The paper recommends 0.7 if it is not known which
            events matter.
        min_size: d_0, rows that the default table must hold before it is drawn from. ``None`` is the batch size, or
            ``capacity`` if that is less.
        correction: importance weights of rows drawn more often than they occur: ``"none"`` (the paper's choice for
            deterministic environments), ``"mixture"`` (exact, any state space), ``"lemma2"`` or ``"lemma2_exact"``
            (discrete states and actions), see
            :mod:`lightning_replay.samplers.tables`, or ``"continuous"``, one draw over all tables, without row counts
            per table, TD priorities or minimum sizes of event tables:
            :class:`~lightning_replay.samplers.continuous_correction.ContinuousCorrectionSampler`.
        multinomial: draw the number of rows of each table at random. Otherwise, shares are exact by largest remainder.
        at_least_one: draw at least one row from every table that holds enough.
        normalize_over_batch: divide the weights by the largest of the batch.
        return_probabilities: add ``table_probability`` and ``raw_weight``, of
            :class:`~lightning_replay.samplers.tables.TableShares` or of the sampler of ``"continuous"``.
        sequence_length: T, draws a sequence with each row, see :class:`~lightning_replay.samplers.SequenceSampler`.
        burn_in: steps at the beginning of a sequence from which nothing is learned.
        max_trajectories: episodes that may run at once.
        forget_stale: if more run, drop the history of episodes continued longest ago instead of refusing new ones.

    With ``n_steps`` above 1 events are tested on single steps. The tables are always on the CPU. A full frame store
    evicts the oldest entries of the fullest table.

    Sampled keys:
        table: int64 ``[B]``, the table each row was drawn from: 0 the default table, then the given tables, in order.
        priority_weight: float32 ``[B]``, with a correction or priorities.
        table_probability, raw_weight: float32 ``[B]``, with ``return_probabilities``.

    Raises:
        ValueError: shares that do not sum to 1, two tables of one name, an unknown correction or one that excludes
            other options, or a ``min_size`` that the default table cannot reach.
        TypeError: a ``min_size`` that is no whole number.
    """
    check_tables(tables)  # the writer does too, and names its own argument
    checked_choice("correction", correction, (*CORRECTIONS, "continuous"))
    if correction == "continuous":
        others = {
            "multinomial": multinomial,
            "at_least_one": at_least_one,
            "priority_exponent": options.get("priority_exponent", 0.0) != 0,
            "age": options.get("age") is not None,
            "replace": not checked_replace(options.pop("replace", True)),
            **{f"table {table.name!r} of share 0": table.share == 0 for table in tables},
        }
        if wrong := [name for name, is_given in others.items() if is_given]:
            raise ValueError(
                f"correction='continuous' draws from all tables at once with priorities of its own; leave out "
                f"{', '.join(wrong)}, or use correction='mixture'"
            )
    writer = EventTableWriter(
        capacity,
        tables,
        max_trajectories=max_trajectories,
        forget_stale=forget_stale,
        count_state_actions=correction in NEEDS_COUNTS,
        check_continuity=options.get("check_continuity", True),
    )
    batch_size = given_batch_size(batch_size, capacity)
    least = min(batch_size, capacity) if min_size is None else checked_count("min_size", min_size, of="rows")
    if least > capacity:
        raise ValueError(
            f"min_size is {min_size} and the default table holds {capacity} rows at most: it can never fill"
        )
    given = {table.name: table.min_size or min(batch_size, table.capacity) for table in tables}
    sampler: Sampler = TableShares(
        _shares(default_share, tables),
        min_sizes={DEFAULT_TABLE: least} | given,
        multinomial=multinomial,
        at_least_one=at_least_one,
        correction=CORRECTIONS.get(correction),
        normalize_over_batch=normalize_over_batch,
        **priorities(options),
        return_probabilities=return_probabilities,
    )
    if correction == "continuous":  # TableShares has checked the shares
        sampler = ContinuousCorrectionSampler(
            1.0 - default_share, least, normalize_over_batch, return_probabilities=return_probabilities
        )
    if sequence_length is not None or checked_count("burn_in", burn_in, 0, of="steps"):
        length = checked_count("sequence_length", sequence_length)
        if not sampler.replace:
            raise ValueError(
                f"replace is False and sequence_length is {sequence_length}; different rows near the end of an episode "
                "share a sequence. Leave one of the two out, or use the recipe sequences"
            )
        checks = options.get("check_continuity", True)
        sampler = SequenceSampler(length, burn_in=burn_in, base_sampler=sampler, check_continuity=checks)
    lengths = [max(event.history_length for event in table.events) for table in tables]
    # Rows lie in runs of an event's history. The rows of running episodes may enter any table.
    rows = [capacity, *(table.capacity for table in tables), max_trajectories * max(lengths)]

    def frames(frame_stack: int) -> int:
        return sum(map(frames_in_order, rows, itertools.repeat(frame_stack), [32, *lengths, max(lengths)]))

    return assemble(TableReplay, writer.num_slots, batch_size, options, sampler, frames, writer=writer)


@with_named_arguments
def sequences(
    capacity: int,
    batch_size: int | None = None,
    *,
    length: int,
    overlap: int = 0,
    burn_in: int = 0,
    min_steps: int | None = None,
    max_share: float = MAX_SHARE,
    **options: Unpack[PriorityOptions],
) -> Replay:
    """Draws sequences of steps ``[B, T]`` for recurrent agents and world models (R2D2, Kapturowski et al. 2019).

    https://openreview.net/forum?id=r1lyTjAqYX. The options are described at
    :class:`~lightning_replay.samplers.SequenceSampler`. ``batch_size`` counts sequences.

    Args:
        length: T, steps of a sequence, the burn-in included.
        overlap: steps that neighboring sequences of an episode share.
        burn_in: steps at the beginning of a sequence from which nothing is learned.
        min_steps: fewest steps of a sequence, by default ``burn_in + 1``. ``length`` draws whole sequences alone.
        max_share: η, share of the largest TD error of a sequence in its priority.
    """
    sampler = SequenceSampler(
        length,
        overlap,
        burn_in,
        min_steps=min_steps,
        **priorities(options),
        max_share=max_share,
        check_continuity=options.get("check_continuity", True),
        device=draw_device(options),
    )
    return assemble(Replay, capacity, batch_size, options, sampler)


@with_named_arguments
def groups(
    capacity: int,
    batch_size: int | None = None,
    *,
    group_size: int,
    fresh_share: float = 0.0,
    priority_exponent: float = 0.0,
    importance_exponent: float | Schedule = 0.4,
    priority_offset: float = 1e-6,
    **options: Unpack[ReplayOptions],
) -> Replay:
    """Stores, draws, and evicts whole groups of rows, such as the eight answers of a language model to one prompt.

    See :class:`~lightning_replay.samplers.GroupSampler`. Rows are stored in whole groups, the rows of a group side by
    side, and lie so in the batch. Other columns travel with their rows. If the log-probability of an answer is one of
    them, ``exp(new_log_prob - batch["log_prob"])`` is the importance ratio that corrects for the older policy.

    Args:
        capacity: most rows kept, a multiple of ``group_size``.
        batch_size: rows of a batch, a multiple of ``group_size``, by default the largest one up to 256 and
            ``capacity``, or one group.
        group_size: G, rows of a group.
        fresh_share: share of each batch from the newest groups, each once before again, 0.5 for half.
        priority_exponent: α of prioritized draws. The priority of a group is the mean of the magnitudes that its rows
            get. 0 draws uniformly.
        importance_exponent: β of their correction.
        priority_offset: ε, added to every priority.

    With an ``age``, ``clock="rows"`` counts groups, and ``version_key`` names a column with the version of the policy,
    of which that of the first row of a group counts. ``Age(max_age=2, version_key="version")`` draws groups of the
    newest three versions.

    Sampled keys:
        is_fresh: bool ``[B]``, with a ``fresh_share``. Fresh rows are first.
        priority_weight: float32 ``[B]``, with priorities, 1 in fresh rows.

    Raises:
        ValueError: ``capacity`` or ``batch_size`` is no multiple of ``group_size``.
    """
    checked_count("group_size", group_size, of="rows")
    if batch_size is None:
        batch_size = max(1, given_batch_size(None, capacity) // group_size) * group_size
    if checked_count("batch_size", batch_size, of="transitions") % group_size:
        raise ValueError(
            f"batch_size is {batch_size} and group_size is {group_size}; batch_size counts rows, and groups are drawn "
            f"whole. Give a multiple of {group_size}"
        )
    num_groups = max(1, checked_count("capacity", capacity, of="transitions") // group_size)
    replace: Any = options.pop("replace", True)
    of_base = taken(options, "age") | ({"replace": replace} if isinstance(replace, str) else {})
    base = prioritized_or_uniform(num_groups, priority_exponent, importance_exponent, priority_offset, **of_base)
    sampler = GroupSampler(group_size, base, fresh_share, True if isinstance(replace, str) else replace)
    return assemble(Replay, capacity, batch_size, options, sampler)


@with_named_arguments
def parallel_curriculum(
    tasks: Sequence[str],
    capacity_per_task: int,
    batch_size: int | None = None,
    *,
    scheduler: Scheduler | None = None,
    min_size: int | None = None,
    **options: Unpack[PriorityOptions],
) -> CurriculumReplay:
    """Draws each batch from one of several tasks, a hard one and easier ones (DPCER).

    Distributed Parallel Curriculum Experience Replay (Li and Ji 2021, https://openreview.net/forum?id=EiW3FLYBiP).
    Rows carry ``task``, int64 ``[N]``, an index into ``tasks``. Report progress to the scheduler with
    ``replay.progress(name, signal)``. ``replay.actor_tasks(n)`` returns the tasks for actors.

    Args:
        tasks: names. By convention the hard one, the target, comes first.
        capacity_per_task: most transitions kept of each task.
        scheduler: chooses the task of the next batch: :class:`~lightning_replay.schedulers.UniformTasks` (the default),
            ``Exp3``, ``Exp3S``, or a baseline, ``OneTask``, ``EasyToHard``, ``ReverseCurriculum``, for which all tasks
            share one table. It is copied.
        min_size: rows that a task needs before it is drawn from, by default the batch size, or the capacity if less.

    Raises:
        ValueError: a task named twice, or a ``min_size`` that no table can reach.
        TypeError: ``scheduler`` is not a scheduler.
    """
    scheduler = UniformTasks() if scheduler is None else scheduler
    check_kind("scheduler", scheduler, Scheduler, "an object of lightning_replay.schedulers, such as Exp3()")
    # Baselines draw from one table of all tasks, as large as the tables together.
    writer = TaskTableWriter(tasks, capacity_per_task, shares_one_table=scheduler.shares_one_table)
    batch_size = given_batch_size(batch_size, writer.num_slots)
    reachable = int(writer.tables.capacity[0])
    if min_size is not None and checked_count("min_size", min_size, of="rows") > reachable:
        raise ValueError(f"min_size is {min_size} and a table holds {reachable} rows at most: it can never fill")
    sampler = ScheduledSampler(
        tasks,
        scheduler,
        min_size=min(batch_size, reachable) if min_size is None else min_size,
        **priorities(options),
    )
    return assemble(CurriculumReplay, writer.num_slots, batch_size, options, sampler, writer=writer)


#: :class:`~lightning_replay.MixedReplay`, of which each side is a buffer of any recipe.
mixed = MixedReplay


def _shares(default_share: float, tables: Sequence[EventTable]) -> dict[str, float]:
    left = 1.0 - checked_share("default_share", default_share) - sum(table.share or 0.0 for table in tables)
    without = [table.name for table in tables if table.share is None]
    if without and left <= 0:
        raise ValueError(
            f"default_share ({default_share}) and the shares of the other tables leave {left:g} of a batch for "
            f"{without}; lower default_share or the share of a table"
        )
    shares = {table.name: left / len(without) if table.share is None else table.share for table in tables}
    return {DEFAULT_TABLE: default_share} | shares


def known() -> dict[str, Callable[..., Replay]]:
    """Returns every recipe of one buffer by its name."""
    return {name: globals()[name] for name in __all__ if name not in ("known", "mixed")}


def by_name(name: str) -> Callable[..., Replay]:
    """Returns a recipe, or raises ``ValueError`` with the known names for any other name."""
    if name not in known():
        raise ValueError(_no_recipe(name))
    return known()[name]


def _no_recipe(name: str) -> str:
    recipes = known()
    if name == "mixed":  # RLlib and a ShardedReplay build buffers from plain options.
        return (
            "recipe 'mixed' joins two buffers that are built and filled before, which a name with plain options cannot "
            "give. Name a recipe of one buffer and fill it with the offline rows; recipes.mixed(online=..., "
            "offline=...) is for loops of your own, TorchRL and Lightning"
        )
    return f"there is no recipe {name!r}; known are {', '.join(sorted(recipes))}{did_you_mean(name, recipes)}"


def __getattr__(name: str) -> Any:
    raise AttributeError(_no_recipe(name))  # Lightning's command imports class paths.
