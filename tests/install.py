# SPDX-License-Identifier: Apache-2.0
"""Runs pip and says in one line what it is doing; the Makefile builds ``.venv`` by it.

.. code-block:: shell

    .venv/bin/python tests/install.py --constraint constraints.txt --editable '.[lightning]'

The line shows the packages that pip has found, the file that it downloads, and the share that is installed. On a
terminal it is renewed in place. Elsewhere a line is printed every ten seconds. This module imports only the standard
library, because nothing else is installed yet.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FOUND = re.compile(r"(?:Collecting|Processing) (\S+)")
DOWNLOADED = re.compile(r"\s*Downloading (\S+?)(?:\.metadata)? \((.+)\)")
INSTALLED = re.compile(r"Installing collected packages: (.+)")


def installed_since(moment: float) -> int:
    """Returns how many packages were installed after a moment, in seconds since the epoch."""
    count = 0
    for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
        with suppress(FileNotFoundError):  # pip removes the files of an older version meanwhile
            count += path.stat().st_mtime >= moment
    return count


class Progress:
    """What the lines of pip tell.

    Args:
        count: function of a moment that returns how many packages were installed after it.
    """

    def __init__(self, count: Callable[[float], int] = installed_since) -> None:
        self.count = count
        self.lines: list[str] = []
        self.found: set[str] = set()
        self.download = ""
        self.begun = 0.0  # when pip begins to install, in seconds since the epoch
        self.total = 0  # packages to install, 0 until pip knows them

    def read(self, line: str) -> None:
        self.lines.append(line)
        if found := FOUND.match(line):
            self.found.add(Path(found[1]).name)
            self.download = ""
        elif downloaded := DOWNLOADED.match(line):
            self.download = f", downloading {downloaded[1].rpartition('/')[2]} ({downloaded[2]})"
        elif installed := INSTALLED.match(line):
            self.begun = time.time()
            self.total = len(installed[1].split(", "))

    def __str__(self) -> str:
        if not self.total:
            return f"{len(self.found)} packages found{self.download}"
        done = min(self.total, self.count(self.begun))
        bar = "#" * (20 * done // self.total)
        return f"[{bar:<20}] {done} of {self.total} packages installed"


def main() -> int:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    process = subprocess.Popen(
        [*command, *sys.argv[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    progress = Progress()
    reader = threading.Thread(target=lambda: [progress.read(line.rstrip()) for line in process.stdout])
    reader.start()
    started = time.monotonic()
    is_terminal = sys.stderr.isatty()
    shown = started
    while reader.is_alive():
        reader.join(0.2)
        now = time.monotonic()
        if is_terminal or now - shown >= 10 or not reader.is_alive():
            shown = now
            text = f"  {now - started:4.0f} s  {progress}"
            print(
                f"\r{text[:100]:<100}" if is_terminal else text,
                end="" if is_terminal else "\n",
                file=sys.stderr,
                flush=True,
            )
    if is_terminal:
        print(file=sys.stderr)
    status = process.wait()
    if status:
        print(*progress.lines[-40:], sep="\n", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
