# SPDX-License-Identifier: Apache-2.0
"""Methods that keep their rows in tables: event tables and a curriculum of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torchrl.data.replay_buffers import Sampler

from lightning_replay.events.event_table import EventTable
from lightning_replay.recipes.options import FrameOptions, assemble, recipe
from lightning_replay.recipes.storage import frames_in_order
from lightning_replay.replay import given_batch_size
from lightning_replay.samplers.continuous_correction import ContinuousCorrectionSampler
from lightning_replay.samplers.scheduled import ScheduledSampler
from lightning_replay.samplers.table_corrections import CORRECTIONS, NEEDS_COUNTS
from lightning_replay.samplers.table_shares import ROUNDING, TableShares
from lightning_replay.schedulers import Scheduler, UniformTasks
from lightning_replay.schedules import Schedule
from lightning_replay.table_replay import CurriculumReplay, TableReplay
from lightning_replay.validation import check_kind, checked_choice, checked_count, checked_share
from lightning_replay.writers.event_tables import DEFAULT_TABLE, EventTableWriter, check_tables
from lightning_replay.writers.task_tables import TaskTableWriter

CONTINUOUS = "continuous"  # the correction that is a sampler of its own


@recipe
def event_tables(
    capacity: int,
    batch_size: int | None = None,
    *,
    tables: Sequence[EventTable],
    default_share: float = 0.5,
    min_size: int | None = None,
    correction: str = "none",
    multinomial: bool = False,
    at_least_one: bool = False,
    normalize_over_batch: bool = False,
    return_probabilities: bool = False,
    priority_exponent: float = 0.0,
    importance_exponent: float | Schedule = 0.4,
    priority_offset: float = 1e-6,
    max_trajectories: int = 64,
    forget_stale: bool = False,
    **options: Unpack[FrameOptions],
) -> TableReplay:
    """Draws a share of every batch from the steps that led to events (SSET, Kompella et al. 2022, arXiv:2211.00576).

    Stratified Sampling from Event Tables. Conditions are tested on new steps; the steps that led to an event stay in
    its table long after the default table evicted them, without a second copy. ``replay.table(name)`` returns a table.

    Args:
        capacity: most transitions in the default table, which every step enters.
        tables: the event tables; a ``share`` of ``None`` is an equal part of what the others and the default leave, a
            ``min_size`` of ``None`` is the batch size, or the table's capacity where that is less.
        default_share: η_0, share of a batch from the default table; the paper recommends 0.7 if it is not known which
            events matter.
        min_size: d_0, rows that the default table must hold before it is drawn from; ``None`` is the batch size, or
            ``capacity`` where that is less.
        correction: importance weights of rows drawn more often than they occur: ``"none"`` (the paper's choice for
            deterministic environments), ``"mixture"`` (exact, any state space), ``"lemma2"`` or ``"lemma2_exact"``
            (discrete states and actions), see :mod:`lightning_replay.samplers.table_corrections`; or ``"continuous"``,
            one draw over all tables, without row counts per table, TD priorities or minimum sizes of event tables:
            :class:`~lightning_replay.samplers.continuous_correction.ContinuousCorrectionSampler`.
        multinomial: draw the number of rows of each table at random; otherwise shares are exact by largest remainder.
        at_least_one: draw at least one row from every table that holds enough.
        normalize_over_batch: divide the weights by the largest of the batch.
        return_probabilities: add ``table_probability`` and ``raw_weight``, of
            :class:`~lightning_replay.samplers.table_shares.TableShares` or of the sampler of ``"continuous"``.
        max_trajectories: episodes that may run at once.
        forget_stale: where more run, drop the history of those continued longest ago instead of refusing new ones.
        n_steps: rewards summed into one return when a row is drawn; events are tested on single steps.
        device: where transitions are kept; the tables are always on the CPU.
        frame_capacity: most frames kept; a full frame store evicts the oldest entries of the fullest table. By default
            enough for tables of long runs of consecutive steps.

    Sampled keys:
        table: int64 ``[B]``, the table each row was drawn from: 0 the default table, then those given, in order.
        priority_weight: float32 ``[B]``, with a correction or priorities.
        table_probability, raw_weight: float32 ``[B]``, with ``return_probabilities``.

    Raises:
        ValueError: shares that do not sum to 1, two tables of one name, an unknown correction or one that excludes
            other options, or a ``min_size`` that the default table cannot reach.
        TypeError: a ``min_size`` that is no whole number.
    """
    check_tables(tables)
    checked_choice("correction", correction, (*CORRECTIONS, CONTINUOUS))
    if correction == CONTINUOUS:
        if multinomial or at_least_one or priority_exponent:
            raise ValueError(
                "correction='continuous' draws from all tables at once with priorities of its own; leave out "
                "multinomial, at_least_one and priority_exponent, or use correction='mixture'"
            )
        unused = [table.name for table in tables if table.share == 0]
        if unused:
            raise ValueError(
                f"correction='continuous' draws from all tables at once, also from {unused}, whose share is 0; leave "
                "these tables out, or use correction='mixture'"
            )
    writer = EventTableWriter(
        capacity,
        tables,
        max_trajectories=max_trajectories,
        forget_stale=forget_stale,
        count_state_actions=correction in NEEDS_COUNTS,
        check_continuity=options["check_continuity"],
    )
    batch_size = given_batch_size(batch_size, capacity)
    least = min(batch_size, capacity) if min_size is None else checked_count("min_size", min_size, of="rows")
    if least > capacity:
        raise ValueError(
            f"min_size is {min_size} and the default table holds {capacity} rows at most: it can never fill"
        )
    given = {table.name: table.min_size or min(batch_size, table.capacity) for table in tables}
    sampler: Sampler = TableShares(
        _shares(default_share, tables),
        min_sizes={DEFAULT_TABLE: least} | given,
        multinomial=multinomial,
        at_least_one=at_least_one,
        correction=CORRECTIONS.get(correction),
        normalize_over_batch=normalize_over_batch,
        priority_exponent=priority_exponent,
        importance_exponent=importance_exponent,
        priority_offset=priority_offset,
        return_probabilities=return_probabilities,
    )
    if correction == CONTINUOUS:  # TableShares has checked the shares
        sampler = ContinuousCorrectionSampler(
            1.0 - default_share, least, normalize_over_batch, return_probabilities=return_probabilities
        )
    lengths = [max(event.history_length for event in table.events) for table in tables]
    runs = [(capacity, 32), *((table.capacity, length) for table, length in zip(tables, lengths, strict=True))]
    runs.append((max_trajectories * max(lengths), max(lengths)))
    frames = sum(frames_in_order(rows, options["frame_stack"], length) for rows, length in runs)
    return assemble(
        TableReplay, writer.num_slots, batch_size, options, sampler, default_frame_capacity=frames, writer=writer
    )


@recipe
def parallel_curriculum(
    tasks: Sequence[str],
    capacity_per_task: int,
    batch_size: int | None = None,
    *,
    scheduler: Scheduler | None = None,
    min_size: int | None = None,
    priority_exponent: float = 0.0,
    importance_exponent: float | Schedule = 0.4,
    priority_offset: float = 1e-6,
    **options: Unpack[FrameOptions],
) -> CurriculumReplay:
    """Draws each batch from one of several tasks, a hard one and easier ones (DPCER).

    Distributed Parallel Curriculum Experience Replay (Li and Ji 2021, https://openreview.net/forum?id=EiW3FLYBiP).
    Rows carry ``task``, int64 ``[N]``, an index into ``tasks``. Report progress to the scheduler with
    ``replay.progress(name, signal)``; ``replay.actor_tasks(n)`` returns the tasks for actors.

    Args:
        tasks: names; by convention the hard one, the target, comes first.
        capacity_per_task: most transitions kept of each task.
        scheduler: chooses the task of the next batch: :class:`~lightning_replay.schedulers.UniformTasks` (the default),
            ``Exp3``, ``Exp3S``; or a baseline, ``OneTask``, ``EasyToHard``, ``ReverseCurriculum``, for which all tasks
            share one table. It is copied.
        min_size: rows that a task needs before it is drawn from; by default the batch size, or the capacity if less.
        frame_capacity: most frames kept; a full frame store evicts the oldest entries of the fullest table. By default
            enough for tables of long runs of consecutive steps.

    Raises:
        ValueError: a task named twice, or a ``min_size`` that no table can reach.
        TypeError: ``scheduler`` is not a scheduler.
    """
    scheduler = UniformTasks() if scheduler is None else scheduler
    check_kind("scheduler", scheduler, Scheduler, "an object of lightning_replay.schedulers, such as Exp3()")
    writer = TaskTableWriter(tasks, capacity_per_task, shares_one_table=scheduler.shares_one_table)
    batch_size = given_batch_size(batch_size, writer.num_slots)
    reachable = int(writer.tables.capacity[0])
    if min_size is not None and checked_count("min_size", min_size, of="rows") > reachable:
        raise ValueError(f"min_size is {min_size} and a table holds {reachable} rows at most: it can never fill")
    sampler = ScheduledSampler(
        tasks,
        scheduler,
        min_size=min(batch_size, reachable) if min_size is None else min_size,
        priority_exponent=priority_exponent,
        importance_exponent=importance_exponent,
        priority_offset=priority_offset,
    )
    return assemble(CurriculumReplay, writer.num_slots, batch_size, options, sampler, writer=writer)


def _shares(default_share: float, tables: Sequence[EventTable]) -> dict[str, float]:
    """Returns every table's share; tables without one divide the rest evenly."""
    checked_share("default_share", default_share)
    given = {table.name: table.share for table in tables}
    without = [name for name, share in given.items() if share is None]
    left = 1.0 - default_share - sum(share for share in given.values() if share is not None)
    if without and left <= 0:
        raise ValueError(
            f"default_share ({default_share}) and the shares of the other tables leave {left:g} of a batch for "
            f"{without}; lower default_share or the share of a table"
        )
    if not without and abs(left) > ROUNDING:
        raise ValueError(
            f"default_share is {default_share} and the tables have the shares {given}, together {1.0 - left:g}; the "
            "shares of a batch must sum to 1. Change default_share or the share of a table, or leave one share out "
            "(share=None), which then gets the rest"
        )
    return {DEFAULT_TABLE: default_share} | {
        name: left / len(without) if share is None else share for name, share in given.items()
    }
