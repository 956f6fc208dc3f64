# SPDX-License-Identifier: Apache-2.0
"""Any sequence of extend, feedback, save and load beside a list that decides one row at a time, for every rule."""

from __future__ import annotations

import tempfile
from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict

from lightning_replay import PackedStorage, Replay, load_replay, save_replay, writers
from lightning_replay.retention import eviction
from lightning_replay.retention.eviction import LeavingOrder, evict_lowest
from lightning_replay.samplers import PrioritizedSampler
from tests.retention_oracle import RetentionOracle, float32, softmax_weight

CAPACITY = 5
# Few different numbers, all exact in float32, so that ties are common.
NUMBERS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 4.0])


def offered_surprise(rows: TensorDict) -> torch.Tensor:
    return rows["offered"]


def rows_of(first: int, surprise: list[float], reward: list[float]) -> TensorDict:
    count = len(surprise)
    return TensorDict(
        {
            "number": torch.arange(first, first + count),
            "offered": torch.tensor(surprise),
            "next": {"reward": torch.tensor(reward).unsqueeze(1)},
        },
        [count],
    )


class RetentionMachine(RuleBasedStateMachine):
    """One rule of those that do not draw."""

    @initialize(
        which=st.sampled_from(["both", "surprise", "policy", "oldest", "reward", "discounted"]),
        always_admit=st.booleans(),
        knows_surprise=st.booleans(),
    )
    def build(self, which: str, always_admit: bool, knows_surprise: bool) -> None:
        rules = {
            "both": writers.SurpriseOnPolicyness(q_inverse_temperature=1.0),
            "surprise": writers.SurpriseOnly(),
            "policy": writers.OnPolicynessOnly(greedy_epsilon=0.25),
            "oldest": writers.OldestLeaves(),
            "reward": writers.SmallestReturnLeaves(),
            "discounted": writers.SurpriseOnPolicyness(draw_discount=0.5),
        }
        self.which = which
        self.knows_surprise = knows_surprise
        initial = offered_surprise if knows_surprise else None
        writer = writers.RetentionWriter(rules[which], initial_surprise=initial, always_admit=always_admit)
        sampler = PrioritizedSampler(CAPACITY, priority_exponent=1.0, priority_offset=0.0, seed=0)
        self.replay = Replay(storage=PackedStorage(CAPACITY), sampler=sampler, writer=writer, batch_size=4)
        self.oracle = RetentionOracle(
            CAPACITY,
            always_admit=always_admit or which in ("oldest", "reward"),
            ties_enter=which == "policy" or (which in ("both", "surprise", "discounted") and not knows_surprise),
        )
        self.draws: Counter[int] = Counter()  # by the row's number
        self.drawn: list[tuple[torch.Tensor, torch.Tensor]] = []

    def first_priority(self, surprise: float, reward: float) -> float | None:
        if self.which in ("both", "surprise", "discounted"):
            return surprise if self.knows_surprise else None
        return {"policy": 1.0, "oldest": 0.0, "reward": reward}[self.which]

    @rule(rows=st.lists(st.tuples(NUMBERS, st.sampled_from([-2.0, -1.0, 0.0, 1.0])), min_size=1, max_size=12))
    def extend(self, rows: list[tuple[float, float]]) -> None:
        first = self.oracle.offered
        index = self.replay.extend(rows_of(first, [row[0] for row in rows], [row[1] for row in rows]))
        for row in rows:
            self.oracle.offer(self.first_priority(*row))
        entered = sorted((row.number, row.slot) for row in self.oracle.rows if row.number >= first)
        assert index.tolist() == [slot for _, slot in entered]
        assert (self.replay.last_insertion.rows + first).tolist() == [number for number, _ in entered]

    @precondition(lambda self: self.oracle.rows)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.integers(0, len(self.oracle.rows) - 1), min_size=1, max_size=6))
        errors = data.draw(st.lists(NUMBERS, min_size=len(slots), max_size=len(slots)))
        values = [[1.0, 2.0, 0.5]] * len(slots)
        actions = data.draw(st.lists(st.integers(0, 2), min_size=len(slots), max_size=len(slots)))
        given_surprise = data.draw(st.booleans())
        signals: dict[str, Any] = {"action_values": torch.tensor(values), "action": torch.tensor(actions)}
        if given_surprise:
            signals["surprise"] = torch.tensor(errors)
        index = torch.tensor(slots)
        generation = self.replay.storage.generation_of(index)
        self.replay.update_priority(index, -torch.tensor(errors), generation=generation, **signals)
        self.drawn.append((index, generation))
        if self.which in ("oldest", "reward"):
            return
        surprise = errors if given_surprise else [error**2 for error in errors]
        weight = torch.softmax(torch.tensor(values), -1)[torch.arange(len(slots)), torch.tensor(actions)]
        numbers = [self.oracle.by_slot()[slot][0] for slot in slots]
        self.draws.update(numbers)
        for place, slot in enumerate(slots):
            product = float32(float(weight[place]) * surprise[place])
            priority = {
                "both": product,
                "discounted": product * 0.5 ** self.draws[numbers[place]],
                "surprise": surprise[place],
                "policy": 1.0 if actions[place] == 1 else 0.25,
            }[self.which]
            assert abs(float(weight[place]) - softmax_weight(values[0], actions[place], 1.0)) < 1e-6
            self.oracle.largest = max(self.oracle.largest, priority)
            self.oracle.update(slot, priority)

    @precondition(lambda self: self.drawn)
    @rule(which=st.integers(0, 50))
    def update_late(self, which: int) -> None:
        index, generation = self.drawn[which % len(self.drawn)]
        late = self.replay.storage.generation_of(index) != generation
        if not bool(late.all()):
            return
        before = self.replay.stats()["stale_updates_dropped"]
        signals = {"action_values": torch.zeros(len(index), 3), "action": torch.zeros_like(index)}
        self.replay.update_priority(index, torch.full((len(index),), 9.0), generation=generation, **signals)
        assert self.replay.stats()["stale_updates_dropped"] == before + len(index)

    @precondition(lambda self: self.oracle.rows)
    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            save_replay(self.replay, folder)
            self.replay = load_replay(folder, trust=["tests"])

    @invariant()
    def holds_what_the_oracle_holds(self) -> None:
        if not hasattr(self, "oracle") or not self.oracle.rows:
            return
        count = len(self.oracle.rows)
        slots = torch.arange(count)
        assert len(self.replay) == count
        expected = self.oracle.by_slot()
        assert self.replay.storage.get(slots)["number"].tolist() == [number for number, _ in expected]
        assert self.replay.writer.retention_priority(slots).tolist() == [float32(value) for _, value in expected]
        ages = [self.oracle.offered - 1 - number for number, _ in expected]
        assert self.replay.writer.age_of(slots).tolist() == ages
        order = self.replay.writer._rows.order
        assert order.lowest(count).tolist() == self.oracle.leaving()
        assert order.lowest(1).tolist() == self.oracle.leaving()[:1]
        stats = self.replay.stats()
        counted = [stats[name] for name in ("admitted", "refused", "evicted", "age_max")]
        assert counted == [self.oracle.admitted, self.oracle.refused, self.oracle.evicted, max(ages)]


RetentionMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestRetention = pytest.mark.slow(RetentionMachine.TestCase)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    surprise=st.lists(st.floats(0, 8, width=16), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    which=st.sampled_from(["both", "surprise drawn", "exploration drawn"]),
)
def test_an_extend_of_many_is_as_many_extends_of_one(surprise: list[float], cuts: list[int], which: str) -> None:
    rules = {
        "both": None,
        "surprise drawn": writers.StochasticSurprise(),
        "exploration drawn": writers.StochasticExploration(),
    }
    buffers = []
    for sizes in (cuts, [1]):
        writer = writers.RetentionWriter(rules[which], initial_surprise=offered_surprise, seed=3)
        replay = Replay(storage=PackedStorage(7), writer=writer, batch_size=2)
        start = 0
        for turn in range(len(surprise)):
            part = surprise[start : start + sizes[turn % len(sizes)]]
            if part:
                replay.extend(rows_of(start, part, part))
            start += len(part)
        assert start == len(surprise)
        slots = torch.arange(len(replay))
        buffers.append(
            (
                replay.storage.get(slots)["number"].tolist(),
                replay.writer.retention_priority(slots).tolist(),
                replay.writer.age_of(slots).tolist(),
                {name: replay.stats()[name] for name in ("admitted", "refused", "evicted")},
            )
        )
    assert buffers[0] == buffers[1]


@settings(max_examples=40)
@given(
    capacity=st.sampled_from([1, 3, 64, 65, 300, 4097]),
    writes=st.lists(st.tuples(st.integers(0, 4096), st.floats(-4, 4, width=16)), min_size=1, max_size=30),
    count=st.integers(1, 40),
)
def test_the_order_is_that_of_a_sorted_list(capacity: int, writes: list[tuple[int, float]], count: int) -> None:
    order = LeavingOrder(capacity)
    held: dict[int, tuple[float, int]] = {}
    for arrival, (slot, priority) in enumerate(writes):
        slot %= capacity
        held[slot] = (priority, arrival)
        order.place(np.array([slot]), np.array([priority], dtype=np.float32), np.array([arrival]))
        assert order.lowest(1).tolist() == [min(held, key=held.__getitem__)]
    assert order.lowest(count).tolist() == sorted(held, key=held.__getitem__)[:count]
    slots = np.array(sorted(held))
    assert order.priority(slots).tolist() == [held[slot][0] for slot in slots]
    assert order.arrival(slots).tolist() == [held[slot][1] for slot in slots]
    order.remove(slots[::2])
    left = [slot for slot in sorted(held, key=held.__getitem__) if slot not in set(slots[::2].tolist())]
    assert order.lowest(capacity).tolist() == left


PRIORITIES = st.sampled_from([0.0, -0.0, 1.0, 1.5, 3.0, 1e-42, 3e38])


@pytest.mark.slow
@settings(max_examples=195)
@given(
    capacity=st.sampled_from([1, 3, 64, 65, 300, 5000]),
    seed=st.integers(0, 2**32 - 1),
    new=st.lists(PRIORITIES, min_size=1, max_size=40),
    fitting=st.integers(0, 3),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_compiled_decisions_are_those_made_one_after_the_other(capacity, seed, new, fitting, flags) -> None:
    """The stored rows have few different priorities; 5000 slots are three levels."""
    fitting = min(fitting, len(new) - 1, capacity - 1)
    always_admits, ties_enter = flags
    generator = np.random.default_rng(seed)
    priority = generator.choice([0.0, 1.0, 1.5, -2.0], capacity).astype(np.float32)
    arrival = generator.permutation(capacity)
    candidates = np.array(new, dtype=np.float32) + np.float32(0.0)
    with patch.object(eviction, "WIDEST_TOP", 64):
        order = LeavingOrder(capacity)
    order.place(np.arange(capacity), priority, arrival)
    slots = np.full(len(new), -1)
    slots[:fitting] = np.arange(fitting)
    order.place(slots[:fitting], candidates[:fitting], capacity + np.arange(fitting))
    held = {slot: (float(priority[slot]), int(arrival[slot]), -1) for slot in range(capacity)}
    held |= {row: (float(candidates[row]), capacity + row, row) for row in range(fitting)}
    evicted = 0
    for row in range(fitting, len(new)):
        slot = min(held, key=held.__getitem__)
        mine, lowest = float(candidates[row]), held[slot][0]
        if always_admits or mine > lowest or (ties_enter and mine == lowest):
            held[slot] = (mine, capacity + row, row)
            evicted += 1
    bits = candidates.view(np.int32)
    assert evict_lowest(bits, fitting, capacity, *flags, slots, order.nodes, order.starts) == evicted
    assert {row: slot for row, slot in enumerate(slots.tolist()) if slot >= 0} == {
        row: slot for slot, (_, _, row) in held.items() if row >= 0
    }
    everything = np.arange(capacity)
    assert order.priority(everything).tolist() == [held[slot][0] for slot in range(capacity)]
    assert order.arrival(everything).tolist() == [held[slot][1] for slot in range(capacity)]
    assert order.lowest(capacity).tolist() == sorted(held, key=held.__getitem__)
