# SPDX-License-Identifier: Apache-2.0
"""Every public name has a known type, as ``pyright --verifytypes`` sees it: the second half of ``make typecheck``.

TorchRL and tensordict have annotations but do not declare them (``py.typed``). pyright then takes their classes, and
every class that derives from one, for unknown; so it reads a copy of theirs with the declaration.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lightning_replay", "rllib_ext")
UNDECLARED = ("tensordict", "torchrl")
#: Names whose type pyright cannot know, because of a host.
UNKNOWN = {"rllib_ext.buffer.images.ImageDQNModule"}  # derives from Ray's modules, whose torch may be missing


def declared_copies(folder: Path) -> None:
    """Copies the sources of hosts with annotations into a folder, and declares these."""
    for name in UNDECLARED:
        spec = find_spec(name)
        sources = Path(spec.origin).parent
        for file in sources.rglob("*.py"):
            copy = folder / name / file.relative_to(sources)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        (folder / name / "py.typed").touch()


def unknown_names(report: str) -> dict[str, list[str]]:
    """Returns the names without a known type in a report of pyright, with its reasons."""
    symbols = json.loads(report)["typeCompleteness"]["symbols"]
    return {
        symbol["name"]: [reason["message"] for reason in symbol["diagnostics"] if "docstring" not in reason["message"]]
        for symbol in symbols
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        declared_copies(Path(folder))
        # pyright asks the first Python of PATH for its folders; in a folder of its own the packages are installed ones.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", "pyright", "--ignoreexternal", "--outputjson", "--verifytypes"]
        empty = Path(folder) / "empty"
        empty.mkdir()
        checks = [
            subprocess.Popen([*command, package], cwd=empty, env=environment, stdout=subprocess.PIPE, text=True)
            for package in PACKAGES
        ]
        reports = [check.communicate()[0] for check in checks]
    found = {name: reasons for report in reports for name, reasons in unknown_names(report).items()}
    for name in sorted(found.keys() - UNKNOWN):
        for reason in found[name]:  # none where a name is unknown because of another
            print(f"{name}: {reason}")
    for name in sorted(UNKNOWN - found.keys()):
        print(f"{name} has a known type now: take it out of UNKNOWN in {Path(__file__).name}")
    counts = [json.loads(report)["typeCompleteness"]["exportedSymbolCounts"] for report in reports]
    total = sum(sum(count.values()) for count in counts)
    print(f"pyright: {total - len(found)} of {total} public names have a known type")
    return int(found.keys() != UNKNOWN or total == 0)


if __name__ == "__main__":
    sys.exit(main())
