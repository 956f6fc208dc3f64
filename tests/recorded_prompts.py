# SPDX-License-Identifier: Apache-2.0
"""Runs a script, and writes down the outcomes that each process gives to level buffers.

``recorded_prompts.py FILE STOP SCRIPT ARGUMENTS`` adds one line of JSON to ``FILE-RANK`` for each call of ``record``:
ids and outcomes. The process ends before call number ``STOP`` as if it were killed; 0 never ends it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from lightning_replay.levels import LevelBuffer


def main() -> None:
    name, stop, *sys.argv = sys.argv[1:]
    path = Path(f"{name}-{os.environ.get('RANK', '0')}")
    calls = 0
    record = LevelBuffer.record

    def recorded(self: LevelBuffer, level_id: Any, score: object = None, *, outcomes: Any = None) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(stop):
            os._exit(1)
        with path.open("a") as file:
            print(json.dumps([list(level_id), list(outcomes)]), file=file)
        return record(self, level_id, score, outcomes=outcomes)

    LevelBuffer.record = recorded
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
