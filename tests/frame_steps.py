# SPDX-License-Identifier: Apache-2.0
"""Steps with stacks of tiny frames: frame number v is filled with v, so that equal numbers are equal frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

Stacks = tuple[tuple[int, ...], tuple[int, ...]]  # numbers of the frames of the observation, and of the next one

WRIST = ("arm", "wrist")  # a second camera, of other images and of another shape
WRIST_SHAPE = (3, 5)
IMAGE_KEYS: tuple[NestedKey | list[NestedKey], ...] = ("pixels", ["pixels", WRIST])  # of one camera, and of both


def stacks_of(frames: Sequence[int], depth: int, n_steps: int = 1) -> list[Stacks]:
    """The transitions of an episode that showed these frames; before the first one it is repeated.

    ::

        frames 5 6 7, depth 3:     5 5 5 -> 5 5 6     5 5 6 -> 5 6 7
    """
    seen = [frames[0]] * (depth - 1) + list(frames)
    stacks = [tuple(seen[place : place + depth]) for place in range(len(frames))]
    return [(stack, stacks[min(place + n_steps, len(stacks) - 1)]) for place, stack in enumerate(stacks[:-1])]


def of_wrist(stacks: Iterable[Stacks]) -> list[Stacks]:
    """What the second camera shows where the first shows these: sometimes more different frames, sometimes fewer."""
    return [(_of_wrist(first), _of_wrist(second)) for first, second in stacks]


def _of_wrist(stack: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((3 * stack[0] + number) % 251 if stack[0] % 2 else 0 for number in stack)


def image_of(numbers: Iterable[int], shape: tuple[int, ...]) -> Tensor:
    """A stack, uint8 ``[k, *shape]``; number v makes a frame of v, with its last byte 255 - v."""
    stack = torch.stack([torch.full(shape, number, dtype=torch.uint8) for number in numbers])
    stack.view(len(stack), -1)[:, -1] = 255 - stack.view(len(stack), -1)[:, 0]
    return stack


def frame_rows(
    stacks: Sequence[Stacks],
    shape: tuple[int, ...] = (4, 4),
    *,
    first: int = 0,
    trajectory: int | Sequence[int] | None = None,
    done: bool = False,
    key: str | list[NestedKey] = "pixels",
) -> TensorDict:
    """Rows that show these frames under ``key``, and with the keys of two cameras those of the second as well."""
    if isinstance(key, list):
        rows = frame_rows(stacks, shape, first=first, trajectory=trajectory, done=done, key=key[0])
        wrist = frame_rows(of_wrist(stacks), WRIST_SHAPE)
        return rows.set(key[1], wrist["pixels"]).set(("next", *key[1]), wrist["next", "pixels"])
    count = len(stacks)
    flags = torch.zeros(count, 1, dtype=torch.bool)
    if count:
        flags[-1] = done
    rows = TensorDict(
        {
            key: torch.stack([image_of(stack, shape) for stack, _ in stacks]),
            "action": torch.arange(first, first + count),
            "next": {
                key: torch.stack([image_of(stack, shape) for _, stack in stacks]),
                "reward": torch.arange(first, first + count, dtype=torch.float32).unsqueeze(1),
                "terminated": flags,
                "truncated": torch.zeros_like(flags),
                "done": flags.clone(),
            },
        },
        [count],
    )
    if trajectory is not None:
        rows["trajectory"] = torch.tensor([trajectory] * count if isinstance(trajectory, int) else list(trajectory))
    return rows


def numbers_in(images: Tensor) -> list[tuple[int, ...]]:
    """The numbers of the frames of stacks ``[N, k, H, W]``, of bytes that must belong together."""
    flat = images.reshape(*images.shape[:2], -1)
    assert (flat[..., :-1] == flat[..., :1]).all() and (flat[..., -1] == 255 - flat[..., 0]).all()
    return [tuple(stack) for stack in flat[..., 0].tolist()]


def stacks_in(rows: TensorDict, key: NestedKey | list[NestedKey] = "pixels") -> list[Stacks]:
    """The frames under ``key``, which with two cameras must belong to those of the second."""
    if isinstance(key, list):
        found = stacks_in(rows, key[0])
        assert [*zip(numbers_in(rows[key[1]]), numbers_in(rows["next", key[1]]), strict=True)] == of_wrist(found)
        return found
    return list(zip(numbers_in(rows[key]), numbers_in(rows["next", key]), strict=True))


def distinct(stacks: Iterable[Stacks], key: NestedKey | list[NestedKey] = "pixels") -> int:
    """Different frames in these transitions; with two cameras of the one that shows more."""
    stacks = list(stacks)
    if isinstance(key, list):
        return max(distinct(stacks), distinct(of_wrist(stacks)))
    return len({number for both in stacks for stack in both for number in stack})
