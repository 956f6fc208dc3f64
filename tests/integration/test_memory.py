# SPDX-License-Identifier: Apache-2.0
"""A full buffer takes the memory that it reports, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks" / "speed"
RECIPES = ["uniform", "prioritized"]
KINDS = ["uniform", "retention, 1-step"]
MEASURE_EACH = """
import json, os, sys
import bench_frame_memory, bench_memory
import lightning_replay.lit.collection, lightning_replay.lit.rollouts
for code in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        print("measured", json.dumps(eval(code)), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"{code} failed")
"""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """What each expression gives in a process of its own, which is forked from one that has imported the libraries."""
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    codes = [f"bench_memory.growth_over_reported({recipe!r}, 200_000)" for recipe in RECIPES]
    codes += [f"bench_frame_memory.measure({kind!r}, 2_500, screen_size=168, per_write=4)" for kind in KINDS]
    command = [sys.executable, "-c", MEASURE_EACH, *codes]
    # Arrays of more than 64 KiB go back to the system when they are freed: by default glibc keeps more of them the
    # longer it runs, up to 32 MiB, which no buffer holds.
    environment = {**os.environ, "RL_LOGGING_LEVEL": "ERROR", "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("measured ")]
    values = [json.loads(line.removeprefix("measured ")) for line in lines]
    return dict(zip([*RECIPES, *(f"frames, {kind}" for kind in KINDS)], values, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_resident_size_is_within_five_percent_of_what_the_buffer_reports(measured: dict[str, Any], recipe: str) -> None:
    assert measured[recipe] == pytest.approx(1, abs=0.05)


# Images larger than usual, so that 5 % are more than a batch; over several steps a batch is many rows that wait.
@pytest.mark.parametrize("kind", KINDS)
def test_at_its_peak_a_buffer_of_atari_frames_takes_what_it_reports(measured: dict[str, Any], kind: str) -> None:
    found = measured[f"frames, {kind}"]
    assert found["rows"] == 2_500 and found["frames"] > 1_000
    assert found["reported"] > 50e6
    assert found["taken"] < 0.2 * found["reported"], "frames take memory as they come"
    for measure in ("peak", "left"):
        assert found[measure] / found["reported"] == pytest.approx(1, abs=0.05), measure
