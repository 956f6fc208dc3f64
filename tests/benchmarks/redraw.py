# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of experiments anew from their saved runs; nothing is trained.

python tests/benchmarks/redraw.py [NAME ...]
"""

from __future__ import annotations

import argparse
import importlib
import json

from experiment_tables import RESULTS

MODULES = {  # of draw_runs(content, path), by the name of the results
    "combination_lock": "experiment_combination_lock",
    "half_cheetah": "experiment_half_cheetah",
    "half_field": "curriculum_runs",
    "level_temperature": "experiment_level_temperature",
    "minatar": "experiment_minatar",
    "multi_room": "experiment_multi_room",
    "point_maze": "curriculum_runs",
    "three_rooms": "experiment_three_rooms",
    "two_rooms": "experiment_two_rooms",
}


def redraw(name: str) -> None:
    """Writes ``results/<name>.png`` from ``results/<name>.json``."""
    path = RESULTS / f"{name}.json"
    importlib.import_module(MODULES[name]).draw_runs(json.loads(path.read_text()), path.with_suffix(".png"))
    print(f"written: {path.with_suffix('.png')}")


def main() -> None:
    """Draws those named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODULES)}; all if absent")
    for name in parser.parse_args().names or MODULES:
        redraw(name)


if __name__ == "__main__":
    main()
