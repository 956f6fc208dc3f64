# SPDX-License-Identifier: Apache-2.0
"""Files of saves damaged: a bit flipped, the end cut off, a file gone, a file of another save in its place."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_replay.saving import DamagedFileError
from tests.attack.report import Report
from tests.attack.subjects import RecipeSubject, Subject
from tests.attack.variants import VARIANTS, Variant
from tests.saves import files_of


class Damager:
    def __init__(self, subject: Subject, folder: Path, report: Report) -> None:
        self.subject, self.report, self.folder = subject, report, folder
        subject.save()
        self.earlier = Path(shutil.copytree(folder, folder.with_name("earlier")))
        subject.change()
        subject.save()
        self.whole = subject.state()
        assert subject.load() == self.whole, "a save that nobody damaged loads something else"
        self.files = files_of(folder)

    def damage(self, number: int) -> None:
        file = self.files[number % len(self.files)]
        ways = [self._flip, self._flip, self._flip, self._cut, self._remove, self._exchange]
        way = self.subject.random.choice(ways)
        content = file.read_bytes()
        what = f"{way.__name__} {file.name}"
        file.unlink()  # not written over: other saves may be linked with it
        way(file, content)
        try:
            self._load(what, is_gone=not file.exists())
        finally:
            file.unlink(missing_ok=True)
            file.write_bytes(content)
        self.report.count(way.__name__.lstrip("_"))

    def _load(self, what: str, *, is_gone: bool) -> None:
        try:
            found = self.subject.load()
        except DamagedFileError:
            self.report.count("refused as damaged")
        except Exception as error:
            is_said = is_gone and isinstance(error, FileNotFoundError)
            assert is_said or self.subject.refuses_by_others, f"{what} ends in {type(error).__name__}: {error}"
            self.report.count("refused as missing" if is_said else "refused by other libraries")
        else:
            assert found == self.whole, f"{what} loads with other behaviour"
            self.report.count("without effect")

    def _flip(self, file: Path, content: bytes) -> None:
        flipped = bytearray(content)
        bit = self.subject.random.randrange(8 * len(flipped)) if flipped else 0
        if flipped:
            flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bytes(flipped))

    def _cut(self, file: Path, content: bytes) -> None:
        file.write_bytes(content[: self.subject.random.randrange(len(content) + 1)])

    def _remove(self, file: Path, content: bytes) -> None:
        pass

    def _exchange(self, file: Path, content: bytes) -> None:
        others = [path for path in files_of(self.earlier) if path.suffix == file.suffix]
        same_name = [path for path in others if path.name == file.name]
        file.write_bytes(self.subject.random.choice(same_name or others or [file]).read_bytes() if others else content)


def attack(build: Callable[[Path], Subject], name: str, count: int) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "saves"
        place.mkdir()
        subject = build(place)
        try:
            with report.round(f"damages of {name}"):
                damager = Damager(subject, place, report)
                for number in range(count):
                    with report.round(f"damage {number} of {name}"):
                        damager.damage(number)
        finally:
            subject.close()
    return report


def attack_recipes(seed: int, count: int, variants: list[Variant] = VARIANTS) -> Report:
    report = Report()
    for place, variant in enumerate(variants):
        build = partial(RecipeSubject, seed=1_000 * seed + place, variant=variant)
        report.add(attack(build, str(variant), count))
    return report
