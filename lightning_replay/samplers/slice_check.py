# SPDX-License-Identifier: Apache-2.0
"""Refuses slices over several episodes, which TorchRL's ``SliceSampler`` does not check."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import find_start_stop_traj
from torchrl.data.replay_buffers import RoundRobinWriter, SliceSampler, Storage, Writer

from lightning_replay import torchrl_compat
from lightning_replay.episodes.links import TRAJECTORY_KEYS, Continuity
from lightning_replay.episodes.running import read_trajectory
from lightning_replay.storage.packed import read_columns, readable_rows

# A SliceSampler without traj_key looks for these keys in this order.
_FOUND_BY_TORCHRL = (("collector", "traj_ids"), "episode")
_DONE = ("next", "done")


def check_slice_writer(sampler: SliceSampler, writer: Writer) -> None:
    """Refuses a writer without slots in order of time, as a ring has, unless the sampler is ``fragmented``."""
    if not (sampler.fragmented or isinstance(writer, RoundRobinWriter)):
        raise ValueError(
            f"{type(sampler).__name__} cuts slices out of rows in order of time, and {type(writer).__name__} does not "
            f"keep them in order. Use FirstInFirstOutWriter, or build the sampler with {_fragmented('trajectory')}"
        )


class SliceCheck:
    """Refuses to draw if the rows of episodes are interleaved. Call it before every draw."""

    # A SliceSampler cuts rows when the trajectory changes, or when an end flag is true. With interleaved rows, cuts by
    # trajectory leave slices of one row, and cuts by end flags leave slices through several episodes. Checking all rows
    # costs as much as a draw, so they are checked again once a sixteenth of them is new.

    def __init__(self) -> None:
        # The number of rows written before the last check.
        self._written: int | None = None

    def broken(self, index: Tensor, storage: Storage) -> Tensor:
        """Returns the slots of rows before those just written in a ring that start with another observation."""
        if not len(index) or not _has(readable_rows(storage), _DONE):
            return index[:0]
        before = (index - 1) % storage.max_size
        # No row follows the newest one.
        follows = (before < len(storage)) & (before != index[-1])
        before = before[follows]
        after = index[follows]
        if not len(before):
            return before
        (ended,) = read_columns(storage, before, [_DONE])
        joined = ~ended.reshape(len(before), -1).any(1).cpu()
        first = read_trajectory(storage, before)
        second = read_trajectory(storage, after)
        if first is not None and second is not None:
            joined &= first == second
        before = before[joined]
        after = after[joined]
        continued = Continuity(storage).of_slots(before.numpy(), after.numpy())
        found = before[torch.from_numpy(~continued)]
        if len(found):
            # The next draw checks all rows again.
            self._written = None
        return found

    def __call__(self, sampler: SliceSampler, storage: Storage, writer: RoundRobinWriter, batch_size: int) -> None:
        """Raises ValueError for interleaved rows, if they have a column of trajectories."""
        newest = (torchrl_compat.next_slot(writer) - 1) % storage.max_size
        # No slice may continue from the newest row to the oldest.
        torchrl_compat.set_newest_slot(storage, newest)
        written = torchrl_compat.rows_written(writer)
        stored = len(storage)
        if self._written is not None and 16 * abs(written - self._written) < stored:
            return
        # A static sampler was given its trajectories.
        is_static = sampler.end_key is None and sampler.end_keys is None
        if stored and not (sampler.fragmented or is_static):
            _check_rows(sampler, storage, newest, batch_size)
        self._written = written


def _check_rows(sampler: SliceSampler, storage: Storage, newest: int, batch_size: int) -> None:
    rows = storage.get(slice(0, len(storage)))
    key = _followed_key(sampler, rows)
    ends: Sequence[NestedKey] = (_DONE,) if key is not None else sampler.end_keys or (sampler.end_key,)
    named = key if key is not None else next((name for name in TRAJECTORY_KEYS if _has(rows, name)), None)
    if named is None:
        return
    trajectory = rows.get(named).reshape(len(rows), -1)[:, 0]
    slots = torch.arange(len(rows), device=trajectory.device)
    following = (slots + 1) % len(rows)
    joined = int((_ended(rows, (_DONE,), slots) & (trajectory == trajectory[following]) & (slots != newest)).sum())
    if joined and key is not None:
        raise ValueError(
            f"{joined} episodes end beside another one of the same {named!r}, and {type(sampler).__name__} with "
            f"traj_key={named!r} would cut slices through both. Give each episode another number, or build the sampler "
            f"with end_key={_DONE!r}"
        )
    _, stop, length = find_start_stop_traj(
        trajectory=trajectory, at_capacity=torchrl_compat.is_full(storage), cursor=newest
    )
    last = stop[:, 0]
    breaks_off = ~_ended(rows, ends, last)
    if key is None:
        broken = int((breaks_off & (last != newest)).sum())
        if broken:
            raise ValueError(
                f"{type(sampler).__name__} ends slices where {' or '.join(map(repr, ends))} is true, and {broken} of "
                f"{len(last)} runs of rows of one {named!r} end without it: rows of several environments are "
                f"interleaved or episodes broke off. Where rows of an episode lie side by side, build the sampler with "
                f"traj_key={named!r}; otherwise {_fragmented(named)}, SequenceSampler, or collect from one environment"
            )
        return
    _, place, runs = trajectory[last].unique(return_inverse=True, return_counts=True)
    steps = sampler.slice_len or batch_size // sampler.num_slices
    broken = int((breaks_off & (runs[place] > 1) & (length < steps)).sum())
    # A few short runs occur at the ends of a collector's batches.
    if 2 * broken > len(last):
        raise ValueError(
            f"the rows of several environments are interleaved: {broken} of {len(last)} runs of rows of one {named!r} "
            f"are shorter than a slice of {steps} and continue elsewhere; {type(sampler).__name__} cuts slices from "
            f"rows that lie side by side. Use {_fragmented(named)}, SequenceSampler, or collect from one environment"
        )


def _followed_key(sampler: SliceSampler, rows: TensorDictBase) -> NestedKey | None:
    """Returns the column of trajectories along which slices are cut, or ``None`` if end flags are used."""
    if sampler.traj_key is not None:
        return sampler.traj_key if _has(rows, sampler.traj_key) else None
    if not torchrl_compat.finds_trajectories(sampler):
        return None
    return next((key for key in _FOUND_BY_TORCHRL if _has(rows, key)), None)


def _has(rows: TensorDictBase, key: NestedKey) -> bool:
    return rows.get(key, None) is not None


def _ended(rows: TensorDictBase, ends: Sequence[NestedKey], index: Tensor) -> Tensor:
    ended = torch.zeros(len(index), dtype=torch.bool, device=index.device)
    for key in ends:
        column = rows.get(key, None)
        if column is not None:
            ended |= column[index].reshape(len(index), -1).any(1)
    return ended


def _fragmented(key: NestedKey) -> str:
    return (
        f"SliceSampler(fragmented=True, traj_key={key!r}, step_key=...), where step_key is a column of integers that "
        "count the steps of each episode"
    )
