# SPDX-License-Identifier: Apache-2.0
"""Columns of a replay from the infos that environments return beside observation and reward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from lightning_replay.envs.step_check import checked_info_keys

__all__ = ["InformationColumns"]


class InformationColumns:
    """Reads some keys of the steps' infos as float32 ``[N]``; 0 where an environment's info lacks the key.

    Args:
        keys: of numbers or flags in the info of an environment's steps.

    Raises:
        TypeError: no sequence of names.
        ValueError: a key that is empty, is given twice, or is the name of a column that every row has.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self.keys: tuple[str, ...] = checked_info_keys(keys)
        self.missing: set[str] = set(keys)
        self._offered: set[str] = set()

    def read(self, infos: dict[str, Any], done: np.ndarray) -> dict[str, np.ndarray]:
        """Returns one column per key, for a vector that resets in the step that ends an episode.

        Raises:
            ValueError: a key that holds something else than one number or flag per environment.
        """
        # of an ended episode the infos are the reset's, and those of its last step are the final ones
        sources = ((infos, ~done), (infos.get("final_info", {}), done))
        if self.missing:
            self._offered |= {key for source, where in sources for key in source if _has(key, source, where).any()}
        columns = {key: np.zeros(len(done), np.float32) for key in self.keys}
        for key, column in columns.items():
            for source, where in sources:
                has_key = _has(key, source, where)
                if has_key.any():
                    self.missing.discard(key)
                    column[has_key] = _numbers(key, source[key], has_key)
        return columns

    def check(self) -> None:
        """Refuses keys that no info had; call it once episodes have ended.

        Raises:
            ValueError: a key was never found.
        """
        if self.missing:
            raise ValueError(
                f"info_keys has {sorted(self.missing)}, which no step's info had during the warm-up and its first "
                f"episodes; seen were {sorted(self._offered)}. Correct the name; a key that is rare must be in every "
                "info, as 0."
            )

    def state_dict(self) -> list[str]:
        return sorted(self.missing)

    def load_state_dict(self, missing: Iterable[str]) -> None:
        self.missing = set(missing) & set(self.keys)


def _has(key: str, infos: dict[str, Any], where: np.ndarray) -> np.ndarray:
    """Returns which of the environments ``where`` gave the key, bool ``[N]``; Gymnasium's mask is ``_key``."""
    given = infos.get(f"_{key}")
    return np.zeros_like(where) if given is None else given & where


def _numbers(key: str, values: Any, has_key: np.ndarray) -> np.ndarray:
    """Returns one number for each environment that has the key."""
    taken: np.ndarray | dict[str, Any] = values if isinstance(values, dict) else values[has_key]
    if isinstance(taken, np.ndarray) and taken.dtype == object:  # holds other values than numbers
        with suppress(TypeError, ValueError):
            taken = np.array([float(value) for value in taken])  # NumPy would make NaN of None
    if isinstance(taken, dict) or taken.ndim != 1 or taken.dtype.kind not in "biuf":
        shown = taken if isinstance(taken, dict) else taken.tolist()
        raise ValueError(
            f"info {key!r} holds {shown!r}; info_keys takes one number or flag per environment and step. "
            "Leave it out, or put a number into the info by a wrapper."
        )
    return taken
