# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from .local_shards import start_locally


@pytest.fixture
def local_shards(shared_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    start_locally(monkeypatch)
