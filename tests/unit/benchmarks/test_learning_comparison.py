# SPDX-License-Identifier: Apache-2.0
"""Statistics of paired seeds, with numbers worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_rel

from tests.benchmarks.interval_sizes import ARMS, FILE, false_verdicts, listed
from tests.benchmarks.learning.comparison import (
    Contrast,
    _verdict,
    compare,
    contrast_text,
    difference_of_means,
    expanded_level,
    interquartile_mean,
    interval,
    probability_of_improvement,
    ratio_of_medians,
)
from tests.benchmarks.learning.evidence import PAGE


def test_interquartile_mean_leaves_out_a_quarter_on_each_side() -> None:
    assert interquartile_mean([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -50.0]) == 3.5  # of 2, 3, 4, 5
    assert interquartile_mean([0.0, 3.0, 6.0]) == 3.0  # a quarter of three seeds is none


def test_probability_of_improvement_counts_all_pairs_and_half_of_the_ties() -> None:
    # of 3 x 2 pairs: 1 is above none and ties with 1; 2 above 1; 5 above 1 and 4
    assert probability_of_improvement(np.array([1.0, 2.0, 5.0]), np.array([1.0, 4.0])) == pytest.approx(3.5 / 6)


def test_intervals_of_few_seeds_are_as_wide_as_students() -> None:
    # t of 9 degrees at 97.5 % is 2.262; times sqrt(10 / 9) 2.384, beyond which a normal has 0.0086 on each side
    assert expanded_level(10) == pytest.approx(1 - 2 * 0.00856, abs=1e-4)
    values = np.random.default_rng(0).normal(size=10)
    low, high = interval(np.mean, values)
    half = 2.262 * values.std(ddof=1) / 10**0.5
    assert values.mean() - low == pytest.approx(half, rel=0.15) and high - values.mean() == pytest.approx(
        half, rel=0.15
    )


@pytest.mark.parametrize("seeds", range(2, 8))
def test_intervals_of_fewer_than_eight_seeds_are_students(seeds: int) -> None:
    values, others = np.random.default_rng(seeds).exponential(size=(2, seeds))
    expected = ttest_rel(values, others).confidence_interval()
    assert interval(difference_of_means.statistic, values, others) == pytest.approx(tuple(expected))


def test_an_interval_of_four_seeds_by_hand() -> None:
    # mean 3.5, standard deviation sqrt((2.5² + 1.5² + 0.5² + 4.5²) / 3) = 3.109, t of 3 degrees at 97.5 % is 3.182
    assert interval(np.mean, [1.0, 2.0, 3.0, 8.0]) == pytest.approx((3.5 - 4.947, 3.5 + 4.947), abs=1e-3)


def test_an_interval_of_a_ratio_is_symmetric_around_its_logarithm() -> None:
    # of two seeds the medians are 3 and 1; resamples have ratios 2, 3, 3, 4, whose logarithms vary by 0.2468; with
    # n / (n - 1) = 2 under the root 0.3491, and t of one degree is 12.706
    low, high = interval(ratio_of_medians.statistic, [2.0, 4.0], [1.0, 1.0], is_ratio=True)
    assert (math.log(3 / low), math.log(high / 3)) == pytest.approx((4.436, 4.436), abs=1e-3)


TRIALS = 1_000


@pytest.mark.slow
@pytest.mark.parametrize("seeds", range(3, 8))
@pytest.mark.parametrize("kind", [kind for kind in ARMS if "equal means alone" not in kind])
def test_equal_arms_of_few_seeds_are_called_different_in_one_case_of_twenty_at_most(kind: str, seeds: int) -> None:
    wrong = false_verdicts(kind, seeds, TRIALS)
    assert binomtest(wrong, TRIALS, 0.05, alternative="greater").pvalue > 1e-4, wrong
    if kind == "normal returns":
        assert binomtest(wrong, TRIALS, 0.05).pvalue > 1e-4, wrong


def test_the_page_has_the_kept_sizes() -> None:
    assert listed(json.loads(FILE.read_text())["shares"]) in PAGE.read_text()


def test_seeds_are_resampled_together() -> None:
    values = np.array([0.0, 10.0, 20.0, 30.0, 40.0, 50.0])
    assert interval(difference_of_means.statistic, values + 1.0, values) == (1.0, 1.0)
    assert interval(ratio_of_medians.statistic, 0.5 * values + 5, values + 10, is_ratio=True) == pytest.approx(
        (0.5, 0.5)
    )


def test_fewer_than_four_seeds_have_no_verdict() -> None:
    assert all(map(math.isnan, interval(np.mean, [1.0])))
    seen = compare("A", "B", [2.0], [1.0])
    assert seen.text == "no verdict from so few seeds, A with B: +1.000 [+nan, +nan], 1 of 1 seeds"
    assert compare("A", "B", [2.0, 3.0, 4.0], [1.0, 2.0, 3.0]).verdict == "too few seeds"
    four = compare("A", "B", [2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0])
    assert four.text == "A is better than B: +1.000 [+1.000, +1.000], 4 of 4 seeds (few seeds: rely on it with care)"


@pytest.mark.parametrize(
    ("shift", "higher_is_better", "verdict", "words"),
    [
        (0.5, True, "better", "A is better than B: +0.5"),
        (-0.5, True, "worse", "A is worse than B: -0.5"),
        (-0.5, False, "better", "A is better than B: -0.5"),
        (0.5, False, "worse", "A is worse than B: +0.5"),
        (0.0, True, "no difference found", "no difference found between A and B: +0.0"),
    ],
)
def test_verdicts(shift: float, higher_is_better: bool, verdict: str, words: str) -> None:
    others = np.arange(8.0)
    values = others + shift + np.array([0.0625, -0.0625] * 4)
    seen = compare("A", "B", values, others, higher_is_better=higher_is_better, digits=1)
    assert seen.verdict == verdict and seen.text.startswith(words)
    assert seen.seeds_better == {"better": 8, "worse": 0, "no difference found": 4}[verdict]
    assert seen.low <= seen.value <= seen.high and seen.value == pytest.approx(shift)
    is_above = seen.improvement[0] > 0.5
    assert is_above == (verdict == "better")


def test_a_verdict_by_a_ratio_is_relative_to_one() -> None:
    others = np.array([80.0, 90.0, 100.0, 110.0, 120.0, 130.0])
    seen = compare("A", "B", others / 2, others, ratio_of_medians, higher_is_better=False)
    assert seen.text == "A is better than B: ratio of medians 0.50 [0.50, 0.50], 6 of 6 seeds"
    equal = compare("A", "B", others, others, ratio_of_medians)
    assert equal.verdict == "no difference found" and equal.seeds_better == 0


def test_a_ratio_to_nothing() -> None:
    assert compare("A", "B", [0.0] * 4, [0.0] * 4, ratio_of_medians).verdict == "no difference found"
    assert compare("A", "B", [1.0, 2.0, 3.0, 4.0], [0.0] * 4, ratio_of_medians).verdict == "no difference found"


@pytest.mark.parametrize("ends", [(1.0, math.nan), (math.nan, 1.0), (-1.0, math.nan), (math.nan, -1.0)])
def test_an_interval_of_which_an_end_is_unknown_has_no_verdict(ends: tuple[float, float]) -> None:
    assert _verdict(*ends, seeds=8) == "no difference found"


def test_text_of_a_contrast() -> None:
    assert contrast_text(difference_of_means, 1234.5, -0.5, 2000.0, digits=0) == "+1,234 [-0, +2,000]"
    other = Contrast("quotient", ratio_of_medians.statistic, 1.0)
    assert contrast_text(other, 0.5, 0.25, 0.75, digits=1) == "quotient 0.5 [0.2, 0.8]"
