# SPDX-License-Identifier: Apache-2.0
"""The storage of a recipe: packed rows, or with ``frame_stack`` frames stored once."""

from __future__ import annotations

from lightning_replay.storage.frames.storage import FrameStorage
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.validation import checked_count, checked_key

_LONG = 32  # steps of a trajectory that are kept side by side, where nothing better is known


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
    """A recipe's storage.

    Args:
        capacity: rows.
        device: where rows are kept.
        memmap: a directory for scratch files.
        frame_stack: k, frames in each stack under ``image_key``, which are then stored once each; ``None`` keeps
            whatever comes as it is.
        image_key: see :class:`~lightning_replay.storage.frames.storage.FrameStorage`.
        frame_capacity: most frames kept; ``None`` is ``default_frame_capacity``.
        default_frame_capacity: what the recipe thinks is enough; ``None`` is :func:`frames_in_order`, for rows that are
            kept in the order in which they were collected.
        n_steps: length of the returns, for the check of the capacity.

    Raises:
        TypeError: an ``image_key`` that is neither a name nor a tuple of names.
        ValueError: a capacity below ``frame_stack + n_steps``, ``frame_capacity`` or ``image_key`` without
            ``frame_stack``, or sizes that are not positive.
    """
    checked_key("image_key", image_key)
    if frame_stack is None:
        for name, value, is_given in (
            ("frame_capacity", frame_capacity, frame_capacity is not None),
            ("image_key", image_key, image_key != "pixels"),
        ):
            if is_given:
                raise ValueError(
                    f"{name} is {value!r} and frame_stack is not given; frames are stored once where frame_stack says "
                    f"how many make a stack. Pass frame_stack=4, say, or leave {name} out"
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
    return FrameStorage(
        capacity,
        frame_stack,
        image_key,
        frame_capacity=frame_capacity,
        device=device,
        memmap=memmap,
    )


def frames_in_order(rows: int, frame_stack: int | None, stretch: int = _LONG) -> int:
    """Frames of ``rows`` that lie in stretches of consecutive steps: each stretch has ``frame_stack`` more than rows.

    Without ``frame_stack`` no frames are stored once, and the number is that of the rows.

    Example:
        >>> frames_in_order(3_200, frame_stack=4)      # 100 stretches of 32 rows, and 64 trajectories that are running
        3856
    """
    return rows + _checked_stack(frame_stack) * (-(-rows // stretch) + 64)


def frames_at_worst(rows: int, frame_stack: int | None, n_steps: int) -> int:
    """Frames of ``rows`` that share none with each other; the two stacks of a row overlap where n is below k.

    Example:
        >>> frames_at_worst(1, frame_stack=4, n_steps=1), frames_at_worst(1, frame_stack=4, n_steps=5)
        (5, 8)
    """
    stack = _checked_stack(frame_stack)
    return rows * (stack + min(stack, n_steps))


def _checked_stack(frame_stack: int | None) -> int:
    return 0 if frame_stack is None else checked_count("frame_stack", frame_stack, of="frames")
