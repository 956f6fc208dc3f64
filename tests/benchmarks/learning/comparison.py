# SPDX-License-Identifier: Apache-2.0
"""Statistics of paired seeds: intervals, interquartile mean, probability of improvement, verdict."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
RESAMPLED_SEEDS = 8  # of fewer, percentiles of resampled seeds call equal arms different too often: of four in 14 %
FEWEST_SEEDS = 4  # of fewer, one pair of seeds decides what the spread is: no ground for a verdict
FEW_SEEDS = 6  # of fewer, chance gives all the same sign in more than one case of twenty

Statistic = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Contrast:
    """Compares the numbers of two arms over the same seeds.

    Args:
        name: for tables.
        statistic: function of two arrays whose ``axis`` is that of the seeds.
        neutral: its value where the arms are equal.
        sign: of the format: ``"+"`` for differences.
        digits: after the point; those of the measure if ``None``.
        is_ratio: whether intervals are symmetric around the logarithm.
    """

    name: str
    statistic: Statistic
    neutral: float
    sign: str = ""
    digits: int | None = None
    is_ratio: bool = False


def _difference(values: np.ndarray, others: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.mean(values - others, axis=axis)


def _ratio(values: np.ndarray, others: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.median(values, axis=axis) / np.median(others, axis=axis)


difference_of_means = Contrast("difference", _difference, neutral=0.0, sign="+")
ratio_of_medians = Contrast("ratio of medians", _ratio, neutral=1.0, digits=2, is_ratio=True)


def interval(
    statistic: Statistic, *columns: Sequence[float] | np.ndarray, is_ratio: bool = False
) -> tuple[float, float]:
    """Returns the 95 % interval of a statistic over seeds.

    Of fewer than eight seeds Student's, with the standard error over all resamples of the seeds: exactly Student's for
    a mean, and for other statistics the same with their own standard error, of a ratio by its logarithm. Of eight and
    more, percentiles of resampled seeds, taken further out so that the interval of a mean is as wide as Student's:
    plain ones of ten seeds miss in 9 % of cases. Hesterberg 2015, section 5.3,
    https://doi.org/10.1080/00031305.2015.1089789.

    Args:
        statistic: function of arrays, one for each column, whose ``axis`` is that of the seeds.
        columns: numbers by seed ``[n]``; they are resampled together.
        is_ratio: whether the statistic is a ratio.

    Returns:
        Lower and upper end, both NaN for fewer than two seeds, and for ratios to 0.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap  # the demo compares nothing, and installs no SciPy

    arrays = tuple(np.asarray(column, dtype=np.float64) for column in columns)
    seeds = len(arrays[0])
    if seeds < 2:
        return float("nan"), float("nan")
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)  # of ratios to 0, whose interval is NaN
        if seeds < RESAMPLED_SEEDS:
            return _students_interval(statistic, arrays, is_ratio)
        options = {"paired": True, "vectorized": True, "n_resamples": RESAMPLES, "batch": 1_000, "method": "percentile"}
        level, generator = expanded_level(seeds), np.random.default_rng(0)
        found = bootstrap(arrays, statistic, confidence_level=level, random_state=generator, **options)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _students_interval(statistic: Statistic, arrays: Sequence[np.ndarray], is_ratio: bool) -> tuple[float, float]:
    from scipy.stats import t

    scale, back = (np.log, np.exp) if is_ratio else (np.asarray, np.asarray)
    seeds = len(arrays[0])
    drawn, chances = _resamples(seeds)
    centre = scale(statistic(*arrays, axis=-1))
    values = scale(statistic(*(array[drawn] for array in arrays), axis=-1))
    variance = np.average((values - np.average(values, weights=chances)) ** 2, weights=chances)
    half = t.ppf((1 + LEVEL) / 2, seeds - 1) * np.sqrt(variance * seeds / (seeds - 1))  # a mean's is that of n - 1
    return float(back(centre - half)), float(back(centre + half))


@cache
def _resamples(seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns all draws of n from n with replacement, whatever their order, ``[draws, n]``, and their chances."""
    drawn = np.array(list(combinations_with_replacement(range(seeds), seeds)))
    orders = [math.factorial(seeds) / math.prod(map(math.factorial, np.bincount(draw))) for draw in drawn]
    return drawn, np.array(orders) / seeds**seeds


def expanded_level(seeds: int) -> float:
    """Returns the level at which percentiles of resampled means are as wide as Student's interval of 95 %."""
    from scipy.stats import norm, t

    width = t.ppf((1 + LEVEL) / 2, seeds - 1) * (seeds / (seeds - 1)) ** 0.5
    return float(1 - 2 * norm.cdf(-width))


def interquartile_mean(values: Sequence[float] | np.ndarray, axis: int = -1) -> np.ndarray:
    """Returns the mean without the lowest and the highest quarter."""
    from scipy.stats import trim_mean

    return trim_mean(values, 0.25, axis=axis)


def probability_of_improvement(values: np.ndarray, others: np.ndarray, axis: int = -1) -> np.ndarray:
    """Returns the share of pairs of any two seeds in which the first is larger; ties count half.

    Agarwal et al. 2021, https://arxiv.org/abs/2108.13264.
    """
    first = np.moveaxis(np.asarray(values), axis, -1)[..., :, None]
    second = np.moveaxis(np.asarray(others), axis, -1)[..., None, :]
    return ((first > second) + 0.5 * (first == second)).mean(axis=(-2, -1))


@dataclass(frozen=True)
class Comparison:
    """An arm compared with another over the same seeds.

    Args:
        arm: name of the arm.
        other: name of the one it is compared with.
        seeds: how many both have.
        value: of the contrast.
        low: lower end of its 95 % interval.
        high: upper end.
        seeds_better: in how many seeds the arm is better.
        improvement: probability of improvement, and its interval.
        verdict: "better", "worse", "no difference found"; "too few seeds" of fewer than four, "unfinished" where seeds
            of one of the two have not been run.
        text: the verdict in words.
    """

    arm: str
    other: str
    seeds: int
    value: float
    low: float
    high: float
    seeds_better: int
    improvement: tuple[float, float, float]
    verdict: str
    text: str


def compare(
    arm: str,
    other: str,
    values: Sequence[float] | np.ndarray,
    others: Sequence[float] | np.ndarray,
    contrast: Contrast = difference_of_means,
    *,
    higher_is_better: bool = True,
    digits: int = 3,
    is_complete: bool = True,
) -> Comparison:
    """Compares the numbers ``[n]`` of two arms over the same n seeds.

    The arm is better, or worse, where the 95 % interval of the contrast does not include equality. While seeds of one
    of them have not been run (``is_complete=False``) there is no verdict: whoever stops when the interval allows one
    finds too many.
    """
    ours, theirs = np.asarray(values, dtype=np.float64), np.asarray(others, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(contrast.statistic(ours, theirs))
    low, high = interval(contrast.statistic, ours, theirs, is_ratio=contrast.is_ratio)
    sign = 1.0 if higher_is_better else -1.0
    pairs = (sign * ours, sign * theirs)
    first, last = np.clip(interval(probability_of_improvement, *pairs), 0.0, 1.0)
    improvement = (float(probability_of_improvement(*pairs)), float(first), float(last))
    better = int((pairs[0] > pairs[1]).sum())
    verdict = (
        _verdict(sign * (low - contrast.neutral), sign * (high - contrast.neutral), len(ours))
        if is_complete
        else "unfinished"
    )
    words = {
        "better": f"{arm} is better than {other}",
        "worse": f"{arm} is worse than {other}",
        "no difference found": f"no difference found between {arm} and {other}",
        "too few seeds": f"no verdict from so few seeds, {arm} with {other}",
        "unfinished": f"no verdict yet, {arm} with {other}",
    }
    text = f"{words[verdict]}: {contrast_text(contrast, value, low, high, digits)}, {better} of {len(ours)} seeds"
    if is_complete and FEWEST_SEEDS <= len(ours) < FEW_SEEDS:
        text += " (few seeds: rely on it with care)"
    return Comparison(arm, other, len(ours), value, low, high, better, improvement, verdict, text)


def _verdict(first_end: float, second_end: float, seeds: int) -> str:
    if seeds < FEWEST_SEEDS:
        return "too few seeds"
    if first_end > 0 and second_end > 0:  # both: an end that is NaN is no evidence
        return "better"
    return "worse" if first_end < 0 and second_end < 0 else "no difference found"


def contrast_text(contrast: Contrast, value: float, low: float, high: float, digits: int) -> str:
    """Returns the value with its interval.

    Example:
        >>> contrast_text(difference_of_means, 0.17, 0.05, 0.29, digits=2)
        '+0.17 [+0.05, +0.29]'
    """
    form = f"{contrast.sign},.{digits if contrast.digits is None else contrast.digits}f"
    name = "" if contrast is difference_of_means else f"{contrast.name} "
    return f"{name}{value:{form}} [{low:{form}}, {high:{form}}]"
