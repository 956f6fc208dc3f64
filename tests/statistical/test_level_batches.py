# SPDX-License-Identifier: Apache-2.0
"""Levels that are drawn in batches and scored by ``record`` have the distribution of levels drawn one at a time."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chisquare

from lightning_replay.levels import Boltzmann, Greedy, LevelBuffer, LevelSet, Proportional, Rank, UniformLevels
from tests.level_steps import first_reward
from tests.statistical.test_levels import EPSILON, RULES

LEVELS, DRAWS = 12, 800
IDS = np.arange(100, 100 + LEVELS)
CASES = [*((*rule, rho) for rule in RULES for rho in (0.0, 0.3)), (*RULES[0], 1.0)]
IN_FLIGHT = [
    ("rank", Rank(), 1.0, 0.2),
    ("proportional", Proportional(), 1.0, 0.2),
    ("epsilon-greedy", Greedy(0.3), 1.0, 0.2),
    ("boltzmann", Boltzmann(), 1.0, 0.2),
]


class Table:
    """Levels with scores, drawn and recorded by batches; each draw from them is undone."""

    def __init__(self, prioritization, temperature: float, rho: float, in_flight: bool = True) -> None:
        self.levels = LevelBuffer(
            IDS.tolist(),
            score=first_reward,
            prioritization=prioritization,
            score_temperature=temperature,
            staleness_weight=rho,
            replay_probability=1.0,
            replay_in_flight=in_flight,
            seed=11,
        )
        drawn = self.levels.next_levels(LEVELS)
        scores = np.random.default_rng(0).random(LEVELS)
        scores[7] = scores[2]
        self.levels.record(drawn, torch.from_numpy(scores))
        self.levels.next_levels(3, replace=True)  # time goes on
        self.levels.running.__init__()
        self.scores = self.levels.table.scores.copy()
        self.timestamps = self.levels.table.timestamps.copy()
        self.clock = self.levels.episodes
        self.row = {level_id: row for row, level_id in enumerate(self.levels.table.level_ids)}

    def draw(self, count: int, replace: bool, out: tuple[int, ...] = ()) -> tuple[int, ...]:
        for row in out:  # in flight before
            self.levels.running.await_scores([self.levels.table.level_ids[row]], 1, 1)
        drawn = tuple(self.row[level_id] for level_id in self.levels.next_levels(count, replace=replace).tolist())
        table = self.levels.table
        started = np.arange(1, count + 1) + self.clock
        assert table.timestamps[drawn[-1]] == started[-1] and self.levels.episodes == self.clock + count
        assert {*self.levels.running.played} == {table.level_ids[row] for row in (*out, *drawn)}
        table.timestamps[:], table.episodes, table._is_behind = self.timestamps, self.clock, True
        self.levels.running.__init__()
        return drawn


def stated(name: str, temperature: float, rho: float, scores, timestamps, clock, out=()) -> np.ndarray:
    """The distribution as the paper writes it, levels in flight left out of that by score."""
    left = [row for row in range(len(scores)) if row not in out]
    order = sorted(left, key=lambda row: (-scores[row], timestamps[row]))
    h = np.zeros(len(scores))
    if name == "rank":
        h[order] = (1 / np.arange(1, len(left) + 1)) ** (1 / temperature)
    elif name == "proportional":
        h[left] = scores[left] ** (1 / temperature)
    elif name == "boltzmann":
        h[left] = np.exp(scores[left] / temperature)
    else:
        best = scores[left] == scores[left].max()
        h[left] = (1 - EPSILON[name]) * best / best.sum() + EPSILON[name] / len(left)
    staleness = clock - timestamps
    return (1 - rho) * h / h.sum() + rho * staleness / staleness.sum()


def check(counts: Counter, expected: dict) -> None:
    draws = sum(counts.values())
    assert sum(expected.values()) == pytest.approx(1.0)
    assert all(expected[cell] > 0 for cell in counts)
    likely = [cell for cell, p in expected.items() if p * draws >= 5]  # the rest make one class
    observed = [*(counts[cell] for cell in likely), draws - sum(counts[cell] for cell in likely)]
    wanted = [*(expected[cell] * draws for cell in likely), draws * (1 - sum(expected[cell] for cell in likely))]
    if wanted[-1] < 1:
        assert observed[-1] <= 12
        observed, wanted = observed[:-1], wanted[:-1]
    if len(observed) > 1:
        assert chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "name", "prioritization", "temperature", "rho"),
    [
        *((how, *case) for how in ("one", "replace", "pairs") for case in CASES),
        *((how, *case) for how in ("one in flight", "in flight") for case in IN_FLIGHT),
    ],
)
def test_batches_follow_the_stated_distribution(how, name, prioritization, temperature, rho):
    table = Table(prioritization, temperature, rho, in_flight="flight" not in how)
    given = (name, temperature, rho)
    first = stated(*given, table.scores, table.timestamps, table.clock)
    np.testing.assert_allclose(table.levels.probabilities()["probability"].numpy(), first, atol=1e-12)
    if how.startswith("one"):
        out = (2, 5) if how == "one in flight" else ()
        first = stated(*given, table.scores, table.timestamps, table.clock, out)
        return check(Counter(table.draw(1, False, out)[0] for _ in range(DRAWS)), dict(enumerate(first)))
    expected: dict[tuple[int, int], float] = {}
    for one, other in product(range(LEVELS), repeat=2):
        if how == "pairs":  # in the order of a shuffle: of both orders the mean
            if one != other:
                each = [first[a] * first[b] / max(1 - first[a], 1e-300) for a, b in ((one, other), (other, one))]
                expected[one, other] = sum(each) / 2
            continue
        timestamps = table.timestamps.copy()
        timestamps[one] = table.clock + 1
        out = (one,) if how == "in flight" else ()
        second = stated(*given, table.scores, timestamps, table.clock + 1, out)
        expected[one, other] = first[one] * second[other]
    if how == "pairs" and first.max() == 1.0:  # then any other follows: the rest has no probability to go by
        best = int(first.argmax())
        expected = {pair: 0.5 / (LEVELS - 1) for pair in expected if best in pair}
    check(Counter(table.draw(2, replace=how != "pairs") for _ in range(DRAWS)), expected)


def test_without_replacement_all_orders_of_weighted_new_levels_have_their_probability():
    weights = np.array([1.0, 2.0, 3.0, 6.0])
    levels = LevelBuffer(LevelSet(list("abcd"), weights=weights.tolist()), score=first_reward, seed=3)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(2_000):
        counts[tuple(sorted(levels.next_levels(2).tolist()))] += 1
        levels.running.__init__()
        levels.forget()
    share = weights / weights.sum()
    expected = {
        (a, b): share[a] * share[b] * (1 / (1 - share[a]) + 1 / (1 - share[b]))
        for a in range(4)
        for b in range(a + 1, 4)
    }
    check(counts, expected)


@pytest.mark.parametrize(("given", "expected"), [(None, 0.4), (0.95, 0.95), (0.2, 0.2)])
@pytest.mark.parametrize("replace", [False, True])
def test_the_share_of_replays_in_batches(given, expected, replace):
    levels = LevelBuffer(100, score=first_reward, replay_probability=given, seed=2)
    levels.record(range(40), torch.linspace(0.1, 1.0, 40))
    replays, state = 0, levels.state_dict()
    for _ in range(200):
        replays += int((levels.next_levels(5, replace=replace) < 40).sum())
        generator = levels.table.generator.get_state()
        levels.load_state_dict(state)
        levels.table.generator.set_state(generator)
    low, high = binomtest(replays, 1_000).proportion_ci(0.9999)
    assert low <= expected <= high


@pytest.mark.parametrize("replace", [False, True])
def test_batches_of_uniform_levels_are_uniform(replace):
    levels = UniformLevels([3, 5, 8, 13], seed=0)
    counts = Counter(level for _ in range(2_000) for level in levels.next_levels(2, replace=replace).tolist())
    assert chisquare([counts[level] for level in (3, 5, 8, 13)]).pvalue > 1e-4
    places = Counter(tuple(levels.next_levels(2, replace=replace).tolist()) for _ in range(2_000))
    assert len(places) == (16 if replace else 12) and chisquare(list(places.values())).pvalue > 1e-4
