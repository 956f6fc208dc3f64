# SPDX-License-Identifier: Apache-2.0
"""T14: environment steps with their updates, end to end: ours beside a single-file loop and three libraries, in turns.

    python tests/benchmarks/speed/bench_end_to_end.py --save          # about ten minutes
    python tests/benchmarks/speed/bench_end_to_end.py --works dqn --rounds 5
    python tests/benchmarks/speed/bench_end_to_end.py --no-libraries --rounds 80    # about eight minutes

Every contender trains in a process of its own, with the same environment, networks, batches and one numerical thread;
see ``end_to_end/``. They take turns of a few hundred steps, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from end_to_end.turns import WORKS
from peers import PeerError, build
from timing import RESULTS, Table

from lightning_replay.inspection.plotting import make_figure, save_figure

HERE = Path(__file__).resolve().parent
OURS = "ours, Lightning"
SINGLE_FILE = "single file, fused Adam"
CONTENDERS = {  # module, argument and environment (None for this one)
    OURS: ("ours", "lightning", None),
    "ours, Lightning, prioritized": ("ours", "prioritized", None),
    "ours, bare loop": ("ours", "bare", None),
    SINGLE_FILE: ("single_file", "", None),
    "Stable-Baselines3": ("sb3", "", "sb3"),
    "TorchRL": ("torchrl_scripts", "", None),
    "tianshou": ("tianshou_runs", "", "tianshou"),
}
ONLY_REPLAY = ("ours, Lightning, prioritized", "ours, bare loop")
WARM_TURNS = 3  # not counted
LIMIT = 1.0  # of the best of the others


class Contender:
    """A process that trains when it has the turn."""

    def __init__(self, work: str, module: str, argument: str, environment: str | None) -> None:
        python = sys.executable if environment is None else str(build(environment))
        command = [python, str(HERE / "end_to_end" / f"{module}.py"), work, argument]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()

    def turn(self) -> dict[str, float]:
        """Lets it train one block; returns microseconds per environment step, by the clock and of the processor."""
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{' '.join(self._process.args[1:])} ended")  # type: ignore[index]
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def measure(work: str, rounds: int, table: Table, has_libraries: bool) -> dict[str, dict[str, float]]:
    """Returns the medians of the contenders, and the medians of their ratios in the same round."""
    contenders = {}
    for name, command in CONTENDERS.items():
        if work == "ppo" and name in ONLY_REPLAY:
            continue
        if not has_libraries and not name.startswith(("ours", "single file")):
            continue
        try:
            contenders[name] = Contender(work, *command)
        except (PeerError, OSError) as error:
            table.missing[f"{name}, {work}"] = str(error)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(WARM_TURNS + rounds):
        for name, contender in contenders.items():
            turns[name].append(contender.turn())
    for contender in contenders.values():
        contender.close()
    counted = {name: found[WARM_TURNS:] for name, found in turns.items()}
    result = {}
    for name, found in counted.items():
        result[name] = {key: statistics.median(each[key] for each in found) for key in ("wall", "cpu")}
        result[name]["ours over it"] = _median_ratio(counted[OURS], found)
        result[name]["over the single file"] = _median_ratio(found, counted[SINGLE_FILE])
    return result


def _median_ratio(turns: list[dict[str, float]], others: list[dict[str, float]]) -> float:
    return statistics.median(turn["cpu"] / other["cpu"] for turn, other in zip(turns, others, strict=True))


def draw(found: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Bars of every contender, a panel for each work."""
    figure, grid = make_figure("the picture of the benchmark", len(found), 1, 2.2 * len(found), 4.4)
    for axes, (work, times) in zip(grid.flat, found.items(), strict=True):
        names = list(reversed(times))
        bars = axes.barh(names, [times[name]["wall"] for name in names])
        for bar, name in zip(bars, names, strict=True):
            bar.set_color("tab:blue" if name == OURS else "tab:cyan" if name.startswith("ours") else "tab:gray")
        axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize="small")
        axes.set_xlim(0, 1.3 * max(times[name]["wall"] for name in names))  # for the labels
        axes.set_title(f"{work.upper()}, {WORKS[work].env}", fontsize="medium")
        axes.tick_params(labelsize="small")
    figure.suptitle("Microseconds per environment step\nwith its update, one core")
    save_figure(figure, path)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=25, help="turns of each contender")
    parser.add_argument(
        "--libraries", action=argparse.BooleanOptionalAction, default=True, help="measure the other libraries as well"
    )
    parser.add_argument("--save", action="store_true", help="write results/end_to_end.json and .png")
    options = parser.parse_args()
    table = Table("microseconds per environment step with its update")
    found = {}
    for work in options.works:
        found[work] = measure(work, options.rounds, table, options.libraries)
        print(f"{work}: {WORKS[work].env}, {WORKS[work].hidden_sizes}, batches of {WORKS[work].batch_size}")
        for name, times in found[work].items():
            print(
                f"  {name:30} {times['wall']:9.0f} us  {times['cpu']:9.0f} us of CPU, "
                f"ours over it {times['ours over it']:.2f}, it over the single file {times['over the single file']:.2f}"
            )
        others = {name: times for name, times in found[work].items() if not name.startswith("ours")}
        best = min(others, key=lambda name: others[name]["cpu"])
        table.at_most(f"T14 {work}: {OURS} over {best}", others[best]["ours over it"], LIMIT)
    for contender, reason in table.missing.items():
        print(f"missing: {contender}: {reason}")
    if options.save:
        content = {"title": table.title, "works": found, "targets": table.targets, "missing": table.missing}
        (RESULTS / "end_to_end.json").write_text(json.dumps(content, indent=1) + "\n")
        draw(found, RESULTS / "end_to_end.png")


if __name__ == "__main__":
    main()
