# SPDX-License-Identifier: Apache-2.0
"""Forks the processes of Ray from one that has imported torch and others, which would take each of them seconds.

Run as a program it is that process. It imports nothing of this project, whose imports are tested. Ray reads its
settings as it is imported, so for each Ray there is a process that imports it with the environment of the first one
that is wanted, and forks the others. :func:`hand_over` is called in each process that Ray starts, before it imports
anything: it passes its command on and waits for the fork that carries it out. Where none begins to, it does so itself.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

ADDRESS = "TESTS_RAY_WORKERS"  # environment variable with the socket's path
COMMAND = "default_worker.py"  # what Ray starts
SETUP = "setup_worker.py"  # what Ray starts first where there is a runtime environment; it imports Ray
ENVIRONMENT = "--serialized-runtime-env-context="
BYTES = 1 << 20  # of a command with its environment
MOST_SECONDS = 20.0  # until a fork begins; the first of a Ray waits for its imports
MOST_RAYS = 4  # at a time: two processes of tests, and what they start
LIBRARIES = (
    "torch",
    "tensordict",
    "pandas",
    "pyarrow.dataset",
    "gymnasium",
    "cv2",
    "jsonschema",
    "tensorboardX",
    "numba",
)
OF_RAY = ("ray.rllib.algorithms.dqn", "ray.tune", "torchrl.data")  # those that import Ray


def hand_over() -> None:
    """Has a command of Ray carried out by a fork and ends with it.

    Returns where this process is none of Ray's, and where no fork has begun in time: Ray starts another process after a
    minute, which would wait as well.
    """
    command = sys.orig_argv[1:]
    while command and command[0].startswith("-"):
        command.pop(0)
    if command and Path(command[0]).name == SETUP:
        command = without_setup(command[1:])
    if not command or Path(command[0]).name != COMMAND:
        return

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(os.environ[ADDRESS])
    except OSError:  # it has ended
        return
    message = {"command": command, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(connection, [json.dumps(message).encode()], [0, 1, 2])
    connection.settimeout(MOST_SECONDS)
    try:
        is_taken = connection.recv(1)
    except TimeoutError:
        connection.shutdown(socket.SHUT_RD)  # from now on a fork cannot begin
        is_taken = connection.recv(1)  # unless it has just begun
    if is_taken:
        connection.settimeout(None)
        connection.recv(1)  # nothing comes; the fork has the other end open as long as it lives
        os._exit(0)


def without_setup(command: list[str]) -> list[str]:
    """Returns the command that follows, if its runtime environment is one of variables alone, and sets these."""
    (text,) = [word.removeprefix(ENVIRONMENT) for word in command if word.startswith(ENVIRONMENT)] or ["{}"]
    given = {name: value for name, value in json.loads(text).items() if value}
    variables = given.pop("env_vars", {})
    if given.pop("py_executable", sys.executable) != sys.executable or given or "$" in "".join(variables.values()):
        return []
    os.environ.update(variables)
    return [word for word in command if not word.startswith((ENVIRONMENT, "--language="))]


def carry_out(message: dict[str, Any], files: list[int], connection: socket.socket) -> NoReturn:
    """Becomes the process that Ray wanted, unless the one that Ray started no longer waits for that."""
    import random
    import runpy

    import numpy

    try:
        connection.send(b"t")
    except OSError:
        os._exit(0)
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


def import_ray() -> None:
    """Imports Ray without a draw from its random numbers, which every fork would continue at the same place.

    The identifiers of objects are such numbers. At import they are drawn for classes of actors only.
    """
    import importlib

    import ray.actor

    drawn = ray.actor.ActorClassID

    class ActorClassID:
        @staticmethod
        def from_random() -> Any:
            return drawn(os.urandom(drawn.size()))

    ray.actor.ActorClassID = ActorClassID
    for library in OF_RAY:
        importlib.import_module(library)
    ray.actor.ActorClassID = drawn


def compile_once() -> None:
    """Has Numba load what it needs before its first function, a third of a second."""
    import numba

    numba.njit(lambda: 0)()


def serve(commands: socket.socket) -> NoReturn:
    """Forks for each command of one Ray until the other end of the socket is closed."""
    has_ray = False
    while True:
        text, files, _, _ = socket.recv_fds(commands, BYTES, 4)
        if not text:
            sys.exit()
        message = json.loads(text)
        if not has_ray:
            os.environ.update(message["environment"])
            import_ray()
            gc.freeze()  # what all forks share stays where it is
            has_ray = True
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            commands.close()
            carry_out(message, files[:3], socket.socket(fileno=files[3]))
        for file in files:
            os.close(file)


def main() -> None:
    """Passes each command to the process of its Ray until standard input is closed; imports before the first."""
    import importlib
    import select

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.environ[ADDRESS])
    listener.listen(64)
    print("listens", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    rays: dict[str, socket.socket] = {}
    while sys.stdin not in (readable := select.select([listener, sys.stdin], [], [])[0]):
        connection, _ = readable[0].accept()
        text, files, _, _ = socket.recv_fds(connection, BYTES, 3)
        if text:
            (wanted,) = (part for part in json.loads(text)["command"] if part.startswith("--session-name="))
            if not rays:
                os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a fork beside a thread may hang
                for library in LIBRARIES:
                    importlib.import_module(library)
                compile_once()
            if wanted not in rays:
                rays[wanted], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for unused in (listener, connection, *rays.values()):
                        unused.close()
                    for file in files:
                        os.close(file)
                    serve(theirs)
                theirs.close()
                if len(rays) > MOST_RAYS:
                    rays.pop(next(iter(rays))).close()
            rays[wanted] = rays.pop(wanted)  # the one that was used last is the last to be closed
            socket.send_fds(rays[wanted], [text], [*files, connection.fileno()])
        connection.close()
        for file in files:
            os.close(file)


if __name__ == "__main__":
    main()
