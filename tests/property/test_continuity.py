# SPDX-License-Identifier: Apache-2.0
"""Rows of environments that are restarted and mixed in any way: nothing follows a row that it does not continue."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers import SliceSampler

from lightning_replay import Replay, load_replay, recipes
from lightning_replay.events import EventTable, sustained
from lightning_replay.samplers import ContinuousTransitionSampler, ReverseSweepSampler
from lightning_replay.storage import PackedStorage
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.transforms import NStepTransitions
from tests.frame_steps import IMAGE_KEYS, WRIST

pytestmark = pytest.mark.filterwarnings("ignore:.*rows of several environments or runs are mixed")


@dataclass
class Row:
    """A step: its stream, what it began and ended with, and whether it ended its episode or is an event."""

    trajectory: int
    seen: int
    following: int
    done: bool
    event: bool


@st.composite
def histories(draw) -> list[list[Row]]:
    """Batches of rows of two environments, which are restarted without an end and may share the number of a stream."""
    shares_number = draw(st.booleans())
    at, fresh, batches = [0, 1000], 2000, []
    for size in draw(st.lists(st.integers(1, 6), min_size=1, max_size=8)):
        batch = []
        for _ in range(size):
            environment = draw(st.integers(0, 1))
            if draw(st.integers(0, 5)) == 0:  # another run begins, or this environment was reset
                at[environment] = fresh = fresh + 100
            done = draw(st.integers(0, 5)) == 0
            seen = at[environment]
            batch.append(Row(0 if shares_number else environment, seen, seen + 1, done, draw(st.integers(0, 2)) == 0))
            at[environment] = seen + 1
            if done:
                at[environment] = fresh = fresh + 100
        batches.append(batch)
    return batches


def rows_of(batch: list[Row], *, named: bool = True) -> TensorDict:
    flags = torch.tensor([[row.done] for row in batch])
    following = {
        "observation": torch.tensor([[float(row.following)] * 2 for row in batch]),
        "reward": torch.tensor([[float(row.event)] for row in batch]),
        "terminated": flags,
        "truncated": torch.zeros_like(flags),
        "done": flags,
    }
    columns = {"observation": torch.tensor([[float(row.seen)] * 2 for row in batch]), "next": following}
    columns["action"] = torch.zeros(len(batch), 1)
    if named:
        columns["trajectory"] = torch.tensor([row.trajectory for row in batch])
    return TensorDict(columns, [len(batch)])


def followers(batches: list[list[Row]], *, named: bool = True) -> list[int]:
    """The oracle: the place of the row that follows each row, -1 where none does."""
    rows = [row for batch in batches for row in batch]
    found, newest = [-1] * len(rows), dict[int, int]()
    for place, row in enumerate(rows):
        stream = row.trajectory if named else 0
        before = newest.get(stream)
        if before is not None and not rows[before].done and rows[before].following == row.seen:
            found[before] = place
        newest[stream] = place
    return found


def led_to(batches: list[list[Row]], place: int, most: int) -> list[int]:
    """The places of up to ``most`` rows of an episode up to ``place``."""
    before = {after: row for row, after in enumerate(followers(batches)) if after >= 0}
    found = [place]
    while len(found) < most and found[0] in before:
        found.insert(0, before[found[0]])
    return found


@settings(max_examples=50, deadline=None)
@given(histories(), st.booleans(), st.sampled_from(["returns", "pairs", "sweep", "torchrl"]))
def test_links_are_those_of_rows_that_connect(batches, named, kind) -> None:
    if kind == "returns":
        replay = recipes.uniform(100, 4, n_steps=3, seed=0)
    elif kind == "torchrl":
        replay = ReplayBuffer(storage=LazyTensorStorage(100), sampler=ContinuousTransitionSampler(), batch_size=4)
    else:
        sampler = ContinuousTransitionSampler() if kind == "pairs" else ReverseSweepSampler(goal=is_event)
        replay = Replay(storage=PackedStorage(100), sampler=sampler, batch_size=4)
    for batch in batches:
        replay.extend(rows_of(batch, named=named))
    links = replay._episodes.links if kind == "returns" else replay.sampler.followed.links
    expected = followers(batches, named=named)
    assert links.successor[: len(expected)].tolist() == expected


def is_event(rows: TensorDict) -> torch.Tensor:
    return rows["next", "reward"][:, 0] > 0


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(histories(), st.booleans(), st.integers(0, 7))
def test_histories_and_conditions_go_back_over_rows_that_connect(batches, remembers, saved_after) -> None:
    """With a condition that has a memory the rows go another way, and so do the first ones."""
    condition = sustained(is_event, steps=2) if remembers else is_event
    table = EventTable("event", condition=condition, history_length=3, capacity=50, min_size=1)
    replay = recipes.event_tables(100, 1, tables=[table], seed=0)
    for number, batch in enumerate(batches):
        replay.extend(rows_of(batch))
        if number == saved_after:
            with tempfile.TemporaryDirectory() as folder:
                replay.save(folder)
                replay = load_replay(folder, trust=["tests"], end_episodes=False)
    rows = [row for batch in batches for row in batch]
    expected: list[int] = []
    runs = [0] * len(rows)
    for place, row in enumerate(rows):
        before = led_to(batches, place, 2)[:-1]
        runs[place] = (runs[before[0]] + 1 if before else 1) if row.event else 0
        if row.event and (not remembers or runs[place] == 2):
            expected += [one for one in led_to(batches, place, 3) if one not in expected]
    assert replay.table("event")["observation"][:, 0].int().tolist() == [rows[place].seen for place in expected]


@settings(max_examples=50, deadline=None)
@given(histories())
def test_returns_formed_before_rows_are_stored_are_of_rows_that_connect(batches) -> None:
    replay = Replay(storage=PackedStorage(100), transform=NStepTransitions(3, 0.5), batch_size=4)
    for batch in batches:
        replay.extend(rows_of(batch))
    replay.store_pending()
    rows, after = [row for batch in batches for row in batch], followers(batches)
    expected = {}
    for place, row in enumerate(rows):
        chain = [place]
        while len(chain) < 3 and after[chain[-1]] >= 0:
            chain.append(after[chain[-1]])
        reward = sum(0.5**step * rows[one].event for step, one in enumerate(chain))
        expected[row.seen] = (reward, len(chain), rows[chain[-1]].following)
    stored = replay[:]
    found = zip(
        stored["observation"][:, 0].int().tolist(),
        stored["next", "reward"].flatten().tolist(),
        stored["steps_to_next_obs"].flatten().tolist(),
        stored["next", "observation"][:, 0].int().tolist(),
        strict=True,
    )
    assert {seen: tuple(formed) for seen, *formed in found} == expected


@settings(max_examples=40, deadline=None)
@given(histories(), st.sampled_from(IMAGE_KEYS))
def test_stacks_of_frames_are_compared_as_they_are(batches, image_key) -> None:
    """Observation n is the stack of frames n and n + 1, so that stacks of one episode share a frame.

    Of two cameras each shows a part of the number.
    """
    storage = FrameStorage(100, 2, image_key, frame_capacity=300)
    replay = Replay(storage=storage, n_steps=3, batch_size=4)
    for batch in batches:
        rows = rows_of(batch)
        for branch in (rows, rows["next"]):
            number = branch.pop("observation")[:, 0].int()
            pixels = torch.stack((number, number // 256, number + 1, (number + 1) // 256), 1).to(torch.uint8)
            branch["pixels"] = pixels.view(-1, 2, 1, 2)
            if isinstance(image_key, list):
                branch[WRIST], branch["pixels"] = branch["pixels"].split(1, -1)
        replay.extend(rows)
    expected = followers(batches)
    assert replay.successors(torch.arange(len(expected))).tolist() == expected


@settings(max_examples=30, deadline=None)
@given(histories())
def test_slices_find_an_end_where_rows_do_not_connect(batches) -> None:
    sampler = SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False)
    replay = Replay(storage=PackedStorage(100), sampler=sampler, batch_size=4)
    for batch in batches:
        replay.extend(rows_of(batch, named=False))
    after = followers(batches, named=False)
    assert replay[:]["next", "done"].flatten().tolist()[:-1] == [one < 0 for one in after[:-1]]
    unchecked = Replay(storage=PackedStorage(100), batch_size=4)
    for batch in batches:
        unchecked.extend(rows_of(batch, named=False))
    unchecked.set_sampler(SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False))
    assert torch.equal(unchecked[:]["next", "done"], replay[:]["next", "done"])
