# SPDX-License-Identifier: Apache-2.0
"""The example that looks at what stays, shortened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_retention_keeps_older_rows_of_larger_returns_than_a_ring(run_script: Any, tmp_path: Path) -> None:
    pytest.importorskip("minatar")
    pytest.importorskip("matplotlib")
    lines = run_script("inspect_retention.py", "--directory", str(tmp_path / "new"))
    cells = [re.split(r" {2,}", line.strip()) for line in lines[1:3]]
    assert [row[0] for row in cells] == ["first in, first out", "retention"]
    fifo, kept = ([float(cell) for cell in row[1:]] for row in cells)
    assert fifo[0] == kept[0] == 100 and fifo[2] == 99 < kept[2]
    assert kept[3] > fifo[3] and kept[4] > fifo[4]
    picture = tmp_path / "new" / "retention.png"
    assert lines[-1] == f"written: {picture}" and picture.read_bytes()[:4] == b"\x89PNG"
