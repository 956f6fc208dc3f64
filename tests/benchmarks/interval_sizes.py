# SPDX-License-Identifier: Apache-2.0
"""Measures how often the intervals of the experiments call equal arms different.

python -m tests.benchmarks.interval_sizes
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.benchmarks.learning.comparison import RESAMPLED_SEEDS, Contrast, difference_of_means, interval
from tests.benchmarks.learning.comparison import ratio_of_medians as ratio

FILE = Path(__file__).parent / "results" / "interval-sizes.json"
SEEDS = (3, 4, 5, 6, 7, 8, 16)
TRIALS, TRIALS_OF_MANY_SEEDS = 4_000, 1_000  # resampling takes a hundred times as long


def _steps(rng: np.random.Generator, seeds: int) -> np.ndarray:
    return np.minimum(np.ceil(rng.exponential(9.0, size=(2, seeds))), 12.0)  # a quarter ends at a limit of 12


def _leaning(rng: np.random.Generator, seeds: int) -> np.ndarray:
    return np.stack([rng.exponential(size=seeds), np.ones(seeds)])


# Two arms [2, seeds] whose contrast is neutral, and the contrast by which they are compared.
ARMS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], Contrast]] = {
    "normal returns": (lambda rng, seeds: rng.normal(size=(2, seeds)), difference_of_means),
    "skewed returns (log-normal)": (lambda rng, seeds: rng.lognormal(size=(2, seeds)), difference_of_means),
    "steps needed, a quarter at the limit": (_steps, ratio),
    "equal means alone, an exponential arm and a constant one": (_leaning, difference_of_means),
}


def false_verdicts(kind: str, seeds: int, trials: int) -> int:
    """Returns in how many trials the interval of arms of ``kind`` leaves out the neutral value."""
    rng, (draw, contrast) = np.random.default_rng(seeds), ARMS[kind]
    ends = (interval(contrast.statistic, *draw(rng, seeds), is_ratio=contrast.is_ratio) for _ in range(trials))
    return sum(not low <= contrast.neutral <= high for low, high in ends)


def measure(kind: str, seeds: int) -> float:
    """Returns the share of false verdicts."""
    trials = TRIALS if seeds < RESAMPLED_SEEDS else TRIALS_OF_MANY_SEEDS
    return false_verdicts(kind, seeds, trials) / trials


def listed(shares: dict[str, list[float]]) -> str:
    """Returns the list of ``docs/evidence.md``: the least and the greatest share over the numbers of seeds."""
    return "\n".join(f"* {kind}: {100 * min(found):.1f}% to {100 * max(found):.1f}%" for kind, found in shares.items())


def main() -> None:
    """Measures all, writes ``results/interval-sizes.json`` and prints the list."""
    shares = {kind: [measure(kind, seeds) for seeds in SEEDS] for kind in ARMS}
    content = {"command": "python -m tests.benchmarks.interval_sizes", "seeds": list(SEEDS), "shares": shares}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    print(listed(shares))


if __name__ == "__main__":
    main()
