# SPDX-License-Identifier: Apache-2.0
"""Forks of processes that hold buffers: one at a time, each of which releases the locks it took."""

from __future__ import annotations

import subprocess
import sys

import pytest

THREADS_THAT_FORK = """
import os, threading, time
from lightning_replay import recipes
from lightning_replay import forking  # later: hooks of concurrent.futures then do not take turns for it

forking._PATIENCE_S = 2.0
replay = recipes.uniform(capacity=100, batch_size=4)

# Comes last, so that the second thread wants to fork while the first holds the locks of the buffer.
class Slow:
    fork_rank = 9

    def before_fork(self):
        time.sleep(0.1)

    def after_fork(self, *, in_child):
        pass

slow = Slow()
forking.register(slow)

def fork(times):
    for _ in range(times):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)

threads = [threading.Thread(target=fork, args=(3,), daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30)
assert not any(thread.is_alive() for thread in threads), "forks wait for each other"
assert replay._replay_lock.acquire(timeout=1), "a fork kept a lock"
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_threads_that_fork_at_the_same_time_release_all_locks() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS_THAT_FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "un-acquired" not in done.stderr


COPIED_IN_A_FORK = """
import copy, os, sys
from lightning_replay import recipes
from tests.transitions import numbered_steps

replay = recipes.uniform(capacity=50, batch_size=4, memmap=sys.argv[1])
replay.extend(numbered_steps(0, 50))
written, tell = os.pipe()
child = os.fork()
if child == 0:
    os.read(written, 1)
    try:
        copy.deepcopy(replay)
    except RuntimeError as error:
        os._exit(0 if "which has written into it since the fork" in str(error) else 2)
    os._exit(1)
replay.extend(numbered_steps(100, 3))
os.write(tell, b"1")
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_fork_does_not_copy_rows_on_disk_that_its_parent_has_written_since(tmp_path) -> None:
    subprocess.run([sys.executable, "-c", COPIED_IN_A_FORK, str(tmp_path)], check=True, timeout=120)


FORKED_BESIDE_A_DRAW = """
import os, threading
from lightning_replay import forking, recipes
from tests.transitions import numbered_steps

forking._PATIENCE_S = 0.5
replay = recipes.uniform(capacity=50, batch_size=4, prefetch=2)
replay.extend(numbered_steps(0, 50))

def fork():
    child = os.fork()
    if child == 0:
        try:
            replay.sample()
        except RuntimeError as error:
            os._exit(0 if "half-changed here" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    forked.set()

forked = threading.Event()
with replay._replay_lock, replay._write_lock:
    replay._prefetch_queue.append(replay._prefetch_executor.submit(replay._sample, 4))
    threading.Thread(target=fork, daemon=True).start()
    assert forked.wait(20), "the fork waits for a draw that waits for this thread"
replay.sample()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_fork_does_not_wait_for_ever_for_a_draw_that_cannot_end() -> None:
    subprocess.run([sys.executable, "-c", FORKED_BESIDE_A_DRAW], check=True, timeout=120)
