# SPDX-License-Identifier: Apache-2.0
"""Each option of each rebuildable class is changed at a load: the buffer equals one built with it, or refuses."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import lightning_replay
from lightning_replay import Age, MixedReplay, PackedStorage, Replay
from lightning_replay import events as ev
from lightning_replay import samplers as sa
from lightning_replay import schedulers as sc
from lightning_replay import transforms as tr
from lightning_replay import writers as wr
from lightning_replay.episodes.returns import NStepTransitions
from lightning_replay.events.conditions import (
    AnyOf,
    EveryOf,
    FirstInEpisode,
    InfoKey,
    KeyInRegion,
    Reestablished,
    RewardAtLeast,
    RewardBelow,
    Sustained,
    TerminalWithReward,
)
from lightning_replay.samplers.tables import mixture
from lightning_replay.schedules import Constant, Linear
from lightning_replay.storage import FrameStorage, ObservationStorage, RaggedStorage
from lightning_replay.table_replay import CurriculumReplay, TableReplay
from tests.frame_steps import frame_rows, stacks_of
from tests.goal_steps import costly, distance, goal_rows, reached
from tests.transitions import numbered_steps

pytestmark = pytest.mark.filterwarnings("ignore:.*another reward than RelabelGoals computes")

CAPACITY = 40
LEAST = {"default": 1, "one": 1}
LATE = ev.reward_at_least(15.0)


def over(sampler: Any = None, **options: Any) -> Replay:
    given = {"storage": PackedStorage(CAPACITY), "batch_size": 8, "seed": 0} | options
    return Replay(sampler=sampler, **given)


def with_events(
    sampler: Any = None, tables: Any = None, kind: type[TableReplay] = TableReplay, **options: Any
) -> Replay:
    of_replay = {
        name: options.pop(name) for name in [*options] if name in inspect.signature(Replay.__init__).parameters
    }
    if "compares" in options:  # the buffer has an option of the same name
        options["check_continuity"] = options.pop("compares")
    tables = [event_table()] if tables is None else tables
    given: dict[str, Any] = {"capacity": CAPACITY, "event_tables": tables} | options
    writer = wr.EventTableWriter(**given)
    sampler = sa.TableShares({"default": 0.5, "one": 0.5}, LEAST) if sampler is None else sampler
    built = {"storage": PackedStorage(writer.num_slots), "batch_size": 8, "seed": 0} | of_replay
    return kind(sampler=sampler, writer=writer, **built)


def event_table(**options: Any) -> ev.EventTable:
    given = {"name": "one", "condition": LATE, "history_length": 3, "capacity": 9, "min_size": 1} | options
    return ev.EventTable(**given)


def with_condition(condition: Any) -> Replay:
    return with_events(tables=[event_table(condition=condition)])


def with_tasks(
    scheduler: Any = None, sampler: Any = None, writer: dict[str, Any] | None = None, **options: Any
) -> Replay:
    tasks = ["target", "near"]
    scheduler = sc.Exp3(0.3) if scheduler is None else scheduler
    sampler = sa.ScheduledSampler(tasks, scheduler, min_size=1) if sampler is None else sampler
    one = {"shares_one_table": True} if scheduler.shares_one_table else {}
    of_writer: dict[str, Any] = {"tasks": tasks, "capacity_per_task": CAPACITY} | one | (writer or {})
    written = wr.TaskTableWriter(**of_writer)
    built = {"storage": PackedStorage(written.num_slots), "batch_size": 8, "seed": 0} | options
    return CurriculumReplay(sampler=sampler, writer=written, **built)


def retained(rule: Any = None, **options: Any) -> Replay:
    return over(writer=wr.RetentionWriter(**{"rule": rule, "seed": 0} | options), storage=PackedStorage(20))


def transformed(transform: Any, sampler: Any = None, **options: Any) -> Replay:
    return over(sampler, transform=transform, **options)


def mixed(**options: Any) -> MixedReplay:
    given = {"online": over(), "offline": over(sa.UniformSampler(seed=1)), "batch_size": 8, "seed": 0} | options
    return MixedReplay(**given)


def steps_for(replay: Replay, first: int, count: int) -> TensorDict:
    if isinstance(replay.storage, FrameStorage):
        return frame_rows(stacks_of(range(first, first + count + 1), 2))
    if any(isinstance(one, tr.RelabelGoals) for one in replay.transform):
        rows = goal_rows(range(first, first + count))
        rows["next", "done"][9::10] = True
        rows["next", "truncated"][9::10] = True
        rows["next", "terminated"][:] = False
        rows["next", "reward"][:] = 0.0  # of goals that are not reached
        return rows
    rows = numbered_steps(first, count, done_every=10)
    if first == 0:
        rows["observation"][20] += 0.5  # which does not continue the row before
    if isinstance(replay.storage, RaggedStorage):
        rows["tokens"] = torch.arange(count * 3).view(count, 3)
    rows["other"] = rows["observation"] * 2
    rows["next", "other"] = rows["next", "observation"] * 2
    rows["next", "flag"] = rows["next", "reward"] >= 12
    rows["next", "end"] = rows["next", "done"].clone()
    rows["next", "end"][4] = True
    rows["picture"] = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(first))
    rows["other picture"] = rows["picture"].flip(0)
    if replay.tasks:
        rows["task"] = torch.arange(count) % 2
    return rows


def give(replay: Any, rows: Any, errors: Tensor) -> None:
    signals: dict[str, Tensor] = {}
    if isinstance(replay.entered.writer, wr.RetentionWriter):
        values = torch.linspace(0.0, 1.0, len(errors))
        signals = {"action_values": torch.stack([values, 1 - values], 1), "action": torch.arange(len(errors)) % 2}
    replay.update_priority(rows, errors, **signals)


def fill(replay: Any) -> None:
    if isinstance(replay, MixedReplay):
        replay.offline.extend(steps_for(replay.offline, 1000, 30))
    slots = replay.extend(steps_for(replay.entered, 0, 34))
    if replay.takes_feedback and replay.sequence_length is None and len(slots):
        give(replay, slots, torch.linspace(0.1, 3.0, len(slots)))


def draws(replay: Any) -> list[Tensor]:
    """Returns the columns of batches, before and after further rows, and what is stored in the end."""
    found = []
    for part in range(2):
        for _ in range(2):
            batch = replay.sample()
            columns = [column for _, column in sorted(batch.items(True, True), key=lambda item: str(item[0]))]
            found += [column.to_padded_tensor(0) if column.is_nested else column for column in columns]
            if replay.takes_feedback:
                give(replay, batch, torch.linspace(0.5, 2.0, batch.numel()).view(batch.shape))
        replay.extend(steps_for(replay.entered, 34 + 10 * part, 10))
        if replay.tasks:
            replay.progress("target", 0.9)
            found.append(torch.tensor(replay.actor_tasks(4)))
    return found


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


Build = Callable[..., Any]
Case = tuple[type, str, Build, Any, Any]


def built(owner: type, options: dict[str, Any], use: Build) -> Any:
    return use(owner(**copy.deepcopy(options)))


def given(use: Build, option: str, value: Any) -> Any:
    return use(**{option: copy.deepcopy(value)})


def cases_of(owner: type, base: dict[str, Any], others: dict[str, Any], use: Build) -> Iterator[Case]:
    """Cases of a class whose object, built with ``base`` and one other option, is ``use``d in a replay."""
    for option, value in others.items():
        yield owner, option, partial(built, owner, base, use), value, partial(built, owner, base | {option: value}, use)


def cases() -> Iterator[Case]:
    rows = PackedStorage
    for storage in (rows, ObservationStorage):
        yield from cases_of(storage, {"capacity": CAPACITY}, {"capacity": 50}, lambda one: over(storage=one))
    of_frames = {"capacity": CAPACITY, "frame_stack": 2, "image_key": "pixels", "frame_capacity": 90}
    others = {"capacity": 50, "frame_stack": 3, "image_key": "other", "frame_capacity": 100}
    yield from cases_of(FrameStorage, of_frames, others, lambda one: over(storage=one))
    of_ragged = {"capacity": CAPACITY, "ragged": ["tokens"], "element_capacity": 200}
    others = {"capacity": 50, "ragged": ["other"], "element_capacity": 110, "jagged": True}
    yield from cases_of(RaggedStorage, of_ragged, others, lambda one: over(storage=one))
    # Of buffers.
    for owner, use in ((Replay, over), (TableReplay, with_events), (CurriculumReplay, with_tasks)):
        options = {
            "batch_size": 6,
            "n_steps": 3,
            "priority_key": "error",
            "check_finite": False,
            "seed": 5,
            "prefetch": 2,
        }
        options |= {"transform": tr.GaussianNoise(0.5, keys=["observation"]), "storage": PackedStorage(200)}
        for option, value in options.items():
            yield owner, option, use, value, partial(given, use, option, value)
        formed = {"n_steps": 3}
        for option, value in {"discount": 0.5, "check_continuity": False, "n_steps": 2}.items():
            new = formed | {option: value}
            yield owner, option, lambda use=use: use(n_steps=3), value, lambda use=use, new=new: use(**new)
    yield Replay, "sampler", over, "prioritized", lambda: over(sa.PrioritizedSampler(CAPACITY))
    yield Replay, "writer", over, "retention", retained
    yield TableReplay, "sampler", with_events, "combined", lambda: with_events(sa.ContinuousCorrectionSampler(0.3, 1))
    yield TableReplay, "writer", with_events, "another", lambda: with_events(capacity=20)
    yield (
        CurriculumReplay,
        "sampler",
        with_tasks,
        "pairs",
        lambda: with_tasks(sampler=sa.RandomPairSampler(sa.ScheduledSampler(["target", "near"], sc.Exp3(0.3), 1))),
    )
    yield CurriculumReplay, "writer", with_tasks, "another", lambda: with_tasks(writer={"capacity_per_task": 20})
    for option, value in {
        "share": 0.25,
        "batch_size": 4,
        "seed": 5,
        "online": over(sa.PrioritizedSampler(CAPACITY)),
    }.items():
        yield MixedReplay, option, mixed, value, partial(given, mixed, option, value)
    yield MixedReplay, "offline", mixed, "prioritized", lambda: mixed(offline=over(sa.PrioritizedSampler(CAPACITY)))
    # Of samplers.
    alike = {"priority_exponent": 0.9, "importance_exponent": 0.8, "priority_offset": 0.5, "seed": 5}
    prioritized = alike | {"normalize_over_batch": True, "backend": "torch", "min_priority": 1.0, "device": "cpu"}
    prioritized |= {"replace": False}
    yield from cases_of(sa.PrioritizedSampler, {"capacity": CAPACITY}, prioritized | {"capacity": 90}, over)
    aged = {"age": Age(half_life=5.0)}
    yield from cases_of(sa.PrioritizedSampler, {"capacity": CAPACITY}, aged, over)
    yield from cases_of(sa.PrioritizedSampler, {"capacity": CAPACITY, "age": Age(half_life=20.0)}, aged, over)
    of_age = {"half_life": 5.0, "floor": 0.5, "max_age": 9.0, "clock": "updates", "version_key": "action"}
    by_age = lambda one: over(sa.RecencySampler(CAPACITY, one))  # noqa: E731
    yield from cases_of(Age, {"half_life": 20.0}, of_age, by_age)
    yield from cases_of(
        sa.RecencySampler,
        {"capacity": CAPACITY, "age": Age(half_life=20.0)},
        aged | {"capacity": 90, "seed": 5, "replace": False},
        over,
    )
    yield from cases_of(sa.UniformSampler, {}, {"seed": 5, "device": "cpu", "replace": False}, over)
    yield from cases_of(sa.ReshuffledSampler, {}, {"seed": 5}, over)
    by_group = {"group_size": 5, "fresh_share": 0.5, "replace": False, "seed": 5}
    by_group |= {"base_sampler": sa.PrioritizedSampler(CAPACITY // 2)}
    yield from cases_of(sa.GroupSampler, {"group_size": 2}, by_group, over)
    pairs = {"base_sampler": sa.PrioritizedSampler(CAPACITY), "update_partners": True}
    for owner in (sa.RandomPairSampler, sa.ContinuousTransitionSampler, sa.NeighborhoodMixupSampler):
        yield from cases_of(owner, {"base_sampler": None}, {"seed": 5, "base_sampler": pairs["base_sampler"]}, over)
        yield from cases_of(owner, {"base_sampler": None}, {"update_partners": True}, over)
    followed = {"check_continuity": False, "done_key": ("next", "end")}
    yield from cases_of(sa.ContinuousTransitionSampler, {}, followed, over)
    neighbors = {"num_neighbors": 4, "refresh_interval": 8, "discrete": "same_action", "feature_keys": ["other"]}
    yield from cases_of(sa.NeighborhoodMixupSampler, {"num_neighbors": 3}, neighbors, over)
    sweep = followed | {"goal": ev.reward_at_least(20.0), "sweep_share": 0.9, "seed": 5}
    yield from cases_of(sa.ReverseSweepSampler, {"goal": LATE}, sweep, over)
    sequences = followed | {"length": 5, "overlap": 2, "burn_in": 1, "min_steps": 2, "seed": 5, "replace": False}
    sequences |= {"base_sampler": sa.UniformSampler(), "device": "cpu"}
    yield from cases_of(sa.SequenceSampler, {"length": 4}, sequences | aged, over)
    weighted = {"priority_exponent": 0.9, "importance_exponent": 0.8, "priority_offset": 0.5, "max_share": 0.1}
    yield from cases_of(sa.SequenceSampler, {"length": 4, "priority_exponent": 0.5}, weighted, over)
    shares = {
        "table_shares": {"default": 0.2, "one": 0.8},
        "min_sizes": {"default": 1, "one": 9},
        "multinomial": True,
        "at_least_one": True,
    }
    shares |= {"correction": mixture, "return_probabilities": True, "seed": 5, "replace": False}
    base = {"table_shares": {"default": 0.9, "one": 0.1}, "min_sizes": LEAST}
    yield from cases_of(sa.TableShares, base, shares | aged, with_events)
    yield from cases_of(sa.TableShares, base | {"correction": mixture}, {"normalize_over_batch": True}, with_events)
    by_priority = {"priority_exponent": 0.9, "importance_exponent": 0.8, "priority_offset": 0.5}
    yield from cases_of(sa.TableShares, base | {"priority_exponent": 0.5}, by_priority, with_events)
    event = {"event_share": 0.8, "min_size": 20, "normalize_over_batch": True, "seed": 5, "return_probabilities": True}
    yield from cases_of(sa.ContinuousCorrectionSampler, {"event_share": 0.3, "min_size": 1}, event, with_events)
    tasks = {"tasks": ["target", "near"], "scheduler": sc.Exp3(0.3), "min_size": 1, "priority_exponent": 0.5}
    scheduled = (
        {"replace": False}
        | by_priority
        | {"seed": 5, "min_size": 16, "scheduler": sc.UniformTasks(), "tasks": ["near", "target"]}
        | aged
    )
    yield from cases_of(sa.ScheduledSampler, tasks, scheduled, lambda one: with_tasks(sampler=one))
    # Of schedulers, schedules and conditions.
    yield from cases_of(sc.Exp3, {"exploration": 0.3}, {"exploration": 0.9}, with_tasks)
    yield from cases_of(sc.Exp3S, {"exploration": 0.3}, {"exploration": 0.9, "weight_sharing": 0.5}, with_tasks)
    yield from cases_of(sc.OneTask, {"task": "target"}, {"task": "near"}, with_tasks)
    for owner in (sc.EasyToHard, sc.ReverseCurriculum):
        staged = {"order": ("target", "near"), "advance_at": 0.95, "max_signals": 1}
        yield from cases_of(owner, {"order": ("near", "target")}, staged, with_tasks)
    of_schedule = lambda one: over(sa.PrioritizedSampler(CAPACITY, importance_exponent=one))  # noqa: E731
    yield from cases_of(Constant, {"value": 0.4}, {"value": 0.9}, of_schedule)
    linear = {"start": 0.2, "end": 0.8, "duration": 4}
    yield from cases_of(Linear, linear, {"start": 0.4, "end": 0.6, "duration": 2, "clock": "updates"}, of_schedule)
    two = {"conditions": [LATE, ev.reward_below(30.0)]}
    one = {"conditions": [LATE, ev.reward_below(20.0)]}
    yield from cases_of(EveryOf, two, one, with_condition)
    yield from cases_of(AnyOf, {"conditions": [ev.reward_at_least(25.0)]}, two, with_condition)
    early = ev.reward_at_least(5.0)
    yield from cases_of(FirstInEpisode, {"condition": LATE}, {"condition": early}, with_condition)
    for owner in (Sustained, Reestablished):
        base = {"condition": LATE, "steps": 2}
        yield from cases_of(owner, base, {"condition": early, "steps": 3}, with_condition)
    yield from cases_of(RewardAtLeast, {"threshold": 15.0}, {"threshold": 5.0}, with_condition)
    yield from cases_of(RewardBelow, {"threshold": 15.0}, {"threshold": 5.0}, with_condition)
    yield from cases_of(TerminalWithReward, {"at_least": 5.0}, {"at_least": 15.0}, with_condition)
    yield from cases_of(InfoKey, {"key": "flag"}, {"key": "end", "at_least": 2.0}, with_condition)
    region = {"key": ("observation"), "low": 5.0, "high": 20.0}
    yield from cases_of(KeyInRegion, region, {"key": "other", "low": 10.0, "high": 10.0}, with_condition)
    of_event = {"condition": early, "history_length": 5}
    event_base = {"condition": LATE, "history_length": 2}
    with_event = lambda one: with_events(tables=[ev.EventTable("one", capacity=9, min_size=1, events=[one])])  # noqa: E731
    yield from cases_of(ev.Event, event_base, of_event, with_event)
    tabled = event_base | {"name": "one", "capacity": 9, "min_size": 1}
    from_table = lambda one: with_events(tables=[one])  # noqa: E731
    yield from cases_of(ev.EventTable, tabled, of_event | {"name": "two", "capacity": 12}, from_table)
    shared = lambda one: with_events(recipes_sampler(one), tables=[one])  # noqa: E731
    yield from cases_of(ev.EventTable, tabled | {"share": 0.5}, {"share": 0.2, "min_size": 8}, shared)
    events_of = {"name": "one", "events": [ev.Event(LATE, 2)], "capacity": 9, "min_size": 1}
    yield from cases_of(ev.EventTable, events_of, {"events": [ev.Event(early, 2)]}, from_table)
    # Of writers.
    writer = {"capacity": 50, "event_tables": [event_table(condition=early)], "max_trajectories": 3}
    writer |= {"forget_stale": True, "check_continuity": False}
    for option, value in writer.items():
        name = {"event_tables": "tables", "check_continuity": "compares"}.get(option, option)
        yield wr.EventTableWriter, option, with_events, value, partial(given, with_events, name, value)
    of_tasks = {"tasks": ["near", "target"], "capacity_per_task": 50, "shares_one_table": True}
    for option, value in of_tasks.items():
        yield (
            wr.TaskTableWriter,
            option,
            with_tasks,
            value,
            lambda option=option, value=value: with_tasks(writer={option: value}),
        )
    for option, value in {
        "rule": wr.SurpriseOnly(2.0),
        "initial_surprise": surprise,
        "always_admit": True,
        "seed": 5,
    }.items():
        yield wr.RetentionWriter, option, retained, value, partial(given, retained, option, value)
    weighing = {"q_inverse_temperature": 2.0, "greedy_epsilon": 0.1}
    surprising = {"surprise_exponent": 0.5, "draw_discount": 0.5}
    yield from cases_of(wr.SurpriseOnPolicyness, {}, weighing | surprising, retained)
    yield from cases_of(wr.SurpriseOnly, {}, surprising, retained)
    yield from cases_of(wr.OnPolicynessOnly, {}, weighing, retained)
    stochastic = {"exponent": 2.0, "q_inverse_temperature": 2.0}
    yield from cases_of(wr.StochasticExploration, {}, stochastic, retained)
    yield from cases_of(wr.StochasticSurprise, {}, {"exponent": 2.0, "offset": 1.0}, retained)
    # Of transforms.
    formed = {"n_steps": 2, "discount": 0.5, "check_continuity": False}
    yield from cases_of(NStepTransitions, {"n_steps": 3, "discount": 0.9}, formed, transformed)
    noise = {"sigma": 0.5, "keys": ["other"], "kind": "multiplicative", "seed": 5}
    yield from cases_of(tr.GaussianNoise, {"sigma": 0.1, "keys": ["observation"]}, noise, transformed)
    images = {"augmentations": ["flip", "crop"], "exploration_coefficient": 9.0, "window": 3, "seed": 5}
    images |= {"image_key": "other picture"}
    yield from cases_of(
        tr.UCBAugmentation, {"augmentations": ["crop", "flip"], "image_key": "picture"}, images, transformed
    )
    yield from cases_of(tr.MixMinibatch, {}, {"mixup_concentration": 3.0, "seed": 5}, transformed)
    paired = lambda one: transformed(one, sa.RandomPairSampler())  # noqa: E731
    mixing = {"mixup_concentration": 3.0, "fraction": 0.5, "keys": ["observation"], "seed": 5}
    yield from cases_of(tr.MixPairs, {"mixup_concentration": 0.4}, mixing, paired)
    states = {"mixup_concentration": 3.0, "keys": ["other"], "seed": 5}
    yield from cases_of(tr.MixStates, {"mixup_concentration": 0.4, "keys": ["observation"]}, states, transformed)
    goals = {"strategy": "final", "share": 0.3, "reward": distance, "seed": 5, "terminated": reached}
    goals |= {"reward_keys": [("observation", "observation")]}
    yield from cases_of(tr.RelabelGoals, {"reward": costly, "share": 0.9}, goals, transformed)
    far = tr.ManhattanDistance(goal=[9.0], components=[0])
    shaping = {
        "potential": tr.ManhattanDistance(goal=[3.0], components=[0]),
        "discount": 0.5,
        "observation_key": "other",
    }
    yield from cases_of(tr.PotentialShaping, {"potential": far, "discount": 0.9}, shaping, transformed)
    shaped = lambda one: transformed(tr.PotentialShaping(one, 0.9))  # noqa: E731
    near = {"goal": [3.0], "scale": 2.0, "components": [1]}
    yield from cases_of(tr.ManhattanDistance, {"goal": [9.0], "components": [0]}, near, shaped)
    at = {"low": [3.0], "high": [7.0], "components": [1]}
    yield from cases_of(tr.OneAt, {"low": [5.0], "high": [9.0], "components": [0]}, at, shaped)


def recipes_sampler(table: ev.EventTable) -> sa.TableShares:
    share = 0.5 if table.share is None else table.share
    return sa.TableShares({"default": 1 - share, table.name: share}, {"default": 1, table.name: table.min_size})


def surprise(rows: TensorDict) -> Tensor:
    return rows["next", "reward"].flatten()


CASES = list(cases())


# These change nothing in this life: where rows lie, checks of wrong rows, and the choice among tasks or rows that were
# learned from in another way.
INERT = {
    *("priority_key", "check_finite", "storage", "device", "backend", "update_partners", "refresh_interval", "window"),
    *("normalize_over_batch", "exploration", "weight_sharing", "advance_at", "max_signals", "initial_surprise"),
    *(
        "always_admit",
        "exploration_coefficient",
        "components",
        "min_size",
        "min_sizes",
        "at_least_one",
        "sweep_share",
        "forget_stale",
    ),
}
OF_UPDATES = {"rows_per_update"}  # bounds the work of updates, which were made before the load
# Where rows lie, the library that searches, keys and an environment for goals of another form, and counts of states.
LEFT_OUT = {("PackedStorage", "device"), ("PackedStorage", "memmap"), ("FrameStorage", "device")}
LEFT_OUT |= {("ObservationStorage", "device"), ("ObservationStorage", "memmap")}
LEFT_OUT |= {("RaggedStorage", "device"), ("RaggedStorage", "memmap")}
LEFT_OUT |= {("FrameStorage", "memmap"), ("RelabelGoals", "env"), ("EventTableWriter", "count_state_actions")}
LEFT_OUT |= {("RelabelGoals", "achieved_key"), ("RelabelGoals", "desired_key"), ("NeighborhoodMixupSampler", "backend")}
# How late rows on a device are refused.
LEFT_OUT |= {(owner, "check_every") for owner in ("Replay", "TableReplay", "CurriculumReplay")}
NO_PARTS = {"SequenceStarts", "MeanReturn", "ReturnChange"}  # of a sampler, and of data modules


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_an_option_that_differs_at_a_load_is_in_force_or_refused(case: Case) -> None:
    _, option, base, _, other = case
    old, new, fresh = base(), other(), other()
    fill(old)
    try:
        new.load_state_dict(old.state_dict())
    except ValueError as refusal:
        assert "saved" in str(refusal) or "the state" in str(refusal)
        return
    fill(fresh)
    before, found, expected = draws(old), draws(new), draws(fresh)
    if option == "seed":  # the generators of the save go on
        assert are_equal(found, before)
    elif option not in OF_UPDATES:
        assert are_equal(found, expected)
        assert option in INERT or not are_equal(before, expected)


def recorded_classes() -> dict[str, type]:
    for module in pkgutil.walk_packages(lightning_replay.__path__, "lightning_replay."):
        if module.name.split(".")[1] not in ("lit", "agents", "sharded", "levels", "envs", "sb3", "__main__"):
            importlib.import_module(module.name)
    return {
        one.__name__: one
        for name, module in [*sys.modules.items()]
        if name.startswith("lightning_replay.")
        for one in vars(module).values()
        if inspect.isclass(one) and hasattr(one, "_record") and one.__module__.startswith("lightning_replay.")
    }


def test_every_option_of_every_recorded_class_has_a_case() -> None:
    options = {
        (name, option)
        for name, one in recorded_classes().items()
        if name not in NO_PARTS
        for option in list(inspect.signature(one.__init__).parameters)[1:]
        if option not in ("args", "kwargs")
    }
    assert len(options) > 150
    covered = {(owner.__name__, option) for owner, option, *_ in CASES}
    assert sorted(options - covered - LEFT_OUT) == []
