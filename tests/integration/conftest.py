# SPDX-License-Identifier: Apache-2.0
"""What several files of integrations share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
    setup, cleanup = Algorithm.setup, Algorithm.cleanup
    monkeypatch.setattr(Algorithm, "setup", lambda one, config: (setup(one, config), running.append(one)))
    monkeypatch.setattr(Algorithm, "cleanup", lambda one: (one in running and running.remove(one), cleanup(one))[1])
    yield
    for algorithm in list(running):
        with suppress(AttributeError):  # of one that was refused after RLlib had set it up
            algorithm.stop()
