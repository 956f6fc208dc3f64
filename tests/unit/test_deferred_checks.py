# SPDX-License-Identifier: Apache-2.0
"""Refusals that are collected on a device and raised by a later call."""

from __future__ import annotations

import pytest
import torch

from lightning_replay.deferred_checks import DeferredChecks

PROBLEMS = ["call {} of extend brought NaN", "call {} of extend brought a wrong flag"]


def test_the_first_wrong_call_is_raised_check_every_calls_later_and_once() -> None:
    checks = DeferredChecks(3, "cpu")
    for call in range(3):
        checks.begin("extend")
        checks.note("extend", PROBLEMS, torch.tensor([call < 1, True]))
    with pytest.raises(ValueError, match="^call 2 of extend brought NaN$"):
        checks.begin("extend")
    for _ in range(7):
        checks.begin("extend")
        checks.note("extend", PROBLEMS, torch.ones(2, dtype=torch.bool))
    checks.note("extend", PROBLEMS, torch.tensor([False, False]))
    with pytest.raises(ValueError, match=r"call 10 of extend brought NaN\. call 10 of extend brought a wrong flag"):
        checks.read()


def test_methods_count_their_own_calls_and_share_the_reads() -> None:
    checks = DeferredChecks(2, "cpu")
    checks.begin("extend")
    checks.begin("update_priority")
    checks.note("update_priority", ["call {} of update_priority is wrong"], torch.tensor(False))
    with pytest.raises(ValueError, match="call 1 of update_priority is wrong"):
        checks.begin("extend")


def test_registered_numbers_come_with_each_read() -> None:
    checks = DeferredChecks(2, "cpu")
    count = torch.tensor(5)
    received: list[int] = []
    checks.register(lambda: torch.stack((count, -count)), received.extend)
    checks.register(lambda: count.view(1) + 1, received.extend)
    for _ in range(5):
        checks.begin("extend")
        count += 1
    assert received == [7, -7, 8, 9, -9, 10]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="check_every is 0; it must be a whole number of calls from 1 on"):
        DeferredChecks(0, "cpu")
