# SPDX-License-Identifier: Apache-2.0
"""The example of recent rows, shortened."""

from __future__ import annotations

import re
from typing import Any

import pytest


@pytest.mark.slow
def test_rows_drawn_with_an_age_are_newer_and_fewer(run_script: Any) -> None:
    _, *lines = run_script("recent_rows.py")
    cells = {name: figures for name, *figures in (re.split(r" {2,}", line) for line in lines)}
    age, newest, effective = (
        {name: float(row[i].strip("%").replace(",", "")) for name, row in cells.items()} for i in range(3)
    )
    for recent, plain in (("truncated geometric", "uniform"), ("faded prioritized", "prioritized")):
        assert age[recent] < 0.95 * age[plain] and newest[recent] > newest[plain]
        assert effective[recent] < effective[plain]
