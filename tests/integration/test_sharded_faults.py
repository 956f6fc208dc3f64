# SPDX-License-Identifier: Apache-2.0
"""Shards that hang or are lost while they are needed, and calls that are refused or time out."""

from __future__ import annotations

import dataclasses
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import ray
import torch
from gymnasium.vector import AsyncVectorEnv
from pyarrow import fs

from lightning_replay.sharded import ShardedReplay
from lightning_replay.sharded.replay import NAMESPACE
from tests.unit.sharded.local_replay import steps

from .shard_contents import Noted

pytestmark = pytest.mark.slow

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
OPTIONS: dict[str, Any] = {"capacity": 1_000, "batch_size": 16, "num_cpus_per_shard": 0.5, "seed": 0}


@pytest.fixture(scope="module")
def replay(shared_ray: None) -> Iterator[ShardedReplay]:
    options = {**OPTIONS, "shard_timeout_s": 1.5, "wait_timeout_s": 2.5, "n_steps": 3, "discount": 1.0}
    with ShardedReplay("prioritized", 2, **options) as replay:
        replay._connection.wait_timeout_s = 60.0  # until something hangs
        yield replay


def in_coordinator(replay: ShardedReplay, function: Callable[..., Any], *arguments: Any) -> Any:
    coordinator = ray.get_actor(replay.name, namespace=NAMESPACE)
    return ray.get(coordinator.__ray_call__.remote(function, *arguments))


def handles_of(replay: ShardedReplay) -> list[Any]:
    return in_coordinator(replay, lambda coordinator: coordinator.shards.handles)


def filled(replay: ShardedReplay, shard: int) -> int:
    """Gives each shard rows, and begins an episode in this one; returns its number."""
    replay.end_episodes()
    for number in range(2):
        replay.extend(steps(10 * number, 10, trajectory=100 + number))
    for number in range(200, 210):
        if int(replay.extend(steps(500, 1, trajectory=number, ends=False))[0] >> 40) == shard:
            return number
    raise AssertionError


@contextmanager
def stopped(handle: Any) -> Iterator[None]:
    """A shard whose process is stopped, which answers nothing and does not end."""
    process = ray.get(handle.__ray_call__.remote(lambda shard: os.getpid()))
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def ended(call: Callable[[], Any], within_s: float = 30.0) -> Any:
    """The result of a call, or its error; the test fails where it does not end."""
    threads = ThreadPoolExecutor(1)
    try:
        return threads.submit(call).result(within_s)
    finally:
        threads.shutdown(wait=False)


@contextmanager
def waits(replay: ShardedReplay, seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replay._connection, "wait_timeout_s", seconds)
        yield


def test_no_call_waits_for_ever_for_a_shard_that_hangs(replay: ShardedReplay, tmp_path: Path) -> None:
    replay.save(tmp_path / "before")
    episode = filled(replay, 1)
    rows, epochs = len(replay), replay.stats()["epochs"]
    given = steps(501, 3, trajectory=episode, ends=False)
    calls: dict[str, Callable[[], Any]] = {
        "extend": lambda: replay.extend(given),
        "end_episodes": lambda: replay.end_episodes([999]),
        "seed": lambda: replay.seed(3),
        "save": lambda: replay.save(tmp_path / "hung"),
        "load": lambda: replay.load(tmp_path / "before"),
    }
    with stopped(handles_of(replay)[1]), waits(replay, 1.0):
        for name, call in calls.items():
            with pytest.raises(TimeoutError, match=r"shard 1 has not answered for [\d.]+ s"):
                ended(call)
                pytest.fail(name)
        assert not (ended(replay.sample)["index"] >> 40).any()  # of the other shard
    assert len(replay.extend(given)) == 3  # which are stored once
    replay.extend(steps(504, 1, trajectory=episode))
    batch = torch.cat([replay.sample(500) for _ in range(2)])
    assert len(replay) == rows + 4 and replay.stats()["epochs"] == epochs
    found = dict(zip(batch["action"].tolist(), batch["next", "reward"].flatten().tolist(), strict=True))
    assert {one: found[one] for one in range(500, 505)} == {500: 1503, 501: 1506, 502: 1509, 503: 1007, 504: 504}


def test_no_call_waits_longer_than_it_may_for_a_coordinator_that_hangs(replay: ShardedReplay) -> None:
    filled(replay, 1)
    calls: dict[str, Callable[[], Any]] = {
        "extend": lambda: replay.extend(steps(900, 3, trajectory=900)),
        "sample": replay.sample,
        "length": lambda: len(replay),
        "stats": replay.stats,
        "end_episodes": lambda: replay.end_episodes([999]),
        "seed": lambda: replay.seed(3),
    }
    with stopped(ray.get_actor(replay.name, namespace=NAMESPACE)), waits(replay, 1.0):
        for name, call in calls.items():
            start = time.monotonic()
            with pytest.raises(TimeoutError, match="coordinator of this sharded replay has not answered for 1 s"):
                ended(call)
                pytest.fail(name)
            assert time.monotonic() - start < 2.0, name
    assert len(ended(replay.sample)) == 16


def test_a_shard_that_hangs_for_long_is_started_again(replay: ShardedReplay) -> None:
    filled(replay, 1)
    before = replay.stats()
    handles_of(replay)[1].__ray_call__.remote(lambda shard: time.sleep(600))
    deadline = time.monotonic() + 60
    while ended(replay.stats)["epochs"] == before["epochs"] or not all(replay.stats()["alive"]):
        assert time.monotonic() < deadline and len(ended(replay.sample)) == 16
        time.sleep(0.2)
    after = replay.stats()
    assert after["rows_lost"] - before["rows_lost"] == before["rows"][1] and after["rows"] == [before["rows"][0], 0]
    filled(replay, 1)


def test_others_fill_it_and_draw_while_one_process_saves(replay: ShardedReplay, tmp_path: Path) -> None:
    filled(replay, 1)
    held = fs.PyFileSystem(Noted.below(tmp_path, held=True))
    stored = len(replay)
    other = pickle.loads(pickle.dumps(replay))
    with ThreadPoolExecutor(1) as threads:
        saved = threads.submit(replay.save, "first", filesystem=held)
        while not (tmp_path / "held").exists():
            time.sleep(0.05)
        assert not (ended(other.sample)["index"] >> 40).any()  # after shard_timeout_s
        (tmp_path / "hold").unlink()
        saved.result()
    other.extend(steps(900, 5, trajectory=7))
    replay.load("first", filesystem=fs.SubTreeFileSystem(str(tmp_path / "files"), fs.LocalFileSystem()))
    assert len(replay) == stored


def test_a_save_ends_when_a_shard_does_not_finish_its_part(
    replay: ShardedReplay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(replay, 1)
    held = fs.PyFileSystem(Noted.below(tmp_path, held=True))
    options = replay._options
    shards = dataclasses.replace(options.shards, save_timeout_s=3.0)
    monkeypatch.setattr(replay, "_options", dataclasses.replace(options, shards=shards))
    with pytest.raises(TimeoutError, match=r"shard 1 has not answered.*No checkpoint was made"):
        ended(lambda: replay.save("first", filesystem=held))
    (tmp_path / "hold").unlink()
    monkeypatch.undo()
    assert len(replay.sample(500)) == 500


@pytest.mark.parametrize("call", ["end_episodes", "seed"])
def test_a_call_right_after_a_death_reaches_the_shard_that_is_started(replay: ShardedReplay, call: str) -> None:
    filled(replay, 0)
    ray.kill(handles_of(replay)[0])
    (replay.end_episodes if call == "end_episodes" else lambda: replay.seed(5))()
    assert len(replay.sample()) == 16


def test_a_shard_that_dies_between_the_halves_of_a_load_reads_its_part_again(
    replay: ShardedReplay, tmp_path: Path
) -> None:
    filled(replay, 0)
    replay.save(tmp_path)
    rows = replay.stats()["rows"]
    filled(replay, 0)
    old = replay.sample(200)
    before = replay.stats()["td_errors_dropped"]

    def die_when_staged(coordinator: Any) -> None:
        from lightning_replay.sharded import coordinator as module

        stage = module.load_shards

        def staged(shards: Any, *arguments: Any) -> Any:
            module.load_shards = stage
            result = stage(shards, *arguments)
            ray.kill(shards.handles[0])
            with suppress(ray.exceptions.RayActorError):  # it may live for a while, and use the save
                while True:
                    ray.get(shards.handles[0].report.remote())
            return result

        module.load_shards = staged

    in_coordinator(replay, die_when_staged)
    replay.load(tmp_path)
    stats = replay.stats()
    assert stats["rows"] == rows and all(stats["alive"])
    replay.update_priority(old, torch.full((200,), 50.0))
    assert replay.stats()["td_errors_dropped"] >= before + 200


def test_errors_of_feedback_are_raised_in_the_process_that_gave_it(replay: ShardedReplay) -> None:
    filled(replay, 0)
    other = pickle.loads(pickle.dumps(replay))
    batch = other.sample()
    index = batch["index"].clone()
    index[0] += 5_000  # no such slot, which a shard alone can see
    other.update_priority(index, torch.ones(16), generation=batch["generation"])
    rows = len(replay)
    replay.extend(steps(50, 2, trajectory=77))
    for _ in range(2):
        assert len(replay.sample()) == 16
    with pytest.raises(IndexError, match="index"):
        other.extend(steps(60, 2, trajectory=77))
    assert len(replay) == rows + 2
    other.extend(steps(60, 2, trajectory=77))
    assert len(replay) == rows + 4


def test_processes_that_build_one_name_at_once_share_it(shared_ray: None) -> None:
    def build(number: int) -> ShardedReplay:
        return ShardedReplay("uniform", 1, name="raced", **OPTIONS)

    with ThreadPoolExecutor(4) as threads:
        built = list(threads.map(build, range(4)))
    try:
        for number, one in enumerate(built):
            one.extend(steps(10 * number, 2))
        assert {len(one) for one in built} == {8} and sum(one._connection.is_owner for one in built) == 1
    finally:
        for one in built:
            one.stop()


def ending_in_a_fork(call: Callable[[], Any]) -> str:
    fork: Any = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(str(call()))
        except Exception as error:
            sender.send(f"{type(error).__name__}: {error}")

    process = fork.Process(target=run)
    process.start()
    try:
        assert receiver.poll(30.0), "the forked process hangs"
        return receiver.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("call", ["sample", "extend", "build", "unpickle"])
def test_a_process_forked_from_one_that_uses_ray_is_refused(replay: ShardedReplay, call: str) -> None:
    sent = pickle.dumps(replay)
    calls: dict[str, Callable[[], Any]] = {
        "sample": replay.sample,
        "extend": lambda: replay.extend(steps(900, 1, trajectory=900)),
        "build": lambda: ShardedReplay("uniform", 1, **OPTIONS),
        "unpickle": lambda: pickle.loads(sent).stats(),
    }
    rows = len(replay)
    assert ending_in_a_fork(calls[call]).startswith("RuntimeError: this process was forked from one that uses Ray")
    assert len(replay) == rows and len(replay.extend(steps(900, 2, trajectory=901))) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_forked_environments_do_not_collect_handles_of_their_parent(shared_ray: None) -> None:
    """They would report it through the parent's connection, in which the parent's next request is then lost."""

    def collecting() -> gymnasium.Env[Any, Any]:
        if os.getpid() != parent:  # which builds one environment, too
            gc.collect()
        return gymnasium.make("CartPole-v1")

    class Answering:
        def answer(self) -> int:
            return 1

    parent = os.getpid()
    actor = ray.remote(num_cpus=0)(Answering)
    garbage: list[Any] = [actor.remote()]
    ray.get(garbage[0].answer.remote())
    garbage.append(garbage)
    gc.disable()
    try:
        del garbage
        AsyncVectorEnv([collecting] * 2, context="fork").close()
        assert not gc.isenabled()
    finally:
        gc.enable()
    AsyncVectorEnv([collecting], context="fork").close()
    assert gc.isenabled()
    if not ray.wait([actor.remote().answer.remote()], timeout=30.0)[0]:
        ray.shutdown()  # this Ray starts no actor any more
        pytest.fail("an actor does not start after a fork")


@pytest.mark.parametrize("waiting", [False, True])
def test_calls_while_another_process_stops_the_replay_are_refused(
    shared_ray: None, waiting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the coordinator has ended: calls that come then, and those that wait in it for a shard."""
    replay = ShardedReplay("uniform", 2, **OPTIONS)
    kill, coordinator = ray.kill, ray.get_actor(replay.name, namespace=NAMESPACE)
    replay.extend(steps(0, 40))
    copy = pickle.loads(pickle.dumps(replay))
    saves = [functools.partial(replay.save, tmp_path / name) for name in "ab"]
    threads, calls = ThreadPoolExecutor(8), []
    if waiting:
        for handle in handles_of(replay):
            os.kill(ray.get(handle.__ray_call__.remote(lambda shard: os.getpid())), signal.SIGSTOP)
        calls = [threads.submit(call) for call in (replay.sample, replay.sample, replay.stats, *saves)]
        time.sleep(1.0)
        assert not any(call.done() for call in calls)
    monkeypatch.setattr(ray, "kill", lambda handle: None)  # which has not been carried out
    copy.stop()
    given = functools.partial(replay.extend, steps(40, 1, trajectory=1))
    for call in [*calls, *(threads.submit(call) for call in (replay.sample, replay.stats, given))]:
        with pytest.raises(RuntimeError, match=r"this sharded replay has stopped: stop\(\) was called"):
            call.result(30.0)
    threads.shutdown()
    kill(coordinator)
