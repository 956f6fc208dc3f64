# SPDX-License-Identifier: Apache-2.0
"""Neighbour lists kept apart by discrete action."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_replay.neighbors.lists import NeighborLists


class SameActionLists:
    """Neighbour lists per discrete action, a :class:`NeighborLists` each: a partner always has the same action.

    The rows of each action have numbers of their own; the number of an overwritten row goes to the next row of that
    action. Until then it may still be drawn, and the drawn row gets no partner. Memory: lists of the whole capacity
    for each action.

    Args:
        capacity, num_neighbors, options: of each :class:`NeighborLists`.

    Example:
        >>> lists = SameActionLists(capacity=4, num_neighbors=1)
        >>> features, action = torch.tensor([[0.0], [0.1], [9.0]]), torch.tensor([0, 1, 0])
        >>> lists.write(torch.arange(3), features, action)
        >>> lists.draw(torch.arange(3), torch.Generator())
        tensor([2, 1, 0])
    """

    def __init__(self, capacity: int, num_neighbors: int, **options: Any) -> None:
        lists = NeighborLists(capacity, num_neighbors, **options)  # refuses bad options before the first action
        self.capacity: int = lists.capacity
        self.num_neighbors: int = lists.num_neighbors
        self._options = options
        self.clear()

    def clear(self) -> None:
        self._lists: list[NeighborLists] = []
        self._actions: dict[tuple[int, ...], int] = {}  # the action's values -> its position in the list of lists
        self._group = torch.full((self.capacity,), -1, dtype=torch.int64, device="cpu")
        self._number = torch.full((self.capacity,), -1, dtype=torch.int64, device="cpu")
        self._slot_of: list[Tensor] = []  # per action: number -> slot, -1 where the number is free
        self._free: list[list[int]] = []  # per action: freed numbers, then the next new one
        self._used: list[int] = []

    @property
    def nbytes(self) -> int:
        own = self._group.nbytes + self._number.nbytes + sum(slots.nbytes for slots in self._slot_of)
        return own + sum(lists.nbytes for lists in self._lists)

    def write(self, index: Tensor, features: Tensor, action: Tensor) -> None:
        slots = index.cpu()
        held = slots[self._group[slots] >= 0]
        for group, number in zip(self._group[held].tolist(), self._number[held].tolist(), strict=True):
            self._slot_of[group][number] = -1
            self._free[group].append(number)
        self._group[held] = -1
        values, row_group = action.reshape(len(index), -1).cpu().long().unique(dim=0, return_inverse=True)
        for position, value in enumerate(values.tolist()):
            group = self._group_of(tuple(value))
            rows = row_group == position
            numbers = self._take_numbers(group, int(rows.sum()))
            self._group[slots[rows]] = group
            self._number[slots[rows]] = numbers
            self._slot_of[group][numbers] = slots[rows]
            self._lists[group].write(numbers.to(features.device), features[rows.to(features.device)])

    def draw(self, index: Tensor, generator: torch.Generator) -> Tensor:
        slots = index.cpu()
        partner, groups = slots.clone(), self._group[slots]
        for group in groups.unique().tolist():
            rows = groups == group
            numbers = self._lists[group].draw(self._number[slots[rows]].to(index.device), generator)
            drawn = self._slot_of[group][numbers.cpu()]
            partner[rows] = torch.where(drawn < 0, slots[rows], drawn)
        return partner.to(index.device)

    def recall_at(self, k: int, sample: int = 1000, generator: torch.Generator | None = None) -> float:
        """Returns the share of the true k nearest in the lists, the mean over all rows."""
        recalls = [lists.recall_at(k, sample=sample, generator=generator) for lists in self._lists]
        return sum(recall * used for recall, used in zip(recalls, self._used, strict=True)) / sum(self._used)

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values from which :meth:`load_state_dict` restores everything."""
        return {
            "actions": [list(value) for value in self._actions],
            "lists": [lists.state_dict() for lists in self._lists],
            "group": self._group.clone(),
            "number": self._number.clone(),
            "free": [list(free) for free in self._free],
            "used": list(self._used),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; the capacity must be the same."""
        self.clear()
        for value in state["actions"]:
            self._group_of(tuple(value))
        for lists, saved in zip(self._lists, state["lists"], strict=True):
            lists.load_state_dict(saved)
        self._group.copy_(state["group"])
        self._number.copy_(state["number"])
        self._free = [list(free) for free in state["free"]]
        self._used = list(state["used"])
        held = (self._group >= 0).nonzero().squeeze(1)
        for group, slot_of in enumerate(self._slot_of):
            slots = held[self._group[held] == group]
            slot_of[self._number[slots]] = slots

    def _group_of(self, value: tuple[int, ...]) -> int:
        if value not in self._actions:
            self._actions[value] = len(self._lists)
            self._lists.append(NeighborLists(self.capacity, self.num_neighbors, **self._options))
            self._slot_of.append(torch.full((self.capacity,), -1, dtype=torch.int64, device="cpu"))
            self._free.append([])
            self._used.append(0)
        return self._actions[value]

    def _take_numbers(self, group: int, count: int) -> Tensor:
        free = self._free[group]
        numbers = [free.pop() for _ in range(min(count, len(free)))]
        new = count - len(numbers)
        numbers += range(self._used[group], self._used[group] + new)
        self._used[group] += new
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
