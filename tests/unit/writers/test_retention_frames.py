# SPDX-License-Identifier: Apache-2.0
"""Where frames are stored once and their room is full, as many rows leave as must for one to enter, or none."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from lightning_replay import Replay, load_replay, save_replay
from lightning_replay.samplers import PrioritizedSampler, UniformSampler
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.writers import RetentionRule, RetentionWriter, StochasticSurprise, SurpriseOnly


def given_surprise(rows: TensorDict) -> torch.Tensor:
    return rows["surprise"]


def pictured(surprise: list[float], frames: list[tuple[int, int]]) -> TensorDict:
    """Rows of stacks of one frame, whose pictures are numbers."""
    numbers = torch.tensor(frames, dtype=torch.uint8).view(-1, 2, 1, 1, 1).expand(-1, 2, 1, 4, 4)
    return TensorDict(
        {"surprise": torch.tensor(surprise), "pixels": numbers[:, 0], "next": {"pixels": numbers[:, 1]}},
        [len(surprise)],
    )


def framed(frame_capacity: int, *, rule: RetentionRule | None = None, prioritized: bool = False) -> Replay:
    return Replay(
        storage=FrameStorage(6, frame_stack=1, frame_capacity=frame_capacity),
        sampler=PrioritizedSampler(6) if prioritized else UniformSampler(),
        writer=RetentionWriter(rule, initial_surprise=given_surprise),
        batch_size=4,
        seed=0,
    )


def held(replay: Replay) -> dict[int, float]:
    slots = replay.storage.occupancy.slots()
    rows = replay.storage.get(slots)
    return dict(zip(slots.tolist(), rows["surprise"].tolist(), strict=True))


@pytest.mark.parametrize("prioritized", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_two_rows_leave_for_one_where_the_first_gives_up_no_frame(at_once, prioritized) -> None:
    replay = framed(5, prioritized=prioritized)
    # the first two share both frames; four frames of five are taken
    assert replay.extend(pictured([1.0, 2.0, 3.0], [(1, 2), (1, 2), (3, 4)])).tolist() == [0, 1, 2]
    generation = replay.storage.generation_of(torch.arange(3))
    assert replay.extend(pictured([1.5], [(5, 6)])).tolist() == [], "2.0 would have to leave as well"
    assert held(replay) == {0: 1.0, 1: 2.0, 2: 3.0}
    candidates = pictured([2.5, 2.75], [(5, 6), (6, 7)])  # in place of both; then only one frame is lacking
    parts = [candidates] if at_once else candidates.split(1)
    index = [slot for part in parts for slot in replay.extend(part).tolist()]
    assert held(replay) == {2: 3.0, index[0]: 2.5, index[1]: 2.75} and len(replay) == 3
    assert [replay.stats()[name] for name in ("admitted", "refused", "evicted")] == [5, 1, 2]
    for _ in range(20):
        batch = replay.sample()
        assert set(batch["surprise"].tolist()) <= {3.0, 2.5, 2.75}
    replay.update_priority(torch.tensor([0, 1, 2]), torch.tensor([9.0, 9.0, 9.0]), generation=generation)
    assert replay.stats()["stale_updates_dropped"] == 2
    assert replay.writer.retention_priority(torch.tensor([2])).tolist() == [81.0]


def test_draws_of_a_row_do_not_lower_the_next_one_in_its_slot() -> None:
    replay = framed(5, rule=SurpriseOnly(draw_discount=0.5))
    replay.extend(pictured([1.0, 2.0, 3.0], [(1, 2), (1, 2), (3, 4)]))
    replay.update_priority(torch.tensor([0, 1]), torch.tensor([1.0, 1.0]))
    new = replay.extend(pictured([2.5, 2.75], [(5, 6), (6, 7)]))
    assert 1 in new.tolist(), "a slot of a row that was drawn"
    replay.update_priority(new, torch.tensor([2.0, 2.0]))
    assert replay.writer.retention_priority(new).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("rule", [None, StochasticSurprise()], ids=["lowest", "drawn"])
def test_many_rows_at_once_are_as_many_one_by_one_and_go_on_after_a_load(rule, tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    surprise = torch.rand(200, generator=generator).tolist()
    frames = [(number % 90, (number + 1) % 90) for number in range(200)]
    one, many = framed(7, rule=rule), framed(7, rule=rule)
    for start in range(0, 200, 10):
        part = pictured(surprise[start : start + 10], frames[start : start + 10])
        many.extend(part)
        for row in part.split(1):
            one.extend(row)
        assert held(one) == held(many)
        assert one.storage.frames_held <= 7
        if start == 100:
            save_replay(one, tmp_path)
            one = load_replay(tmp_path, trust=["tests"])
    stats = one.stats()
    assert stats["admitted"] + stats["refused"] == 200 and stats["admitted"] - stats["evicted"] == len(one)
    assert all(one.stats()[name] == many.stats()[name] for name in ("admitted", "refused", "evicted", "age_mean"))
