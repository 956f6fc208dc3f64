# SPDX-License-Identifier: Apache-2.0
"""Nothing waits for the device: calls of replays with rows on a pretended device, counted in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CALLS = ("extend", "sample", "update_priority")
CASES = ("uniform", "prioritized", "n-step", "prioritized n-step", "hindsight", "sequences", "observations once")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.waits"]
    done = subprocess.run(command, cwd=root, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_where_slots_are_drawn_on_the_device(found: dict[str, Any], case: str, call: str) -> None:
    assert found[case][call]["waits"] == {}
    assert found[case][call]["copies"] == 0
    is_ignored = call == "update_priority" and "prioritized" not in case
    assert (found[case][call]["kernels"] > 0) is not is_ignored


@pytest.mark.parametrize("call", ["prepare", "draw", "update_priority"])
def test_static_draws_wait_for_nothing(found: dict[str, Any], call: str) -> None:
    assert found["static"][call]["waits"] == {} and found["static"][call]["copies"] == 0
    assert found["static"][call]["kernels"] > 0


def test_rows_on_the_cpu_are_refused_at_once(found: dict[str, Any]) -> None:
    assert "('next', 'reward') is nan in rows [0, 1" in found["rows on the CPU"]
    assert found["rows on the CPU"].endswith("Stored: 16")


def test_refusals_are_read_in_one_transfer(found: dict[str, Any]) -> None:
    waits = {call: found["read every 4 calls"][call]["waits"] for call in CALLS}
    # Twenty inserts and twenty updates are forty calls.
    assert [sum(waits[call].values()) for call in CALLS] != [0, 0, 0]
    assert {place.split(":")[0] for several in waits.values() for place in several} == {
        "copy to the CPU in deferred_checks.py"
    }


def test_the_pretended_device_sees_waits_of_draws_on_the_cpu(found: dict[str, Any]) -> None:
    assert all(found["drawn on the CPU"][call]["waits"] for call in ("extend", "update_priority"))
    assert found["drawn on the CPU"]["sample"]["copies"] > 0


@pytest.mark.parametrize("call", ["step", "store"])
@pytest.mark.parametrize("case", ["simulator", "simulator without last observations"])
def test_steps_of_a_simulator_wait_for_nothing(found: dict[str, Any], case: str, call: str) -> None:
    assert found[case][call]["waits"] == {} and found[case][call]["copies"] == 0
    assert found[case][call]["kernels"] > 0


def test_rows_that_are_left_out_are_read_in_each_step(found: dict[str, Any]) -> None:
    waits = found["simulator with skips"]["step"]["waits"]
    assert sum(waits.values()) == 1 and "collecting.py" in next(iter(waits))
