# SPDX-License-Identifier: Apache-2.0
"""Any sequence of choices, updates, saves and loads by many actors against the rules over dictionaries; sum trees."""

from __future__ import annotations

import tempfile
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.levels import Boltzmann, Greedy, LevelBuffer, Proportional, Rank
from lightning_replay.levels.prioritization import SumTree
from tests.level_oracle import LevelOracle
from tests.level_steps import first_reward, segment

# (what, actor, rewards, does the episode end); sums of eighths are exact, so ties are ties on both sides
rewards = st.lists(st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=3)
call = st.one_of(
    st.tuples(st.just("next"), st.integers(0, 3)),
    st.tuples(st.just("update"), st.integers(0, 3), rewards, st.booleans(), st.integers(0, 9)),
    st.tuples(st.sampled_from(["flush", "save"]), st.just(0)),
)


def build(
    finite: bool, size: int, temperature: float, staleness_weight: float, replay_probability: float | None, seed: int
):
    options = {"score": first_reward, "score_temperature": temperature, "staleness_weight": staleness_weight}
    where = {"levels": range(100, 100 + size)} if finite else {"capacity": size, "generate": any_of_twenty}
    return LevelBuffer(**where, **options, replay_probability=replay_probability, seed=seed)


def any_of_twenty(generator: torch.Generator) -> int:
    return int(torch.randint(20, (), generator=generator))


def check_same(levels: LevelBuffer, oracle: LevelOracle) -> None:
    shown = levels.probabilities()
    ids = shown["level_id"].tolist()
    assert levels.episodes == oracle.c
    assert dict(zip(ids, shown["score"].tolist(), strict=True)) == pytest.approx(oracle.scores)
    stale = {level: oracle.c - timestamp for level, timestamp in oracle.timestamps.items()}
    assert dict(zip(ids, shown["staleness"].tolist(), strict=True)) == stale
    if ids:
        expected = oracle.probabilities()
        assert dict(zip(ids, shown["probability"].tolist(), strict=True)) == pytest.approx(expected, abs=1e-12)
        stats = levels.stats()
        assert stats["effective_levels"] == pytest.approx(1.0 / sum(p * p for p in expected.values()))
        assert stats["probability_max"] == pytest.approx(max(expected.values()))
    assert len(levels) == len(ids)
    for actor, episodes in oracle.flight.items():
        assert levels.in_flight(actor) == [episode.level for episode in episodes]


@pytest.mark.slow
@settings(max_examples=150)
@given(
    finite=st.booleans(),
    size=st.integers(1, 6),
    temperature=st.sampled_from([0.1, 1.0]),
    staleness_weight=st.sampled_from([0.0, 0.3, 1.0]),
    replay_probability=st.sampled_from([None, 0.0, 0.7, 1.0]),
    calls=st.lists(call, min_size=1, max_size=40),
)
def test_contents_and_probabilities_are_those_of_the_rules(
    finite, size, temperature, staleness_weight, replay_probability, calls
):
    options = (finite, size, temperature, staleness_weight, replay_probability)
    levels = build(*options, seed=3)
    oracle = LevelOracle(size, temperature, staleness_weight)
    for what, actor, *rest in calls:
        if what == "next":
            known = set(oracle.scores)
            played = {episode.level for episodes in oracle.flight.values() for episode in episodes}
            before, chance = levels.table.generator.get_state(), levels.replay_chance()
            assert torch.equal(levels.table.generator.get_state(), before), "the chance is computed without a draw"
            level = levels.next_level(actor)
            assert chance < 1.0 or level in known
            assert chance > 0.0 or level not in known or not finite, "without end, an id may be drawn again"
            if finite and len(known) == size:
                assert level in known
            if level not in known and finite and set(range(100, 100 + size)) - known - played:
                assert level not in played, "a new level that nobody plays was to be had"
            oracle.begin(actor, level)
        elif what == "update" and oracle.flight.get(actor):
            terms, done, which = rest
            level = oracle.flight[actor][which % len(oracle.flight[actor])].level
            levels.update(actor, level, segment(terms, done=done), episode_done=done)
            oracle.update(actor, level, terms, done)
        elif what == "flush":
            levels.flush()
            oracle.flush()
        elif what == "save":
            with tempfile.TemporaryDirectory() as directory:
                levels.save(directory)
                other = build(*options, seed=4)
                other.load(directory)
            check_same(levels, oracle)
            assert [other.next_level(9) for _ in range(10)] == choices_without_trace(levels, 10)
            other.load_state_dict(levels.state_dict())
            levels = other
        check_same(levels, oracle)


def choices_without_trace(levels: LevelBuffer, count: int) -> list[int]:
    """The next choices, which the buffer forgets again."""
    state = levels.state_dict()
    chosen = [levels.next_level(9) for _ in range(count)]
    levels.load_state_dict(state)
    return chosen


scores_and_times = st.lists(
    st.tuples(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 0.5, 3.0, 1e-9, 1e9]), st.integers(0, 5)), min_size=1, max_size=12
)


@settings(max_examples=100)
@given(
    prioritization=st.sampled_from([Rank(), Proportional(), Greedy(), Greedy(0.3), Boltzmann()]),
    temperature=st.sampled_from([0.05, 0.1, 1.0, 50.0]),
    puts=scores_and_times,
    changes=st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from([0.0, 1.0, 1e9, -1.0]), st.integers(6, 9)), max_size=6
    ),
)
def test_what_is_drawn_has_probability_and_what_is_kept_up_equals_what_is_filled(
    prioritization, temperature, puts, changes
):
    kept_up = prioritization.bind(temperature)
    scores, times = [], []
    for row, (score, time) in enumerate(puts):
        kept_up.put(row, score, time)
        scores.append(score)
        times.append(time)
    for row, score, time in changes:
        if row < len(scores):
            kept_up.put(row, score, time)
            scores[row], times[row] = score, time
    given_scores, given_times = np.array(scores), np.array(times)
    probabilities = kept_up.probabilities(given_scores, given_times)
    assert probabilities.sum() == pytest.approx(1.0)
    filled = prioritization.bind(temperature)
    filled.fill(given_scores, given_times)
    generator, same = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    drawn = [kept_up.draw(generator) for _ in range(20)]
    assert drawn == [filled.draw(same) for _ in range(20)]
    assert (probabilities[drawn] > 0).all()


ROWS = st.integers(0, 20)


@given(st.lists(st.integers(0, 5), max_size=6), st.lists(st.tuples(ROWS, st.integers(0, 9)), max_size=30))
def test_a_prefix_is_found_in_the_row_whose_share_it_lies_in(filled, changes):
    tree, values = SumTree(), [0] * 21
    tree.fill(filled)
    values[: len(filled)] = filled
    for row, value in changes:
        tree[row] = value
        values[row] = value
    assert tree.total == sum(values)
    found = Counter(tree.find(prefix) for prefix in range(sum(values)))
    assert found == Counter({row: value for row, value in enumerate(values) if value})


@given(st.lists(st.integers(0, 20), max_size=6), st.lists(st.tuples(ROWS, st.integers(0, 20)), max_size=20))
def test_rows_are_found_in_proportion_to_their_staleness(filled, changes):
    tree, timestamps = SumTree(), list(filled)
    tree.fill(list(filled))
    for row, timestamp in changes:
        place = min(row, len(timestamps))  # a row more, or one of those there are
        timestamps[place : place + 1] = [timestamp]
        tree[place] = timestamp
    staleness = [20 - timestamp for timestamp in timestamps]
    found = Counter(tree.find_below(20, len(staleness), prefix) for prefix in range(sum(staleness)))
    assert found == Counter({row: stale for row, stale in enumerate(staleness) if stale})
