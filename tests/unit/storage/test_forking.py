# SPDX-License-Identifier: Apache-2.0
"""What a forked process may do with its parent's buffer: it writes no rows of others and never waits for ever."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_replay import forking, hooks, recipes
from lightning_replay.replay import Replay
from lightning_replay.storage.packed import PackedStorage
from tests.stored import stored_numbers
from tests.transitions import numbered_steps

PATIENCE_S = 20.0  # after which a process hangs
REFUSED = "this process was forked while another thread used this Replay"


class Fork:
    """A forked process that makes one call, once it is let go; :meth:`ending` returns how the call ended."""

    def __init__(self, call: Callable[[], object], *, waits: bool = False) -> None:
        result, report = os.pipe()
        gate, let_go = os.pipe()
        self.id = os.fork()
        if self.id == 0:
            os.close(let_go)
            if waits:
                os.read(gate, 1)
            os.write(report, _ending_of(call).encode())
            os._exit(0)
        os.close(report)
        os.close(gate)
        self._result, self._let_go = result, let_go

    def ending(self) -> str:
        """What the call returned, or the error it ended in."""
        os.close(self._let_go)
        deadline = time.monotonic() + PATIENCE_S
        while os.waitpid(self.id, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self.id, signal.SIGKILL)
                os.waitpid(self.id, 0)
                raise AssertionError("the forked process hangs")
            time.sleep(0.002)
        text = os.read(self._result, 1 << 16).decode()
        os.close(self._result)
        return text


def _ending_of(call: Callable[[], object]) -> str:
    try:
        return str(call())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def in_fork(call: Callable[[], object]) -> str:
    return Fork(call).ending()


def numbers(replay: Replay) -> list[int]:
    return stored_numbers(replay)


@pytest.fixture
def on_disk(tmp_path: Path) -> Replay:
    """Rows 0 to 3 of 8 in a file."""
    replay = recipes.prioritized(8, 4, memmap=str(tmp_path), seed=0)
    replay.extend(numbered_steps(0, 4))
    return replay


@pytest.mark.slow
@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize(
    "write",
    [
        lambda replay: replay.extend(numbered_steps(50, 2)),
        lambda replay: replay.empty(),
        lambda replay: replay.end_episodes(slots=torch.tensor([3]), generation=torch.tensor([1])),
        lambda replay: replay.load_state_dict(replay.state_dict()),
    ],
    ids=["extend", "empty", "truncate", "load_state_dict"],
)
def test_a_forked_process_cannot_write_rows_that_lie_in_its_parents_file(on_disk, write, generation) -> None:
    before = on_disk.state_dict()["storage"]["rows"]

    def call() -> object:
        return in_fork(lambda: write(on_disk)) if generation == 2 else write(on_disk)

    assert in_fork(call).startswith("RuntimeError: the rows of this PackedStorage lie in a file that a forked process")
    assert torch.equal(on_disk.state_dict()["storage"]["rows"], before)
    on_disk.extend(numbered_steps(4, 2))
    assert numbers(on_disk) == [0, 1, 2, 3, 4, 5]


READS = {
    "sample": lambda replay: replay.sample()["index"].tolist(),
    "get": numbers,
    "slice": lambda replay: replay[:4]["generation"].tolist(),
    "column": lambda replay: replay.storage.column("action", torch.tensor([0])).shape,
    "state_dict": lambda replay: replay.state_dict()["length"],
    "copy": lambda replay: len(copy.deepcopy(replay)),
}


@pytest.mark.slow
@pytest.mark.parametrize("read", list(READS.values()), ids=list(READS))
def test_a_forked_process_reads_until_its_parent_has_written(on_disk, read) -> None:
    unwritten = Fork(lambda: read(on_disk), waits=True)
    assert "Error" not in unwritten.ending()
    written = Fork(lambda: read(on_disk), waits=True)
    on_disk.extend(numbered_steps(4, 2))
    assert written.ending().startswith("RuntimeError: the rows of this PackedStorage lie in a file")


def test_a_process_forked_by_a_fork_cannot_read_what_changed_after_the_first_fork(on_disk) -> None:
    """Its rows are as old as its parent's: from before the first process wrote."""
    child = Fork(lambda: in_fork(on_disk.sample), waits=True)
    on_disk.extend(numbered_steps(4, 2))
    assert "has written into it since the fork" in child.ending()


def test_a_save_in_a_forked_process_is_refused_once_its_parent_has_written(on_disk, tmp_path) -> None:
    child = Fork(lambda: on_disk.save(tmp_path / "save"), waits=True)
    on_disk.extend(numbered_steps(4, 2))
    assert "has written into it since the fork" in child.ending()
    assert not list((tmp_path / "save").glob("*.json"))


@pytest.mark.parametrize("prefetch", [None, 2])
def test_rows_in_memory_are_a_forked_processs_own(prefetch) -> None:
    replay = recipes.prioritized(8, 4, prefetch=prefetch, seed=0)
    replay.extend(numbered_steps(0, 4))
    replay.sample()
    replay.advance(updates=1)  # after the batches that are drawn ahead

    def go_on() -> list[int]:
        replay.extend(numbered_steps(50, 2))
        replay.update_priority(replay.sample(), torch.ones(4))
        return numbers(replay)

    assert in_fork(go_on) == "[0, 1, 2, 3, 50, 51]"
    assert numbers(replay) == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"prefetch": 2}, {"in_file": True}], ids=str)
def test_a_fork_while_a_thread_extends_has_whole_rows_or_is_refused(options, tmp_path) -> None:
    """Of a buffer of 8 slots, written three rows at a time, a fork sees the newest 8 numbers and can draw."""
    memmap = str(tmp_path) if options.pop("in_file", False) else None
    replay = recipes.prioritized(8, 4, memmap=memmap, seed=0, **options)
    replay.extend(numbered_steps(0, 9))
    running = True

    def write() -> None:
        first = 9
        while running:
            replay.extend(numbered_steps(first, 3))
            first += 3
            time.sleep(0.001)

    def look() -> list[int]:
        replay.sample()
        found = numbers(replay)
        if memmap is None:
            replay.extend(numbered_steps(0, 1))
        return found

    thread = threading.Thread(target=write)
    thread.start()
    try:
        endings = [in_fork(look) for _ in range(10)]
    finally:
        running = False
        thread.join()
    read = [ending for ending in endings if "has written into it since" not in ending and REFUSED not in ending]
    assert read or memmap is not None
    for ending in read:
        found = sorted(int(number) for number in ending.strip("[]").split(","))
        assert found == list(range(found[0], found[0] + 8))


@pytest.mark.slow
def test_a_fork_while_threads_wait_for_prefetched_batches() -> None:
    """Each of them holds the locks of the batches for a moment, in which the process may be forked."""
    replay = recipes.uniform(20, 4, prefetch=2, seed=0)
    replay.extend(numbered_steps(0, 20))
    replay.sample()
    is_over = threading.Event()

    def wait() -> None:
        while not is_over.is_set():
            replay.raise_max_priority(1.0)  # which waits for them, and changes nothing

    threads = [threading.Thread(target=wait) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(10):
            ending = in_fork(lambda: [len(replay.sample()) for _ in range(3)])
            assert ending == "[4, 4, 4]" or REFUSED in ending
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_fork_does_not_wait_for_a_thread_that_uses_the_buffer(is_mixed: bool) -> None:
    """The thread may be waiting for the one that forks; its buffer is then of no use to the forked process."""
    replay: Any = recipes.uniform(8, 4, seed=0)
    replay.extend(numbered_steps(0, 4))
    if is_mixed:
        replay = recipes.mixed(online=recipes.uniform(8, 4), offline=replay, batch_size=4)
        assert in_fork(lambda: len(replay.sample())) == "4"
    holds, may_end = threading.Event(), threading.Event()

    def use() -> None:
        with replay._lock if is_mixed else replay.locked():
            holds.set()
            may_end.wait()

    thread = threading.Thread(target=use)
    thread.start()
    holds.wait()
    try:
        ending = in_fork(replay.sample)
    finally:
        may_end.set()
        thread.join()
    assert (REFUSED.replace("Replay", "MixedReplay") if is_mixed else REFUSED) in ending
    assert len(replay.sample()) == 4


@pytest.mark.slow
def test_forks_beside_threads_that_build_buffers_or_fork_end() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    until = time.monotonic() + 0.6
    endings: list[str] = []

    def build() -> None:
        while time.monotonic() < until:
            _ = [PackedStorage(4) for _ in range(50)]

    def fork() -> None:
        while time.monotonic() < until:
            try:
                process = Fork(lambda: (PackedStorage(3).capacity, gc.isenabled()))
            except RuntimeError as error:  # of filelock, which torch imports: from Python 3.12 on one fork at a time
                assert "filelock" in str(error)
                continue
            endings.append(process.ending())

    threads = [threading.Thread(target=call) for call in (build, build, fork, fork)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(endings) > 1 and set(endings) == {"(3, True)"} and gc.isenabled()


class Ring:
    def __init__(self) -> None:
        self.itself = self


def is_collected_after_its_loss() -> bool:
    ring = weakref.ref(Ring())
    gc.collect()
    return ring() is None


@pytest.mark.slow
def test_a_fork_collects_its_own_garbage_and_not_that_of_its_parent() -> None:
    gc.disable()
    try:
        ring = weakref.ref(Ring())
        assert in_fork(lambda: (gc.collect(), ring() is None)[1]) == "False"
        assert not gc.isenabled() and in_fork(gc.isenabled) == "False"
    finally:
        gc.enable()
    assert is_collected_after_its_loss() and ring() is None
    assert in_fork(is_collected_after_its_loss) == "True"
    assert gc.isenabled() and in_fork(gc.isenabled) == "True"


@pytest.mark.parametrize("turned_off", [True, False])
def test_garbage_of_the_parent_is_kept_only_with_ray_in_the_process(
    turned_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "are_on", not turned_off)
    if not turned_off:
        monkeypatch.delitem(sys.modules, "ray", raising=False)
    gc.disable()
    try:
        ring = weakref.ref(Ring())
        assert in_fork(lambda: (gc.collect(), ring() is None)[1]) == "True"
    finally:
        gc.enable()


def test_a_fork_while_another_thread_begins_one_collects_garbage() -> None:
    begun, ends = threading.Event(), threading.Event()

    def begin() -> None:
        forking._pause_collector()
        begun.set()
        ends.wait()
        forking._resume_collector()

    thread = threading.Thread(target=begin)
    thread.start()
    begun.wait()
    try:
        assert not gc.isenabled() and in_fork(gc.isenabled) == "True"
    finally:
        ends.set()
        thread.join()
    assert gc.isenabled()


def test_a_fork_while_another_thread_ends_one_collects_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    endings: list[str] = []

    class Forking(set[int]):
        def remove(self, number: int) -> None:
            monkeypatch.undo()
            thread = threading.Thread(target=lambda: endings.append(in_fork(gc.isenabled)))
            thread.start()
            thread.join()

    monkeypatch.setattr(forking, "_pausing", Forking({threading.get_ident()}))
    gc.disable()
    forking._resume_collector()
    assert endings == ["True"] and gc.isenabled()
