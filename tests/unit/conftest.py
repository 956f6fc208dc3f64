# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from lightning_replay.saving import chunks
from lightning_replay.saving import states as saved_state


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    """Stores the rows of ``tests.saves.stored`` in 13 chunks of 16 rows, 64 bytes each, with 8 rows in the last."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(saved_state, "LARGE_BYTES", 6000)
