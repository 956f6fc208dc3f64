# SPDX-License-Identifier: Apache-2.0
"""Saves killed at random moments: what loads afterwards is the save before or the new one, exactly."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

from lightning_replay.saving import DamagedFileError
from tests.attack.report import Report
from tests.attack.subjects import Subject


class Killer:
    def __init__(self, subject: Subject, report: Report) -> None:
        self.subject, self.report = subject, report
        self.seconds = 0.0  # that a save in a forked process takes
        self.save()

    def save(self) -> None:
        """A save that is not killed."""
        self.subject.save()
        started = time.monotonic()
        os.waitpid(self.begin(), 0)
        self.seconds = time.monotonic() - started
        self.before = self.subject.state()
        assert self.subject.load() == self.before, "a save that nobody killed loads something else"

    def begin(self) -> int:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                self.subject.save()
            os._exit(0)
        return child

    def kill(self) -> None:
        """Saves a changed subject in a forked process, which is killed during the save."""
        subject = self.subject
        subject.change()
        new = subject.state()
        child = self.begin()
        time.sleep(subject.random.uniform(0, 1.2 * self.seconds))
        os.kill(child, signal.SIGKILL)
        is_late = os.waitpid(child, 0)[1] == 0
        self.report.count("kills that came late" if is_late else "kills")
        self.seconds *= 0.97 if is_late else 1.01
        try:
            found = subject.load()
        except DamagedFileError as error:
            assert subject.may_be_refused, f"a save killed over another leaves nothing: {error}"
            self.report.count("refused")
            self.save()
            return
        assert found in (self.before, new), "what loads after a kill is neither the save before nor the new one"
        self.report.count("new ones loaded" if found == new else "old ones loaded")
        self.before = found


def attack(kind: type[Subject], seed: int, kills: int) -> Report:
    """Kills saves into one place; kills that came after the save had ended are not counted."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        subject = kind(Path(folder), seed)
        try:
            with report.round(f"kills of {kind.name} {seed}"):
                killer = Killer(subject, report)
                while report.figures["kills"] < kills:
                    killer.kill()
                for _ in range(subject.kept):
                    subject.change()
                    killer.save()
                check_nothing_left(subject, report)
        finally:
            subject.close()
    return report


def check_nothing_left(subject: Subject, report: Report) -> None:
    """Compares the files after a save that ends with those of a save elsewhere: nothing of the killed ones is left."""
    files = count_files(subject.place.parent)
    with tempfile.TemporaryDirectory() as fresh:
        subject.place = Path(fresh) / subject.place.name
        for _ in range(subject.kept):
            subject.save()
        expected = count_files(Path(fresh))
    assert files == expected, f"killed saves left files: {files} instead of {expected}"


def count_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*") if not path.name.startswith("."))
