# SPDX-License-Identifier: Apache-2.0
"""The example of a simulator, shortened."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
def test_the_example_trains(run_script: Any) -> None:
    (last,) = run_script("simulator.py")
    assert last.lstrip().startswith("1,920 steps: return ")
