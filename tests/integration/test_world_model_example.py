# SPDX-License-Identifier: Apache-2.0
"""The example that trains a world model on sequences, shortened."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
def test_the_last_step_of_a_sequence_is_predicted_better_than_at_the_beginning(run_script: Any) -> None:
    lines = run_script("world_model_sequences.py")
    assert lines[0] == "updates  error of the first step  of the last"
    errors = [float(line.split()[-1]) for line in lines[1:]]
    assert len(errors) == 5 and errors[-1] < 0.8 * errors[0]
