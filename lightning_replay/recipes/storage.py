# SPDX-License-Identifier: Apache-2.0
"""The storage of a recipe: packed rows, or with ``frame_stack`` frames stored once."""

from __future__ import annotations

from lightning_replay.storage.frames.storage import FrameStorage
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.validation import checked_count, checked_key

_RUN = 32  # consecutive steps of a trajectory that are assumed to be kept together


def storage_for(
    capacity: int,
    *,
    device: str = "cpu",
    memmap: str | None = None,
    frame_stack: int | None = None,
    image_key: str | tuple[str, ...] = "pixels",
    frame_capacity: int | None = None,
    default_frame_capacity: int | None = None,
    n_steps: int = 1,
) -> PackedStorage:
    """Returns a recipe's storage; most options are described in :mod:`lightning_replay.recipes.options`.

    Args:
        default_frame_capacity: the recipe's default of ``frame_capacity``; ``None`` uses :func:`frames_in_order`, for
            rows that are kept in the order in which they were collected.
        n_steps: length of the returns, for the check of the capacity.

    Raises:
        TypeError: an ``image_key`` that is neither a name nor a tuple of names.
        ValueError: a capacity below ``frame_stack + n_steps``, ``frame_capacity`` or ``image_key`` without
            ``frame_stack``, or sizes that are not positive.
    """
    checked_key("image_key", image_key)
    if frame_stack is None:
        for name, value, default in (("frame_capacity", frame_capacity, None), ("image_key", image_key, "pixels")):
            if value != default:
                raise ValueError(
                    f"{name} is {value!r} and frame_stack is not given; frames are stored once only where frame_stack "
                    f"is their number in a stack. Pass frame_stack=4, for example, or leave {name} out"
                )
        return PackedStorage(capacity, device=device, memmap=memmap)
    checked_count("capacity", capacity, of="transitions")
    if capacity < _checked_stack(frame_stack) + checked_count("n_steps", n_steps):
        raise ValueError(
            f"capacity is {capacity}, below frame_stack + n_steps = {frame_stack} + {n_steps}: not even the frames of "
            "one return would be shared between transitions. Raise the capacity"
        )
    if frame_capacity is None:
        wanted = frames_in_order(capacity, frame_stack) if default_frame_capacity is None else default_frame_capacity
        frame_capacity = max(wanted, 2 * frame_stack)
    return FrameStorage(capacity, frame_stack, image_key, frame_capacity=frame_capacity, device=device, memmap=memmap)


def frames_in_order(rows: int, frame_stack: int | None, run_length: int = _RUN) -> int:
    """Number of frames of ``rows`` in runs of consecutive steps: each run has ``frame_stack`` more frames than rows.

    Example:
        >>> frames_in_order(3_200, frame_stack=4)  # 100 runs of 32 rows, and 64 trajectories that are running
        3856
    """
    return rows + _checked_stack(frame_stack) * (-(-rows // run_length) + 64)


def frames_at_worst(rows: int, frame_stack: int | None, n_steps: int) -> int:
    """Number of frames of ``rows`` that share none; the two stacks of a row overlap where n is below k.

    Example:
        >>> frames_at_worst(1, frame_stack=4, n_steps=1), frames_at_worst(1, frame_stack=4, n_steps=5)
        (5, 8)
    """
    stack = _checked_stack(frame_stack)
    return rows * (stack + min(stack, n_steps))


def _checked_stack(frame_stack: int | None) -> int:
    return 0 if frame_stack is None else checked_count("frame_stack", frame_stack, of="frames")
