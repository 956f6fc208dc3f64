# SPDX-License-Identifier: Apache-2.0
"""The sequences that can be drawn are those found by hand in a list of all episodes, whatever is stored and leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.replay import Replay
from lightning_replay.samplers import SequenceSampler
from lightning_replay.samplers.sequence_starts import DeviceStarts
from lightning_replay.storage import PackedStorage
from lightning_replay.storage.frames import FrameStorage

CAPACITY = 12
TRAJECTORIES = (3, 8, 9)


@dataclass
class Row:
    """One step that was stored, by the number of its observation."""

    slot: int
    number: int
    is_held: bool = True


@dataclass
class Segment:
    """Steps that follow each other."""

    rows: list[Row] = field(default_factory=list)
    ended: bool = False


class Oracle:
    """Keeps all episodes, and looks at every place of every one after each call."""

    def __init__(self, length: int, overlap: int, min_steps: int) -> None:
        self.length, self.overlap, self.min_steps = length, overlap, min_steps
        self.segments: list[Segment] = []
        self.running: dict[int, Segment] = {}
        self.head = 0

    def leave(self, slots: set[int]) -> None:
        for segment in self.segments:
            for row in segment.rows:
                row.is_held &= row.slot not in slots
        for name, segment in list(self.running.items()):
            if not segment.rows[-1].is_held:
                self.end([name])

    def end(self, names: Any) -> None:
        for name in names:
            if name in self.running:
                self.running.pop(name).ended = True

    def extend(self, rows: list[tuple[int, int, bool]]) -> None:
        self.leave({(self.head + place) % CAPACITY for place in range(len(rows))})
        for name, number, done in rows:
            if name in self.running and self.running[name].rows[-1].number + 1 != number:
                self.end([name])
            if name not in self.running:
                self.running[name] = Segment()
                self.segments.append(self.running[name])
            self.running[name].rows.append(Row(self.head, number))
            self.head = (self.head + 1) % CAPACITY
            if done:
                self.end([name])

    def drawable(self) -> set[tuple[tuple[int, ...], int]]:
        """Numbers of each sequence, padded, and its steps."""
        found = set()
        for segment in self.segments:
            for first in range(0, len(segment.rows), self.length - self.overlap):
                rows = segment.rows[first : first + self.length]
                steps, is_last = len(rows), segment.ended and (first == 0 or len(rows) > self.overlap)
                if not all(row.is_held for row in rows):
                    continue
                if steps == self.length or (is_last and steps >= self.min_steps):
                    numbers = [row.number for row in rows]
                    found.add((tuple(numbers + numbers[-1:] * (self.length - steps)), steps))
        return found


class World:
    """Three environments, whose steps are numbered from 1,000 times their trajectory on."""

    def __init__(self) -> None:
        self.next = {name: 1_000 * name for name in TRAJECTORIES}

    def rows(self, drawn: list[tuple[int, str]]) -> list[tuple[int, int, bool]]:
        rows = []
        for name, what in drawn:
            self.next[name] += 50 * (what == "jump")
            rows.append((name, self.next[name], what == "done"))
            self.next[name] += 1 + 20 * (what == "done")
        return rows


def steps_of(rows: list[tuple[int, int, bool]]) -> TensorDict:
    names, numbers, done = (torch.tensor(column) for column in zip(*rows, strict=True))
    pixels = (numbers % 251).to(torch.uint8).view(-1, 1, 1, 1)
    following = ((numbers + 1) % 251).to(torch.uint8).view(-1, 1, 1, 1)
    flags = done.unsqueeze(1)
    after = {"observation": numbers.unsqueeze(1) + 1.0, "pixels": following, "done": flags, "terminated": flags.clone()}
    after |= {"truncated": torch.zeros_like(flags), "reward": torch.zeros(len(rows), 1)}
    columns = {"observation": numbers.unsqueeze(1).float(), "pixels": pixels, "trajectory": names, "next": after}
    return TensorDict(columns, [len(rows)])


row = st.tuples(st.sampled_from(TRAJECTORIES), st.sampled_from(["go", "go", "go", "go", "go", "done", "jump"]))
call = st.one_of(
    st.tuples(st.just("extend"), st.lists(row, min_size=1, max_size=CAPACITY)),
    st.tuples(st.just("extend"), st.lists(row, min_size=1, max_size=2)),
    st.tuples(st.just("end"), st.one_of(st.none(), st.lists(st.sampled_from(TRAJECTORIES), max_size=2))),
    st.tuples(st.just("release"), st.sets(st.integers(0, CAPACITY - 1), min_size=1, max_size=3)),
    st.tuples(st.just("load"), st.just(None)),
)
shape = st.integers(1, 5).flatmap(
    lambda length: st.tuples(
        st.just(length),
        st.integers(0, length - 1),
        st.integers(1, length),
        st.sampled_from(["frames", "prioritized frames", "rows", "rows on a device"]),
    )
)


def built(length: int, overlap: int, min_steps: int, kind: str) -> Replay:
    sampler = SequenceSampler(
        length,
        overlap,
        min_steps=min_steps,
        priority_exponent=0.7 if kind == "prioritized frames" else 0.0,
        device="cpu" if kind == "rows on a device" else None,
    )
    storage = FrameStorage(CAPACITY, frame_stack=1, frame_capacity=4 * CAPACITY)
    return Replay(
        storage=storage if "frames" in kind else PackedStorage(CAPACITY), sampler=sampler, batch_size=5, seed=0
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(shape, st.lists(call, min_size=1, max_size=10))
def test_the_drawable_sequences_are_those_of_the_oracle(
    shape: tuple[int, int, int, str], calls: list[tuple[str, Any]]
) -> None:
    replay, oracle, world = built(*shape), Oracle(*shape[:3]), World()
    for name, argument in calls:
        if name == "extend":
            rows = world.rows(argument)
            replay.extend(steps_of(rows))
            oracle.extend(rows)
        elif name == "end" and len(replay):
            replay.end_episodes(argument)
            oracle.end(list(TRAJECTORIES) if argument is None else argument)
        elif name == "release" and len(replay) and "frames" in shape[3]:
            slots = {slot for slot in argument if bool(replay.storage.occupancy.slots().eq(slot).any())}
            replay.storage.release(torch.tensor(sorted(slots), dtype=torch.int64))
            oracle.leave(slots)
        elif name == "load":
            if "rows" in shape[3]:  # To the device, or from it.
                shape = (*shape[:3], "rows" if shape[3] == "rows on a device" else "rows on a device")
            other = built(*shape)
            other.load_state_dict(replay.state_dict())
            replay = other
        expected = oracle.drawable()
        starts = replay.sampler.base_sampler
        if isinstance(starts, DeviceStarts):  # As at a read of the device.
            starts.receive(starts.number().tolist())
        if not len(replay) or not expected:
            with pytest.raises((RuntimeError, ValueError), match="no sequence|empty"):
                replay.sample()
            continue
        batch = replay.sample(400)  # each is missed with a chance below 1e-14 by uniform draws of at most 12
        numbers, steps = batch["observation"][..., 0].int().tolist(), batch["mask"].sum(1).tolist()
        assert set(zip(map(tuple, numbers), steps, strict=True)) == expected
        assert (batch["mask"].int().diff(dim=1) <= 0).all()
        assert torch.equal(batch["pixels"].flatten(), (batch["observation"] % 251).to(torch.uint8).flatten())
