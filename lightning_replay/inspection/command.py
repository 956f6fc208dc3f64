# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``lightning-replay inspect``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lightning_replay.inspection.page import Subject, page_of, printable, text_about
from lightning_replay.inspection.saves import read_buffers
from lightning_replay.options import checked_local_path
from lightning_replay.saving.files import DamagedFileError

_DESCRIPTION = """Prints what a saved buffer holds, and writes a page of pictures.

PATH is the directory of save_replay, of LevelBuffer.save or of a sharded replay; an RLlib checkpoint or the folder
replay_buffer in it; a Lightning checkpoint (.ckpt) with its replay beside it, or the folder of that replay. No buffer
is built and no code is run: rows are read piece by piece, whatever the size of the buffer. The page is one HTML file
without scripts, for light and dark screens.
"""


def main(arguments: Sequence[str]) -> None:
    """Prints a summary of each buffer, and writes the page of ``--output``. An error is one line and status 2."""
    parser = argparse.ArgumentParser(
        prog="lightning-replay inspect", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="what was saved")
    parser.add_argument("--output", metavar="PAGE.html", type=Path, help="file of the page; its folder is created")
    given = parser.parse_args(arguments)
    if given.output is not None and given.output.is_dir():
        parser.error(f"--output is the folder {given.output}; give a file, such as {given.output / 'page.html'}")
    subjects = []
    try:
        checked_local_path("--output", given.output or "")
        for buffer in read_buffers(given.path):  # one after the other: each is printed as soon as it is read
            name = buffer.name or ("" if buffer.path == given.path else buffer.path.name)
            subjects.append(Subject(name, buffer.contents, buffer.size))
            _print(text_about(subjects[-1]))
    except (DamagedFileError, OSError, ValueError) as error:
        _refuse(str(error))
    if given.output is not None:
        page = page_of(f"Buffer {given.path.name or given.path}", str(given.path.resolve()), subjects)
        try:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(page, encoding="utf-8")
        except OSError as error:
            _refuse(f"--output is {str(given.output)!r}, which cannot be written ({error}); give another file")
        _print(f"pictures: {given.output}")


def _refuse(sentence: str) -> NoReturn:
    # Names in a damaged file may hold sequences that a terminal executes.
    print(f"lightning-replay inspect: error: {printable(sentence)}", file=sys.stderr)
    raise SystemExit(2)


def _print(text: str) -> None:
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:  # the reader, such as head, has enough; the page is written all the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
