# SPDX-License-Identifier: Apache-2.0
"""Times several contenders for one piece of work in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Work = Callable[[], object]
Burst = Callable[[int], float]
RESULTS = Path(__file__).resolve().parents[1] / "results"


def burst_of(work: Work) -> Burst:
    """Turns one call into a function of a number of calls that returns the median microseconds of a call."""

    def burst(calls: int) -> float:
        return statistics.median(microseconds(work) for _ in range(calls))

    return burst


def microseconds(work: Work) -> float:
    """Of one call."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


@dataclass
class Table:
    """Microseconds of named contenders per piece of work, and how their ratios compare with the targets."""

    title: str
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    targets: list[dict[str, object]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def measure(self, work: str, contenders: dict[str, Burst], *, rounds: int = 9, seconds: float = 0.15) -> None:
        """Runs every contender once per round and keeps the median over the rounds."""
        calls = {name: max(3, min(2000, int(seconds / (burst(3) * 1e-6)))) for name, burst in contenders.items()}
        bursts: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, burst in contenders.items():
                bursts[name].append(burst(calls[name]))
        self.keep(work, bursts)

    def measure_in_turns(self, work: str, contenders: dict[str, Work], *, rounds: int = 9) -> None:
        """Medians of calls of this process that take turns, so that each finds the caches as another left them."""
        slowest = max(min(microseconds(each) for _ in range(3)) for each in contenders.values())
        calls = max(5, min(500, int(200_000 / slowest))) * rounds
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(calls):
            for name, each in contenders.items():
                samples[name].append(microseconds(each))
        self.keep(work, samples)

    def keep(self, work: str, samples: dict[str, list[float]]) -> None:
        self.times[work] = {name: statistics.median(values) for name, values in samples.items()}
        row = "  ".join(f"{name} {value:.1f}" for name, value in self.times[work].items())
        print(f"{work}: {row}  (us)", flush=True)

    def at_most(self, target: str, ratio: float, limit: float) -> None:
        """Records a ratio that should not exceed ``limit``."""
        self._record(target, ratio, "at most", limit, ratio <= limit)

    def at_least(self, target: str, ratio: float, limit: float) -> None:
        """Records a ratio that should reach ``limit``."""
        self._record(target, ratio, "at least", limit, ratio >= limit)

    def faster(self, target: str, work: str, ours: str, peer: str, factor: float) -> None:
        """Records that ``ours`` should be ``factor`` times faster than ``peer``, which may be missing."""
        times = self.times[work]
        if peer in times:
            self.at_least(f"{target} {work}: {ours} faster than {peer}", times[peer] / times[ours], factor)
        else:
            print(f"   --   {target} {work}: {peer} is missing ({self.missing.get(peer, 'not measured')})")

    def _record(self, target: str, ratio: float, word: str, limit: float, met: bool) -> None:
        self.targets.append({"target": target, "value": ratio, word: limit, "met": met})
        print(f"  {'met' if met else 'NOT MET':>7}  {target}: {ratio:.3g} ({word} {limit:g})", flush=True)

    def finish(self, *, save: bool, name: str) -> None:
        """Names the missing peers and, when asked, writes ``results/<name>.json``."""
        for peer, reason in self.missing.items():
            print(f"missing: {peer}: {reason}")
        if save:
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"{name}.json"
            content = {"title": self.title, "us": self.times, "targets": self.targets, "missing": self.missing}
            path.write_text(json.dumps(content, indent=1) + "\n")
            print(f"written: {path}")
