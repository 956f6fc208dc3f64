# SPDX-License-Identifier: Apache-2.0
"""Checks of transitions before they are stored: flags that contradict each other, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy import vdot
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay.storage.devices import as_tensor
from lightning_replay.storage.row_layout import Key, shown

__all__ = [
    "MASKS",
    "ONE_EACH",
    "TRAJECTORIES",
    "Column",
    "ColumnsCheck",
    "ContradictingFlags",
    "TransitionCheck",
    "check_trajectory",
    "contradicts",
    "normalized",
    "with_done",
    "with_one_shape",
    "without_padding",
]

Column = Tensor | np.ndarray

_DONE, _TERMINATED, _TRUNCATED = ("next", "done"), ("next", "terminated"), ("next", "truncated")
#: Columns that name the episode of each row; the first that is there counts.
TRAJECTORIES: tuple[Key, ...] = (("trajectory",), ("collector", "traj_ids"))

#: Columns of one number or flag for each row, which are stored as ``[N, 1]``.
ONE_EACH: tuple[Key, ...] = (
    ("next", "reward"),
    *(_DONE, _TERMINATED, _TRUNCATED),
    *(("done",), ("terminated",), ("truncated",)),
)
_NAMES_OF_ONE = frozenset(key[-1] for key in ONE_EACH)
#: Columns that are false where a row is padding, bool of one entry for each row; TorchRL's ``split_trajs`` pads.
MASKS: tuple[Key, ...] = (("collector", "mask"), ("mask",))


def normalized(rows: TensorDictBase) -> TensorDictBase:
    """Returns rows as buffers store them: without padding, with one shape of rewards and flags, and with ``done``."""
    return with_done(with_one_shape(without_padding(rows)))


def without_padding(rows: TensorDictBase) -> TensorDictBase:
    """Returns the rows ``[n]`` for which a mask, see :data:`MASKS`, is true; rows of any shape as they are without one.

    Trajectories ``[N, T]`` are flattened, the steps of each in order.
    """
    names = rows.keys()
    for key in (key for key in MASKS if key[0] in names):  # few rows have one
        mask = rows.get(key, None)
        if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.numel() == rows.numel():
            rows = rows[mask.reshape(rows.shape)]
    return rows


def with_one_shape(rows: TensorDictBase) -> TensorDictBase:
    """Returns rows whose rewards and flags ``[N]`` are ``[N, 1]``, as those of TorchRL: a mixture would broadcast."""
    dimensions, flat = rows.ndim, []
    for path, branch in (((), rows), (("next",), rows.get("next", None))):
        if isinstance(branch, TensorDictBase):
            # Reading all is fastest, but a lazy stack would stack every column.
            names = (name for name in branch.keys() if name in _NAMES_OF_ONE)  # noqa: SIM118, not the rows
            found = branch.items() if type(branch) is TensorDict else ((name, branch.get(name)) for name in names)
            flat += [
                ((*path, name), value) for name, value in found if name in _NAMES_OF_ONE and value.ndim == dimensions
            ]
    flat = [(key, value) for key, value in flat if key in ONE_EACH and isinstance(value, Tensor)]
    if flat:
        rows = rows.copy()
    for key, value in flat:
        rows.set(key, value.unsqueeze(-1))
    return rows


def with_done(rows: TensorDictBase) -> TensorDictBase:
    """Returns rows that have ``("next", "done")``: derived from ``terminated`` and ``truncated`` where it is absent.

    Rows with neither flag, or with flags that are not bool or of two shapes, are returned as they are.
    """
    following = rows.get("next", None)
    if not isinstance(following, TensorDictBase) or "done" in following:
        return rows
    ends = [end for end in (following.get(key, None) for key in ("terminated", "truncated")) if end is not None]
    if not ends or any(end.dtype != torch.bool or end.shape != ends[0].shape for end in ends):
        return rows
    done = ends[0].clone() if len(ends) == 1 else ends[0] | ends[1]
    return rows.copy().set(_DONE, done)


class TransitionCheck:
    """Refuses transitions that no buffer should hold, before anything is stored.

    * ``("next", "terminated")`` or ``("next", "truncated")`` is true where ``("next", "done")`` is false: returns and
      histories would cross the end of an episode; of rows that TorchRL's trainers give,
      :func:`~lightning_replay.episodes.links.with_real_ends` finds the ends.
    * ``trajectory`` is not of an integer dtype: episodes could not be distinguished.
    * NaN or infinity in the reward or an observation: any column that is also under ``"next"``, or is named so. One
      such row makes every network it trains NaN.

    Args:
        check_finite: whether to refuse NaN and infinity.
    """

    def __init__(self, check_finite: bool = True) -> None:
        self.check_finite = check_finite

    def __call__(self, columns: Mapping[Key, Column]) -> None:
        """Checks columns ``[N, ...]``, tensors or arrays by key.

        Raises:
            TypeError: ``trajectory`` is not of an integer dtype.
            ValueError: contradicting flags, NaN or infinity; the message names the column and the rows.
        """
        self.of(columns)(list(columns.values()))

    def of(self, columns: Mapping[Key, Column]) -> ColumnsCheck:
        """Returns the check of further rows with columns of these names, dtypes and shapes; refuses ``trajectory``."""
        for key in (key for key in TRAJECTORIES if key in columns):
            given = as_tensor(columns[key])
            check_trajectory(key, given.dtype, given.shape[1:])
        place_of = {key: place for place, key in enumerate(columns)}
        flags = [key for key in (_DONE, _TERMINATED, _TRUNCATED) if key in columns]
        shapes = {(str(columns[key].dtype).endswith("bool"), columns[key].shape[1:]) for key in flags}
        are_alike = len(shapes) == 1 and next(iter(shapes))[0]
        finite = [key for key, value in columns.items() if self.check_finite and _must_be_finite(key, columns, value)]
        arrays = [key for key in finite if isinstance(columns[key], np.ndarray)]
        return ColumnsCheck(
            list(columns),
            [place_of[key] for key in flags] if _DONE in columns and are_alike else [],
            [(place_of[key], place_of[other]) for key, other in _in_pairs(arrays, columns)],
            [place_of[key] for key in finite if key not in arrays],
        )


def check_trajectory(key: Key, dtype: torch.dtype, shape: torch.Size) -> None:
    """Refuses a column that names the episode of each row and is not one whole number ``[N]`` or ``[N, 1]``."""
    if shape.numel() != 1:
        raise ValueError(
            f"the column {shown(key)} has the shape {list(shape)} for each row; it names the episode of each row "
            "and must be [N] or [N, 1]. Nothing was stored"
        )
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(
            f"the column {shown(key)} is {dtype}; it names the episode of each row and must be of an integer dtype, as "
            "int64. Nothing was stored"
        )


class ColumnsCheck:
    """A :class:`TransitionCheck` of rows of known columns.

    Args:
        names: of the columns.
        flags: places of ``("next", "done")`` and of the flags that imply it.
        arrays: places of arrays that must be finite, two by two.
        tensors: places of tensors that must be finite.
    """

    def __init__(self, names: list[Key], flags: list[int], arrays: list[tuple[int, int]], tensors: list[int]) -> None:
        self._names = names
        self._done, *self._ends = flags or [0]
        self._arrays = arrays
        self._tensors = tensors

    def __call__(self, columns: Sequence[Column]) -> None:
        """Checks rows ``[N, ...]``, in the order of the names; see :class:`TransitionCheck`."""
        if self._ends:
            self._check_flags(columns)
        for one, other in self._arrays:
            # A sum of products is finite only if every factor is; it may overflow, so each is checked then.
            a: Any = columns[one]
            b: Any = columns[other]
            if not isfinite(a.item() * b.item() if a.size == 1 else vdot(a, b)):
                self._check_each(columns, (one, other))
        if self._tensors:
            self._check_each(columns, self._tensors)

    def _check_flags(self, columns: Sequence[Column]) -> None:
        done: Any = columns[self._done]
        is_one = type(done) is np.ndarray and done.size == 1  # which takes a tenth of the time
        if is_one and done.item():
            return
        for place in self._ends:
            ended: Any = columns[place]
            if ended.item() if is_one else contradicts(done, ended):
                raise _contradiction(done, columns[self._ends[0]] | columns[self._ends[-1]])

    def _check_each(self, columns: Sequence[Column], places: Sequence[int]) -> None:
        for place in places:
            value = as_tensor(columns[place])
            if not bool(value.isfinite().all()):
                raise _not_finite(self._names[place], value)


def _in_pairs(keys: list[Key], columns: Mapping[Key, Column]) -> list[tuple[Key, Key]]:
    """Returns arrays of one shape and dtype two by two, to check each pair at once; others are paired with itself."""
    pairs: list[tuple[Key, Key]] = []
    alone: dict[Any, Key] = {}
    for key in keys:
        kind = (columns[key].dtype, columns[key].shape)
        other = alone.pop(kind, None)
        if other is None:
            alone[kind] = key
        else:
            pairs.append((other, key))
    return pairs + [(key, key) for key in alone.values()]


def contradicts(done: Any, ended: Any) -> bool:
    """Returns whether a flag of an end is true where ``done``, of the same shape, is false."""
    if type(done) is not np.ndarray:
        return bool((ended > done).any())
    return bool(np.count_nonzero(ended) and np.count_nonzero(ended > done))


class ContradictingFlags(ValueError):
    """Rows that are terminated or truncated and not done."""


def _contradiction(done: Any, ended: Any) -> ContradictingFlags:
    rows = as_tensor(ended > done).reshape(len(done), -1).any(1).nonzero().flatten().tolist()
    return ContradictingFlags(
        f"rows {rows[:10]} are terminated or truncated, and ('next', 'done') is false there; done must be true where "
        "an episode ended, for either reason. Nothing was stored; store done = terminated | truncated"
    )


def _must_be_finite(key: Key, columns: Mapping[Key, Column], value: Column) -> bool:
    is_floating = value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"
    own = key[1:] if key[0] == "next" else key
    is_state = own in columns and ("next", *own) in columns
    is_named = own[-1] == "reward" or any(part.startswith("observation") for part in own)
    return is_floating and (is_state or is_named)


def _not_finite(key: Key, value: Tensor) -> ValueError:
    finite = value.isfinite().reshape(len(value), -1).all(1)
    rows = (~finite).nonzero().flatten().tolist()
    first = value[rows[0]].reshape(-1)
    return ValueError(
        f"{shown(key)} is {float(first[~first.isfinite()][0])} in rows {rows[:10]} of "
        f"{len(value)}; it must be finite. Nothing was stored. Look for a diverging policy or environment, or build "
        "the buffer with check_finite=False to store such rows"
    )
