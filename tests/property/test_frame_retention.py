# SPDX-License-Identifier: Apache-2.0
"""Retention over frames stored once, returns formed before, environments side by side: beside lists, row by row."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.schedules import Linear
from lightning_replay.writers import OldestLeaves, SurpriseOnPolicyness
from tests.frame_steps import IMAGE_KEYS, Stacks, distinct, frame_rows, stacks_in, stacks_of

CAPACITY = 6
DEPTH = 2
DISCOUNT = 0.5  # with whole rewards, sums are exact
# Few different numbers, all exact in float32, so that ties are common.
NUMBERS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
# Numbers of frames go up to this: where all episodes show the same two, slots are what lacks, else frames.
MOST_FRAMES = (1, 9, 40, 99)


def offered_surprise(rows: TensorDict) -> torch.Tensor:
    return rows["offered"]


class Step(NamedTuple):
    number: int
    trajectory: int
    stacks: Stacks
    offered: float
    done: bool


class Formed(NamedTuple):
    """A row as it should be stored; ``action`` is the number of its first step."""

    action: int
    stacks: Stacks
    offered: float
    value: float


@dataclass
class ReturnOracle:
    """Returns over ``n_steps``, of the steps that wait in a list."""

    n_steps: int
    waiting: list[Step] = field(default_factory=list)

    def add(self, steps: list[Step]) -> list[Formed]:
        self.waiting += steps
        formed, left = [], []
        for place, step in enumerate(self.waiting):
            used: list[Step] = []
            for other in self.waiting[place:]:
                if other.trajectory == step.trajectory and len(used) < self.n_steps and not (used and used[-1].done):
                    used.append(other)
            if used[-1].done or len(used) == self.n_steps:
                value = sum(DISCOUNT**later * each.number for later, each in enumerate(used))
                formed.append(Formed(step.number, (step.stacks[0], used[-1].stacks[1]), step.offered, value))
            else:
                left.append(step)
        self.waiting = left
        return formed


@dataclass
class Kept:
    arrival: int
    surprise: float
    priority: float
    row: Formed


@dataclass
class FrameRetentionOracle:
    """One row at a time: as many of the lowest leave as the candidate's slot and frames need, or it is refused."""

    room: int
    always_admit: bool
    ties_enter: bool
    image_key: str | list = "pixels"
    rows: list[Kept] = field(default_factory=list)
    offered: int = 0
    admitted: int = 0
    refused: int = 0
    evicted: int = 0
    largest: float = -1.0
    exponent: float = 1.0

    def leaving(self) -> list[Kept]:
        return sorted(self.rows, key=lambda kept: (kept.priority, kept.arrival))

    def offer(self, row: Formed, surprise: float | None) -> None:
        """``None`` is surprise that nobody knows; such a row gets the largest priority seen."""
        priority = surprise**self.exponent if surprise is not None else self.largest if self.largest > 0 else 1.0
        self.largest = max(self.largest, priority)
        arrival = self.offered
        self.offered += 1
        leave = 1 if len(self.rows) == CAPACITY else 0
        while True:
            victims, staying = self.leaving()[:leave], self.leaving()[leave:]
            if any(not self.drives_out(priority, victim.priority) for victim in victims):
                self.refused += 1
                return
            if distinct([row.stacks, *(kept.row.stacks for kept in staying)], self.image_key) <= self.room:
                break
            leave += 1
        self.rows = sorted([*staying, Kept(arrival, surprise or 0.0, priority, row)], key=lambda kept: kept.arrival)
        self.admitted += 1
        self.evicted += leave

    def drives_out(self, mine: float, other: float) -> bool:
        return self.always_admit or mine > other or (self.ties_enter and mine == other)


class FrameRetentionMachine(RuleBasedStateMachine):
    @initialize(
        room=st.sampled_from([4, 5, 6, 8, 12]),
        n_steps=st.integers(1, 3),
        which=st.sampled_from(["both", "annealed", "oldest"]),
        always_admit=st.sampled_from([False, False, False, True]),
        knows_surprise=st.booleans(),
        image_key=st.sampled_from(IMAGE_KEYS),
    )
    def build(self, room, n_steps: int, which: str, always_admit: bool, knows_surprise: bool, image_key) -> None:
        self.image_key = image_key
        self.learns = which != "oldest"
        self.is_annealed = which == "annealed"
        self.knows_surprise = knows_surprise = knows_surprise or self.is_annealed
        exponent = Linear(1.0, 2.0, duration=1, clock="updates") if self.is_annealed else 1.0
        self.replay = recipes.surprise_retention(
            CAPACITY,
            4,
            rule=SurpriseOnPolicyness(surprise_exponent=exponent) if self.learns else OldestLeaves(),
            always_admit=always_admit,
            initial_surprise=offered_surprise if knows_surprise else None,
            n_steps=n_steps,
            discount=DISCOUNT,
            frame_stack=DEPTH,
            image_key=image_key,
            frame_capacity=room,
            check_continuity=False,
            seed=0,
        )
        self.former = ReturnOracle(n_steps)
        self.oracle = FrameRetentionOracle(
            room, always_admit or not self.learns, self.learns and not knows_surprise, image_key
        )
        self.steps = self.trajectories = 0
        self.drawn: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []

    @rule(seed=st.integers(0, 2**32), most=st.sampled_from(MOST_FRAMES), at_once=st.integers(1, 16))
    def extend(self, seed: int, most: int, at_once: int) -> None:
        """By a seed: drawn one by one, nearly all numbers would be the simplest ones, and nothing would be refused."""
        random = Random(seed)
        streams = []
        for _ in range(random.randint(1, 3)):
            stacks = stacks_of([random.randint(0, most) for _ in range(random.randint(2, 6))], DEPTH)
            is_done = random.random() < 0.7
            streams.append([(self.trajectories, both, is_done and both is stacks[-1]) for both in stacks])
            self.trajectories += 1
        # As a vectorised collector gives them: a step of each environment in turn.
        in_turn = [part[step] for step in range(6) for part in streams if step < len(part)]
        for start in range(0, len(in_turn), at_once):
            part = in_turn[start : start + at_once]
            self.extend_by(
                [Step(self.steps + i, step[0], step[1], random.choice(NUMBERS), step[2]) for i, step in enumerate(part)]
            )

    def extend_by(self, steps: list[Step]) -> None:
        trajectory = [step.trajectory for step in steps]
        stacks = [step.stacks for step in steps]
        rows = frame_rows(stacks, first=self.steps, trajectory=trajectory, key=self.image_key)
        rows["offered"] = torch.tensor([step.offered for step in steps])
        for name in ("done", "terminated"):
            rows["next", name] = torch.tensor([[step.done] for step in steps])
        index = self.replay.extend(rows)
        self.steps += len(steps)
        first = self.oracle.offered
        formed = self.former.add(steps)
        for row in formed:
            known = row.offered if self.knows_surprise else None
            self.oracle.offer(row, known if self.learns else 0.0)
        entered = [kept for kept in self.oracle.rows if kept.arrival >= first]
        assert len(index) == len(entered)
        if formed:
            assert (self.replay.last_insertion.rows + first).tolist() == [kept.arrival for kept in entered]
        if entered:
            assert self.replay.storage.get(index)["action"].tolist() == [kept.row.action for kept in entered]

    @precondition(lambda self: self.oracle.rows)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        held = self.replay.storage.occupancy.slots().tolist()
        slots = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=5))
        errors = data.draw(st.lists(st.sampled_from(NUMBERS), min_size=len(slots), max_size=len(slots)))
        index = torch.tensor(slots)
        generation = self.replay.storage.generation_of(index)
        self.replay.update_priority(index, -torch.tensor(errors), generation=generation)
        actions = self.replay.storage.get(index)["action"].tolist()
        self.drawn.append((index, generation, actions))
        if self.learns:
            for action, error in zip(actions, errors, strict=True):
                (kept,) = (kept for kept in self.oracle.rows if kept.row.action == action)
                kept.surprise = error**2
                kept.priority = kept.surprise**self.oracle.exponent
                self.oracle.largest = max(self.oracle.largest, kept.priority)

    @precondition(lambda self: self.is_annealed)
    @rule(updates=st.integers(0, 2))
    def advance(self, updates: int) -> None:
        self.replay.advance(updates=updates)
        self.oracle.exponent = 2.0 if updates else 1.0
        for kept in self.oracle.rows:
            kept.priority = kept.surprise**self.oracle.exponent

    @precondition(lambda self: self.oracle.rows)
    @rule()
    def renumber(self) -> None:
        """As happens before the numbers of arrivals run out."""
        writer = self.replay.writer
        writer._offered = writer._rows.renumber()
        writer._newest.clear()
        self.oracle.offered = len(self.oracle.rows)
        for arrival, kept in enumerate(self.oracle.rows):
            kept.arrival = arrival

    @precondition(lambda self: self.drawn)
    @rule(which=st.integers(0, 50))
    def update_late(self, which: int) -> None:
        index, generation, actions = self.drawn[which % len(self.drawn)]
        held = [kept.row.action for kept in self.oracle.rows]
        late = torch.tensor([action not in held for action in actions])
        if not bool(late.any()):
            return
        before = self.replay.stats()["stale_updates_dropped"]
        index, generation = index[late], generation[late]
        self.replay.update_priority(index, torch.full((len(index),), 9.0), generation=generation)
        assert self.replay.stats()["stale_updates_dropped"] == before + len(index)

    @precondition(lambda self: self.oracle.rows)
    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            save_replay(self.replay, folder)
            self.replay = load_replay(folder, trust=["tests"], end_episodes=False)

    @invariant()
    def holds_what_the_oracle_holds(self) -> None:
        if not hasattr(self, "oracle"):
            return
        replay, rows = self.replay, self.oracle.rows
        assert len(replay) == len(rows)
        stats = replay.stats()
        counted = [stats[name] for name in ("admitted", "refused", "evicted", "frames_held")]
        frames = distinct([kept.row.stacks for kept in rows], self.image_key)
        assert counted == [self.oracle.admitted, self.oracle.refused, self.oracle.evicted, frames]
        if not rows:
            return
        slots = replay.storage.occupancy.slots()
        slots = slots[replay.writer.age_of(slots).argsort(descending=True)]
        stored = replay.storage.get(slots)
        assert stored["action"].tolist() == [kept.row.action for kept in rows]
        assert stacks_in(stored, self.image_key) == [kept.row.stacks for kept in rows]
        assert stored["next", "reward"].flatten().tolist() == [kept.row.value for kept in rows]
        ages = [self.oracle.offered - 1 - kept.arrival for kept in rows]
        assert replay.writer.age_of(slots).tolist() == ages
        assert (stats["age_mean"], stats["age_max"]) == (pytest.approx(sum(ages) / len(ages)), max(ages))
        assert replay.writer.retention_priority(slots).tolist() == [kept.priority for kept in rows]
        in_order = [kept.priority for kept in self.oracle.leaving()]
        quantiles = stats["retention_priority"]
        assert (quantiles["0"], quantiles["1"]) == (in_order[0], in_order[-1])
        leaving = torch.from_numpy(replay.writer._rows.order.lowest(CAPACITY))
        assert replay.storage.get(leaving)["action"].tolist() == [kept.row.action for kept in self.oracle.leaving()]

    @precondition(lambda self: self.oracle.rows)
    @rule()
    def sample(self) -> None:
        batch = self.replay.sample(8)
        expected = {kept.row.action: kept.row.stacks for kept in self.oracle.rows}
        assert stacks_in(batch, self.image_key) == [expected[action] for action in batch["action"].tolist()]
        self.drawn.append((batch["index"], batch["generation"], batch["action"].tolist()))


FrameRetentionMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestFrameRetention = pytest.mark.slow(FrameRetentionMachine.TestCase)
