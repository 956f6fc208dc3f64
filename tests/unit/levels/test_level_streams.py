# SPDX-License-Identifier: Apache-2.0
"""Levels from a source without a known end: turns, retirement by probability, and resumed runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lightning_replay.levels import LevelBatchSampler, LevelBuffer, LevelSet, LevelStream, scores


def rows() -> Any:
    return ({"id": f"q{number}", "number": number} for number in itertools.count())


def built(seed: int = 0, **options: Any) -> tuple[LevelBuffer, LevelStream]:
    source = rows()
    prompts = LevelSet(itertools.islice(source, 12), name="id")
    score = scores.Learnability(window=8)
    levels = LevelBuffer(prompts, score=score, replay_probability=0.5, staleness_weight=0.0, seed=seed)
    return levels, LevelStream(levels, source, **{"num_new": 12, "capacity": 20} | options)


def outcomes(level_ids: list[int]) -> torch.Tensor:
    """One level in four is worth learning from."""
    return torch.tensor([[0.0, 1.0] if one % 4 == 0 else [1.0, 1.0] for one in level_ids])


def test_new_levels_come_as_they_are_needed_and_the_least_likely_leave() -> None:
    levels, stream = built()
    seen = set()
    for number, level_ids in enumerate(itertools.islice(LevelBatchSampler(levels, 8, stream=stream), 60)):
        seen |= {*level_ids}
        levels.record(level_ids, outcomes=outcomes(level_ids))
        assert len(levels) <= 20 + 8 and levels.num_unseen >= 4, number
    assert len(seen) > 100
    stream.top_up()
    known = levels.probabilities()["level_id"]
    assert len(known) == 20 and (known % 4 == 0).all(), "those from which nothing is learned were retired"
    assert levels.count == 20 + 12


def test_levels_in_flight_are_not_retired_and_a_source_may_end() -> None:
    levels, stream = built(capacity=1)
    drawn = levels.next_levels(6).tolist()
    levels.record(drawn, outcomes=outcomes(drawn))
    again = levels.next_levels(12).tolist()
    stream.top_up()
    assert levels.stats()["in_flight"] == 12 and {*again} <= {*levels.known.ids}
    ending = LevelStream(levels, [{"id": "last"}], num_new=50)
    assert len(ending.top_up()) == 1 and ending.top_up() == []


def test_a_resumed_stream_goes_on_where_it_stopped() -> None:
    levels, stream = built()
    sampler = LevelBatchSampler(levels, 8, stream=stream)
    batches = iter(sampler)
    for level_ids in itertools.islice(batches, 20):
        levels.record(level_ids, outcomes=outcomes(level_ids))
    saved = levels.state_dict(), stream.state_dict(), sampler.state_dict()
    again, stream_again = built(seed=1)
    sampler_again = LevelBatchSampler(again, 8, stream=stream_again)
    stream_again.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    sampler_again.load_state_dict(saved[2])
    resumed = iter(sampler_again)
    for _ in range(10):
        expected, found = next(batches), next(resumed)
        assert expected == found
        levels.record(expected, outcomes=outcomes(expected))
        again.record(found, outcomes=outcomes(found))
    assert [again.levels.level(one) for one in found] == [levels.levels.level(one) for one in expected]
    short = LevelStream(built()[0], [], num_new=1)
    with pytest.raises(ValueError, match="the source ended after 12 of .* saved objects"):
        short.load_state_dict(saved[1])


def test_wrong_options() -> None:
    levels, stream = built()
    with pytest.raises(TypeError, match="levels has ids and no objects"):
        LevelStream(LevelBuffer(3), [], num_new=1)
    with pytest.raises(ValueError, match="stream adds levels to another buffer"):
        LevelBatchSampler(built()[0], 4, stream=stream)
    for options, told in (
        ({"num_new": 0}, "num_new is 0"),
        ({"capacity": 0}, "capacity is 0"),
        ({"source": 3}, "source is 3"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            LevelStream(levels, **{"source": [], "num_new": 4} | options)
