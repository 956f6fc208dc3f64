# SPDX-License-Identifier: Apache-2.0
"""A full buffer takes the memory it says, measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_resident_size_is_within_five_percent_of_what_the_buffer_says(recipe: str) -> None:
    code = f"import bench_memory; print(bench_memory.grown_over_said({recipe!r}, 200_000))"
    environment = {**os.environ, "RL_LOGGING_LEVEL": "ERROR"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=BENCHMARKS, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) == pytest.approx(1, abs=0.05)
