# SPDX-License-Identifier: Apache-2.0
"""Options that recipes share: their types, defaults and documentation, and the buffer that is built from them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypedDict, TypeVar, get_args, get_type_hints

from torchrl.data.replay_buffers import Sampler

from lightning_replay.argument_names import with_named_arguments
from lightning_replay.recipes.storage import storage_for
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler, UniformSampler
from lightning_replay.schedules import Schedule, checked_schedule
from lightning_replay.validation import checked_number

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B", bound=Replay)

_OF_STORAGE = ("device", "memmap", "frame_stack", "image_key", "frame_capacity", "n_steps")
_OF_BUFFER = ("n_steps", "discount", "prefetch", "check_finite", "check_continuity", "seed")


class ReplayOptions(TypedDict, total=False):
    """Options of every recipe."""

    n_steps: int
    discount: float
    device: str
    memmap: str | None
    prefetch: int | None
    check_finite: bool
    check_continuity: bool
    seed: int | None


class FrameOptions(ReplayOptions, total=False):
    """Options of recipes that can store each frame once."""

    frame_stack: int | None
    image_key: str | tuple[str, ...]
    frame_capacity: int | None


_PARAMETERS = {
    **inspect.signature(Replay.__init__).parameters,
    **inspect.signature(storage_for).parameters,
}  # with the defaults

_DOCUMENTED = """
    capacity: most transitions kept.
    batch_size: transitions per batch; by default 256, or the capacity where it is smaller.
    mixup_concentration: both parameters of the Beta distribution of the mixing coefficient.
    fraction: share of rows that are mixed.
    keys: floating columns that are mixed; a key includes every entry nested under it. Integers, such as discrete
        actions, are refused; columns that are not named stay those of the first transition.
    priority_exponent: α of prioritized draws inside each table; 0 draws uniformly.
    importance_exponent: β of their correction.
    priority_offset: ε, added to every priority.
    n_steps: rewards summed into one return when a row is drawn.
    discount: γ of that return.
    device: where transitions are kept.
    memmap: a directory for a scratch file that holds the transitions, for buffers larger than memory.
    frame_stack: frames in each stack under ``image_key``; each frame is then stored once, see
        :class:`~lightning_replay.storage.frames.FrameStorage`. ``None`` stores rows unchanged.
    image_key: key of the stacks, uint8 ``[N, frame_stack, H, W]``, and under ``"next"`` of their successors.
    frame_capacity: most frames kept; a full frame store evicts the oldest transitions. By default an eighth more than
        ``capacity`` for stacks of 4, enough for episodes of 32 steps or more.
    prefetch: batches drawn ahead in threads.
    check_finite: refuse rows with NaN or infinity in rewards or observations.
    check_continuity: a row follows another only if it starts with the observation that the other ended with, bit for
        bit; see :class:`~lightning_replay.episodes.links.Continuity`.
    seed: seed of every draw; ``None`` seeds from torch's global generator.
"""
_ENTRY = re.compile(r"^    (\w+):.*(?:\n(?:     .*))*", re.MULTILINE)
_SHARED = {entry[1]: entry[0] for entry in _ENTRY.finditer(_DOCUMENTED)}


def recipe(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a recipe: adds the shared options to its signature and docstring, and refuses unknown ones by name.

    Editors and type checkers read the types of ``**options``; ``--help``, YAML files and RLlib's checks read names and
    defaults from the signature that this sets. A recipe documents an option itself where it differs.

    Raises:
        KeyError: neither the recipe nor this module documents an option.
    """
    signature = inspect.signature(function)
    *own, options = signature.parameters.values()
    (kind,) = get_args(get_type_hints(function)[options.name])
    annotations = {name: hint.__forward_arg__ for name, hint in kind.__annotations__.items()}
    defaults = {name: _PARAMETERS[name].default for name in annotations}
    shared = [
        _PARAMETERS[name].replace(kind=_PARAMETERS[name].KEYWORD_ONLY, annotation=annotations[name])
        for name in annotations
    ]

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **{**defaults, **kwargs})

    build.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    build.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if name != options.name}
    build.__annotations__ |= annotations
    if build.__doc__ is not None:  # python -OO has none
        before, _, rest = f"{inspect.cleandoc(build.__doc__)}\n\n".partition("Args:\n")
        section, _, after = rest.partition("\n\n")
        documented = {entry[1]: entry[0] for entry in _ENTRY.finditer(section)}
        entries = [documented.get(name) or _SHARED[name] for name in inspect.signature(build).parameters]
        build.__doc__ = "\n".join([f"{before}Args:", *entries, "", after]).rstrip() + "\n"
    return with_named_arguments(build)


def assemble(
    kind: type[B],
    slots: int,
    batch_size: int | None,
    options: ReplayOptions,
    sampler: Sampler,
    *,
    default_frame_capacity: int | None = None,
    **parts: Any,
) -> B:
    """Builds the buffer of a recipe.

    Args:
        kind: class of the buffer.
        slots: of the storage.
        batch_size: transitions per batch.
        options: those that recipes share.
        sampler: of the buffer.
        default_frame_capacity: see :func:`~lightning_replay.recipes.storage.storage_for`.
        parts: further arguments of the buffer, before those in ``options``.
    """
    given: dict[str, Any] = {**options}
    of_storage = {name: given[name] for name in _OF_STORAGE if name in given}
    storage = storage_for(slots, default_frame_capacity=default_frame_capacity, **of_storage)
    of_buffer = {name: given[name] for name in _OF_BUFFER} | parts
    return kind(storage=storage, sampler=sampler, batch_size=batch_size, **of_buffer)


def prioritized_or_uniform(
    capacity: int, priority_exponent: float, importance_exponent: float | Schedule, priority_offset: float = 1e-6
) -> Sampler:
    """Returns a prioritized sampler; with ``priority_exponent`` 0 a uniform one, on which the others have no effect."""
    if priority_exponent != 0:
        return PrioritizedSampler(
            capacity=capacity,
            priority_exponent=priority_exponent,
            importance_exponent=importance_exponent,
            priority_offset=priority_offset,
        )
    checked_number("priority_exponent", priority_exponent)  # False == 0, and is refused
    checked_schedule("importance_exponent", importance_exponent, highest=1.0)
    checked_number("priority_offset", priority_offset, 0.0)
    return UniformSampler()
