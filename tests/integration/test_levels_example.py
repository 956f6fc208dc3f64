# SPDX-License-Identifier: Apache-2.0
"""The example of levels around a plain PPO loop, shortened, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_plain_loop_learns_mazes_it_was_never_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("matplotlib")
    command = [sys.executable, "examples/plr_any_gymnasium_env.py", "--fast", "--directory", str(tmp_path / "new")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    *figures, last = result.stdout.splitlines()
    found = [re.fullmatch(r" *([\d,]+) steps: return (.+) held out, .+ trained on", line) for line in figures]
    assert [line and line[1] for line in found] == ["0", "25,600", "51,200", "76,800", "102,400"]
    held_out = [float(line[2]) for line in found if line]
    assert held_out[0] < 0.35 and held_out[-1] > 0.5
    picture = tmp_path / "new" / "score_against_staleness.png"
    assert last == f"written: {picture}" and picture.read_bytes()[:4] == b"\x89PNG"
