# SPDX-License-Identifier: Apache-2.0
"""The examples of levels in other people's loops, in their short form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"),
    [("sb3", "stable_baselines3"), ("cleanrl", "torch"), ("torchrl", "torchrl"), ("make_vec", "gymnasium")],
)
def test_a_loop_trains_with_uniform_levels_and_with_replay(
    run_script: Any, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    pytest.importorskip(package)
    pytest.importorskip("gymnasium")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")  # for locks.py, beside them
    lines = run_script(f"levels_{name}.py")
    found = [re.fullmatch(r"(.+): held-out return (0\.\d+), ([\d,]+) episodes", line) for line in lines]
    assert [line and line[1] for line in found] == ["uniform levels", "level replay"]
    for line in found:
        assert line is not None and int(line[3].replace(",", "")) > 500
