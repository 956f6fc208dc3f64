# SPDX-License-Identifier: Apache-2.0
"""Columns of transitions on their way in: read, checked, put together in rows and copied to their slots."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy import vdot
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from lightning_replay.deferred_checks import DeferredChecks
from lightning_replay.storage.rows import WORD_BYTES, Key, RowLayout, gather_branch, nest, shown

MOST_SINGLE_BYTES = 4096  # columns of longer rows are written as fast one by one
_ACCEPTED = "extend_columns takes arrays or tensors [N, ...] by key, a name or a tuple such as ('next', 'reward')"
Column = Tensor | np.ndarray
#: Columns that name the episode of each row. The first that is there counts.
TRAJECTORIES: tuple[Key, ...] = (("trajectory",), ("collector", "traj_ids"))
_FLAGS: tuple[Key, ...] = (("next", "done"), ("next", "terminated"), ("next", "truncated"))
_DONE, _TERMINATED, _TRUNCATED = _FLAGS
#: Columns of one number or flag for each row, which are stored as ``[N, 1]``.
ONE_EACH: tuple[Key, ...] = (
    ("next", "reward"),
    *_FLAGS,
    *(("done",), ("terminated",), ("truncated",)),
)
#: Columns that are false if a row is padding, bool of one entry for each row. TorchRL's ``split_trajs`` pads.
MASKS: tuple[Key, ...] = (("collector", "mask"), ("mask",))
GENERATION: Key = ("generation",)
INDEX: Key = ("index",)
#: Columns of batches, ignored in rows that are given. A stored weight would weight the losses of later draws.
NOT_STORED: frozenset[Key] = frozenset((GENERATION, INDEX, ("index_generation",), ("priority_weight",)))
WITHOUT_NUMPY: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class SingleRow:
    """Writes the columns of one row on the CPU by one copy: an ``extend`` of a row takes 19 us, and 23 without.

    ``columns`` are the views of all ``rows``, int64 ``[capacity, words]``, in the order of the values.
    """

    def __init__(self, layout: RowLayout, rows: Tensor, columns: Sequence[Tensor], generation: Tensor) -> None:
        offsets = [column.storage_offset() * column.itemsize for column in columns]
        self._order = sorted(range(len(offsets)), key=offsets.__getitem__)
        self._generation = generation.storage_offset()  # the word of a row
        self._before_generation = sum(offset < WORD_BYTES * self._generation for offset in offsets)
        self._rows = rows.numpy()
        everything: Any = self._rows.reshape(-1).view(np.uint8)
        self._bytes, self._row_bytes = memoryview(everything), layout.row_bytes

    def write(self, slot: int, values: Sequence[Any], least_generation: int) -> bool:
        """Writes columns ``[1, ...]`` into a slot.

        Returns ``False``, with nothing written, for a tensor or a column that is not contiguous.
        """
        generation = max(int(self._rows[slot, self._generation]), least_generation) + 1
        parts = [values[place] for place in self._order]
        parts.insert(self._before_generation, generation.to_bytes(8, sys.byteorder))
        try:
            row = b"".join(parts)
        except TypeError:
            return False
        start = slot * self._row_bytes
        self._bytes[start : start + len(row)] = row
        return True


def as_rows(given: TensorDictBase | Mapping[Any, Any]) -> TensorDictBase:
    return given if isinstance(given, TensorDictBase) else rows_of_columns(given)


def rows_of_columns(columns: Mapping[Any, Any]) -> TensorDict:
    """Returns rows, TensorDict ``[N]``, whose columns are the arrays and tensors ``[N, ...]`` of a mapping."""
    if not isinstance(columns, Mapping):
        raise TypeError(f"{_ACCEPTED}; got {type(columns).__name__}. Give a TensorDict to extend")
    leaves: dict[Key, Tensor] = {}
    for given, value in columns.items():
        key = (given,) if isinstance(given, str) else given
        if not isinstance(key, tuple) or not key or not all(isinstance(name, str) for name in key):
            raise TypeError(f"{_ACCEPTED}; got the key {given!r}")
        if key in leaves:
            raise ValueError(f"{_ACCEPTED}; the column {shown(key)} is given twice")
        leaves[key] = _tensor(key, value)
    for key in leaves:
        branch = next((key[:end] for end in range(1, len(key)) if key[:end] in leaves), None)
        if branch is not None:
            raise ValueError(f"{_ACCEPTED}; {shown(branch)} is a column, and {shown(key)} is below it. Rename one")
    lengths = {key: value.size(0) for key, value in leaves.items()}  # strided nested tensors have no len
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{shown(key)}: {length}" for key, length in lengths.items()) or "no columns"
        raise ValueError(f"{_ACCEPTED}, all with the same N >= 1; got {found}. Nothing was stored")
    devices = {value.device for value in leaves.values()}
    if len(devices) != 1:
        raise ValueError(f"{_ACCEPTED}, all on one device; got {sorted(map(str, devices))}. Nothing was stored")
    return gather_branch(nest(leaves), leaves, torch.Size([next(iter(lengths.values()))]), devices.pop())


def refuse_ragged(rows: TensorDictBase) -> None:
    """Raises ``TypeError`` for a nested tensor, such as a list becomes, among the columns of rows."""
    for name, value in rows.items(True, True):
        if isinstance(value, Tensor) and value.is_nested:
            if len({row.shape for row in value.unbind()}) == 1:
                raise TypeError(
                    f"the column {name!r} is a list, or a nested tensor, and its rows have one length; nothing was "
                    "stored. Give an array or a tensor [N, ...], as numpy.asarray(rows) or torch.stack(rows)"
                )
            raise TypeError(
                f"the column {name!r} has rows of different lengths, which only a buffer built with the option ragged "
                f"stores, as recipes.uniform(..., ragged=[{name!r}], element_capacity=...); nothing was stored"
            )


def _jagged(key: Key, rows: Sequence[Any]) -> Any:
    """Returns a list of tensors ``[L, ...]`` or of lists of numbers as a jagged tensor, and anything else as it is."""
    if rows and all(isinstance(row, list | tuple) for row in rows):
        try:
            # An empty list has the dtype of the others.
            kind = torch.as_tensor(next(filter(None, rows), []), device="cpu").dtype
            rows = [torch.as_tensor(row, dtype=None if row else kind, device="cpu") for row in rows]
        except (TypeError, ValueError, RuntimeError):
            return rows
    if not rows or not all(isinstance(row, Tensor) and row.ndim for row in rows):
        return rows
    kinds = {f"{row.dtype} {list(row.shape[1:])} on {row.device}" for row in rows}
    if len(kinds) > 1:
        raise ValueError(
            f"the tensors of the column {shown(key)} may differ only in length; their elements are "
            f"{', '.join(sorted(kinds))}. Nothing was stored"
        )
    return torch.nested.as_nested_tensor([*rows], layout=torch.jagged)


def _tensor(key: Key, value: Any) -> Tensor:
    if isinstance(value, list | tuple):
        value = _jagged(key, value)
    try:
        # A copy if torch takes no view: read-only, or with negative strides.
        copied = isinstance(value, np.ndarray) and not value.flags.carray
        tensor = torch.from_numpy(np.array(value) if copied else value) if isinstance(value, np.ndarray) else value
    except TypeError:
        tensor = None
    if not isinstance(tensor, Tensor) or not tensor.ndim:
        kind = f"an array of {value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)[:60]
        raise TypeError(f"{_ACCEPTED}; the column {shown(key)} is {kind}. Convert a list by numpy.asarray")
    return tensor


def as_tensor(value: Any) -> Tensor:
    # torch.as_tensor would take torch's default device.
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


class MissingDeviceError(ValueError):
    """A device that this machine, or torch as it is installed, does not have."""


def checked_device(device: Any) -> torch.device:
    """Returns a device of torch that keeps data and is there. Otherwise torch would fail at the first rows."""
    wrong = f"device is {device!r}; it must be a device of torch that keeps data, such as 'cpu' or 'cuda'"
    if not isinstance(device, str | torch.device):
        raise TypeError(wrong)
    try:
        known = torch.device(device)
    except RuntimeError as error:
        raise ValueError(wrong) from error
    if known.type == "meta":
        raise ValueError(wrong)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if known.type == "cuda" and (known.index or 0) >= count:
        raise MissingDeviceError(
            f"device is {str(device)!r}, and torch finds {count} CUDA devices here; use device='cpu', or install a "
            "torch that supports the GPU of this machine"
        )
    return known


def normalized(rows: TensorDictBase) -> TensorDictBase:
    """Returns rows as buffers store them.

    Columns of batches, see :data:`NOT_STORED`, are left out. So is padding: rows for which a mask, see :data:`MASKS`,
    is false. Trajectories ``[N, T]`` with a mask are flattened, the steps of each in order. Rewards and flags ``[N]``
    become ``[N, 1]``, as in TorchRL: a mixture would broadcast. ``("next", "done")`` is derived from ``terminated`` and
    ``truncated`` if it is absent, unless these are not bool or of two shapes. ``TypeError`` for nested tensors.
    """
    refuse_ragged(rows)
    names = rows.keys()
    of_batches = [key for key in NOT_STORED if key[0] in names]
    if of_batches:
        rows = rows.exclude(*of_batches)
    for key in (key for key in MASKS if key[0] in names):  # few rows have one
        mask = rows.get(key, None)
        if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.numel() == rows.numel():
            rows = rows[mask.reshape(rows.shape)]
    flat = {key: value for key in ONE_EACH if isinstance(value := rows.get(key, None), Tensor)}
    flat = {key: value for key, value in flat.items() if value.ndim == rows.ndim}
    if flat:
        rows = rows.copy()
    for key, value in flat.items():
        rows.set(key, value.unsqueeze(-1))
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

    * ``("next", "terminated")`` or ``("next", "truncated")`` is true while ``("next", "done")`` is false: returns and
      histories would cross the end of an episode. In rows that TorchRL's trainers give,
      :func:`~lightning_replay.episodes.links.with_real_ends` finds the ends.
    * ``trajectory`` is not of an integer dtype: episodes could not be distinguished.
    * A reward or a flag of an end is not one value for each row: a loss would broadcast it over the batch.
    * A flag of an end is not bool: the inverse ``~flag`` of the integer 0 is -1.
    * NaN or infinity in the reward or an observation: any column that is also under ``"next"``, or is named so. One
      such row makes every network it trains NaN. Not without ``check_finite``.

    Args:
        check_finite: Whether NaN and infinity are refused.
        deferred: Collects flags and numbers that are wrong on a device, to be raised later. ``None`` raises at once.
    """

    def __init__(self, check_finite: bool = True, deferred: DeferredChecks | None = None) -> None:
        self.check_finite = check_finite
        self.deferred: DeferredChecks | None = deferred

    def __call__(self, columns: Mapping[Key, Column]) -> None:
        """Checks columns ``[N, ...]``, tensors or arrays by key."""
        self.of(columns)(list(columns.values()))

    def of(self, columns: Mapping[Key, Column]) -> Callable[[Sequence[Column]], None]:
        """Returns the check of further rows, whose columns have the names, dtypes and shapes and order of these.

        Refuses ``trajectory``, rewards, and flags, whose dtypes and shapes then stay.
        """
        for key in (key for key in TRAJECTORIES if key in columns):
            given = as_tensor(columns[key])
            check_trajectory(key, given.dtype, given.shape[1:])
        for key in (key for key in ONE_EACH if key in columns):
            _check_one_each(key, columns[key])
        names = list(columns)
        flags = [names.index(key) for key in _FLAGS if key in columns]
        shapes = {columns[names[place]].shape[1:] for place in flags}
        ends = flags[1:] if _DONE in columns and len(shapes) == 1 else []
        finite = [key for key, value in columns.items() if self.check_finite and _must_be_finite(key, columns, value)]
        arrays = [key for key in finite if isinstance(columns[key], np.ndarray)]
        pairs = [(names.index(key), names.index(other)) for key, other in _in_pairs(arrays, columns)]
        tensors = [names.index(key) for key in finite if key not in arrays]

        # Rows that come from the CPU are refused at once, wherever they are kept.
        source = as_tensor(columns[names[0]]).device.type
        if self.deferred is not None and source == self.deferred.device.type:
            return _check_later(self.deferred, flags if ends else [], [names.index(key) for key in finite], names)

        def check_each(values: Sequence[Column], places: Sequence[int]) -> None:
            for place in places:
                value = as_tensor(values[place])
                if not bool(value.isfinite().all()):
                    raise _not_finite(names[place], value)

        def check(values: Sequence[Column]) -> None:
            if ends:
                done: Any = values[flags[0]]
                is_one = type(done) is np.ndarray and done.size == 1  # which takes a tenth of the time
                for place in () if is_one and done.item() else ends:
                    ended: Any = values[place]
                    if ended.item() if is_one else contradicts(done, ended):
                        raise _contradiction(done, values[ends[0]] | values[ends[-1]])
            for one, other in pairs:
                # A sum of products is finite only if every factor is. It may overflow, so each is checked then.
                a: Any = values[one]
                b: Any = values[other]
                if not isfinite(a.item() * b.item() if a.size == 1 else vdot(a, b)):
                    check_each(values, (one, other))
            if tensors:
                check_each(values, tensors)

        return check


def _check_later(
    deferred: DeferredChecks, flags: Sequence[int], finite: Sequence[int], names: Sequence[Key]
) -> Callable[[Sequence[Column]], None]:
    """Returns the check of rows on a device: of ``done`` and the other flags, and of numbers that must be finite."""
    problems = [
        f"call {{}} of extend brought NaN or infinity in {shown(names[place])}. The rows are stored by now. Look for a "
        "diverging policy or environment, or build the buffer with check_finite=False to store such rows"
        for place in finite
    ]
    if flags:
        problems.append(
            "call {} of extend brought rows that are terminated or truncated and not done. The rows are stored by now; "
            "store done = terminated | truncated"
        )

    def check(values: Sequence[Column]) -> None:
        # A sum is NaN or infinite if a term is, so that each column is read once. A float64 sum of float32 is finite.
        sums = [as_tensor(values[place]).sum(dtype=torch.float64) for place in finite]
        if flags:
            done, *others = (as_tensor(values[place]) for place in flags)
            wrong = ((others[0] | others[-1]) > done).sum(dtype=torch.float64)
            sums.append(wrong / (wrong == 0))  # This is infinite, unless no row is wrong.
        if sums:
            deferred.note("extend", problems, torch.stack(sums).abs() < torch.inf)

    return check


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


def _check_one_each(key: Key, column: Column) -> None:
    shape = tuple(column.shape)
    if shape[1:] not in ((), (1,)):
        raise ValueError(
            f"the column {shown(key)} has the shape {list(shape)} for {shape[0]} rows; give one value for each row, "
            f"[{shape[0]}] or [{shape[0]}, 1], and store several values under another name. Nothing was stored"
        )
    if key in _FLAGS and not str(column.dtype).endswith("bool"):
        raise ValueError(
            f"the column {shown(key)} is {column.dtype}; flags of ends must be bool. Nothing was stored; convert them, "
            ".bool() of a tensor or .astype(bool) of an array"
        )


def _in_pairs(keys: list[Key], columns: Mapping[Key, Column]) -> list[tuple[Key, Key]]:
    # Each pair is checked in one pass. An array without a partner is paired with itself.
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
    """Returns whether a flag of an end is true while ``done``, of the same shape, is false."""
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


class StoredColumn:
    """One column of all rows, as a tensor and, if NumPy has the dtype, as an array: its small writes are cheaper."""

    def __init__(self, key: Key, tensor: Tensor) -> None:
        self.key: Key = key
        self.tensor: Tensor = tensor
        has_array = tensor.device.type == "cpu" and tensor.dtype not in WITHOUT_NUMPY
        self.array: np.ndarray | None = tensor.numpy() if has_array else None
        self._vectors: np.ndarray | None = None  # each a single element of its bytes: many are copied in half the time
        if self.array is not None and self.array.ndim == 2 and self.array.shape[1] > 1:
            self._vectors = self.array.view(f"V{self.array.shape[1] * self.array.itemsize}")[:, 0]

    def write(self, slots: Any, values: Tensor | np.ndarray) -> None:
        """Writes values ``[N, ...]`` of the column's dtype into slots, a slice or int64 ``[N]``."""
        if self.array is None or type(values) is not np.ndarray:
            self.tensor[slots] = torch.as_tensor(values, device=self.tensor.device)
        elif self._vectors is None or len(values) == 1 or not values.flags.c_contiguous:
            self.array[slots] = values
        else:
            self._vectors[slots] = values.view(self._vectors.dtype)[:, 0]


def as_array(value: Tensor | np.ndarray) -> np.ndarray:
    return value if type(value) is np.ndarray else torch.as_tensor(value, device="cpu").detach().numpy()


_read_kind = operator.attrgetter("dtype", "shape")


class RowReader:
    """Reads the columns of new rows, which must match the storage. On a CPU it reads ``arrays`` as arrays."""

    def __init__(self, columns: Mapping[Key, tuple[torch.dtype, torch.Size]], arrays: Collection[Key]) -> None:
        self._may_be_flat = {
            place for place, (key, (_, shape)) in enumerate(columns.items()) if key in ONE_EACH and tuple(shape) == (1,)
        }
        self._kinds = [
            (dtype, tuple(shape), torch.empty(0, dtype=dtype, device="cpu").numpy().dtype if key in arrays else None)
            for key, (dtype, shape) in columns.items()
        ]
        place_of = {key: place for place, key in enumerate(columns)}
        self._trees = [_places(nest(columns), place_of)]
        # Rows may lack ``done`` if it follows from the other flags.
        ends = [key for key in (_TERMINATED, _TRUNCATED) if key in columns]
        flags = {columns[key] for key in (_DONE, *ends) if key in columns}
        self._done_at: Any = None
        if ends and _DONE in columns and len(flags) == 1 and flags.pop()[0] == torch.bool:
            self._done_at = place_of[_DONE]
            self._ends_at = (place_of[ends[0]], place_of[ends[-1]])
            self._trees.append(_places(nest(key for key in columns if key != _DONE), place_of))
        self.derived_done: bool = False  #: Whether the rows read last lacked ``("next", "done")``.
        # Columns of a dictionary that are all arrays are read by these names: one row in a quarter of the time.
        names: list[Any] = [key[0] if len(key) == 1 else key for key in columns]
        self._names = {len(names): names}
        if self._done_at is not None:
            self._names[len(names) - 1] = [name for name in names if name != _DONE]
        # Dtypes and shapes of the arrays that were read last, and the places of arrays [N] among all columns.
        self._read_last: list[tuple[Any, Any]] = []
        self._flat_last: list[int] = []
        # A single name may be given as a tuple too, as in a TensorDict.
        self._place_of: dict[Any, int] = place_of | {key[0]: place for key, place in place_of.items() if len(key) == 1}

    def read(self, rows: TensorDictBase | Mapping[Any, Any], device: torch.device) -> list[Tensor | np.ndarray] | None:
        """Returns the values ``[N, ...]`` on ``device`` in the order of the columns, or ``None`` if rows have others.

        Rows are a TensorDict ``[N]``, of which ``generation``, ``index`` and empty branches are ignored, or arrays and
        tensors by key, a name or a tuple of names. Rewards and flags may be ``[N]`` if ``[N, 1]`` is stored.
        """
        on_cpu = device.type == "cpu"
        if on_cpu and type(rows) is dict:
            # Usually, the rows have the form of the rows before, which was checked.
            known = self._read_as_before([*map(rows.get, self._names.get(len(rows), ()))])
            if known is not None:
                return known
        values: list[Any] = [None] * len(self._kinds)
        if type(rows) is dict or not isinstance(rows, TensorDictBase):
            if not self._collect_named(rows, values):
                return None
        elif rows.ndim != 1 or not any(_collect(rows, tree, values) for tree in self._trees):
            return None
        given = [place for place, value in enumerate(values) if value is not None]
        if on_cpu and self._read_last and isinstance(rows, TensorDictBase):
            known = self._read_as_before([values[place] for place in given])
            if known is not None:
                return known
        flat = [place for place in given if place in self._may_be_flat and values[place].ndim == 1]
        for place in given:
            value = values[place]
            dtype, shape, array_dtype = self._kinds[place]
            if type(value) is not np.ndarray and value.is_nested:
                return None
            if on_cpu and array_dtype is not None:  # the attributes of an array are cheaper to read than a tensor's
                if type(value) is not np.ndarray:
                    if not value.is_cpu:
                        return None
                    try:
                        value = value.detach().numpy() if value.requires_grad else value.numpy()
                    except TypeError:  # of a dtype that NumPy lacks
                        return None
                if value.dtype is not array_dtype and value.dtype != array_dtype:  # equal after it is unpickled
                    return None
            elif type(value) is np.ndarray or value.dtype != dtype or value.device != device:
                return None
            elif value.requires_grad:
                value = value.detach()
            if value.shape[1:] != shape and place not in flat:
                return None
            values[place] = value
        read = [values[place] for place in given]
        if all(type(value) is np.ndarray for value in read):
            self._read_last = [*map(_read_kind, read)]
            self._flat_last = flat
        return self._completed(read, flat)

    def _read_as_before(self, values: list[Any]) -> list[Any] | None:
        """Returns given columns in their order as arrays, or ``None`` if dtypes or shapes differ from the last ones."""
        kinds = set(map(type, values))
        if kinds == {Tensor}:
            try:
                values = [*map(Tensor.numpy, values)]
            except (RuntimeError, TypeError):  # with a gradient, on a device, or of a dtype that NumPy lacks
                return None
        elif kinds != {np.ndarray}:
            return None
        return self._completed(values, self._flat_last) if [*map(_read_kind, values)] == self._read_last else None

    def _completed(self, values: list[Any], flat: Sequence[int]) -> list[Any]:
        """Returns given columns with ``done``, and as ``[N, 1]`` at the places ``flat`` among all columns."""
        self.derived_done = len(values) < len(self._kinds)
        if self.derived_done:
            values.insert(self._done_at, None)
        for place in flat:
            values[place] = values[place][:, None]
        if self.derived_done:
            terminated, truncated = self._ends_at
            values[self._done_at] = values[terminated] | values[truncated]
        return values

    def _collect_named(self, columns: Mapping[Any, Any], values: list[Any]) -> bool:
        if len(columns) not in self._names:
            return False
        count = None
        for key, value in columns.items():
            place = self._place_of.get(key)
            if place is None or values[place] is not None:
                return False
            if type(value) is not np.ndarray and not isinstance(value, Tensor):
                return False
            length = value.shape[:1]  # none if it has no dimension
            if length != count:
                if count is not None or not length:
                    return False
                count = length
            values[place] = value
        return len(columns) == len(values) or values[self._done_at] is None  # Only ``done`` may be missing.


def _places(tree: dict[str, Any], place_of: Mapping[Key, int]) -> list[tuple[str, Any]]:
    """Returns a tree of :func:`nest` as lists of names with the place of a column or a branch."""
    return [
        (name, _places(node, place_of) if isinstance(node, dict) else place_of[node]) for name, node in tree.items()
    ]


def _collect(rows: TensorDictBase, tree: list[tuple[str, Any]], values: list[Any], is_whole: bool = True) -> bool:
    """Fills ``values`` from ``rows``, or a branch of them, and returns whether their keys match the tree."""
    entries = dict(rows.items())
    for name, node in tree:
        value = entries.get(name)
        if type(node) is int:
            if not isinstance(value, Tensor):
                return False
            values[node] = value
        elif not isinstance(value, TensorDictBase) or not _collect(value, node, values, False):
            return False
    if len(entries) == len(tree):
        return True
    ignored = NOT_STORED if is_whole else ()
    others = [value for name, value in entries.items() if (name,) not in ignored and name not in dict(tree)]
    return all(isinstance(one, TensorDictBase) and not is_non_tensor(one) and one.is_empty() for one in others)
