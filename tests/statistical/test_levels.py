# SPDX-License-Identifier: Apache-2.0
"""Levels are drawn as often as their probabilities say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chisquare, kstest
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay.levels import (
    Boltzmann,
    Greedy,
    LevelBuffer,
    LevelSampler,
    LevelWriter,
    Proportional,
    Rank,
    UniformLevels,
)
from lightning_replay.state import uniform
from tests.level_steps import first_reward, scored

LEVELS = 12
EPSILON = {"greedy": 0.0, "epsilon-greedy": 0.3}
DRAWS = 40_000


def sampler_of(prioritization, temperature: float, staleness_weight: float) -> LevelSampler:
    """Twelve levels, two with equal scores, played at different times."""
    sampler = LevelSampler(prioritization, temperature, staleness_weight, seed=11)
    generator = np.random.default_rng(0)
    scores = generator.random(LEVELS)
    scores[7] = scores[2]
    for row, (score, timestamp) in enumerate(zip(scores, generator.permutation(LEVELS), strict=True)):
        sampler.put(row, float(score), int(timestamp))
    sampler.episodes = LEVELS + 3
    return sampler


def stated(sampler: LevelSampler, name: str, temperature: float, rho: float) -> np.ndarray:
    """The distribution as the paper writes it."""
    scores, staleness = sampler.scores, sampler.staleness
    order = sorted(range(LEVELS), key=lambda row: (-scores[row], sampler.timestamps[row]))
    if name == "rank":
        h = np.empty(LEVELS)
        h[order] = (1 / np.arange(1, LEVELS + 1)) ** (1 / temperature)
    elif name == "proportional":
        h = scores ** (1 / temperature)
    elif name == "boltzmann":
        h = np.exp(scores / temperature)
    else:
        h = (1 - EPSILON[name]) * (scores == scores.max()) + EPSILON[name] / LEVELS
    return (1 - rho) * h / h.sum() + rho * staleness / staleness.sum()


RULES = [
    ("rank", Rank(), 0.1),
    ("rank", Rank(), 1.4),
    ("proportional", Proportional(), 0.5),
    ("boltzmann", Boltzmann(), 0.3),
    ("greedy", Greedy(), 1.0),
    ("epsilon-greedy", Greedy(0.3), 1.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prioritization", "temperature", "rho"),
    [*((*rule, rho) for rule in RULES for rho in (0.0, 0.3)), (*RULES[0], 1.0)],  # 1 is of no scores
)
def test_drawn_levels_follow_the_stated_distribution(name, prioritization, temperature, rho):
    sampler = sampler_of(prioritization, temperature, rho)
    expected = stated(sampler, name, temperature, rho)
    np.testing.assert_allclose(sampler.probabilities(), expected, atol=1e-12)
    counts = np.bincount([sampler.draw() for _ in range(DRAWS)], minlength=LEVELS)
    assert counts[expected == 0].sum() == 0
    likely = expected * DRAWS >= 5  # chi-square needs a few expected in each class; the rest make one
    observed = [*counts[likely], counts[~likely].sum()]
    wanted = [*(expected[likely] * DRAWS), expected[~likely].sum() * DRAWS]
    if wanted[-1] < 1e-6:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(observed) > 1:
        assert chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue > 1e-4


def test_equal_best_scores_are_drawn_equally_by_the_greedy_rule():
    sampler = LevelSampler(Greedy(), staleness_weight=0.0, seed=5)
    for row, score in enumerate([0.2, 0.9, 0.9, 0.1, 0.9]):
        sampler.put(row, score, row)
    counts = np.bincount([sampler.draw() for _ in range(10_000)], minlength=5)
    assert counts[[0, 3]].sum() == 0
    assert chisquare(counts[[1, 2, 4]]).pvalue > 1e-4


@pytest.mark.parametrize(("given", "visited", "expected"), [(None, 4, 0.4), (0.95, 4, 0.95), (0.2, 4, 0.2)])
def test_the_share_of_replays(given, visited, expected):
    levels = LevelBuffer(10, score=first_reward, replay_probability=given, seed=2)
    for level_id in range(visited):
        levels.start("scorer", level_id)
        levels.update("scorer", level_id, scored(0.1 * level_id), episode_done=True)
    assert levels.replay_chance() == expected
    replays = 0
    trials = 10_000
    for _ in range(trials):
        replays += levels.next_level(0) < visited
        levels.abandon(0)
    assert binomtest(replays, trials, expected).pvalue > 1e-4


def test_new_levels_are_uniform_among_those_that_nobody_plays():
    levels = LevelBuffer(10, score=first_reward, replay_probability=0.0, seed=3)
    for level_id in (0, 1):
        levels.start("scorer", level_id)
        levels.update("scorer", level_id, scored(0.5), episode_done=True)
    for level_id in (2, 3, 4):
        levels.start("player", level_id)
    drawn = []
    for _ in range(20_000):
        drawn.append(levels.next_level(0))
        levels.abandon(0)
    counts = np.bincount(drawn, minlength=10)
    assert counts[:5].sum() == 0
    assert chisquare(counts[5:]).pvalue > 1e-4


def test_uniform_levels_are_uniform():
    levels = UniformLevels([3, 5, 8, 13], seed=0)
    drawn = [levels.next_level(0) for _ in range(20_000)]
    assert chisquare([drawn.count(level) for level in (3, 5, 8, 13)]).pvalue > 1e-4


def test_torchrls_buffer_draws_by_the_same_distribution():
    sampler = LevelSampler(score_temperature=1.0, staleness_weight=0.0, seed=1)
    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), sampler=sampler, writer=LevelWriter(sampler), batch_size=20_000
    )
    replay.extend(TensorDict({"level_id": torch.arange(10, 14), "score": torch.tensor([0.1, 0.4, 0.2, 0.3])}, [4]))
    counts = np.bincount(replay.sample()["level_id"].numpy() - 10, minlength=4)
    expected = np.array([1 / 4, 1, 1 / 3, 1 / 2])
    assert chisquare(counts, expected / expected.sum() * 20_000).pvalue > 1e-4


def test_random_fractions_are_uniform():
    generator = torch.Generator().manual_seed(3)
    drawn = [uniform(generator) for _ in range(DRAWS)]
    assert min(drawn) >= 0.0 and max(drawn) < 1.0
    assert kstest(drawn, "uniform").pvalue > 1e-4
    assert kstest([2**20 * one % 1 for one in drawn], "uniform").pvalue > 1e-4, "and so are the bits behind the first"
