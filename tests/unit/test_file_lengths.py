# SPDX-License-Identifier: Apache-2.0
"""A file of the library holds one idea: 300 lines at most, or its first lines give the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for package in ("lightning_replay", "rllib_ext") for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_long_file_gives_the_reason_in_its_first_lines(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 300 or any(line.startswith("Longer than other files because") for line in lines[:5])
