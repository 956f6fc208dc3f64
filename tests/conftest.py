# SPDX-License-Identifier: Apache-2.0
"""What every test shares: one thread, fixed seeds, and for those that need it one Ray for each process of tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ADDRESS", "local")  # a cluster of its own for each process, whatever else runs
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import pytest
import torch

NUM_CPUS = 8
SECONDS_TO_FREE = 10.0

torch.set_num_threads(1)
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)  # some upstream environments draw from the global generator


@pytest.fixture
def fixtures() -> Path:
    """The folder of worked examples."""
    return Path(__file__).parent / "fixtures"


@pytest.fixture
def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that was written since, to be read as an object; the files are written, too."""
    figure = pytest.importorskip("matplotlib.figure")
    saved: list[Any] = []
    write = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *args, **options: (saved.append(self), write(self, *args, **options))
    )
    return saved


@pytest.fixture(scope="module")
def shared_ray() -> None:
    """A Ray of 8 CPUs, all of them free. It stays for the next file; files with a Ray of their own shut it down."""
    import ray

    if ray.is_initialized() and not _becomes_free():  # a test that failed has left its actors
        ray.shutdown()
    if not ray.is_initialized():
        ray.init(num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False)


@pytest.fixture
def run_example(
    shared_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Runs an RLlib example with ``--fast`` in ``tmp_path`` and returns the lines that it prints.

    It runs in this process and on the shared Ray: a process and a Ray for each example would take ten seconds more.
    """
    import ray

    def run(name: str, *arguments: str) -> list[str]:
        path = str(Path(__file__).parents[1] / "examples" / name)
        calls: list[str] = []

        def init(address: str, num_cpus: int, **options: Any) -> None:
            assert address == "local" and num_cpus <= NUM_CPUS
            calls.append("init")

        with monkeypatch.context() as patched:
            patched.chdir(tmp_path)
            patched.setattr(sys, "argv", [path, "--fast", *arguments])
            patched.setattr(ray, "init", init)
            patched.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
            runpy.run_path(path, run_name="__main__")
        assert calls == ["init", "shutdown"]
        return [line for line in capsys.readouterr().out.splitlines() if "(raylet)" not in line]

    return run


def _becomes_free() -> bool:
    import ray

    deadline = time.monotonic() + SECONDS_TO_FREE
    while ray.available_resources().get("CPU", 0) != NUM_CPUS:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
