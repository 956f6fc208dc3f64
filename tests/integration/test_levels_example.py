# SPDX-License-Identifier: Apache-2.0
"""The examples of levels outside Lightning and RLlib, shortened."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SMALLER = {  # mazes that are learned in a third of the steps
    "SIZE, MOVES = 7,": "SIZE, MOVES = 5,",
    "updates = 100 if options.fast": "updates = 40 if options.fast",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:of the last 1,000 replays:UserWarning")  # 500 mazes and few updates
def test_a_plain_loop_learns_mazes_it_was_never_trained_on(run_script: Any, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("matplotlib")
    code = (ROOT / "examples" / "plr_any_gymnasium_env.py").read_text()
    for large, small in SMALLER.items():
        assert code.count(large) == 1
        code = code.replace(large, small)
    (tmp_path / "smaller.py").write_text(code)
    *figures, last = run_script(str(tmp_path / "smaller.py"), "--directory", str(tmp_path / "new"))
    found = [re.fullmatch(r" *([\d,]+) steps: return (.+) held out, .+ trained on", line) for line in figures]
    assert [line and line[1] for line in found] == ["0", "10,240", "20,480", "30,720", "40,960"]
    held_out = [float(line[2]) for line in found if line]
    assert held_out[0] < 0.35 and held_out[-1] > 0.6
    picture = tmp_path / "new" / "score_against_staleness.png"
    assert last == f"written: {picture}" and picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".bench-procgen" / ".complete").exists(), reason="examples/plr_procgen.py builds it")
def test_procgen_returns_to_the_first_state_of_a_level() -> None:
    code = (
        "import numpy as np\n"
        "from plr_procgen import Procgen\n"
        "envs = Procgen('bigfish', 3)\n"
        "first, _ = envs.reset(seed=[4, 5, 4])\n"
        "assert (first[0] == first[2]).all() and (first[0] != first[1]).any()\n"
        "way = [envs.step(np.array([1, 2, 1]))[:3] for _ in range(30)]\n"
        "assert all((frames[0] == frames[2]).all() for frames, _, _ in way)\n"
        "mask = np.array([True, False, True])\n"
        "again, _ = envs.reset(seed=[4, 9, 5], options={'reset_mask': mask})\n"
        "assert (again[[0, 2]] == first[[0, 1]]).all() and (again[1] == way[-1][0][1]).all()\n"
        "for frames, rewards, ended in way:\n"
        "    seen = envs.step(np.array([1, 2, 1]))\n"
        "    assert (seen[0][0] == frames[0]).all() and seen[1][0] == rewards[0]\n"
        "envs.close()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "examples", timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr
