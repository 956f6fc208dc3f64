# SPDX-License-Identifier: Apache-2.0
"""Links agree with a list of steps searched by hand, whatever is written in whatever order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_replay.episodes.links import EpisodeLinks

CAPACITY = 7


@dataclass
class Step:
    """One row that was written: where, of which trajectory, and whether its episode ended there."""

    slot: int
    trajectory: int | None
    done: bool


class Oracle:
    """Keeps every step ever written and searches them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def is_stored(self, position: int) -> bool:
        return all(later.slot != self.steps[position].slot for later in self.steps[position + 1 :])

    def successor(self, slot: int) -> int:
        positions = [position for position, step in enumerate(self.steps) if step.slot == slot]
        if not positions or self.steps[positions[-1]].done:
            return -1
        trajectory = self.steps[positions[-1]].trajectory
        for position in range(positions[-1] + 1, len(self.steps)):
            if self.steps[position].trajectory == trajectory:
                # Was the row still there when the next step came, and is that one still there now?
                between = {step.slot for step in self.steps[positions[-1] + 1 : position + 1]}
                return self.steps[position].slot if self.is_stored(position) and slot not in between else -1
        return -1


@st.composite
def batches(draw: st.DrawFn, named: bool) -> list[list[tuple[int | None, bool]]]:
    trajectory: st.SearchStrategy[Any] = st.integers(0, 2) if named else st.none()
    row = st.tuples(trajectory, st.sampled_from([False, False, False, True]))
    return draw(st.lists(st.lists(row, min_size=1, max_size=CAPACITY + 3), min_size=1, max_size=8))


def drive(written: list[list[tuple[int | None, bool]]], ring: bool, choose: Any) -> EpisodeLinks:
    links, oracle, head = EpisodeLinks(CAPACITY), Oracle(), 0
    for rows in written:
        if ring:
            slots = [(head + row) % CAPACITY for row in range(len(rows))]
            head = (head + len(rows)) % CAPACITY
        else:
            slots = choose(len(rows))
            rows = rows[: len(slots)]
        names = [name for name, _ in rows]
        trajectory = None if names[0] is None else torch.tensor(names)
        links.write(torch.tensor(slots), trajectory, torch.tensor([done for _, done in rows]))
        oracle.steps += [Step(slot, name, done) for slot, (name, done) in zip(slots, rows, strict=True)]
        expected = [oracle.successor(slot) for slot in range(CAPACITY)]
        assert links.successor.tolist() == expected
        if len(oracle.steps) % 2:  # now and then, so that both old and restored links go on
            restored = EpisodeLinks(CAPACITY)
            restored.load_state_dict(links.state_dict())
            links = restored
    return links


@given(st.booleans().flatmap(batches))
def test_links_in_a_ring_equal_the_oracle(written: list[list[tuple[int | None, bool]]]) -> None:
    drive(written, ring=True, choose=None)


@pytest.mark.slow
@given(st.booleans().flatmap(batches), st.randoms(use_true_random=False))
def test_links_under_any_eviction_equal_the_oracle(written: list[list[tuple[int | None, bool]]], random: Any) -> None:
    drive(written, ring=False, choose=lambda count: random.sample(range(CAPACITY), min(count, CAPACITY)))


@given(st.booleans().flatmap(batches), st.integers(1, 5))
def test_chains_follow_successors(written: list[list[tuple[int | None, bool]]], n_steps: int) -> None:
    links = drive(written, ring=True, choose=None)
    chains, steps_used = links.chain(torch.arange(CAPACITY), n_steps)
    for start in range(CAPACITY):
        followed = [start]
        while len(followed) < n_steps and int(links.successor[followed[-1]]) >= 0:
            followed.append(int(links.successor[followed[-1]]))
        assert int(steps_used[start]) == len(followed)
        assert chains[start].tolist() == followed + followed[-1:] * (n_steps - len(followed))
