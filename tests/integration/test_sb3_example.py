# SPDX-License-Identifier: Apache-2.0
"""The example of Stable-Baselines3's DQN, in its short form."""

from __future__ import annotations

import re
from typing import Any

import pytest


@pytest.mark.slow
def test_dqn_trains_with_each_buffer_and_the_cost_of_a_step_is_printed(run_script: Any) -> None:
    _, *lines = run_script("sb3_prioritized.py")
    found = [re.fullmatch(r"(\S.*\S) +(\d+\.\d) +(\d+)", line) for line in lines]
    assert [line and line[1] for line in found] == ["Stable-Baselines3's own", "prioritized", "steps before a fall"]
