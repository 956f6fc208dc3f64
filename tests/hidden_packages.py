# SPDX-License-Identifier: Apache-2.0
"""Python processes in which installed packages are absent: neither importable nor known by their metadata."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def site_packages_without(directory: Path, modules: Sequence[str]) -> Path:
    """Fills a new folder with links to all that is installed, except the distributions that bring ``modules``."""
    owners = metadata.packages_distributions()
    hidden: set[str] = set()
    for name in {owner for module in modules for owner in owners.get(module, [])}:
        hidden |= {file.parts[0] for file in metadata.distribution(name).files or [] if file.parts[0] != ".."}
    directory.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name not in hidden - {"__pycache__"} and entry.suffix != ".pth":
            (directory / entry.name).symlink_to(entry)
    return directory


def run_without(modules: Sequence[str], arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    installed = site_packages_without(folder / f"without_{'_'.join(modules)}", modules)
    path = os.pathsep.join([str(ROOT), str(installed)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", *arguments]  # without the site-packages of this process
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
