# SPDX-License-Identifier: Apache-2.0
"""cpprb and tianshou, each in an environment of its own, timed in turns with this process over a pipe."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from timing import Burst

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SAME_VERSIONS = ("torch==", "gymnasium==", "mujoco==", "numpy==")
REQUIREMENTS = {
    "cpprb": ["cpprb==11.0.0", "numpy"],
    "tianshou": ["tianshou==2.0.1", "gymnasium[mujoco]"],
    "sb3": ["stable-baselines3==2.9.0", "gymnasium[mujoco]"],
}


class PeerError(RuntimeError):
    """The peer's environment cannot be built, or the peer failed in it."""


def build(name: str) -> Path:
    """Returns the interpreter of ``.bench-<name>``, which is built when it is not there."""
    folder = ROOT / f".bench-{name}"
    python = folder / "bin" / "python"
    if (folder / ".complete").exists():
        return python
    print(f"building {folder.name} (once)", flush=True)
    # The same torch, Gymnasium and MuJoCo as ours.
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith(SAME_VERSIONS)]
    wanted = REQUIREMENTS[name] + (pins if name != "cpprb" else [])
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *wanted],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise PeerError((result.stderr or result.stdout).strip().splitlines()[-1])
    (folder / ".complete").touch()
    return python


class Peer:
    """A peer's process: answers one line of JSON to each line of JSON.

    Args:
        name: ``cpprb`` or ``tianshou``.

    Raises:
        PeerError: it cannot be built or does not start.
    """

    def __init__(self, name: str) -> None:
        command = [str(build(name)), str(HERE / "peer_server.py"), name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask(work="ready")

    def burst(self, work: str, *, rows: int, batch_size: int) -> Burst:
        """A piece of the peer's work as something :class:`timing.Table` can measure; fills the peer's buffer first."""
        self._ask(work=work, rows=rows, batch_size=batch_size, calls=1)
        return lambda calls: self._ask(work=work, rows=rows, batch_size=batch_size, calls=calls)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _ask(self, **request: object) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError("its process ended") from error
        answer = self._process.stdout.readline()
        if not answer:
            raise PeerError("its process ended without an answer")
        content = json.loads(answer)
        if "error" in content:
            raise PeerError(content["error"])
        return float(content["microseconds"])


def start_peers(missing: dict[str, str], names: tuple[str, ...] = ("cpprb", "tianshou")) -> dict[str, Peer]:
    """Starts what can be started and says in ``missing`` why the others cannot."""
    peers = {}
    for name in names:
        try:
            peers[name] = Peer(name)
        except (PeerError, OSError) as error:
            missing[name] = str(error)
    return peers


def bursts(
    peers: dict[str, Peer], missing: dict[str, str], work: str, *, rows: int, batch_size: int
) -> dict[str, Burst]:
    """The same piece of work of every peer that can do it."""
    found = {}
    for name, peer in peers.items():
        try:
            found[name] = peer.burst(work, rows=rows, batch_size=batch_size)
        except PeerError as error:
            missing[name] = str(error)
    return found


def arguments(description: str | None, **flags: str) -> argparse.Namespace:
    """The options every benchmark has, and ``flags`` of one, by name with a text of help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", type=int, default=1_000_000, help="transitions stored")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--save", action="store_true", help="write results/<name>.json")
    parser.add_argument("--no-peers", action="store_true", help="leave out cpprb and tianshou")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser.parse_args()
