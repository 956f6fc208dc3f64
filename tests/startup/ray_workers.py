# SPDX-License-Identifier: Apache-2.0
"""Forks the processes of Ray from one that has imported torch and others, which would take each of them seconds.

Run as a program it is that process. It imports nothing of this project, whose imports are tested, and nothing of Ray,
which reads its settings as it is imported. :func:`hand_over` is called in each process that Ray starts, before it
imports anything: it passes its command on and waits for the fork that carries it out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

ADDRESS = "TESTS_RAY_WORKERS"  # environment variable with the socket's path
COMMAND = "default_worker.py"  # what Ray starts
BYTES = 1 << 20  # of a command with its environment
LIBRARIES = (
    *("torch", "torch.distributions", "pandas", "pyarrow.dataset", "pyarrow.parquet", "gymnasium", "cv2", "tree"),
    *(
        "pydantic",
        "rich.console",
        "requests",
        "jsonschema",
        "fsspec",
        "tensorboardX",
        "scipy.signal",
        "yaml",
        "aiohttp",
    ),
)


def hand_over() -> None:
    """Has a command of Ray carried out by a fork and ends with it; returns where this process is none of Ray's."""
    command = sys.orig_argv[1:]
    while command and command[0].startswith("-"):
        command.pop(0)
    if not command or Path(command[0]).name != COMMAND:
        return

    import socket

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(os.environ[ADDRESS])
    except OSError:  # it has ended
        return
    message = {"command": command, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(connection, [json.dumps(message).encode()], [0, 1, 2])
    connection.recv(1)  # nothing comes; the fork has the other end open as long as it lives
    os._exit(0)


def carry_out(message: dict[str, Any], files: list[int]) -> NoReturn:
    """Becomes the process that Ray wanted."""
    import random
    import runpy

    import numpy

    os.setpgid(0, 0)  # Ray ends whole groups of processes
    for number, file in enumerate(files):
        os.dup2(file, number)
    known = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["folder"])
    script, *_ = sys.argv = message["command"]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(script).parent), *given, *(path for path in sys.path[1:] if path not in known)]
    random.seed()
    numpy.random.seed()
    runpy.run_path(script, run_name="__main__")
    sys.exit()


def main() -> None:
    """Imports the libraries, then forks for each command until the process that started this one ends."""
    import importlib
    import select
    import signal
    import socket

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.environ[ADDRESS])
    listener.listen(64)
    print("listens", flush=True)
    for library in LIBRARIES:
        importlib.import_module(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while sys.stdin not in (readable := select.select([listener, sys.stdin], [], [])[0]):
        connection, _ = readable[0].accept()
        text, files, _, _ = socket.recv_fds(connection, BYTES, 3)
        if text and os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            carry_out(json.loads(text), files)
        connection.close()
        for file in files:
            os.close(file)


if __name__ == "__main__":
    main()
