# SPDX-License-Identifier: Apache-2.0
"""The long form of every attack: how often, how long, and in which order."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch

from tests.attack import (
    cluster,
    contents,
    datasets,
    endurance,
    flips,
    histories,
    kills,
    names,
    neighbors,
    overlaps,
    threads,
)
from tests.attack.report import Report
from tests.attack.subjects import SUBJECTS
from tests.attack.variants import VARIANTS
from tests.recordings import RECORDINGS

Task = Callable[[], Report]

KILLS = 250  # of the saves of each subject
DAMAGES = 1_000  # to a save of each subject
DAMAGES_OF_RECIPES = 60  # to a save of each variant of a recipe
NAMES = 1_000  # put into a save of each subject
NAMES_OF_RECIPES = 200  # put into a save of each variant of a recipe
CONTENTS = 2_000  # forged in the state of each variant of a recipe
CHANGES = 3_000  # to a data set of each layout
NEIGHBORS = 200  # places with files of a user's, of each kind
HISTORIES, CALLS = 100, 60  # of each variant, and calls in each
SECONDS_OF_OVERLAPS = 180.0
SECONDS_OF_THREADS = 8.0  # of each variant
ROWS = 3e7
STEPS_OF_CLUSTER = 50_000
# An update of levels is of one episode, and rows that look for neighbours take fifty times as long as others.
ROWS_OF_SLOW_KINDS = 1 / 30


def planned(share: float, seed: int, rows: float) -> dict[str, list[Task]]:
    def some(count: float) -> int:
        return max(round(count * share), 1)

    slow = {name for name in endurance.KINDS if name.startswith(("levels", "neighborhood_mixup"))}
    kinds = sorted(endurance.KINDS, key=lambda name: name not in slow)
    return {
        "cluster": [partial(cluster.attack, some(STEPS_OF_CLUSTER))],
        "kills": [partial(kills.attack, kind, seed, some(KILLS)) for kind in reversed(SUBJECTS.values())],
        "endurance": [
            partial(endurance.attack, name, int(rows * (ROWS_OF_SLOW_KINDS if name in slow else 1))) for name in kinds
        ],
        "damages": [
            *(
                partial(flips.attack, partial(kind, seed=seed), kind.name, some(DAMAGES))
                for kind in reversed(SUBJECTS.values())
            ),
            partial(flips.attack_recipes, seed, some(DAMAGES_OF_RECIPES)),
        ],
        "names": [
            *(
                partial(names.attack, partial(kind, seed=seed), kind.name, some(NAMES), seed)
                for kind in reversed(SUBJECTS.values())
            ),
            partial(names.attack_recipes, seed, some(NAMES_OF_RECIPES)),
        ],
        "contents": [partial(contents.attack, seed, some(CONTENTS), [variant]) for variant in VARIANTS],
        "datasets": [partial(datasets.attack, recording, seed, some(CHANGES)) for recording in RECORDINGS.values()],
        "neighbors": [partial(neighbors.attack, seed, some(NEIGHBORS))],
        "overlaps": [
            partial(overlaps.attack, kind, SECONDS_OF_OVERLAPS * share) for kind in (overlaps.Rows, overlaps.Scores)
        ],
        "threads": [partial(threads.attack, seed, SECONDS_OF_THREADS * share)],
        "histories": [partial(histories.attack, seed + number, CALLS) for number in range(some(HISTORIES))],
    }


def run(name: str, task: Task) -> tuple[str, Report, float]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started = time.monotonic()
    return name, task(), time.monotonic() - started
