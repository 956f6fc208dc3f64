# SPDX-License-Identifier: Apache-2.0
"""Units of an experiment, an arm with a group of seeds: carried out once, kept in a folder, resumable."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.learning.experiment import Experiment, Settings, hash_of, slug
from tests.benchmarks.learning.recorder import CHECKPOINT_SECONDS, OutOfTimeError, Recorder

ROOT = Path(__file__).resolve().parents[3]
ANEW = "begun-anew"  # a file in the folder of an experiment's units


class UsageError(ValueError):
    """A command that cannot be carried out as given; the message is for whoever typed it."""


@dataclass(frozen=True)
class Unit:
    """An arm with a group of seeds.

    Args:
        experiment: with the arm.
        arm: its name.
        seeds: stacked in one run.
        state: folder of the experiment's units.
    """

    experiment: Experiment
    arm: str
    seeds: tuple[int, ...]
    state: Path

    @property
    def folder(self) -> Path:
        """Folder of ``settings.json``, ``checkpoints`` and, when finished, ``unit.json``."""
        return self.state / slug(self.arm) / (str(self.seeds[0]) + (f"-{self.seeds[-1]}" if self.seeds[1:] else ""))

    @property
    def settings(self) -> Settings:
        """Settings of the arm, which with the seeds decide the results."""
        return self.experiment.settings_of(self.arm)

    @property
    def is_finished(self) -> bool:
        """Whether its results are kept."""
        return (self.folder / "unit.json").exists()

    def results(self) -> dict[str, Any]:
        """Returns what was recorded, with ``arm``, ``seeds``, ``settings_hash``, ``commit`` and ``seconds``."""
        return json.loads((self.folder / "unit.json").read_text())

    def recorded(self) -> dict[str, Any]:
        """Returns the results, or of an unfinished unit all that its newest checkpoint holds of them."""
        if self.is_finished:
            return self.results()
        self.check_settings()
        return self._made() | Recorder(self.seeds, self.folder / "checkpoints").content

    def check_settings(self) -> None:
        """Refuses a unit that was begun with other settings or another group of seeds.

        Raises:
            UsageError: with the settings that differ.
        """
        path = self.folder / "settings.json"
        if not path.exists():
            return
        kept, given = json.loads(path.read_text()), {"settings": self.settings, "seeds": list(self.seeds)}
        if hash_of(kept) == hash_of(given):
            return
        kept, given = ({"seeds": each["seeds"], **each["settings"]} for each in (kept, given))
        differ = sorted(key for key in kept | given if kept.get(key) != given.get(key))
        words = ", ".join(f"{key} {kept.get(key)!r} (now {given.get(key)!r})" for key in differ)
        raise UsageError(
            f"{self.experiment.name}, {self.arm}: {self.folder} was begun with {words}. Restore these settings, or set "
            "the kept units aside with --restart."
        )

    def keep(self, results: dict[str, Any]) -> None:
        """Writes results, which finishes the unit."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "settings.json", {"settings": self.settings, "seeds": list(self.seeds)})
        _write(self.folder / "unit.json", results)

    def carry_out(self, deadline: float = float("inf"), checkpoint_seconds: float = CHECKPOINT_SECONDS) -> None:
        """Runs the unit, from its last checkpoint if there is one, and keeps its results.

        Raises:
            OutOfTimeError: the deadline, a ``time.time()``, passed; the unit can be resumed.
        """
        self.check_settings()
        settings, checkpoints = self.settings, self.folder / "checkpoints"
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "settings.json", {"settings": settings, "seeds": list(self.seeds)})
        out = Recorder(self.seeds, checkpoints, deadline, checkpoint_seconds)
        self.experiment.run(settings, self.seeds, out)
        self.keep(self._made() | out.content)
        shutil.rmtree(checkpoints, ignore_errors=True)

    def _made(self) -> dict[str, Any]:
        made = {"arm": self.arm, "seeds": list(self.seeds)}
        return made | {"settings_hash": hash_of(self.settings), "commit": commit()}

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Locks the unit until the end of the block; yields False where another process holds the lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True


def units_of(experiment: Experiment, seeds: Sequence[int], arms: Sequence[str], state: Path) -> list[Unit]:
    """Returns the units of seeds and arms, all arms of the first seeds before the next seeds."""
    size = experiment.seeds_together
    groups = [tuple(seeds[start : start + size]) for start in range(0, len(seeds), size)]
    return [Unit(experiment, arm, group, state) for group in groups for arm in arms]


def carry_out_all(units: Sequence[Unit], deadline: float, report: Callable[[str], None] = print) -> None:
    """Carries out the units that are not finished and that no other process runs, until the deadline."""
    for unit in units:
        unit.check_settings()  # before hours are spent
    for number, unit in enumerate(units, 1):
        if unit.is_finished or time.time() >= deadline:
            continue
        with unit.claim() as is_ours:
            if not is_ours or unit.is_finished:
                continue
            try:
                unit.carry_out(deadline)
            except OutOfTimeError:
                report(f"{unit.experiment.name}: {unit.arm}, seeds {list(unit.seeds)}: to be resumed")
                return
            seconds = unit.results()["seconds"]
            report(
                f"[{number}/{len(units)}] {unit.experiment.name}: {unit.arm}, seeds {list(unit.seeds)}: {seconds:.1f} s"
            )


def carry_out_in_turn(units: Sequence[Unit], deadline: float, report: Callable[[str], None] = print) -> None:
    """Carries out units one checkpoint at a time, always the unit with the fewest points, until the deadline.

    All units then have about the same length at any time, and :func:`cut_to_common_length` loses little.
    """
    for unit in units:
        unit.check_settings()  # before hours are spent
    while time.time() < deadline and _advance_one([unit for unit in units if not unit.is_finished], report):
        pass


def _advance_one(units: Sequence[Unit], report: Callable[[str], None]) -> bool:
    """Carries out the least advanced unit up to its next checkpoint; returns whether there was one to carry out."""
    for unit in sorted(units, key=lambda unit: len(unit.recorded()["steps"])):
        with unit.claim() as is_ours:
            if not is_ours or unit.is_finished:
                continue
            with suppress(OutOfTimeError):
                unit.carry_out(deadline=time.time())
            content = unit.recorded()
            report(f"{unit.experiment.name}: {unit.arm}: {content['steps'][-1]:,} steps, {content['seconds']:,.0f} s")
            return True
    return False


def cut_to_common_length(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """Returns what units recorded, finished or not, up to the last step that all of them have reached.

    If a unit is shorter than the longest one, all of them have the key ``cut_at``, the last step.

    Raises:
        UsageError: a unit has no checkpoint yet.
    """
    contents = [unit.recorded() for unit in units]
    if absent := [each["arm"] for each in contents if not each["steps"]]:
        raise UsageError(f"--cut needs a checkpoint of every unit; units of {', '.join(absent)} have none. Run longer.")
    points = min(len(each["steps"]) for each in contents)
    if all(unit.is_finished for unit in units):
        return contents
    for each in contents:
        each["steps"] = each["steps"][:points]
        each["curves"] = {name: curve[:points] for name, curve in each["curves"].items()}
        each["final"] = {}
        each["cut_at"] = each["steps"][-1]
    return contents


def take_finished(units: Sequence[Unit], path: Path) -> None:
    """Restores the finished units from the results of an unfinished experiment, so that any machine goes on with it.

    Complete results are not taken: whoever repeats an experiment computes all of it.

    Args:
        units: of the experiment; those with other settings than the results are not taken.
        path: of ``NAME.json``, which need not exist.
    """
    if not path.exists():
        return
    content = json.loads(path.read_text())
    if not content["missing"]:
        return
    written = {(each["arm"], tuple(each["seeds"]), each["settings_hash"]): each for each in content["units"]}
    for unit in units:
        found = written.get((unit.arm, unit.seeds, hash_of(unit.settings)))
        if found is not None and not unit.is_finished:
            unit.keep(found)


def set_aside(state: Path) -> None:
    """Renames the folder of an experiment's units, so that it begins anew and nothing is lost."""
    if state.exists():
        number = 1 + len(list(state.parent.glob(f"{state.name}.old-*")))
        state.rename(state.with_name(f"{state.name}.old-{number}"))
    state.mkdir(parents=True)
    (state / ANEW).touch()


def begins_anew(state: Path) -> bool:
    """Whether the units of earlier results were set aside, so that later commands do not take them either."""
    return (state / ANEW).exists()


def commit() -> str:
    """Returns the checked-out commit, with ``+`` where files that decide results differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    sources = ("lightning_replay", "rllib_ext", "configs", "tests/benchmarks/learning")
    changed = git("status", "--porcelain", "--untracked-files=no", *sources)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def _write(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content) + "\n")
    os.replace(part, path)
