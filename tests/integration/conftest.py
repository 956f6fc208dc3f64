# SPDX-License-Identifier: Apache-2.0
"""What several files of integrations share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
def algorithms_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """RLlib's algorithms that the test has built are stopped, whatever happens."""
    from ray.rllib.algorithms.algorithm import Algorithm

    running: list[Algorithm] = []
    init, cleanup = Algorithm.__init__, Algorithm.cleanup

    def build(algorithm: Algorithm, *given: Any, **options: Any) -> None:
        init(algorithm, *given, **options)
        running.append(algorithm)

    monkeypatch.setattr(Algorithm, "__init__", build)
    monkeypatch.setattr(Algorithm, "cleanup", lambda one: (one in running and running.remove(one), cleanup(one))[1])
    yield
    for algorithm in list(running):
        algorithm.stop()
