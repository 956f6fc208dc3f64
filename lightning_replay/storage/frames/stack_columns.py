# SPDX-License-Identifier: Apache-2.0
"""Columns that rows with stacks of frames must have, when they are stored and when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.storage.row_layout import Key, Leaf, leaves_of, shown
from lightning_replay.storage.stored_column import GENERATION, NOT_STORED

FRAMES: Key = ("frames_of_stacks",)  # int32 [2 k]: the observation's frames, then the next one's; 0 is none


class StackColumns(NamedTuple):
    """The keys of the stacks and of their successors, and how many frames each stack has."""

    image_key: Key
    next_key: Key
    frame_stack: int

    def checked(self, data: TensorDictBase) -> list[Leaf]:
        """Returns the columns of the first rows, with dtype and shape of a row each.

        Raises:
            ValueError: stacks are missing, are not uint8 ``[k, H, W]`` or ``[k, H, W, C]``, or differ in shape.
        """
        if data.get(self.next_key, None) is None or data.get(self.image_key, None) is None:
            raise self._refusal("there are " + ", ".join(shown(key) for key, _, _ in leaves_of(data[0])))
        leaves = {key: (dtype, shape) for key, dtype, shape in leaves_of(data[0]) if key not in NOT_STORED}
        if FRAMES in leaves:
            raise ValueError(f"the column {FRAMES[0]!r} is the storage's own; rename it. Nothing was stored")
        for key in (self.image_key, self.next_key):
            dtype, shape = leaves.get(key, (None, torch.Size()))
            if dtype != torch.uint8 or len(shape) not in (3, 4) or shape[0] != self.frame_stack or not shape.numel():
                given = data.get(key)
                is_dense = isinstance(given, Tensor) and not given.is_nested
                described = f"{given.dtype} {list(given.shape)}" if is_dense else type(given).__name__
                raise self._refusal(f"{shown(key)} is {described}")
        shapes = [list(leaves[key][1][1:]) for key in (self.image_key, self.next_key)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the frames under {shown(self.image_key)} have shape {shapes[0]} and those under "
                f"{shown(self.next_key)} {shapes[1]}; all frames need one shape. Nothing was stored"
            )
        return [(key, *leaf) for key, leaf in leaves.items()]

    def saved(self, state: Mapping[str, Any], frame_capacity: int) -> list[Leaf]:
        """Returns the columns of a saved storage, in the order in which rows were given.

        Raises:
            ValueError: other stacks were saved, or more frames than ``frame_capacity``.
        """
        layout = {tuple(leaf["key"]): leaf for leaf in state["layout"]}
        stacked = layout[FRAMES]["shape"][0] // 2 if FRAMES in layout else 0
        if stacked != self.frame_stack or list(self.image_key) not in state["order"]:
            raise ValueError(
                f"the saved storage has stacks of {stacked} frames in rows of {state['order']}, this one stacks of "
                f"{self.frame_stack} under {shown(self.image_key)}; build it with the saved options"
            )
        if len(state["frames"]) > frame_capacity + 1:
            raise ValueError(
                f"the saved storage has {len(state['frames']) - 1:,} frames and this one room for "
                f"{frame_capacity:,}; build it with the saved frame_capacity"
            )
        stack = torch.Size([self.frame_stack, *state["frame_shape"]])
        columns: list[Leaf] = []
        for key in map(tuple, state["order"]):
            if key in (self.image_key, self.next_key):
                columns.append((key, torch.uint8, stack))
            elif key != GENERATION:
                columns.append((key, getattr(torch, layout[key]["dtype"]), torch.Size(layout[key]["shape"])))
        return columns

    def _refusal(self, given: str) -> ValueError:
        return ValueError(
            f"rows need stacks of {self.frame_stack} frames, uint8 [N, {self.frame_stack}, H, W], under "
            f"{shown(self.image_key)} and {shown(self.next_key)}; {given}. Nothing was stored; give their key as "
            "image_key and their number of frames as frame_stack, and convert them to uint8 images"
        )
