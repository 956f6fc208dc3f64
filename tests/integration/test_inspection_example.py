# SPDX-License-Identifier: Apache-2.0
"""The example that looks at what stays, shortened, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_retention_keeps_older_rows_of_larger_returns_than_a_ring(tmp_path: Path) -> None:
    pytest.importorskip("minatar")
    pytest.importorskip("matplotlib")
    command = [sys.executable, "examples/inspect_retention.py", "--fast", "--directory", str(tmp_path / "new")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    cells = [re.split(r" {2,}", line.strip()) for line in lines[1:3]]
    assert [row[0] for row in cells] == ["first in, first out", "retention"]
    fifo, kept = ([float(cell) for cell in row[1:]] for row in cells)
    assert fifo[0] == kept[0] == 100 and fifo[2] == 99 < kept[2]
    assert kept[3] > fifo[3] and kept[4] > fifo[4]
    picture = tmp_path / "new" / "retention.png"
    assert lines[-1] == f"written: {picture}" and picture.read_bytes()[:4] == b"\x89PNG"
