# SPDX-License-Identifier: Apache-2.0
"""A full buffer takes the memory it says, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks" / "speed"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_resident_size_is_within_five_percent_of_what_the_buffer_says(recipe: str) -> None:
    printed = run(f"import bench_memory; print(bench_memory.grown_over_said({recipe!r}, 200_000))")
    assert float(printed) == pytest.approx(1, abs=0.05)


# Images larger than usual, so that 5 % are more than a batch; over several steps a batch is many rows that wait.
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["uniform", "retention, 1-step"])
def test_at_its_peak_a_buffer_of_atari_frames_takes_what_it_says(kind: str) -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    measure = f"bench.measure({kind!r}, 2_500, screen_size=168, per_write=4)"
    printed = run(f"import json, bench_frame_memory as bench; print(json.dumps({measure}))")
    found = json.loads(printed.splitlines()[-1])
    assert found["rows"] == 2_500 and found["frames"] > 1_000
    assert found["said"] > 50e6
    assert found["taken"] < 0.2 * found["said"], "frames take memory as they come"
    for measured in ("peak", "left"):
        assert found[measured] / found["said"] == pytest.approx(1, abs=0.05), measured


def run(code: str) -> str:
    """What a process of its own prints, started beside the benchmarks."""
    environment = {**os.environ, "RL_LOGGING_LEVEL": "ERROR"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=BENCHMARKS, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
