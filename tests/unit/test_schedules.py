# SPDX-License-Identifier: Apache-2.0
"""Schedules read a clock and hold no state."""

from __future__ import annotations

import pytest

from lightning_replay.saving.spec import build, describe
from lightning_replay.schedules import Constant, Linear, checked_schedule


def test_constant() -> None:
    assert [Constant(0.4)(reading) for reading in (0, 10**9)] == [0.4, 0.4]
    assert Constant(1).clock == "draws"


def test_linear_goes_straight_and_stays() -> None:
    anneal = Linear(0.4, 1.0, duration=10, clock="env_steps")
    assert [anneal(reading) for reading in (-5, 0, 5, 10, 11)] == [0.4, 0.4, pytest.approx(0.7), 1.0, 1.0]
    assert anneal.clock == "env_steps"


def test_a_number_becomes_a_constant_and_a_schedule_stays() -> None:
    anneal = Linear(1.0, 0.0, duration=2)
    assert checked_schedule("share", anneal) is anneal
    assert checked_schedule("share", 0.5)(7) == 0.5


def test_a_schedule_can_be_described_and_built_again() -> None:
    again = build(describe(Linear(0.4, 1.0, duration=10, clock="updates")))
    assert again(5) == pytest.approx(0.7) and again.clock == "updates"
