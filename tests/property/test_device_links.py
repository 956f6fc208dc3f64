# SPDX-License-Identifier: Apache-2.0
"""Links on a device equal the links on the CPU, whatever is written, ended, released, saved, and loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.episodes import kernels
from lightning_replay.episodes.device_links import DeviceContinuity, DeviceLinks
from lightning_replay.episodes.links import Continuity, EpisodeLinks

CAPACITY = 7

row = st.tuples(st.integers(0, 3), st.sampled_from([False, False, False, True]), st.integers(0, 1), st.integers(0, 1))
rows = st.lists(row, min_size=1, max_size=CAPACITY + 3)
slots = st.lists(st.integers(0, CAPACITY - 1), max_size=3, unique=True)
operation = st.one_of(
    *(st.tuples(st.just("write"), rows, st.permutations(range(CAPACITY))) for _ in range(6)),
    st.tuples(st.just("end"), slots, st.lists(st.integers(0, 3), max_size=2)),
    st.tuples(st.just("release"), slots, st.none()),
    st.tuples(st.sampled_from(["clear", "shrink", "swap", "reload"]), st.none(), st.none()),
)


class Both:
    """The same rows, linked by both classes."""

    def __init__(self, is_named: bool, compares: bool) -> None:
        observation = torch.zeros(CAPACITY, 1)
        self.rows = TensorDict({"observation": observation, "next": {"observation": observation.clone()}}, [CAPACITY])
        self.is_named = is_named
        self.compares = compares
        self.head = 0
        self.on_cpu, self.on_device = self.new()

    def new(self) -> tuple[EpisodeLinks, DeviceLinks]:
        compares = self.compares
        return (
            EpisodeLinks(CAPACITY, Continuity(self.rows) if compares else None),
            DeviceLinks(CAPACITY, "cpu", DeviceContinuity(self.rows) if compares else None, counts_steps=True),
        )

    def write(self, given_rows: list[Any], order: list[int], is_ring: bool) -> None:
        if is_ring:
            written = [(self.head + place) % CAPACITY for place in range(len(given_rows))]
            self.head = (self.head + len(given_rows)) % CAPACITY
        else:
            written = order[: len(given_rows)]
            given_rows = given_rows[: len(written)]
        name, done, own, following = (torch.tensor(column) for column in zip(*given_rows, strict=True))
        for place, slot in enumerate(written):
            self.rows["observation"][slot] = own[place]
            self.rows["next", "observation"][slot] = following[place]
        for links in (self.on_cpu, self.on_device):
            links.write(torch.tensor(written), name if self.is_named else None, done)

    def apply(self, name: str, first: Any, second: Any, is_ring: bool) -> None:
        if name == "write":
            self.write(first, second, is_ring)
        elif name == "shrink":
            self.on_device.receive(self.on_device.counts.tolist())
        elif name in ("swap", "reload"):  # A save of each class is loaded into the other, or into its own.
            saved = [self.on_cpu.state_dict(), self.on_device.state_dict()]
            self.on_cpu, self.on_device = self.new()
            self.on_cpu.load_state_dict(saved[name == "swap"])
            self.on_device.load_state_dict(saved[name != "swap"])
        else:
            for links in (self.on_cpu, self.on_device):
                if name == "end":
                    links.end_episodes(torch.tensor(first, dtype=torch.int64), second if self.is_named else [None])
                elif name == "release":
                    links.release(torch.tensor(first, dtype=torch.int64))
                else:
                    links.clear()

    def compare(self) -> None:
        cpu, device = self.on_cpu, self.on_device
        assert device.successor.tolist() == cpu.successor.tolist()
        assert device.predecessor.tolist() == cpu.predecessor.tolist()
        states = [links.state_dict() for links in (cpu, device)]
        running = [
            dict(zip(one["running_trajectory"].tolist(), one["running_slot"].tolist(), strict=True)) for one in states
        ]
        assert running[0] == running[1] and states[0]["newest_slot"] == states[1]["newest_slot"]
        assert sorted(cpu.running) == device.is_newest.nonzero().flatten().tolist()
        if self.compares:
            tallies = [links.continuity._tally for links in (cpu, device)]
            on_cpu, on_device = (torch.tensor([tally._compared, tally._broken]) for tally in tallies)
            assert (on_device + device.counts[1:]).equal(on_cpu)


@settings(max_examples=50)
@given(st.booleans(), st.booleans(), st.booleans(), st.lists(operation, min_size=1, max_size=10))
def test_links_equal_those_on_the_cpu(is_named: bool, compares: bool, is_ring: bool, operations: list[Any]) -> None:
    both = Both(is_named, compares)
    everywhere = torch.arange(CAPACITY)
    for name, first, second in operations:
        both.apply(name, first, second, is_ring)
        both.compare()
        cpu, device = both.on_cpu, both.on_device
        steps = torch.tensor([0, 1, 2, 3, 7, 1, 7])
        for n_steps, back in ((1, False), (3, True)):
            found = [
                (*links.chain(everywhere, n_steps), *links.walk(everywhere, steps, back=back))
                for links in (cpu, device)
            ]
            assert all(one.equal(other) for one, other in zip(*found, strict=True))


@settings(max_examples=50)
@given(st.booleans(), st.lists(st.lists(row, min_size=1, max_size=CAPACITY), min_size=1, max_size=8))
def test_positions_equal_those_that_the_cpu_counts(compares: bool, calls: list[Any]) -> None:
    both = Both(is_named=True, compares=compares)
    position = np.full(CAPACITY, -1)
    for given_rows in calls:
        index = np.arange(both.head, both.head + len(given_rows)) % CAPACITY
        both.write(given_rows, [], is_ring=True)
        kernels.number(both.on_cpu.before(torch.from_numpy(index)), index, position, 1, 1)
        assert both.on_device.position.tolist() == position.tolist()


def test_a_row_continues_another_only_if_all_its_observations_do() -> None:
    columns = {name: torch.arange(4.0).view(4, 1) for name in ("camera", "joints", "touch")}
    following = {name: column + 1 for name, column in columns.items()}
    following["camera"][0] = -1.0
    following["joints"][1] = -1.0
    following["touch"][2] = -1.0
    rows = TensorDict({"observation": columns, "next": {"observation": following}}, [4])
    before, after = torch.tensor([0, 1, 2, 1]), torch.tensor([1, 2, 3, 3])
    assert DeviceContinuity(rows).of_slots(before, after).tolist() == [False] * 4
    for name, place in (("camera", 0), ("joints", 1), ("touch", 2)):
        following[name][place] = place + 1.0
    continues = DeviceContinuity(TensorDict({"observation": columns, "next": {"observation": following}}, [4]))
    assert continues.of_slots(before, after).tolist() == [True, True, True, False]
