# SPDX-License-Identifier: Apache-2.0
"""Processes that Ray starts in these tests: carried out by a fork, and by themselves where no fork begins."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.startup.ray_workers import ADDRESS, BYTES, COMMAND

STARTUP = Path(__file__).parents[1] / "startup"
SCRIPT = f"""
import sys
sys.path.insert(0, {str(STARTUP)!r})
import ray_workers
ray_workers.MOST_SECONDS = 0.5
ray_workers.hand_over()
print("itself")
"""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        yield listener


@pytest.fixture
def worker(listener: socket.socket, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / COMMAND
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": "", ADDRESS: str(tmp_path / "socket")}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process


def accepted(listener: socket.socket) -> socket.socket:
    """The connection of the process, whose command was received."""
    connection, _ = listener.accept()
    _, files, _, _ = socket.recv_fds(connection, BYTES, 3)
    for file in files:
        os.close(file)
    return connection


def test_it_ends_with_the_fork_that_has_begun(listener: socket.socket, worker: subprocess.Popen[str]) -> None:
    with accepted(listener) as connection:
        connection.send(b"t")
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(1.0)
    assert worker.communicate(timeout=30.0)[0] == ""


def test_no_fork_begins_after_it_has_stopped_waiting(listener: socket.socket, worker: subprocess.Popen[str]) -> None:
    with accepted(listener) as connection:
        assert worker.communicate(timeout=30.0)[0] == "itself\n"
        with pytest.raises(OSError, match="Broken pipe"):
            connection.send(b"t")


def test_it_does_not_wait_for_a_server_that_has_ended(listener: socket.socket, worker: subprocess.Popen[str]) -> None:
    accepted(listener).close()
    assert worker.communicate(timeout=30.0)[0] == "itself\n"
