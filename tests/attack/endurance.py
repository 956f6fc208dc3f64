# SPDX-License-Identifier: Apache-2.0
"""A day of training through a small buffer: memory stays as it is."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict

from tests import level_steps
from tests.attack.report import Report
from tests.attack.variants import TASKS, VARIANTS, Variant

CAPACITY, BATCH = 2_000, 64
ENVIRONMENTS, STEPS = 50, 20  # of a block of rows
GROWTH_BYTES = 2 << 20  # of the process, from a fifth of the way to its end


class Steps:
    """Blocks of rows of environments side by side; one episode in ten breaks off without an end."""

    def __init__(self, *, has_tasks: bool) -> None:
        count = ENVIRONMENTS * STEPS
        self._environment = torch.arange(count) % ENVIRONMENTS
        done = torch.arange(count).unsqueeze(1) >= count - ENVIRONMENTS
        done &= self._environment.unsqueeze(1) % 10 != 0
        start = torch.rand(ENVIRONMENTS, 8)[self._environment]
        step = (torch.arange(count) // ENVIRONMENTS).unsqueeze(1)
        self.rows = TensorDict(
            {
                "observation": start + step,
                "action": start[:, :2],
                "trajectory": self._environment.clone(),
                "next": {
                    "observation": start + (step + 1),
                    "reward": torch.arange(count).unsqueeze(1) % 8.0,
                    "terminated": done,
                    "truncated": torch.zeros_like(done),
                    "done": done,
                },
            },
            [count],
        )
        if has_tasks:
            self.rows["task"] = self._environment % len(TASKS)

    def block(self, number: int) -> TensorDict:
        self.rows["trajectory"] = self._environment + number * ENVIRONMENTS
        return self.rows


def through_replay(variant: Variant) -> Callable[[int], int]:
    """Returns what stores block after block, draws from it and feeds back; returns its rows."""
    replay = variant.build(CAPACITY, BATCH, seed=0)
    steps = Steps(has_tasks=variant.recipe == "parallel_curriculum")

    def go_on(number: int) -> int:
        rows = steps.block(number)
        replay.extend(rows)
        batch = replay.sample()
        replay.update_priority(batch, batch["next", "reward"])
        if variant.n_steps > 1 and variant.recipe == "surprise_retention":
            replay.store_pending(rows["trajectory"][:ENVIRONMENTS:10].tolist())  # those that broke off
        return len(rows)

    return go_on


def through_levels() -> Callable[[int], int]:
    """Returns what plays levels without end, of which a buffer keeps some; one actor of ten dies in every block."""
    levels = level_steps.buffer(None, capacity=500, generate=_any_level)

    def go_on(number: int) -> int:
        for place in range(10):
            level = levels.next_level(place)
            if place:
                levels.update(place, level, level_steps.scored(float(level % 7)), episode_done=True)
            else:
                levels.abandon(place)
        return 10

    return go_on


def _any_level(generator: torch.Generator) -> int:
    return int(torch.randint(10**9, (), generator=generator))


def attack(name: str, rows: int) -> Report:
    """Writes rows through a buffer of :data:`KINDS`; the process must not grow after a fifth of them."""
    report, go_on = Report(), KINDS[name]()
    with report.round(f"endurance of {name}"):
        stored = number = before = 0
        started = time.monotonic()
        while stored < rows:
            stored += go_on(number)
            number += 1
            if not before and stored >= rows / 5:
                before = resident_bytes()
        growth = resident_bytes() - before
        report.count("rows", stored)
        report.count(f"KiB grown by {name}", growth >> 10)
        report.count(f"seconds of {name}", round(time.monotonic() - started))
        assert growth < GROWTH_BYTES, f"{growth:,} bytes more after {rows:,} rows than after a fifth of them"
    return report


def resident_bytes() -> int:
    """Resident bytes of this process (Linux with glibc), freed ones given back first: growth would go into them."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


#: One buffer of each kind, its rows of one step or of several.
KINDS: dict[str, Callable[[], Callable[[int], int]]] = {"levels": through_levels}
for _variant in VARIANTS:
    if not {"in_file", "frame_stack", "rule", "correction"} & _variant.chosen.keys():
        _crowded = Variant(_variant.recipe, (*_variant.options, ("max_trajectories", 2 * ENVIRONMENTS)))
        KINDS[str(_variant)] = partial(through_replay, _crowded if _variant.recipe == "event_tables" else _variant)
