# SPDX-License-Identifier: Apache-2.0
"""What every test shares: one thread, fixed seeds, and for those that need it one Ray for each process of tests."""

from __future__ import annotations

import gc
import inspect
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ADDRESS", "local")  # a cluster of its own for each process, whatever else runs
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray gives its workers niceness 15. On a busy machine they then wait until a test has timed out.
os.environ.setdefault("RAY_worker_niceness", "0")

import logging
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import pytest
import torch

from tests.ray_cpus import become_free
from tests.startup import frames
from tests.startup.ray_workers import ADDRESS

NUM_CPUS = 8
OWN_RAY = ("test_rllib_cluster", "test_rllib_faults", "test_rllib_sharded_saves")
IN_MEMORY = Path("/dev/shm")  # writing through to a disk, thousands of times, takes a tenth of the tests' time
STARTUP = str(Path(__file__).parent / "startup")  # sitecustomize.py of the processes that tests start

if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 8 << 30:
    os.environ.setdefault("TMPDIR", str(IN_MEMORY))
    tempfile.tempdir = None  # pytest has looked for it before, for what it captures
collect_ignore = ["startup"]  # for the processes that tests start
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))
inspect.stack = frames.stack  # as in tests/startup/sitecustomize.py
gc.disable()  # what libraries and tests import stays to the end: looking for garbage in it took a third of the time
torch.set_num_threads(1)
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Starts what forks the processes of Ray, for this process and those of pytest-xdist, which find it there."""
    if sys.platform == "win32" or ADDRESS in os.environ:
        return
    folder = tempfile.TemporaryDirectory()
    os.environ[ADDRESS] = os.path.join(folder.name, "socket")
    command = [sys.executable, os.path.join(STARTUP, "ray_workers.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"listens\n"

    def end() -> None:
        process.communicate()
        del os.environ[ADDRESS]
        folder.cleanup()

    config.add_cleanup(end)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in OWN_RAY)  # before the shared one, which then stays
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("trl") and "trl" not in item.config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="builds an environment with TRL; run it with -m trl"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # By default a collection comes so often that it takes a fifteenth of the time.
    gc.enable()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    # torch.manual_seed would also note the stack for devices that this machine may lack: 0.6 ms
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    numpy.random.seed(0)  # some upstream environments draw from the global generator


@pytest.fixture
def fixtures() -> Path:
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


@pytest.fixture(scope="session")
def small_ray() -> Iterator[None]:
    """A Ray that starts after this has no autoscaler, dashboard or forwarded logs: three processes of a second each.

    Nor has it the thread that prints to standard output, in the middle of whatever test runs then, that a worker of an
    earlier test has ended.
    """
    node = pytest.importorskip("ray._private.node").Node
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ray._private.worker.listen_error_messages", lambda worker, stopped: None)
        for start in ("start_monitor", "start_api_server", "start_log_monitor"):
            patched.setattr(node, start, lambda self, **options: None)
        yield


@pytest.fixture(scope="module")
def shared_ray(small_ray: None) -> None:
    """A Ray of 8 CPUs, all of them free. It stays for the next file; files with a Ray of their own come before."""
    import ray

    if ray.is_initialized() and not become_free(NUM_CPUS):  # a test that failed has left its actors
        ray.shutdown()
    if not ray.is_initialized():
        ray.init(num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False)


@pytest.fixture
def run_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Runs an example with ``--fast`` in ``tmp_path`` and returns the lines that it prints.

    It runs in this process: one of its own would take five seconds to import the libraries.
    """

    def run(name: str, *arguments: str) -> list[str]:
        path = str(Path(__file__).parents[1] / "examples" / name)
        logger = logging.getLogger("lightning.pytorch")  # which an example silences
        level = logger.level
        with monkeypatch.context() as patched:
            patched.chdir(tmp_path)
            patched.setattr(sys, "argv", [path, "--fast", *arguments])
            try:
                runpy.run_path(path, run_name="__main__")
            finally:
                logger.setLevel(level)
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def starts_shared_ray(shared_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code that starts a Ray and ends it, which would take five seconds, has the shared one instead."""
    import ray

    calls: list[str] = []

    def init(address: str, num_cpus: int, **options: Any) -> None:
        assert address == "local" and num_cpus <= NUM_CPUS
        calls.append("init")

    with monkeypatch.context() as patched:
        patched.setattr(ray, "init", init)
        patched.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
        yield
    assert calls == ["init", "shutdown"]


@pytest.fixture
def run_example(starts_shared_ray: None, run_script: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The same for an example that starts a Ray."""
    return run_script
