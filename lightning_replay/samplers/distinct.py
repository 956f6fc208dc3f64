# SPDX-License-Identifier: Apache-2.0
"""Draws without replacement within a batch: no row is twice in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.options import check_option

FEWEST_ROUNDS = 4  # Before the masses of all rows are read.


def checked_replace(replace: object, device: object = None) -> bool:
    """Returns the option ``replace`` of a sampler. Refuses passes, and ``False`` for draws on a device."""
    if isinstance(replace, str) and replace == "pass":
        raise ValueError(
            "replace is 'pass', and a pass draws rows or groups uniformly, without priorities, ages, tables, and "
            "sequences, and on the CPU; give True or False, or use uniform draws"
        )
    check_option("replace", replace, bool, "True, False, or, of a recipe that draws uniformly, 'pass'")
    if not replace and device is not None:
        raise ValueError(
            f"replace is False and slots are drawn on {str(device)!r}; draws without replacement are made on the CPU. "
            "Leave out device of the sampler or draws_on of the recipe, or give replace=True"
        )
    return bool(replace)


def draw_rows(sampler: Any, storage: Any, groups: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws a row at each point. If ``sampler.replace`` is false, a row that was drawn before is drawn again.

    This is successive sampling: rows are drawn one after the other, each in proportion to its mass among the rows of
    its group that are left. Small groups are drawn first.

    Args:
        sampler: Sampler with ``_rows_at(storage, groups, points)``, which draws with replacement, and
            ``masses(storage, group)``, which returns the masses of all slots in the group.
        storage: Storage of the rows, which is not empty.
        groups: Group of each row, int64 ``[n]``, ascending.
        points: Points in the masses of the groups, float64 ``[n]`` in [0, 1).

    Returns:
        Slots, int64 ``[n]``, and the probability of each in a draw with replacement from its group, float64 ``[n]``.

    Raises:
        RuntimeError: Fewer rows can be drawn than there are points.
    """
    slots, probability = sampler._rows_at(storage, groups, points)
    if not sampler.replace and has_repeats(slots):
        draw_repeats_again(sampler, storage, groups, slots, probability)
    return slots, probability


def has_repeats(slots: np.ndarray) -> bool:
    """Returns whether a slot is twice among ``slots``, int64 ``[n]``."""
    ordered = slots.copy()
    ordered.sort()
    return bool(np.count_nonzero(ordered[1:] == ordered[:-1]))


def draw_repeats_again(
    sampler: Any, storage: Any, groups: np.ndarray, slots: np.ndarray, probability: np.ndarray
) -> None:
    """Replaces slots that are repeated, and their probabilities. The arguments are as in :func:`draw_rows`."""
    totals = sampler.group_totals(storage)
    taken = slots[:0]
    # If a large table came first, it could leave too few rows of a small one.
    for group in np.argsort(totals.rows, kind="stable"):
        order = np.flatnonzero(groups == group)
        # A round takes about as long as reading the masses of 2**14 rows.
        for _ in range(FEWEST_ROUNDS + int(totals.rows[group]) // 2**14):
            is_first = _are_first(taken, slots[order])
            if is_first.all():
                break
            missing = order[~is_first]
            points = uniform_points(sampler._generator, len(missing))
            slots[missing], probability[missing] = sampler._rows_at(storage, groups[missing], points)
            order = np.concatenate((order[is_first], missing))
        is_first = _are_first(taken, slots[order])
        taken = np.concatenate((taken, slots[order[is_first]]))
        missing = order[~is_first]
        if len(missing):
            # The batch needs most of the rows, or most of their mass.
            mass = sampler.masses(storage, group)
            left = mass.index_fill(0, torch.from_numpy(taken), 0.0)
            held = int(left.count_nonzero())
            if held < len(missing):
                of_table = f" of table {totals.names[group]!r}" if len(totals.names) > 1 else ""
                raise RuntimeError(
                    f"replace is False, and a batch needs {len(order)} different rows or sequences{of_table}, of which "
                    f"{len(order) - len(missing) + held} can be drawn. Store more before the first draw, or use a "
                    "smaller batch_size or replace=True"
                )
            slots[missing] = first_arrivals(left, len(missing), sampler._generator).numpy()
            probability[missing] = mass.numpy()[slots[missing]] / totals.mass[group]
            taken = np.concatenate((taken, slots[missing]))


def _are_first(taken: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Returns which slots ``[n]`` are neither among those taken, each of which is there once, nor repeated, bool."""
    is_first = np.zeros(len(taken) + len(slots), dtype=np.bool_)
    is_first[np.unique(np.concatenate((taken, slots)), return_index=True)[1]] = True
    return is_first[len(taken) :]


def first_arrivals(mass: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draws ``count`` places without replacement in proportion to ``mass``, float64 ``[m]``. Returns int64 ``[count]``.

    The first arrivals of Poisson processes with these rates are draws without replacement. At least ``count`` masses
    are positive.
    """
    # Quotients could be too large for a float.
    arrival = torch.empty_like(mass).exponential_(generator=generator).log_() - mass.log()
    return arrival.topk(count, largest=False).indices


def uniform_points(generator: torch.Generator, count: int) -> np.ndarray:
    """Returns random points in [0, 1), float64 ``[count]``."""
    uniform = torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)
    return (uniform if uniform.is_cpu else uniform.cpu()).numpy()
