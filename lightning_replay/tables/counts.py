# SPDX-License-Identifier: Apache-2.0
"""Counts of states and actions: how often each was stored, and how often it led to an event.

Only the correction ``"lemma2"`` of :class:`~lightning_replay.samplers.TableShares` reads these counts. Its writer keeps
them with ``count_state_actions``. Without the correction, this module is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase


class StateActionCounts:
    """Counts exact values of observation and action over all rows ever stored in ``num_slots`` slots.

    States and actions must be discrete. If they are continuous, every pair is new and the estimate is 0 or 1. Use the
    correction ``mixture`` then. Each different pair takes about 100 bytes.
    """

    def __init__(self, num_slots: int) -> None:
        self._numbers: dict[bytes, int] = {}
        self._stored: list[int] = []
        self._in_events: list[int] = []
        self._of_slot = np.full(num_slots, -1, dtype=np.int64)
        self._is_counted = np.zeros(num_slots, dtype=np.bool_)

    def store(self, slots: np.ndarray, keys: list[bytes]) -> None:
        """Counts new rows ``[N]`` in ``slots`` by their :func:`state_action_keys`."""
        for slot, key in zip(slots.tolist(), keys, strict=True):
            # Pairs are numbered in the order in which they come. The lists of their counts grow with them.
            number = self._numbers.setdefault(key, len(self._stored))
            if number == len(self._stored):
                self._stored.append(0)
                self._in_events.append(0)
            self._stored[number] += 1
            self._of_slot[slot] = number
        self._is_counted[slots] = False  # An earlier row of the slot may have been counted.

    def send(self, slots: np.ndarray) -> None:
        """Counts rows that became part of an event's history. Each row counts once for all events."""
        for slot in slots[~self._is_counted[slots]].tolist():
            self._in_events[self._of_slot[slot]] += 1
        self._is_counted[slots] = True

    def share_outside(self, slots: np.ndarray) -> np.ndarray:
        """Returns q of each row, float64 ``[B]``: the share of its state and action that led to no event."""
        numbers = self._of_slot[slots].tolist()
        return np.array([1.0 - self._in_events[number] / self._stored[number] for number in numbers])

    def state_dict(self) -> dict[str, Any]:
        """Returns the pairs as bytes, uint8 ``[P, bytes]``, and their counts."""
        keys = np.frombuffer(b"".join(self._numbers), dtype=np.uint8).copy()
        return {
            "keys": torch.from_numpy(keys.reshape(len(self._numbers), -1) if len(keys) else keys.reshape(0, 0)),
            "stored": torch.tensor(self._stored, dtype=torch.int64, device="cpu"),
            "in_events": torch.tensor(self._in_events, dtype=torch.int64, device="cpu"),
            "of_slot": torch.from_numpy(self._of_slot.copy()),
            "is_counted": torch.from_numpy(self._is_counted.copy()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._numbers = {row.tobytes(): number for number, row in enumerate(state_dict["keys"].numpy())}
        self._stored = state_dict["stored"].tolist()
        self._in_events = state_dict["in_events"].tolist()
        self._of_slot[:] = state_dict["of_slot"].numpy()
        self._is_counted[:] = state_dict["is_counted"].numpy()


def state_action_keys(rows: TensorDictBase) -> list[bytes]:
    """Returns the bytes of state and action of each row, or raises ``ValueError`` if a column is missing."""
    missing = [name for name in ("observation", "action") if rows.get(name, None) is None]
    if missing:
        raise ValueError(f"there is no column {missing}, which Lemma 2 counts; add it, or use the correction 'mixture'")
    columns = rows.select("observation", "action").values(True, True)
    flat = [column.reshape(len(column), -1).contiguous().cpu().numpy() for column in columns]
    # Floats that compare equal but have different bytes, such as -0.0 and 0.0, count as two states.
    parts = [column.view(np.uint8) for column in flat]
    return [row.tobytes() for row in np.concatenate(parts, axis=1)]
