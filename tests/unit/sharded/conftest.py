# SPDX-License-Identifier: Apache-2.0
"""Sharded replays that start in the process of the test."""

from __future__ import annotations

import pytest

from tests.unit.sharded.local_replay import started_here


@pytest.fixture
def local_replays(shared_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started_here(monkeypatch)
