# SPDX-License-Identifier: Apache-2.0
"""What several files of integrations share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For command lines, which change what modules are imported from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def build() -> Iterator[Callable[[Any], Any]]:
    """Builds RLlib's algorithms after ``configure`` and stops them whatever happens."""
    import rllib_ext

    algorithms: list[Any] = []

    def built(config: Any) -> Any:
        algorithms.append(rllib_ext.configure(config).build_algo())
        return algorithms[-1]

    yield built
    for algorithm in algorithms:
        algorithm.stop()
